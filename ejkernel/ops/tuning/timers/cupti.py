"""CUPTI: kernel times from NVIDIA's own profiling interface, for processes that only measure.

CUPTI allows one subscriber: it cannot be used beside a running profiler, which is an ordinary error. But after a JAX
profiler trace that has recorded kernels, however long ago, subscribing again ends the whole process ("activity records
were dropped", an abort inside the extension of JAX 0.11.2 on an H200, finalized or not). It is not possible to find out
whether there was such a trace, so this timer is not used in a user's process.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import jax

from ejkernel import _compat
from ejkernel.ops.tuning.timers.base import Call, TimerError, profiling, repeat


class Cupti:
    """The sum of the kernels' times. CUPTI allows one subscriber, so it does not work beside a running profiler."""

    name: ClassVar[str] = "cupti"
    device_time: ClassVar[bool] = True

    def __init__(self, *, sample_s: float = 2e-4) -> None:
        self.sample_s = sample_s

    def measure(self, calls: Sequence[Call]) -> list[float]:
        extension = _compat.cupti()
        if extension is None:
            raise TimerError("cupti: this JAX has no CUDA plugin.")
        with profiling(self.name):
            return [repeat(lambda n, call=call: _kernel_seconds(extension, call, n), self.sample_s) for call in calls]


def _kernel_seconds(extension: Any, call: Call, n: int) -> float:
    try:
        extension._cupti_init()
    except RuntimeError as error:
        raise TimerError(f"cupti: another profiler is listening ({error}). End it to get device times.") from error
    try:
        jax.block_until_ready([call() for _ in range(n)])
    finally:
        # Not finalized: detaching CUPTI from the process costs 17 ms per sample.
        kernels = extension._cupti_get_timings(False)
    if not kernels:
        raise TimerError("cupti: the call launched no kernel, so it has no device time.")
    return sum(ms for _, ms in kernels) / 1e3
