"""A bench in a process of its own, so that a candidate that crashes, hangs or eats all memory harms nobody else."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ejkernel.ops.core.kernel import Invocation, Kernel
from ejkernel.ops.execution.bench import Bench, Built, Rejected
from ejkernel.ops.execution.problem import from_call
from ejkernel.ops.execution.timers import TimerError
from ejkernel.ops.execution.workers import JobError, JobRaised, ProcessWorker

# --- In the worker ---

_bench: Bench | None = None


def _open(kernel: Kernel[Any, Any], inv: Invocation[Any, Any], options: dict[str, Any]) -> str:
    global _bench
    # Nothing else runs in here, so the most exact timer may be used.
    _bench = Bench(from_call(inv, kernel, configs=[]), exclusive=True, **options)
    return _bench.timer.name


def _do(method: str, *args: Any) -> Any:
    assert _bench is not None
    return getattr(_bench, method)(*args)


def _device_time() -> bool:
    assert _bench is not None
    return _bench.timer.device_time


# --- In the program ---


class _RemoteTimer:
    def __init__(self, name: str, device_time: bool) -> None:
        self.name = name
        self.device_time = device_time


class RemoteBench:
    """The interface of `Bench`. A job that breaks a limit costs its limit; what others had built is built again.

    Args:
      kernel: Must be importable and picklable.
      inv: The call, whose data travels along.
      options: For `Bench`.
      compile_s: Limit of compiling one candidate.
      run_s: Limit of running one candidate once, or of one round.
      memory_bytes: Limit of the worker's memory.
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
    ) -> None:
        self._call = (kernel, replace(inv, metadata=dict(inv.metadata)), options)
        self._compile_s, self._run_s = compile_s, run_s
        self._worker = ProcessWorker(memory_bytes=memory_bytes)
        self._built: dict[int, Any] = {}
        self._proved: list[int] = []
        self._truth: int | str | None = "unset"
        self._wall = False
        self._start()

    def build(self, candidates: Sequence[tuple[int, Any]]) -> list[Built | Rejected]:
        """Compiles all of them in one job, or, if that job breaks, each in a job of its own."""
        if len(candidates) > 1:
            waves = math.ceil(len(candidates) / (os.cpu_count() or 1))
            try:
                results = self._run("build", list(candidates), limit_s=self._compile_s * waves)
            except JobError:
                self._restart()
                return [result for pair in candidates for result in self.build([pair])]
        else:
            try:
                results = self._run("build", list(candidates), limit_s=self._compile_s)
            except JobError as error:
                self._restart()
                return [Rejected("failed", _reason(error))]
        self._built.update(pair for pair, result in zip(candidates, results, strict=True) if isinstance(result, Built))
        return results

    def set_truth(self, number: int | None) -> None:
        """As in `Bench`; a candidate that cannot even run once raises."""
        try:
            self._run("set_truth", number, limit_s=self._run_s)
        except JobError:
            self.forget(number) if number is not None else None
            self._restart()
            raise
        self._truth = number

    def prove(self, number: int) -> Rejected | None:
        """As in `Bench`."""
        rejected = self._guarded("prove", number, number)
        if rejected is None:
            self._proved.append(number)
        return rejected

    def prove_gradient(self, cfg: Any) -> Rejected | None:
        """As in `Bench`."""
        try:
            return self._run("prove_gradient", cfg, limit_s=self._compile_s + self._run_s)
        except JobError as error:
            self._restart()
            return Rejected("failed", f"gradient: {_reason(error)}")

    def measure(self, order: Sequence[int]) -> dict[int, float | Rejected]:
        """As in `Bench`; if a round breaks the worker, each candidate is measured in a job of its own."""
        try:
            return self._run("measure", list(order), limit_s=self._run_s * len(order))
        except JobRaised as error:
            if error.kind == "TimerError":
                raise TimerError(str(error)) from error
            raise
        except JobError as error:
            if len(order) == 1:
                self.forget(order[0])
                self._restart()
                return {order[0]: Rejected("failed", _reason(error))}
        self._restart()
        return {number: sample for each in order for number, sample in self.measure([each]).items()}

    def use_wall_clock(self) -> None:
        """As in `Bench`."""
        self._wall = True
        self._run("use_wall_clock", limit_s=self._run_s)
        self.timer = _RemoteTimer("wall", device_time=False)

    def forget(self, number: int) -> None:
        """Frees what a candidate that is out of the race holds."""
        self._built.pop(number, None)
        if number in self._proved:
            self._proved.remove(number)

    def close(self) -> None:
        """Ends the worker."""
        self._worker.close()

    def _run(self, method: str, *args: Any, limit_s: float) -> Any:
        return self._worker.run(_do, method, *args, limit_s=limit_s)

    def _guarded(self, method: str, number: int, *args: Any) -> Any:
        try:
            return self._run(method, *args, limit_s=self._run_s)
        except JobError as error:
            self.forget(number)
            self._restart()
            return Rejected("failed", _reason(error))

    def _start(self) -> None:
        # Making the data and the reference's inputs may compile too.
        name = self._worker.run(_open, *self._call, limit_s=self._compile_s + self._run_s)
        self.timer = _RemoteTimer(name, self._worker.run(_device_time, limit_s=self._run_s))

    def _restart(self) -> None:
        """A worker in the state of the one that was lost, less what broke it."""
        if self._worker.pid is not None:
            return
        self._start()
        if self._wall:
            self.use_wall_clock()
        steps: list[Callable[[], Any]] = []
        if self._built:
            built = list(self._built.items())
            steps.append(lambda: self._run("build", built, limit_s=self._compile_s * len(built)))
        if self._truth != "unset":
            steps.append(lambda: self._run("set_truth", self._truth, limit_s=self._run_s))
        steps += [lambda n=n: self._run("prove", n, limit_s=self._run_s) for n in self._proved]
        for step in steps:
            step()


def _reason(error: JobError) -> str:
    return f"{type(error).__name__}: {error}"
