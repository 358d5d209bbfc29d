"""Standings: what a race reports about its winner and about everyone else."""

import dataclasses
from collections.abc import Hashable
from typing import Generic, Literal, Self, TypeVar

import numpy as np

from ejkernel.ops.tuning import robust

Key = TypeVar("Key", bound=Hashable)

Status = Literal["winner", "finalist", "raced out", "screened", "failed", "unfinished"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A time per call in seconds, with the interval that holds its median at 95 %; fewer than six samples have none."""

    median_s: float
    mad_s: float
    n: int
    low_s: float | None
    high_s: float | None

    @classmethod
    def of(cls, seconds: np.ndarray) -> Self | None:
        """Returns the estimate of some samples, None of none."""
        if not len(seconds):
            return None
        low, high = robust.median_interval(seconds) or (None, None)
        median = float(np.median(seconds))
        return cls(median_s=median, mad_s=robust.mad(seconds), n=len(seconds), low_s=low, high_s=high)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """How many times faster, with its 95 % interval; above 1 is faster."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Standing(Generic[Key]):
    """How one candidate left the race."""

    key: Key
    status: Status
    rounds: int
    estimate: Estimate | None
    reason: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RaceResult(Generic[Key]):
    """Who won, how surely, and what became of the others.

    `complete` is False when the race was stopped from outside. `speedup` is over the heuristic, from the final's paired
    samples; None without a heuristic that ran.
    """

    winner: Key
    complete: bool
    estimate: Estimate | None
    speedup: Ratio | None
    rounds: int
    runs: int
    standings: tuple[Standing[Key], ...]
