"""One tuning: proposes candidates, has them compiled, checked and timed, and reports."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ejkernel.errors import EjkernelError
from ejkernel.ops.tuning import racing, search
from ejkernel.ops.tuning.bench import Built, Rejected, Sample, seconds_of
from ejkernel.ops.tuning.cost import Cost, larger
from ejkernel.ops.tuning.history import Decided, History
from ejkernel.ops.tuning.outcome import Tuning
from ejkernel.ops.tuning.problem import Outline
from ejkernel.ops.tuning.progress import Progress
from ejkernel.ops.tuning.roster import Roster
from ejkernel.ops.tuning.shortfall import grouped
from ejkernel.ops.tuning.standings import RaceResult
from ejkernel.ops.tuning.timers import TimerError
from ejkernel.ops.utils.fingerprint import short_hash
from ejkernel.ops.utils.serialize import cfg_id

logger = logging.getLogger("ejkernel.tuning")

EARLIER = "in an earlier tuning"
_LISTED = 4096
"""Spaces up to this size are known by their members, larger ones by their axes."""


class TuningError(EjkernelError, RuntimeError):
    """No candidate could be measured; the message gives the reasons."""


class TuningRefusedError(TuningError, NotImplementedError):
    """Every candidate raised NotImplementedError: the backend refuses the call from inside."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much to try, and how hard to measure."""

    num_iters: int = 1
    budget_s: float | None = None
    max_candidates: int | None = None
    progress: bool | None = None
    seed: int = 0
    build_at_once: int = 2 * (os.cpu_count() or 1)


@dataclass
class Session:
    """One tuning.

    Attributes:
      effort: How much to try.
      outline: What to try.
      open_bench: Makes the `Bench` or `IsolatedBench`; not called if the answer is already known.
      history: Results of earlier tunings.
      stop: Set to end the tuning with the best so far.
      seeds: Configs to start a large search from.
      stored: The config of the finished tuning that is stored for the call.
    """

    effort: Effort
    outline: Outline
    open_bench: Callable[[], Any]
    history: History
    stop: threading.Event
    seeds: Sequence[Any] = ()
    stored: Any = None

    _proved: set[int] = field(default_factory=set)
    _right_gradient: set[int] = field(default_factory=set)
    _results: list[RaceResult[int]] = field(default_factory=list)
    _has_truth: bool = False
    _finished: bool = False
    _cost: Cost | None = None
    _by_case: dict[int, dict[str, list[float]]] = field(default_factory=dict)

    def run(self) -> Tuning:
        """Runs the tuning and returns its result.

        Raises:
          TuningError: No candidate could be measured.
        """
        start = time.monotonic()
        self._deadline = start + self.effort.budget_s if self.effort.budget_s is not None else None
        self._space = search.Space.of(self.outline.space, self.outline.guess)
        self._roster = Roster(self.outline.guess)
        self._known = self._earlier()
        if self._known is not None and self._is_settled(self._known):
            return self._unchanged(self._known, time.monotonic() - start)
        progress = Progress(self.outline.name, self.effort.budget_s, self.effort.progress)
        with progress as self._progress, contextlib.ExitStack() as self._open:
            self._search()
            if self._is_hopeless():
                # What caused the failures then, a module or the data, may have been fixed.
                self._roster.pardon(self.history.rejected)
                self.history.pardon()
                self._search()
            tuning = self._report(time.monotonic() - start)
            progress.finished(tuning.summary())
        return tuning

    @functools.cached_property
    def _bench(self) -> Any:
        bench = self.open_bench()
        self._open.callback(bench.close)
        return bench

    @property
    def _over(self) -> bool:
        return self.stop.is_set() or (self._deadline is not None and time.monotonic() > self._deadline)

    # --- What is known ---

    @functools.cached_property
    def _members(self) -> dict[str, Any] | None:
        """Configs of the space by `cfg_id`; None if there are too many to list."""
        listed = list(itertools.islice(self._space, _LISTED + 1)) if self._space.points <= 16 * _LISTED else None
        return None if listed is None or len(listed) > _LISTED else {cfg_id(cfg): cfg for cfg in listed}

    @functools.cached_property
    def _space_id(self) -> str:
        members = sorted(self._members) if self._members is not None else repr(self._space.axes)
        return short_hash([members, cfg_id(self.outline.guess)])

    def _earlier(self) -> Decided | None:
        """The known times of races against a config that may still win."""
        known = self.history.decided
        if known is None or known.winner in self.history.rejected:
            return None
        options = [self.outline.guess, *self.seeds, *(self._members or {}).values()]
        if self._members is None:
            options.append(self.stored)
        winner = next((cfg for cfg in options if cfg is not None and cfg_id(cfg) == known.winner), None)
        if winner is None:
            return None
        self._roster.best = self._roster.number(winner)
        return known

    def _is_settled(self, known: Decided) -> bool:
        stored = self.stored is not None and cfg_id(self.stored) == known.winner
        return stored and self.history.has_searched(self._space_id)

    def _is_hopeless(self) -> bool:
        """Whether no candidate is left because of the results of earlier tunings."""
        nobody = self._roster.best is None and not self._over
        return nobody and any(self._roster.name(n) in self.history.rejected for n in range(len(self._roster.cfgs)))

    def _is_known(self, number: int) -> bool:
        """Whether there is already an answer, from an earlier tuning or from this one; notes it."""
        name = self._roster.name(number)
        if self._roster.is_rejected(number):
            return True
        if (before := self.history.rejected.get(name)) is not None:
            self._roster.reject(number, before.outcome, f"{before.reason} ({EARLIER})")
        elif self._known is not None and name in self._known.seconds:
            self._roster.seconds[number] = self._known.seconds[name]
        else:
            return False
        return True

    # --- Which configs ---

    def _search(self) -> None:
        seeds = [cfg for cfg in (self.outline.guess, *self.seeds) if cfg is not None]
        strategy = search.choose(self._space, seeds, seed=self.effort.seed)
        trials: list[search.Trial[Any]] = []
        while batch := strategy.propose(trials):
            if self.effort.max_candidates is not None:
                batch = batch[: max(0, self.effort.max_candidates - len(trials))]
            if self._over or not batch:
                return
            trials += self._try(batch)
        self._finished = True

    def _try(self, batch: list[Any]) -> list[search.Trial[Any]]:
        roster = self._roster
        numbers = [roster.number(cfg) for cfg in batch]
        fresh = [n for n in numbers if not self._is_known(n)]
        if fresh:
            # The guess goes first: without a reference, its output is the right answer.
            first = [n for n in (roster.heuristic, roster.best) if n is not None and n not in self._proved]
            entrants = self._prove(self._build(list(dict.fromkeys([*first, *fresh]))))
            if entrants and (roster.best is None or set(entrants) & set(fresh)):
                self._race(entrants)
        return [search.Trial(cfg, roster.time(n)) for cfg, n in zip(batch, numbers, strict=True)]

    # --- Compiling and checking ---

    def _build(self, numbers: list[int]) -> list[int]:
        built: list[int] = []
        size = self.effort.build_at_once
        for at in range(0, len(numbers), size):
            if self._over:
                break
            chunk = numbers[at : at + size]
            for n, result in zip(chunk, self._bench.build([(n, self._cfg(n)) for n in chunk]), strict=True):
                if isinstance(result, Rejected):
                    self._reject(n, result)
                    continue
                assert isinstance(result, Built)
                self._cost = larger(self._cost, result.cost)
                if self._roster.is_new(n, result.program, result.memory_bytes):
                    built.append(n)
                else:
                    self._bench.forget(n)
            self._progress.building(at + len(chunk), len(numbers))
        return built

    def _cfg(self, number: int) -> Any:
        return self._roster.cfgs[number]

    def _reject(self, number: int, rejected: Rejected) -> None:
        logger.debug("%s: %r %s: %s", self.outline.name, self._cfg(number), rejected.outcome, rejected.reason)
        if number == self._roster.best:
            # Candidates that lost against it in an earlier tuning may be right: the next tuning tries them again.
            self._known = None
        self._roster.reject(number, rejected.outcome, rejected.reason)
        self.history.reject(self._cfg(number), rejected)
        self._bench.forget(number)
        self._proved.discard(number)

    def _prove(self, numbers: list[int]) -> list[int]:
        """Those that compute the right answer."""
        right = []
        for n in numbers:
            if self._over:
                break
            if not self._has_truth and not self._find_truth(n):
                continue
            rejected = self._bench.prove(n)
            if rejected is None:
                right.append(n)
            else:
                self._reject(n, rejected)
        self._proved.update(right)
        return right

    def _find_truth(self, number: int) -> bool:
        """Uses the reference, or else this candidate, as the right answer; the guess is tried first."""
        own = self.outline.has_truth
        try:
            self._bench.set_truth(None if own else number)
        except Exception as error:
            if own:
                raise TuningError(f"{self.outline.name}: the reference failed: {error}") from error
            self._reject(number, Rejected("failed", f"{type(error).__name__}: {error}"))
            return False
        if not own and number != self._roster.heuristic:
            logger.warning("%s: the guess cannot run; %r is taken as right.", self.outline.name, self._cfg(number))
        self._has_truth = True
        return True

    # --- Racing ---

    def _race(self, entrants: list[int]) -> None:
        """Races candidates against the best so far and the guess."""
        roster = self._roster
        contestants = {*entrants, *(n for n in (roster.best, roster.heuristic) if n in self._proved)}
        while left := [n for n in contestants if n is not None and not roster.is_rejected(n)]:
            result = self._one_race(sorted(left, key=roster.preference))
            if result is None and self._over:
                return
            if result is None:
                continue  # All of them broke.
            rejected = self._prove_gradient(result.winner)
            if rejected is None:
                self._adopt(result)
                return
            self._reject(result.winner, rejected)
            contestants.update(self._others_with_its_program(result.winner))

    def _others_with_its_program(self, number: int) -> list[int]:
        """A candidate with a right gradient, among those that share the program of one with a wrong gradient."""
        waiting = self._roster.release(number)
        while waiting and not self._over and (rejected := self._prove_gradient(waiting[0])) is not None:
            self._reject(waiting.pop(0), rejected)
        return self._prove(self._build(waiting))

    def _prove_gradient(self, number: int) -> Rejected | None:
        if number in self._right_gradient:
            return None
        rejected = self._bench.prove_gradient(self._cfg(number))
        if rejected is None:
            self._right_gradient.add(number)
        return rejected

    def _one_race(self, numbers: list[int]) -> RaceResult[int] | None:
        """The result of a race; None if no candidate was measured."""
        timer, heuristic = self._bench.timer, self._roster.heuristic
        race = racing.Race(
            numbers,
            heuristic=heuristic if heuristic in numbers else None,
            seed=self.effort.seed,
            min_rounds=self.effort.num_iters,
            rules=racing.DEVICE_TIME if timer.device_time else racing.WALL_CLOCK,
            timer=timer.name,
        )
        names = {self._roster.name(n): n for n in numbers}
        for seconds in self.history.start_race(list(names), timer.name):
            known = {names[name]: value for name, value in seconds.items() if name in names}
            if not race.done and all(n in known for n in race.survivors):
                race.record({n: known[n] for n in race.survivors})
        try:
            self._measure(race)
        except TimerError as error:
            logger.warning("%s: %s Starting over with the wall clock.", self.outline.name, error)
            self._bench.use_wall_clock()
            return self._one_race(numbers)
        return race.result if race.rounds and race.survivors else None

    def _measure(self, race: racing.Race[int]) -> None:
        total = len(race.survivors)
        while not race.done:
            if self._over:
                race.stop()
                return
            samples = self._bench.measure(race.next_round())
            seconds = {n: self._seconds(n, s) for n, s in samples.items() if not isinstance(s, Rejected)}
            for number, sample in samples.items():
                if isinstance(sample, Rejected):
                    race.fail(number, sample.reason)
                    self._reject(number, sample)
            if race.done:
                return
            race.record(seconds)
            self.history.add_round({self._roster.name(n): s for n, s in seconds.items()})
            self._progress.racing(race, total, self._cfg)

    def _seconds(self, number: int, sample: Sample) -> float:
        """What counts of a sample; the times of several cases are kept for the report."""
        for name, time_s in sample.items() if isinstance(sample, dict) else ():
            self._by_case.setdefault(number, {}).setdefault(name, []).append(time_s)
        return seconds_of(sample)

    def _adopt(self, result: RaceResult[int]) -> None:
        self._results.append(result)
        self._roster.adopt(result)
        if result.complete:
            self.history.decide(
                Decided(
                    winner=self._roster.name(result.winner),
                    seconds=self._roster.times_of(s.cfg for s in result.standings),
                    measurement=result.measurement,
                    speedup=result.speedup,
                )
            )
        for standing in result.standings:
            out = standing.status in ("raced out", "screened") and standing.cfg != self._roster.heuristic
            if out and not self._roster.is_rejected(standing.cfg):
                self._bench.forget(standing.cfg)
                self._proved.discard(standing.cfg)

    # --- Reporting ---

    def _report(self, seconds: float) -> Tuning:
        roster = self._roster
        timer = self._bench.timer.name if "_bench" in vars(self) else ""
        cases = {n: {c: 1e3 * statistics.median(x) for c, x in by.items()} for n, by in self._by_case.items()}
        candidates = tuple(roster.list_candidates(self._results, EARLIER, cases))
        unfinished = any(c.status == "unfinished" for c in candidates)
        facts: dict[str, Any] = {
            "candidates": candidates,
            "rounds": sum(result.rounds for result in self._results),
            "seconds": seconds,
            "cost": self._cost,
        }
        if roster.best is None:
            if not self._over or (fallback := self._untested()) is None:
                refused = all(c.reason.startswith(f"{NotImplementedError.__name__}:") for c in candidates)
                raise (TuningRefusedError if refused else TuningError)(_nothing(self.outline.name, candidates))
            return Tuning(cfg=self._cfg(fallback), complete=False, measurement=None, speedup=None, timer=timer, **facts)
        whole = self._finished and not unfinished
        if not self._results:
            assert self._known is not None
            tuning = self._told(self._known, complete=whole, **facts)
        else:
            last = self._results[-1]
            tuning = Tuning(
                cfg=self._cfg(roster.best),
                complete=whole and last.complete,
                decided=last.complete,
                measurement=last.measurement,
                speedup=last.speedup,
                timer=timer,
                **facts,
            )
        if tuning.complete:
            self.history.finish(self._space_id)
        return tuning

    def _untested(self) -> int | None:
        """The config to use if time was up before anything was measured: the guess, unless it was rejected."""
        guess = self._roster.number(self.outline.guess)
        if not self._roster.is_rejected(guess):
            return guess
        return min(self._proved, default=None)

    def _told(self, known: Decided, **facts: Any) -> Tuning:
        """The result from the history."""
        assert self._roster.best is not None
        return Tuning(
            cfg=self._cfg(self._roster.best),
            measurement=known.measurement,
            speedup=known.speedup,
            timer="" if known.measurement is None else known.measurement.timer,
            **facts,
        )

    def _unchanged(self, known: Decided, seconds: float) -> Tuning:
        """The stored result, if nothing new could change it."""
        return self._told(known, complete=True, candidates=(), rounds=0, seconds=seconds)


def _nothing(name: str, candidates: Sequence[Any]) -> str:
    lines = [f"  {reason}" for reason in grouped(candidates)] or ["  There are none, and the guess is None."]
    if any("unbound axis name" in c.reason for c in candidates):
        lines.append("  To tune a kernel that communicates over an axis on its mesh, set `collective = True` on it.")
    return "\n".join([f"{name}: no candidate can be used.", *lines])
