"""A bench: the candidates of one problem, compiled and ready to be checked and timed in this process."""

from __future__ import annotations

import contextvars
import functools
import os
import queue
import re
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from ejkernel import _compat
from ejkernel.ops.core import context
from ejkernel.ops.core.kernel import KernelDefinitionError
from ejkernel.ops.tuning import timers
from ejkernel.ops.tuning.cost import Cost, cost_of, flops_of
from ejkernel.ops.tuning.problem import Problem
from ejkernel.ops.utils import arguments
from ejkernel.ops.utils.fingerprint import short_hash

Fault = Literal["failed", "wrong"]
Sample = float | dict[str, float]
"""Seconds; of several cases, those of each by name."""


def seconds_of(sample: Sample) -> float:
    """What counts in a race: of several cases the geometric mean."""
    return statistics.geometric_mean(sample.values()) if isinstance(sample, dict) else sample


_CALLBACK = re.compile(r"custom_call @\w*callback")

_measuring = threading.Lock()
"""Two tunings of one process take turns, round by round: in parallel they would disturb each other's times."""


@dataclass(frozen=True)
class Built:
    """A candidate that compiled: its program, and the memory it needs besides its arguments."""

    program: str
    memory_bytes: int
    cost: Cost | None = None


@dataclass(frozen=True)
class Rejected:
    """A candidate that may not race, and why."""

    outcome: Fault
    reason: str
    limit: tuple[str, float] | None = None
    """The name of the limit that it exceeded: with a wider limit it is tried again."""


class Bench:
    """Compiles, checks and times candidates by number.

    Args:
      problem: What is tuned.
      timer: A timer, `"wall"`, or `"auto"` for the best that works here.
      cold: Whether every call runs with inputs that are not in the cache.
      num_warmup: Runs of each candidate before the first sample; the output of the first one is checked.
      exclusive: Whether this process only measures; then timers that would disturb others are allowed.
      compile_s: How long compiling one candidate may take before it is given up.
      cases: The same problem on other data, by name, instead of `problem`'s own: candidates must be right on all of
        them, and a sample is a time for each.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        timer: timers.Timer | Literal["auto", "wall"] = "auto",
        cold: bool = False,
        num_warmup: int = 1,
        exclusive: bool = False,
        compile_s: float = 600.0,
        cases: Mapping[str, Problem] | None = None,
    ) -> None:
        self._cases = dict(cases) if cases else {"": problem}
        self.problem = next(iter(self._cases.values()))
        self._data = {name: _on_device(case) for name, case in self._cases.items()}
        self._arrays = next(iter(self._data.values()))
        self._tree = arguments.merge(self._arrays, arguments.split((self.problem.args, self.problem.kwargs))[1])
        self._cold = cold
        self._num_warmup = max(1, num_warmup)
        self._compile_s = compile_s
        self._compiled: dict[int, Any] = {}
        self._calls: dict[int, list[Callable[[], Any]]] = {}
        self._truths: list[Any] = []
        self.timer = self._choose_timer(timer, exclusive)

    def _choose_timer(self, timer: timers.Timer | str, exclusive: bool) -> timers.Timer:
        if not isinstance(timer, str):
            return timer
        on = [next(iter(x.devices())) for x in self._arrays]
        device = on[0] if on else jax.local_devices()[0]
        if timer == "wall":
            return timers.available(device)[-1]
        return timers.choose(device, exclusive=exclusive)

    def build(self, candidates: Sequence[tuple[int, Any]]) -> list[Built | Rejected]:
        """Compiles (number, config) pairs in parallel."""
        # Threads are abandoned after the limit: a compiler that hangs cannot be stopped from here.
        return _side_by_side([_carried(functools.partial(self._build, *pair)) for pair in candidates], self._compile_s)

    def _build(self, number: int, cfg: Any) -> Built | Rejected:
        try:
            fn = self.problem.make_fn(cfg)
            # A new function for each candidate: JAX (0.10 to 0.12) finds traces by the function and the shapes, and
            # `make_fn` may return one function for two configs.
            run, arrays = arguments.on_arrays(lambda args, kwargs: fn(*args, **kwargs), self._tree)
            lowered = jax.jit(run).lower(*arrays)
            compiled = lowered.compile()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a candidate's failure is a result.
            return _failed(error)
        self._compiled[number] = compiled
        analysis = compiled.memory_analysis()
        memory = getattr(analysis, "temp_size_in_bytes", 0) or 0
        text = lowered.as_text()
        # The text of a program says of a host callback only that there is one.
        program = short_hash([text, number]) if _CALLBACK.search(text) else short_hash(text)
        return Built(program, int(memory), cost_of(compiled, self._least_flops))

    @functools.cached_property
    def _least_flops(self) -> float:
        """The operations of the reference: the compiler does not count those inside loops and kernels of candidates."""
        reference = self.problem.reference
        if reference is None:
            return 0.0
        return flops_of(lambda args, kwargs: reference(*args, **kwargs), *self._tree)

    def set_truth(self, number: int | None) -> None:
        """Uses a candidate's output, or the problem's own reference, as the right answer."""
        if number is None:
            self._truths = [jax.block_until_ready(case.truth()) for case in self._cases.values() if case.truth]
        else:
            with context.no_scope():
                self._truths = [jax.block_until_ready(self._compiled[number](*x)) for x in self._data.values()]

    def prove(self, number: int) -> Rejected | None:
        """Runs a candidate, compares its output with the right answer, and warms it up."""
        compiled = self._compiled[number]
        try:
            with context.no_scope():
                # Strict: without a right answer nothing is right.
                pairs = zip(self._data, self._truths, strict=True)
                reason = next(filter(None, (self._mismatch(compiled, *pair) for pair in pairs)), None)
                for _ in range(self._num_warmup - 1):
                    jax.block_until_ready(compiled(*self._arrays))
        except KernelDefinitionError:
            raise  # This is not a candidate's fault.
        except Exception as error:  # noqa: BLE001 - a candidate's failure is a result.
            return _failed(error)
        if reason is not None:
            return Rejected("wrong", reason)
        call = lambda arrays: timers.cold(compiled, arrays) if self._cold else partial(compiled, *arrays)
        self._calls[number] = [call(arrays) for arrays in self._data.values()]
        return None

    def _mismatch(self, compiled: Any, name: str, truth: Any) -> str | None:
        out = jax.block_until_ready(compiled(*self._data[name]))
        reason = self._cases[name].mismatch(out, truth)
        return f"case {name}: {reason}" if reason is not None and name else reason

    def prove_gradient(self, cfg: Any) -> Rejected | None:
        """Compares a config's gradient with the right one, for kernels with their own gradient."""
        provers = [case.prove_gradient for case in self._cases.values() if case.prove_gradient is not None]
        try:
            reason = next(filter(None, (prove(cfg) for prove in provers)), None)
        except KernelDefinitionError:
            raise
        except Exception as error:  # noqa: BLE001 - a candidate's failure is a result.
            return _failed(error, "gradient: ")
        return None if reason is None else Rejected("wrong", reason)

    def measure(self, order: Sequence[int]) -> dict[int, Sample | Rejected]:
        """One sample each, in this order, in seconds; a candidate that broke has its reason instead.

        Raises:
          TimerError: The clock broke, not a candidate.
        """
        try:
            with _measuring, context.no_scope():
                calls = [call for number in order for call in self._calls[number]]
                times = iter(self.timer.measure(calls))
            return {number: self._sample([next(times) for _ in self._cases]) for number in order}
        except timers.TimerError:
            raise
        except Exception as error:  # noqa: BLE001 - a candidate's failure is a result.
            if len(order) == 1:
                return {order[0]: _failed(error)}
        return {number: sample for each in order for number, sample in self.measure([each]).items()}

    def _sample(self, times: list[float]) -> Sample:
        return times[0] if "" in self._cases else dict(zip(self._cases, times, strict=True))

    def use_wall_clock(self) -> None:
        """Switches to the wall clock, if the better timer stops working because another profiler was started."""
        self.timer = self._choose_timer("wall", exclusive=False)

    def forget(self, number: int) -> None:
        """Frees the memory of a candidate that has left the race."""
        self._calls.pop(number, None)
        self._compiled.pop(number, None)

    def close(self) -> None:
        """Frees everything."""
        self._calls.clear()
        self._compiled.clear()


def _on_device(problem: Problem) -> list[jax.Array]:
    """A problem's arrays, copied to the device once: the time of a call must not include copying its arguments."""
    arrays, _ = arguments.split((problem.args, problem.kwargs))
    return [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in arrays]


def _failed(error: BaseException, where: str = "") -> Rejected:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - the text of a kernel's own error may be made by code that fails, too.
        text = "its text cannot be made"
    return Rejected("failed", f"{where}{type(error).__name__}: {text}{_place(error)}")


def _place(error: BaseException) -> str:
    """The last line of a kernel's own code that an error came through, as text; empty if there is none."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_kernels(frame.filename)]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


_OTHERS = tuple(
    f"{path}{os.sep}" for path in (*jax.__path__, *jaxlib.__path__, *np.__path__, Path(__file__).parents[1])
)
_PYTHON = f"{Path(os.__file__).parent}{os.sep}"


def _is_kernels(file: str) -> bool:
    """Whether a file is the kernel author's: not of JAX, NumPy, ejkernel or Python's library."""
    return not (file.startswith(("<", *_OTHERS)) or (file.startswith(_PYTHON) and "-packages" not in file))


def _carried(job: Callable[[], Built | Rejected]) -> Callable[[], Built | Rejected]:
    """`job` for another thread, with the options, overlays and policy of this one."""
    config, scope, variables = _compat.thread_config(), context.same_scope(), contextvars.copy_context()

    def inside() -> Built | Rejected:
        with _compat.entered_config(config), scope:
            return job()

    return lambda: variables.run(inside)


def _side_by_side(jobs: Sequence[Callable[[], Built | Rejected]], limit_s: float) -> list[Built | Rejected]:
    """Results of jobs in threads, as many as there are cores; a job that passes its limit counts as failed.

    An exception in a job is raised here: otherwise this would wait for the missing result until the limit.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(jobs)):
        waiting.put(index)
    results: dict[int, Built | Rejected] = {}
    errors: list[BaseException] = []
    started: dict[int, float] = {}
    finished = threading.Condition()

    def worker() -> None:
        while True:
            try:
                index = waiting.get_nowait()
            except queue.Empty:
                return
            started[index] = time.monotonic()
            try:
                result = jobs[index]()
            except BaseException as error:  # noqa: BLE001 - raised where the results are awaited.
                with finished:
                    errors.append(error)
                    finished.notify()
                return
            with finished:
                results.setdefault(index, result)
                finished.notify()

    def start() -> None:
        threading.Thread(target=worker, name="ejkernel-compile", daemon=True).start()

    for _ in range(min(len(jobs), os.cpu_count() or 1)):
        start()
    with finished:
        while len(results) < len(jobs):
            finished.wait(timeout=0.2)
            if errors:
                raise errors[0]
            now = time.monotonic()
            for index, since in list(started.items()):
                if index not in results and now - since > limit_s:
                    reason = f"compiling took more than {limit_s:g} s"
                    results[index] = Rejected("failed", reason, ("compile_s", limit_s))
                    start()  # The thread hangs in the compiler and is abandoned.
    return [results[index] for index in range(len(jobs))]
