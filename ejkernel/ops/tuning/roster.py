"""The roster of a tuning: its candidates by number, and the result of each."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ejkernel.ops.tuning.standings import Candidate, RaceResult, Status
from ejkernel.ops.utils.serialize import cfg_id


@dataclass
class Roster:
    """Candidates in the order in which they were proposed; the number of a candidate is its index.

    Attributes:
      guess: The heuristic's config.
      cfgs: The configs.
      ends: The results of those that did not finish the race, with reasons.
      twins: Candidates that share a program with an earlier one, which represents both.
      seconds: Times, comparable between all races.
      best: The winner so far.
    """

    guess: Any
    cfgs: list[Any] = field(default_factory=list)
    ends: dict[int, tuple[Status, str]] = field(default_factory=dict)
    twins: dict[int, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    best: int | None = None
    _memory: dict[int, int] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)
    _programs: dict[str, int] = field(default_factory=dict)

    def number(self, cfg: Any) -> int:
        """The number of a config, a new one if it is new."""
        found = self._numbers.setdefault(cfg_id(cfg), len(self.cfgs))
        if found == len(self.cfgs):
            self.cfgs.append(cfg)
        return found

    def name(self, number: int) -> str:
        """The name of a candidate in the history."""
        return cfg_id(self.cfgs[number])

    def is_new(self, number: int, program: str, memory_bytes: int) -> bool:
        """Notes what a candidate compiled to; False if another one has the same program."""
        twin = self._programs.setdefault(program, number)
        if twin == number:
            self._memory[number] = memory_bytes
            return True
        self.twins[number] = twin
        self.ends[number] = ("duplicate", f"the same program as {self.cfgs[twin]!r}")
        return False

    def reject(self, number: int, status: Status, reason: str) -> None:
        """Removes a candidate from the race."""
        self.ends[number] = (status, reason)
        # The next candidate with this program is treated as new.
        self._programs = {program: n for program, n in self._programs.items() if n != number}
        if number == self.best:
            self.best = None

    def pardon(self, names: Container[str]) -> None:
        """Admits the candidates with these names again."""
        self.ends = {n: end for n, end in self.ends.items() if self.name(n) not in names}

    def release(self, number: int) -> list[int]:
        """The candidates that a rejected one represented; from now on they represent themselves."""
        free = [n for n, twin in self.twins.items() if twin == number]
        for n in free:
            del self.twins[n], self.ends[n]
        return free

    def is_rejected(self, number: int) -> bool:
        """Whether a candidate was rejected."""
        return self.ends.get(number, ("", ""))[0] in ("failed", "wrong")

    @property
    def heuristic(self) -> int | None:
        """The guess, or the candidate that represents it, unless it was rejected or not proposed."""
        number = self._numbers.get(cfg_id(self.guess))
        number = None if number is None else self.twins.get(number, number)
        return None if number is None or self.is_rejected(number) else number

    def time(self, number: int) -> float:
        """Seconds of a candidate; infinite if it has none."""
        return self.seconds.get(self.twins.get(number, number), float("inf"))

    def preference(self, number: int) -> tuple[int, str]:
        """The order among equally fast candidates: less memory, then the lower hash, the same on every host."""
        return self._memory.get(number, 0), self.name(number)

    def adopt(self, result: RaceResult[int]) -> None:
        """Takes over the winner and the times of a race."""
        found = {s.cfg: s.measurement.median_ms / 1e3 for s in result.standings if s.measurement is not None}
        # The machine may be slower now than in an earlier race; candidates that took part in both show by how much.
        anchor = next((n for n in (self.best, self.heuristic) if n in found and n in self.seconds), None)
        scale = 1.0 if anchor is None else self.seconds[anchor] / found[anchor]
        self.seconds |= {n: seconds * scale for n, seconds in found.items()}
        self.best = result.winner

    def times_of(self, numbers: Iterable[int]) -> dict[str, float]:
        """Seconds by name, of these and of those that they represent."""
        wanted = set(numbers)
        everyone = (n for n in range(len(self.cfgs)) if n in wanted or self.twins.get(n) in wanted)
        return {self.name(n): self.time(n) for n in everyone if self.time(n) < float("inf")}

    def list_candidates(
        self, results: list[RaceResult[int]], earlier: str, cases: Mapping[int, Mapping[str, float]]
    ) -> Iterator[Candidate]:
        """What became of every candidate; `earlier` is said of those that raced in another tuning."""
        standings = {s.cfg: s for result in results for s in result.standings}
        for n, cfg in enumerate(self.cfgs):
            standing = standings.get(n)
            if n == self.best:
                status, reason = "winner", ""
            elif n in self.ends:
                status, reason = self.ends[n]
            elif standing is not None:
                status, reason = standing.status, standing.reason
                status = "raced out" if status == "winner" else status
            else:
                status, reason = ("raced out", earlier) if n in self.seconds else ("unfinished", "")
            measured = None if standing is None else standing.measurement
            guess = self.name(n) == cfg_id(self.guess)
            facts = {"measurement": measured, "guess": guess, "cases": cases.get(n, {})}
            yield Candidate(cfg=cfg, status=status, reason=reason, **facts)
