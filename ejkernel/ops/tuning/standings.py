"""Standings: how far candidates came, their times, and the winner; plain statistics, without JAX."""

from __future__ import annotations

import typing
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from ejkernel.ops.tuning import robust

Key = TypeVar("Key", bound=Hashable)

Status = Literal["winner", "finalist", "unfinished", "raced out", "screened", "duplicate", "wrong", "failed"]
_BEST_FIRST = typing.get_args(Status)


def rank(status: str) -> int:
    """How far a candidate came, as a number; the winner has the smallest."""
    return _BEST_FIRST.index(status) if status in _BEST_FIRST else len(_BEST_FIRST)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The time of one call: a median with the interval that holds it at 95 %, and the clock it was read from.

    Fewer than six samples have no such interval: then `low_ms` and `high_ms` are None.
    """

    median_ms: float
    low_ms: float | None
    high_ms: float | None
    samples: int
    timer: str

    @classmethod
    def of(cls, seconds: np.ndarray, timer: str) -> Measurement | None:
        """The measurement from samples; None if there are none."""
        if not len(seconds):
            return None
        ms = 1e3 * np.asarray(seconds)
        low, high = robust.median_interval(ms) or (None, None)
        return cls(median_ms=float(np.median(ms)), low_ms=low, high_ms=high, samples=len(ms), timer=timer)

    def __str__(self) -> str:
        return time_text(self.median_ms, self.low_ms, self.high_ms)


def time_text(median_ms: float, low_ms: float | None, high_ms: float | None) -> str:
    """A time in one line, with its interval if there is one: `1.23 ms [1.2, 1.25]`."""
    interval = "" if low_ms is None or high_ms is None else f" [{low_ms:.4g}, {high_ms:.4g}]"
    return f"{median_ms:.4g} ms{interval}"


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How many times faster, with its 95 % interval; above 1 is faster."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """The result of one config; in a race it is identified by its key."""

    cfg: Any
    status: Status
    reason: str = ""
    measurement: Measurement | None = None
    guess: bool = False
    cases: Mapping[str, float] = field(default_factory=dict)
    """Median milliseconds of each case, if there were several; `measurement` is of their geometric means."""


@dataclass(frozen=True, kw_only=True)
class RaceResult(Generic[Key]):
    """The winner, with its interval, and the results of the others.

    `complete` is False when the race was stopped from outside. `speedup` is over the heuristic, from the final's paired
    samples; None without a heuristic that ran.
    """

    winner: Key
    complete: bool
    measurement: Measurement | None
    speedup: Ratio | None
    rounds: int
    standings: tuple[Candidate, ...]
