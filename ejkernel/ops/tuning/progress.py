"""Progress of a tuning: a bar on terminals, a line every 15 seconds elsewhere, and a log everywhere."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from ejkernel.ops.tuning.racing import Race

logger = logging.getLogger("ejkernel.tuning")

_EVERY_S = 0.1
_LINE_EVERY_S = 15.0


class Progress:
    """Shown while a tuning runs.

    Args:
      name: The operation.
      budget_s: The time it may take, if there is a limit.
      show: Whether to draw; None draws if standard error is a terminal, and else prints lines.
    """

    def __init__(self, name: str, budget_s: float | None, show: bool | None = None) -> None:
        self._name = name
        self._budget_s = budget_s
        self._show = _is_terminal() if show is None else show
        self._speaker = Speaker() if show is None and not self._show else None
        self._start = time.monotonic()
        self._race_start = (0.0, 0)
        self._drawn = 0.0
        self._status: Any = None

    def __enter__(self) -> Self:
        logger.info("%s: tuning", self._name)
        if self._show:
            from rich.console import Console

            self._status = Console(stderr=True).status(f"{self._name}: compiling")
            self._status.start()
        if self._speaker is not None:
            self._speaker.start(f"{self._name}: compiling")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._status is not None:
            self._status.stop()
        if self._speaker is not None:
            self._speaker.stop()

    def building(self, done: int, total: int) -> None:
        """`done` of `total` candidates are compiled, or failed to."""
        logger.debug("%s: compiled %d of %d", self._name, done, total)
        self._draw(f"compiled {done} of {total}", None)

    def racing(self, race: Race[Any], total: int, cfg_of: Callable[[Any], Any]) -> None:
        """A round is over."""
        now = time.monotonic()
        if race.rounds <= self._race_start[1] or not self._race_start[1]:
            self._race_start = now, race.rounds
        verbose = logger.isEnabledFor(logging.DEBUG)
        is_shown = self._status is not None or self._speaker is not None
        if not verbose and (not is_shown or now - self._drawn < _EVERY_S):
            return
        best = race.result
        alive = f"round {race.rounds} of the {race.phase}, {len(race.survivors)} of {total} alive"
        text = f"{alive}, best {cfg_of(best.winner)!r}{'' if best.measurement is None else f' {best.measurement}'}"
        if verbose:
            logger.debug("%s: %s", self._name, text)
        self._draw(text, self._left_s(race, now))

    def finished(self, summary: str) -> None:
        """Logs the result."""
        logger.info("%s: %s", self._name, summary)

    def _left_s(self, race: Race[Any], now: float) -> float | None:
        """The most that the race can still take, if its rounds take as long as they took so far."""
        start, first = self._race_start
        if race.done or race.rounds == first:
            return None
        most = race.rules.heat_rounds + race.rules.final_rounds[1]
        return (now - start) / (race.rounds - first) * max(most - race.rounds, 0)

    def _draw(self, text: str, left_s: float | None) -> None:
        self._drawn = time.monotonic()
        spent = self._drawn - self._start
        limits = [left_s, None if self._budget_s is None else max(self._budget_s - spent, 0)]
        least = min((limit for limit in limits if limit is not None), default=None)
        left = "" if least is None else f", at most {least:.0f} s left"
        line = f"{self._name}: {text} ({spent:.0f} s{left})"
        if self._speaker is not None:
            self._speaker.text = line
        if self._status is not None:
            from rich.markup import escape

            self._status.update(escape(line))


def _is_terminal() -> bool:
    """Whether standard error is a terminal; a program without a console has none, or a closed one."""
    return sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()


class Speaker:
    """Prints the latest text to the standard error at intervals, also while a compiler blocks everything else."""

    def __init__(self) -> None:
        self.text = ""
        self._over = threading.Event()

        self._thread = threading.Thread(target=self._speak, name="ejkernel-progress", daemon=True)

    def start(self, text: str) -> None:
        """Begins, with a first text."""
        self.text = text
        self._thread.start()

    def stop(self) -> None:
        """Ends; nothing is printed afterwards, unless printing itself hangs."""
        self._over.set()
        self._thread.join(timeout=1)

    def _speak(self) -> None:
        while not self._over.wait(_LINE_EVERY_S):
            try:
                if sys.stderr is not None:
                    print(self.text, file=sys.stderr, flush=True)
            except (OSError, ValueError) as error:  # The stream is closed: no reason to stop measuring.
                logger.info("progress is no longer printed: %s", error)
                return
