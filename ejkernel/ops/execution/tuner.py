"""The tuner: proposes candidates, proves them, races them, and reports."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ejkernel.errors import EjkernelError
from ejkernel.ops.config import context
from ejkernel.ops.config.entry import StoredEntry
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.selection import source_of
from ejkernel.ops.core.kernel import Invocation, Kernel
from ejkernel.ops.execution import racing, search
from ejkernel.ops.execution.bench import Bench, Built, Rejected
from ejkernel.ops.execution.history import History, cfg_id
from ejkernel.ops.execution.problem import Problem, from_call, materialise
from ejkernel.ops.execution.progress import Progress
from ejkernel.ops.execution.remote import RemoteBench
from ejkernel.ops.execution.report import Candidate, Measurement, Status, Tuning
from ejkernel.ops.execution.standings import RaceResult, Ratio
from ejkernel.ops.execution.timers import Timer, TimerError
from ejkernel.ops.execution.workers import run_outside
from ejkernel.ops.utils.fingerprint import short_hash

logger = logging.getLogger("ejkernel.tuning")

Isolation = Literal["thread", "process"]


class TuningError(EjkernelError, RuntimeError):
    """No candidate could be measured; the message lists each with its reason."""


class TunerSettingError(EjkernelError, ValueError):
    """A tuner was set up in a way that has no meaning."""


@dataclass(frozen=True, kw_only=True)
class Autotuner:
    """Finds the fastest correct config.

    Attributes:
      num_warmup: Runs of each candidate before its first sample.
      num_iters: The least number of samples behind the winner's figures; the race takes more where it needs them.
      budget_s: Stop after this many seconds with the best so far, marked incomplete.
      max_candidates: Try at most this many configs.
      isolation: `"thread"` measures in this process, outside of whatever is being traced. `"process"` measures in a
        worker that is killed when a candidate hangs, crashes or eats all memory; kernels must be importable.
      timer: `"auto"` takes the best clock that works, `"wall"` the host's.
      cold: Time every call with its inputs out of the cache, for kernels bound by bandwidth.
      compile_s, run_s: How long compiling, and running once, may take.
      memory_bytes: The worker's limit with `"process"`; by default three quarters of what is available.
      progress: Draw a bar; None draws on terminals only.
      seed: Of the order of measurements and of random candidates.
    """

    num_warmup: int = 1
    num_iters: int = 1
    budget_s: float | None = None
    max_candidates: int | None = None
    isolation: Isolation = "thread"
    timer: Timer | Literal["auto", "wall"] = "auto"
    cold: bool = False
    compile_s: float = 120.0
    run_s: float = 60.0
    memory_bytes: int | None = None
    progress: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.isolation not in ("thread", "process"):
            raise TunerSettingError(f"Autotuner: isolation must be 'thread' or 'process', got {self.isolation!r}.")
        if isinstance(self.timer, str) and self.timer not in ("auto", "wall"):
            raise TunerSettingError(f"Autotuner: timer must be 'auto', 'wall' or a Timer, got {self.timer!r}.")
        limits = {"num_warmup": 0, "num_iters": 1, "max_candidates": 1, "budget_s": 0, "compile_s": 0, "run_s": 0}
        for name, least in limits.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise TunerSettingError(f"Autotuner: {name} must be at least {least}, got {value!r}.")

    def autotune(
        self, make_fn: Callable[[Any], Callable[..., Any]], args: Any, kwargs: Any, candidates: Iterable[Any]
    ) -> Any:
        """The best of `candidates`; `make_fn(cfg)` is a function of `(*args, **kwargs)`. The first one is the truth."""
        if self.isolation == "process":
            raise TunerSettingError("Autotuner.autotune: functions cannot be sent to a worker; use tune(inv, kernel).")

        def run(stop: threading.Event) -> Tuning:
            import jax

            data = materialise("autotune", (tuple(args), dict(kwargs)), jax.random.key(0))
            first, rest = _peek(candidates)
            problem = Problem("autotune", make_fn, *data, space=rest, guess=first)
            history = History(None, None, None, "")
            return _Session(self, problem, Bench(problem, **self._bench_options()), history, stop).run()

        return self._outside(run).cfg

    def tune(
        self,
        inv: Invocation[Any, Any],
        kernel: Kernel[Any, Any],
        *,
        configs: Any = None,
        store: PersistentCache | None = None,
        seeds: Sequence[Any] = (),
    ) -> Tuning:
        """Tunes one call, forward or backward; safe while the caller is tracing.

        Args:
          inv: The call. If it is abstract, data of its shapes is made up.
          kernel: Whose call it is.
          configs: What to try, instead of the kernel's own space.
          store: Where trials are kept, so that an interrupted tuning goes on and nothing is measured twice.
          seeds: Configs to start a large search from.

        Raises:
          TuningError: No candidate could be measured.
          TuningInputsError: The call is abstract, and nobody knows legal data for it.
        """
        return self._outside(lambda stop: self._tune(inv, kernel, configs, store, seeds, stop))

    def _outside(self, run: Callable[[threading.Event], Tuning]) -> Tuning:
        stop = threading.Event()
        # Overlays and policy come along: a candidate may call other kernels.
        return run_outside(lambda: run(stop), contexts=[context.same_scope()], on_interrupt=stop.set)

    def _tune(
        self,
        inv: Invocation[Any, Any],
        kernel: Kernel[Any, Any],
        configs: Any,
        store: PersistentCache | None,
        seeds: Sequence[Any],
        stop: threading.Event,
    ) -> Tuning:
        problem = from_call(inv, kernel, configs)
        with contextlib.closing(self._bench(problem, inv, kernel)) as bench:
            clock = f"{bench.timer.name}{', cold' if self.cold else ''}"
            history = History(store, inv.key, source_of(kernel), clock)
            session = _Session(self, problem, bench, history, stop, seeds=seeds)
            known = store.own(*inv.key) if store is not None else None
            if known is not None and known.complete and history.raced:
                session.known = known.typed(kernel.cfg_type)
            return session.run()

    def _bench(self, problem: Problem, inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Any:
        if self.isolation == "thread":
            return Bench(problem, compile_s=self.compile_s, **self._bench_options())
        limits = {"compile_s": self.compile_s, "run_s": self.run_s, "memory_bytes": self.memory_bytes}
        return RemoteBench(kernel, inv, self._bench_options(), **limits)

    def _bench_options(self) -> dict[str, Any]:
        return {"timer": self.timer, "cold": self.cold, "num_warmup": self.num_warmup}


@dataclass
class _Session:
    """One tuning."""

    tuner: Autotuner
    problem: Problem
    bench: Any
    history: History
    stop: threading.Event
    seeds: Sequence[Any] = ()
    known: StoredEntry | None = None
    """The outcome of an earlier tuning: only what its winner never raced against is measured."""

    _cfgs: list[Any] = field(default_factory=list)
    _ends: dict[int, tuple[Status, str]] = field(default_factory=dict)
    _memory: dict[int, int] = field(default_factory=dict)
    _programs: dict[str, int] = field(default_factory=dict)
    _results: list[RaceResult[int]] = field(default_factory=list)
    _has_truth: bool = False

    def run(self) -> Tuning:
        start = time.monotonic()
        self._deadline = start + self.tuner.budget_s if self.tuner.budget_s is not None else None
        with Progress(self.problem.name, self.tuner.budget_s, self.tuner.progress) as self._progress:
            self._search()
            tuning = self._report(time.monotonic() - start)
            self._progress.finished(tuning.summary())
        return tuning

    # --- Which configs ---

    def _search(self) -> None:
        guess = self.problem.guess
        space = search.Space.of(self.problem.space, guess)
        seeds = [cfg for cfg in (guess, self.known and self.known.cfg, *self.seeds) if cfg is not None]
        strategy = search.choose(space, seeds, seed=self.tuner.seed)
        trials: list[search.Trial[Any]] = []
        while not self._over:
            batch = strategy.propose(trials)
            if self.tuner.max_candidates is not None:
                batch = batch[: self.tuner.max_candidates - len(self._cfgs)]
            batch = self._only_new(batch)
            if not batch:
                return
            trials += self._try(batch)

    def _only_new(self, batch: list[Any]) -> list[Any]:
        """After a finished tuning, what it has not seen, with its winner and the guess to measure against."""
        if self.known is None:
            return batch
        known = self.history.raced | set(self.history.rejected)
        fresh = [cfg for cfg in batch if cfg_id(cfg) not in known]
        if not fresh:
            return []
        keep = {cfg_id(cfg): cfg for cfg in (self.problem.guess, self.known.cfg, *fresh) if cfg is not None}
        return list(keep.values())

    def _try(self, batch: list[Any]) -> list[search.Trial[Any]]:
        numbers = [self._number(cfg) for cfg in batch]
        entrants = self._prove(self._build(numbers))
        times = self._race(entrants) if entrants and not self._over else {}
        seconds = [times.get(self._twin(n), float("inf")) for n in numbers]
        return [search.Trial(cfg, s) for cfg, s in zip(batch, seconds, strict=True)]

    def _number(self, cfg: Any) -> int:
        self._cfgs.append(cfg)
        return len(self._cfgs) - 1

    def _twin(self, number: int) -> int:
        """The candidate whose program this one shares."""
        status, reason = self._ends.get(number, ("unfinished", ""))
        return int(reason) if status == "duplicate" else number

    @property
    def _over(self) -> bool:
        return self.stop.is_set() or (self._deadline is not None and time.monotonic() > self._deadline)

    # --- Building and proving ---

    def _build(self, numbers: list[int]) -> list[int]:
        built: list[int] = []
        known = self.history.rejected
        for n in numbers:
            if (before := known.get(cfg_id(self._cfgs[n]))) is not None:
                self._ends[n] = (before.outcome, f"{before.reason} (in an earlier tuning)")
        waiting = [n for n in numbers if n not in self._ends]
        for chunk in _chunks(waiting, 2 * (os.cpu_count() or 1)):
            if self._over:
                break
            results = self.bench.build([(n, self._cfgs[n]) for n in chunk])
            for n, result in zip(chunk, results, strict=True):
                if isinstance(result, Rejected):
                    self._reject(n, result)
                elif (twin := self._programs.setdefault(result.program, n)) != n:
                    self._ends[n] = ("duplicate", str(twin))
                    self.bench.forget(n)
                else:
                    assert isinstance(result, Built)
                    self._memory[n] = result.memory_bytes
                    built.append(n)
            self._progress.building(len(built), len(waiting))
        return built

    def _reject(self, number: int, rejected: Rejected) -> None:
        self._ends[number] = (rejected.outcome, rejected.reason)
        self.history.reject(self._cfgs[number], rejected)
        self.bench.forget(number)

    def _prove(self, numbers: list[int]) -> list[int]:
        """Those that compute the right answer."""
        right = []
        for n in numbers:
            if self._over:
                break
            if not self._has_truth and not self._find_truth(n):
                continue
            rejected = self.bench.prove(n)
            if rejected is None:
                right.append(n)
            else:
                self._reject(n, rejected)
        return right

    def _find_truth(self, number: int) -> bool:
        """Takes the reference, or else this candidate, as the right answer; the guess is the first one to be asked."""
        own = self.problem.truth is not None
        try:
            self.bench.set_truth(None if own else number)
        except Exception as error:
            if own:
                raise TuningError(f"{self.problem.name}: the reference failed: {error}") from error
            self._reject(number, Rejected("failed", f"{type(error).__name__}: {error}"))
            return False
        if not own and search.identity(self._cfgs[number]) != search.identity(self.problem.guess):
            logger.warning("%s: the guess cannot run; %r is taken as right.", self.problem.name, self._cfgs[number])
        self._has_truth = True
        return True

    # --- Racing ---

    def _race(self, entrants: list[int]) -> dict[int, float]:
        """Races candidates, the best so far and the guess; seconds of each entrant, comparable between races."""
        earlier = [n for n in {self._winner, self._guess} if n is not None and n not in entrants]
        while True:
            field_ = sorted({*earlier, *entrants} - set(self._rejected()), key=self._preference)
            if not field_:
                return {}
            result = self._one_race(field_)
            if self._over or (rejected := self.bench.prove_gradient(self._cfgs[result.winner])) is None:
                break
            self._reject(result.winner, rejected)
        self._results.append(result)
        for standing in result.standings:
            if standing.status == "failed":
                self._reject(standing.key, Rejected("failed", standing.reason))
            elif standing.status in ("raced out", "screened"):
                self.bench.forget(standing.key) if standing.key != self._guess else None
        return self._times(result)

    def _one_race(self, numbers: list[int]) -> RaceResult[int]:
        rules = racing.DEVICE_TIME if self.bench.timer.device_time else racing.WALL_CLOCK
        guess = self._guess if self._guess in numbers else None
        race = racing.Race(numbers, heuristic=guess, seed=self.tuner.seed, min_rounds=self.tuner.num_iters, rules=rules)
        by_id = {cfg_id(self._cfgs[n]): n for n in numbers}
        for seconds in self.history.start_race(list(by_id)):
            if not race.done and all(cfg_id(self._cfgs[n]) in seconds for n in race.survivors):
                race.record({by_id[i]: s for i, s in seconds.items() if by_id.get(i) in race.survivors})
        try:
            self._measure(race)
        except TimerError as error:
            logger.warning("%s: %s Starting over with the wall clock.", self.problem.name, error)
            self.bench.use_wall_clock()
            return self._one_race(numbers)
        if race.result.complete:
            self.history.decide(list(by_id))
        return race.result

    def _measure(self, race: racing.Race[int]) -> None:
        total = len(race.survivors)
        while not race.done:
            if self._over:
                race.stop()
                return
            samples = self.bench.measure(race.next_round())
            for number, sample in samples.items():
                if isinstance(sample, Rejected):
                    race.fail(number, sample.reason)
            if race.done:
                return
            seconds = {n: s for n, s in samples.items() if not isinstance(s, Rejected)}
            race.record(seconds)
            self.history.add_round({cfg_id(self._cfgs[n]): s for n, s in seconds.items()})
            if race.rounds % 4 == 0:
                best = race.result
                self._progress.racing(len(race.survivors), total, race.rounds, self._cfgs[best.winner], best.estimate)

    def _times(self, result: RaceResult[int]) -> dict[int, float]:
        found = {s.key: s.estimate.median_s for s in result.standings if s.estimate is not None}
        return found | {n: float("inf") for n in self._rejected()}

    def _preference(self, number: int) -> tuple[int, str]:
        """Among equals the one that needs less memory, then the lower hash: the same on every host."""
        return self._memory.get(number, 0), short_hash(repr(self._cfgs[number]))

    def _rejected(self) -> list[int]:
        return [n for n, (status, _) in self._ends.items() if status in ("failed", "wrong")]

    @property
    def _winner(self) -> int | None:
        return self._results[-1].winner if self._results else None

    @property
    def _guess(self) -> int | None:
        wanted = search.identity(self.problem.guess)
        found = next((n for n, cfg in enumerate(self._cfgs) if search.identity(cfg) == wanted), None)
        if found is None or (end := self._ends.get(self._twin(found))) is None or end[0] not in ("failed", "wrong"):
            return None if found is None else self._twin(found)
        return None

    # --- Reporting ---

    def _report(self, seconds: float) -> Tuning:
        candidates = tuple(self._candidates())
        if not self._results and self.known is not None:
            return self._unchanged(self.known, seconds)
        if not self._results:
            if not self._over or not any(c.status == "unfinished" for c in candidates):
                raise TuningError(_nothing(self.problem.name, candidates))
            # Stopped before anything was measured: the guess, and nothing that could be stored.
            return self._outcome(self.problem.guess, None, candidates, seconds)
        return self._outcome(self._cfgs[self._results[-1].winner], self._results[-1], candidates, seconds)

    def _unchanged(self, known: StoredEntry, seconds: float) -> Tuning:
        """The stored outcome, which nothing new could change."""
        found = known.statistics
        measurement, speedup = found.get("measurement"), found.get("speedup")
        return Tuning(
            cfg=known.cfg,
            complete=True,
            measurement=None if measurement is None else Measurement(**measurement),
            speedup=None if speedup is None else Ratio(**speedup),
            candidates=(),
            timer=found.get("timer", self.bench.timer.name),
            rounds=0,
            seconds=seconds,
        )

    def _outcome(
        self, cfg: Any, result: RaceResult[int] | None, candidates: tuple[Candidate, ...], seconds: float
    ) -> Tuning:
        unfinished = any(c.status == "unfinished" for c in candidates)
        return Tuning(
            cfg=cfg,
            complete=result is not None and result.complete and not unfinished,
            measurement=None if result is None else Measurement.of(result.estimate, self.bench.timer.name),
            speedup=None if result is None else result.speedup,
            candidates=candidates,
            timer=self.bench.timer.name,
            rounds=sum(r.rounds for r in self._results),
            seconds=seconds,
        )

    def _candidates(self) -> Iterator[Candidate]:
        standings = {s.key: s for result in self._results for s in result.standings}
        for n, cfg in enumerate(self._cfgs):
            status, reason = self._ends.get(n, ("unfinished", ""))
            standing = standings.get(n)
            if n not in self._ends and standing is not None:
                status, reason = standing.status, standing.reason
                if status == "winner" and n != self._winner:
                    status = "raced out"
            if status == "duplicate":
                reason = f"the same program as {self._cfgs[int(reason)]!r}"
            measured = None if standing is None else Measurement.of(standing.estimate, self.bench.timer.name)
            yield Candidate(cfg=cfg, status=status, reason=reason, measurement=measured)


def _nothing(name: str, candidates: tuple[Candidate, ...]) -> str:
    lines = [f"  {c.cfg!r}: {c.status}: {c.reason}" for c in candidates]
    return "\n".join([f"{name}: no candidate could be measured.", *lines])


def _peek(candidates: Iterable[Any]) -> tuple[Any, list[Any]]:
    listed = list(candidates) if not isinstance(candidates, Mapping) else []
    if not listed:
        raise TunerSettingError("Autotuner.autotune: candidates must list at least one config.")
    return listed[0], listed


def _chunks(items: list[int], size: int) -> Iterator[list[int]]:
    it = iter(items)
    while chunk := list(itertools.islice(it, size)):
        yield chunk
