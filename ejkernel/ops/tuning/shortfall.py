"""Shortfall: where a tuning did not do what its caller may expect."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from ejkernel.ops.config.asking import source_line
from ejkernel.ops.core.kernel import Invocation, Kernel

_NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?")
_PLACE = re.compile(r"\(\S+:\d+\)")


class TuningWarning(UserWarning):
    """A tuning did not do what its caller may expect."""


def warn(tuning: Any, inv: Invocation[Any, Any], kernel: Kernel[Any, Any], *, stacklevel: int) -> None:
    """Warns the caller of a tuning if its result may not be what they expect."""
    if (text := tuning.shortfall(source_line(inv, kernel))) is not None:
        warnings.warn(f"{inv.op_id}: {text}", TuningWarning, stacklevel=stacklevel + 1)


def shortfall(tuning: Any, place: str) -> str | None:
    """The warning about a `Tuning`, in lines; None if there is none. `place` is the kernel's file and line."""
    guess = next((c for c in tuning.candidates if c.guess), None)
    others = [c for c in tuning.candidates if c is not guess and c.status != "duplicate"]
    told: list[str] = []
    if guess is not None and guess.status in _OUT:
        fate = "is wrong" if guess.status == "wrong" else "failed"
        told.append(f"the guess {guess.cfg!r} {fate}, and is still used for calls that are not tuned")
    if others and guess is not None and guess.status not in _OUT and all(c.status in _OUT for c in others):
        told.append(f"the guess {guess.cfg!r} stays because all other candidates failed or are wrong ({len(others)})")
    elif tuning.measurement is None and not tuning.rounds:
        told.append(f"stopped before anything was measured, and {tuning.cfg!r} is only a guess: raise the budget")
    if not told:
        return None
    reasons = list(grouped(tuning.candidates))
    if reasons and not _PLACE.search(reasons[0]):
        reasons[0] = f"{reasons[0]} ({place})"
    return "\n".join([f"{'; '.join(told)}.", *(f"  {reason}" for reason in reasons)])


_OUT = ("failed", "wrong")


def grouped(candidates: Iterable[Any]) -> Iterator[str]:
    """Why candidates were rejected, most frequent reason first; reasons that differ only in numbers are shown once."""
    groups: dict[Any, list[Any]] = {}
    for c in candidates:
        if c.status in _OUT:
            groups.setdefault((c.status, _NUMBER.sub("#", brief(c.reason))), []).append(c)
    for (status, _), alike in sorted(groups.items(), key=lambda item: -len(item[1])):
        first = alike[0]
        count = f"{len(alike)} {status}, such as" if len(alike) > 1 else f"{status}:"
        yield f"{count} {first.cfg!r}: {brief(first.reason)}"


def brief(reason: str) -> str:
    """A reason's first line, and the last one too: that of a traceback says what went wrong."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()] or [""]
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
