"""The result of a tuning: the winner, with its interval, and the result of every candidate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ejkernel.ops.tuning.cost import Cost
from ejkernel.ops.tuning.shortfall import grouped, shortfall
from ejkernel.ops.tuning.standings import Candidate, Measurement, Ratio, rank
from ejkernel.ops.utils.canonical import same_cfg


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The result of one tuning.

    Attributes:
      cfg: The winner.
      complete: Whether it was finished, not stopped by a budget or Ctrl-C.
      measurement: The winner's time, from fresh samples.
      speedup: Over the heuristic, with its interval; None if the heuristic could not run.
      candidates: Every config that was considered.
      timer: The clock; times of different clocks are not comparable.
      rounds: Rounds of the race.
      seconds: Time spent.
      cost: A lower bound of the call's cost, if it can be counted.
      keywords: The static keywords of the call as its caller writes them, each as text.
      decided: Whether the race was finished, even if not every config took part.
    """

    cfg: Any
    complete: bool
    measurement: Measurement | None
    speedup: Ratio | None
    candidates: tuple[Candidate, ...]
    timer: str
    rounds: int
    seconds: float
    cost: Cost | None = None
    keywords: Mapping[str, str] = field(default_factory=dict)
    decided: bool = False

    def has_beaten(self, cfg: Any) -> bool:
        """Whether the winner was fairly compared with a config."""
        return self.decided and any(c.measurement is not None and same_cfg(c.cfg, cfg) for c in self.candidates)

    def ranked(self) -> list[Candidate]:
        """Every config: the winner, then by how far they came, then by time."""
        time = lambda c: float("inf") if c.measurement is None else c.measurement.median_ms
        return sorted(self.candidates, key=lambda c: (rank(c.status), time(c)))

    def counts(self) -> dict[str, int]:
        """The number of candidates per kind of result."""
        return dict(Counter(candidate.status for candidate in self.candidates))

    def statistics(self) -> Mapping[str, Any]:
        """The result as data, for the store."""
        return {
            "timer": self.timer,
            "measurement": None if self.measurement is None else asdict(self.measurement),
            "speedup": None if self.speedup is None else asdict(self.speedup),
            "rounds": self.rounds,
            "seconds": round(self.seconds, 3),
            "cost": None if self.cost is None else asdict(self.cost),
            "keywords": dict(self.keywords),
            "counts": self.counts(),
            "candidates": [_candidate(c) for c in self.candidates],
        }

    def summary(self) -> str:
        """One paragraph for a person."""
        counts = ", ".join(f"{n} {status}" for status, n in self.counts().items())
        lines = [
            f"tried {len(self.candidates)}: {counts}; {self.rounds} rounds, {self.timer} timer, {self.seconds:.1f} s"
        ]
        lines.append(
            f"winner {self.cfg!r}: {self.measurement or 'not measured'}{'' if self.complete else ' (incomplete)'}"
        )
        if cases := next((c.cases for c in self.candidates if c.status == "winner"), None):
            lines.append("  the geometric mean of " + ", ".join(f"{n} {ms:.4g} ms" for n, ms in cases.items()))
        if self.speedup is not None:
            gain = self.speedup
            lines.append(f"speed-up over the heuristic {gain.value:.3f} [{gain.low:.3f}, {gain.high:.3f}]")
        lines += [f"  {reason}" for reason in grouped(self.candidates)]
        return "\n".join(lines)

    def shortfall(self, place: str) -> str | None:
        """A warning if the result may not be what the caller expects; `place` is the kernel's file and line."""
        return shortfall(self, place)


def _candidate(c: Candidate) -> dict[str, Any]:
    measured = c.measurement
    times = {} if measured is None else {"low_ms": measured.low_ms, "high_ms": measured.high_ms, "n": measured.samples}
    return {
        "cfg": repr(c.cfg),
        "status": c.status,
        "reason": c.reason,
        "guess": c.guess,
        "median_ms": None if measured is None else measured.median_ms,
        **times,
        **({"cases": dict(c.cases)} if c.cases else {}),
    }
