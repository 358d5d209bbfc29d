"""The tuner, and its settings."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ejkernel.errors import EjkernelError
from ejkernel.ops.config.asking import source_of
from ejkernel.ops.config.policy import as_stored
from ejkernel.ops.core import context
from ejkernel.ops.core.kernel import Invocation, Kernel
from ejkernel.ops.store import provenance
from ejkernel.ops.store.persistent import PersistentCache
from ejkernel.ops.tuning.bench import Bench
from ejkernel.ops.tuning.history import History
from ejkernel.ops.tuning.isolated import IsolatedBench, open_bench
from ejkernel.ops.tuning.keywords import written_keywords
from ejkernel.ops.tuning.outcome import Tuning
from ejkernel.ops.tuning.problem import Outline, Problem, materialise, outline
from ejkernel.ops.tuning.session import Effort, Session
from ejkernel.ops.tuning.session import TuningError as TuningError
from ejkernel.ops.tuning.timers import Timer
from ejkernel.ops.tuning.workers import run_outside
from ejkernel.ops.utils.fingerprint import require_here
from ejkernel.ops.utils.records import ConfigMismatchError

Isolation = Literal["thread", "process"]


class TunerSettingError(EjkernelError, ValueError):
    """A setting of a tuner has an invalid value."""


@dataclass(frozen=True, kw_only=True)
class Autotuner:
    """Finds the fastest correct config.

    Attributes:
      num_warmup: Runs of each candidate before its first sample.
      num_iters: The least number of samples behind the winner's figures; the race takes more if it needs them.
      budget_s: Stop after this many seconds with the best so far, marked incomplete.
      max_candidates: Try at most this many configs.
      isolation: `"thread"` measures in this process, outside whatever is being traced. `"process"` measures in a
        worker that is killed when a candidate hangs, crashes or uses too much memory; kernels must be importable.
      timer: `"auto"` uses the best clock that works, `"wall"` the host's.
      cold: Time every call with inputs that are not in the cache, for kernels bound by bandwidth.
      compile_s, run_s: How long compiling, and running once, may take.
      memory_bytes: The worker's limit with `"process"`; by default three quarters of what is available.
      progress: Draw a bar; None draws on terminals, and elsewhere prints a line every 15 seconds; False does neither.
      seed: Of the order of measurements and of random candidates.
      cases: Names of the kernel's `example_cases`: other data for the same shapes. A config must be right on all of
        them, and is ranked by the geometric mean of its times.
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
    cases: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.isolation not in ("thread", "process"):
            raise TunerSettingError(f"Autotuner: isolation must be 'thread' or 'process', got {self.isolation!r}.")
        if isinstance(self.timer, str) and self.timer not in ("auto", "wall"):
            raise TunerSettingError(f"Autotuner: timer must be 'auto', 'wall' or a Timer, got {self.timer!r}.")
        if isinstance(self.cases, str) or not all(isinstance(name, str) and name for name in self.cases):
            raise TunerSettingError(f"Autotuner: cases must be a sequence of names, got {self.cases!r}.")
        limits = {"num_warmup": 0, "num_iters": 1, "max_candidates": 1, "budget_s": 0, "compile_s": 0, "run_s": 0}
        for name, least in limits.items():
            value = getattr(self, name)
            number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
            if value is not None and not (number and value >= least):
                raise TunerSettingError(f"Autotuner: {name} must be at least {least}, got {value!r}.")

    def autotune(
        self, make_fn: Callable[[Any], Callable[..., Any]], args: Any, kwargs: Any, candidates: Iterable[Any]
    ) -> Any:
        """The best of `candidates`, which must agree with the first; `make_fn(cfg)` takes `(*args, **kwargs)`."""
        if self.isolation == "process":
            raise TunerSettingError("Autotuner.autotune: functions cannot be sent to a worker; use tune(inv, kernel).")
        listed = list(candidates)
        if not listed:
            raise TunerSettingError("Autotuner.autotune: candidates must list at least one config.")

        def run(stop: threading.Event) -> Tuning:
            import jax

            data = materialise("autotune", (tuple(args), dict(kwargs)), jax.random.key(0))
            what, problem = Outline("autotune", listed, listed[0]), Problem("autotune", make_fn, *data)
            return Session(self.effort(), what, lambda: self.bench(problem), History(), stop).run()

        return self.outside(run).cfg

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
          inv: The call. If it is abstract, data of its shapes is generated.
          kernel: The kernel of the call.
          configs: Candidates to try instead of the kernel's own space.
          store: The store of trials, so that an interrupted tuning resumes and nothing is measured twice.
          seeds: Configs to start a large search from.

        Raises:
          TuningError: No candidate could be measured.
          TuningInputsError: The call is abstract, and valid data for it is not known.
          AbsentDeviceError: The device is only described.
        """
        require_here(f"tuning {inv.op_id}")
        return self.outside(lambda stop: self._tune(inv, kernel, configs, store, seeds, stop))

    def outside(self, run: Callable[[threading.Event], Tuning]) -> Tuning:
        """`run(stop)` where nothing is being traced; the first Ctrl-C sets `stop`."""
        stop = threading.Event()
        # A candidate may call other kernels: with the caller's overlays.
        contexts = [context.same_scope(), as_stored()]
        return run_outside(lambda: run(stop), contexts=contexts, on_interrupt=stop.set)

    def _tune(
        self,
        inv: Invocation[Any, Any],
        kernel: Kernel[Any, Any],
        configs: Any,
        store: PersistentCache | None,
        seeds: Sequence[Any],
        stop: threading.Event,
    ) -> Tuning:
        what = outline(inv, kernel, configs)
        limits = {"compile_s": self.compile_s, "run_s": self.run_s, "memory_bytes": self.memory_bytes}
        if self.isolation == "thread":
            new_bench = lambda: self.bench_of(inv, kernel)
        else:
            new_bench = lambda: IsolatedBench(kernel, inv, self._options(), **limits, cases=self.cases)
        aim = " ".join(["cold"] * self.cold + [f"cases {', '.join(self.cases)}"] * bool(self.cases))
        history = History(store, inv.key, source_of(kernel), aim=aim, limits=limits)
        stored = None if store is None else _stored(store, inv, kernel)
        keywords = written_keywords(inv, kernel)
        tuning = Session(self.effort(), what, new_bench, history, stop, seeds, stored).run()
        return replace(tuning, keywords=keywords)

    def bench_of(self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any], **options: Any) -> Bench:
        """Where the candidates of a call are measured in this process."""
        return open_bench(kernel, inv, self.cases, compile_s=self.compile_s, **(self._options() | options))

    def bench(self, problem: Problem, **options: Any) -> Bench:
        """Where the candidates of a problem are measured in this process."""
        return Bench(problem, compile_s=self.compile_s, **(self._options() | options))

    def _options(self) -> dict[str, Any]:
        return {"timer": self.timer, "cold": self.cold, "num_warmup": self.num_warmup}

    def effort(self) -> Effort:
        """How much to try."""
        return Effort(
            num_iters=self.num_iters,
            budget_s=self.budget_s,
            max_candidates=self.max_candidates,
            progress=self.progress,
            seed=self.seed,
        )


def _stored(store: PersistentCache, inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Any:
    """The config of a finished tuning of this call, if it still fits its class and nothing has changed since."""
    entry = store.own(*inv.key)
    if entry is None or not entry.complete or provenance.changes(entry.provenance, source_of(kernel)):
        return None
    try:
        return entry.typed(kernel.cfg_type).cfg
    except ConfigMismatchError:
        return None
