"""A bench in a separate process, so that a candidate that crashes, hangs or uses too much memory does no harm."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from ejkernel.errors import EjkernelError
from ejkernel.ops.config.asking import source_of
from ejkernel.ops.config.policy import as_stored
from ejkernel.ops.core.kernel import Invocation, Kernel, KernelDefinitionError
from ejkernel.ops.tuning.bench import Bench, Built, Rejected, Sample
from ejkernel.ops.tuning.problem import from_call, from_cases
from ejkernel.ops.tuning.timers import TimerError
from ejkernel.ops.tuning.workers import JobError, JobOutOfMemory, JobRaised, JobTimedOut, ProcessWorker
from ejkernel.ops.utils import arguments


class IsolatedBenchError(EjkernelError, RuntimeError):
    """A problem could not be set up in a worker; this is not a candidate's fault."""


def open_bench(kernel: Kernel[Any, Any], inv: Invocation[Any, Any], cases: Sequence[str] = (), **options: Any) -> Bench:
    """The bench of a call in this process, on the call's data or on the kernel's `example_cases` of these names."""
    if not cases:
        return Bench(from_call(inv, kernel), **options)
    problems = from_cases(inv, kernel, cases)
    return Bench(problems[cases[0]], cases=problems, **options)


# --- In the worker ---

_bench: Bench | None = None


def _open(
    kernel: Kernel[Any, Any], inv: Invocation[Any, Any], options: dict[str, Any], cases: Sequence[str]
) -> tuple[str, bool]:
    global _bench
    # Nothing else runs in here, so the most exact timer may be used.
    with as_stored():
        _bench = open_bench(kernel, inv, cases, exclusive=True, **options)
    return _timer()


def _do(method: str, *args: Any) -> Any:
    assert _bench is not None
    with as_stored():
        return getattr(_bench, method)(*args)


def _timer() -> tuple[str, bool]:
    assert _bench is not None
    return _bench.timer.name, _bench.timer.device_time


# --- In the program ---


class IsolatedTimer:
    """The name and kind of the worker's timer."""

    def __init__(self, name: str, device_time: bool) -> None:
        self.name = name
        self.device_time = device_time


class IsolatedBench:
    """The interface of `Bench`. A job that exceeds a limit is killed with its worker, and a new worker is started.

    What an earlier worker did for a candidate is done again before the candidate is used.

    Args:
      kernel: Must be importable and picklable.
      inv: The call; its data is sent to the worker.
      options: For `Bench`.
      compile_s: Limit of compiling one candidate.
      run_s: Limit of running one candidate once.
      memory_bytes: Limit of the worker's memory.
      cases: Names of the kernel's `example_cases` to measure on, instead of the call's data.
    """

    def __init__(
        self,
        kernel: Kernel[Any, Any],
        inv: Invocation[Any, Any],
        options: dict[str, Any],
        *,
        compile_s: float,
        run_s: float,
        memory_bytes: int | None,
        cases: Sequence[str] = (),
    ) -> None:
        owner = type(source_of(kernel))
        if owner.__module__ == "__main__":
            raise IsolatedBenchError(
                f"{owner.__name__} is defined in the script that runs, where a worker process cannot import it. Move "
                'it into a module, or tune with isolation="thread".'
            )
        # Data of other processes cannot be sent; the worker generates it.
        sent = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if arguments.has_no_data(x) else x
        args, kwargs = jax.tree.map(sent, (inv.args, dict(inv.kwargs)))
        inv = replace(inv, args=args, kwargs=kwargs, metadata=dict(inv.metadata))
        self._call = (kernel, inv, {**options, "compile_s": compile_s}, tuple(cases))
        self._compile_s, self._run_s = compile_s, run_s
        self._runs = max(1, options.get("num_warmup", 1)) + max(0, len(cases) - 1)
        self._worker = ProcessWorker(memory_bytes=memory_bytes)
        self._cfgs: dict[int, Any] = {}
        self._truth: tuple[int | None, Any] | None = None
        self._took_s: dict[int, float] = {}
        self._timer: IsolatedTimer | None = None
        self._wall = False
        # The state of the present worker:
        self._built: set[int] = set()
        self._proved: set[int] = set()
        self._has_truth = False

    @property
    def timer(self) -> IsolatedTimer:
        """The worker's timer."""
        if self._timer is None:
            self._open()
        assert self._timer is not None
        return self._timer

    def build(self, candidates: Sequence[tuple[int, Any]]) -> list[Built | Rejected]:
        """Compiles all of them in one job, or, if that job breaks, each in a separate job."""
        waves = math.ceil(len(candidates) / (os.cpu_count() or 1))
        try:
            # The worker stops a candidate at the same limit; this one is reached only if the whole worker hangs.
            results = self._ask("build", list(candidates), limit_s=self._compile_s * waves + 1)
        except JobError as error:
            if len(candidates) == 1:
                return [self._rejected(error, "compile_s")]
            return [result for pair in candidates for result in self.build([pair])]
        for (number, cfg), result in zip(candidates, results, strict=True):
            if isinstance(result, Built):
                self._cfgs[number] = cfg
                self._built.add(number)
        if any(isinstance(result, Rejected) and result.limit is not None for result in results):
            self._lose_worker()  # A compiler that is still running there would disturb the timing.
        return results

    def set_truth(self, number: int | None) -> None:
        """As in `Bench`.

        Raises:
          JobError: The candidate could not even run once.
          IsolatedBenchError: The reference could not, or there is no worker for it.
        """
        cfg = None if number is None else self._cfgs[number]
        self._take_truth(number, cfg)
        self._truth = number, cfg

    def prove(self, number: int) -> Rejected | None:
        """As in `Bench`."""
        if self._truth is not None and not self._has_truth:
            self._take_truth(*self._truth)
        if number not in self._built:
            (built,) = self.build([(number, self._cfgs[number])])
            if isinstance(built, Rejected):
                return built
        start = time.monotonic()
        try:
            rejected = self._ask("prove", number, limit_s=self._run_s * self._runs)
        except JobError as error:
            return self._rejected(error, "run_s")
        if rejected is None:
            self._took_s[number] = time.monotonic() - start
            self._proved.add(number)
        return rejected

    def prove_gradient(self, cfg: Any) -> Rejected | None:
        """As in `Bench`."""
        try:
            return self._ask("prove_gradient", cfg, limit_s=self._compile_s + self._run_s)
        except JobError as error:
            return self._rejected(error, "compile_s", "gradient: ")

    def measure(self, order: Sequence[int]) -> dict[int, Sample | Rejected]:
        """As in `Bench`; if a round breaks the worker, each candidate is measured in a job of its own."""
        samples: dict[int, Sample | Rejected] = {**self._revive(order)}
        left = [number for number in order if number not in samples]
        if not left:
            return samples
        # Checked candidates have run within the limit, so a whole round takes about the sum of those times.
        limit_s = self._run_s + 4 * sum(self._took_s[number] for number in left)
        try:
            return samples | self._ask("measure", left, limit_s=limit_s)
        except JobRaised as error:
            if error.kind == "TimerError":
                raise TimerError(str(error)) from error
            raise
        except JobError as error:
            if len(left) == 1:
                return samples | {left[0]: self._rejected(error, "run_s")}
        for number in left:
            samples |= self.measure([number])
        return samples

    def use_wall_clock(self) -> None:
        """As in `Bench`."""
        self._wall = True
        self._ask("use_wall_clock", limit_s=self._run_s)
        self._timer = IsolatedTimer("wall", device_time=False)

    def forget(self, number: int) -> None:
        """Frees the memory of a candidate that has left the race."""
        self._cfgs.pop(number, None)
        if number in self._built:
            self._ask("forget", number, limit_s=self._run_s)
        self._built.discard(number)
        self._proved.discard(number)

    def close(self) -> None:
        """Ends the worker."""
        self._worker.close()

    def _ask(self, method: str, *args: Any, limit_s: float) -> Any:
        if self._worker.pid is None:
            self._open()
        try:
            return self._worker.run(_do, method, *args, limit_s=limit_s)
        except JobRaised as error:
            if error.kind == KernelDefinitionError.__name__:
                raise KernelDefinitionError(error.text) from error
            raise
        finally:
            if self._worker.pid is None:
                self._lose_worker()

    def _open(self) -> None:
        # Generating the data may compile something too.
        try:
            name, device_time = self._worker.run(_open, *self._call, limit_s=self._compile_s + self._run_s)
        except JobError as error:
            self._worker.close()
            raise IsolatedBenchError(
                f"{self._call[1].op_id}: cannot be tuned in a separate process. {error.summary}"
            ) from error
        self._timer = IsolatedTimer(name, device_time)
        if self._wall:
            self.use_wall_clock()

    def _lose_worker(self) -> None:
        """Resets the state: the next worker has nothing prepared."""
        self._worker.close()
        self._built.clear()
        self._proved.clear()
        self._has_truth = False

    def _take_truth(self, number: int | None, cfg: Any) -> None:
        if number is not None and number not in self._built:
            (built,) = self.build([(number, cfg)])
            if isinstance(built, Rejected):
                raise IsolatedBenchError(
                    f"{self._call[1].op_id}: the reference candidate no longer runs: {built.reason}"
                )
        limit_s = self._run_s if number is not None else self._compile_s + self._run_s
        try:
            self._ask("set_truth", number, limit_s=limit_s)
        except JobError as error:
            if number is not None:
                raise
            raise IsolatedBenchError(error.summary) from error
        self._has_truth = True

    def _revive(self, numbers: Sequence[int]) -> dict[int, Rejected]:
        """Prepares these for measuring; returns those that failed, with reasons."""
        broken: dict[int, Rejected] = {}
        # A candidate that breaks the worker undoes the others, so repeat until all are ready or have failed.
        while lost := [n for n in numbers if n not in broken and n not in self._proved]:
            unbuilt = [n for n in lost if n not in self._built]
            if unbuilt:
                results = self.build([(n, self._cfgs[n]) for n in unbuilt])
                broken |= {n: r for n, r in zip(unbuilt, results, strict=True) if isinstance(r, Rejected)}
                continue
            if (rejected := self.prove(lost[0])) is not None:
                broken[lost[0]] = rejected
        return broken

    def _rejected(self, error: JobError, limit: str, where: str = "") -> Rejected:
        values = {"compile_s": self._compile_s, "run_s": self._run_s, "memory_bytes": self._worker.memory_bytes}
        name = "memory_bytes" if isinstance(error, JobOutOfMemory) else limit
        broke = isinstance(error, (JobTimedOut, JobOutOfMemory)) and values[name] is not None
        reason = f"{where}{type(error).__name__}: {str(error).removeprefix(f'{_do.__qualname__}: ')}"
        return Rejected("failed", reason, (name, float(values[name])) if broke else None)
