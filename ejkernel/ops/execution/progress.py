"""How a tuning is doing: a bar on terminals, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import Any, Self

logger = logging.getLogger("ejkernel.tuning")


class Progress:
    """Shown while a tuning runs.

    Args:
      name: The operation.
      budget_s: The time it may take, if there is a limit.
      show: Whether to draw; None draws if standard error is a terminal.
    """

    def __init__(self, name: str, budget_s: float | None, show: bool | None = None) -> None:
        self._name = name
        self._budget_s = budget_s
        self._show = sys.stderr.isatty() if show is None else show
        self._start = time.monotonic()
        self._status: Any = None

    def __enter__(self) -> Self:
        logger.info("%s: tuning", self._name)
        if self._show:
            from rich.console import Console

            self._status = Console(stderr=True).status(f"{self._name}: compiling")
            self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._status is not None:
            self._status.stop()

    def building(self, built: int, total: int) -> None:
        """`built` of `total` candidates are compiled."""
        logger.debug("%s: compiled %d of %d", self._name, built, total)
        self._draw(f"compiled {built} of {total}")

    def racing(self, alive: int, total: int, rounds: int, best: Any, estimate: Any) -> None:
        """A round is over."""
        logger.debug("%s: round %d, %d of %d alive, best %r", self._name, rounds, alive, total, best)
        if self._status is None:
            return
        time_ms = (
            ""
            if estimate is None
            else (f" {1e3 * estimate.median_s:.4g} ms [{1e3 * estimate.low_s:.4g}, {1e3 * estimate.high_s:.4g}]")
        )
        self._draw(f"round {rounds}, {alive} of {total} alive, best {best!r}{time_ms}")

    def finished(self, summary: str) -> None:
        """Logs the outcome."""
        logger.info("%s: %s", self._name, summary)

    def _draw(self, text: str) -> None:
        if self._status is None:
            return
        from rich.markup import escape

        spent = time.monotonic() - self._start
        left = "" if self._budget_s is None else f", {max(self._budget_s - spent, 0):.0f} s left"
        self._status.update(escape(f"{self._name}: {text} ({spent:.0f} s{left})"))
