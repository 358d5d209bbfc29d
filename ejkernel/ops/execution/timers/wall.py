"""Wall clock: what the host sees, dispatch included."""

import time
from collections.abc import Sequence
from typing import ClassVar

import jax

from ejkernel.ops.execution.timers.base import Call, repeat


class WallClock:
    """The host's clock around enough calls for a millisecond.

    Accelerators run calls one after the other, so there is one wait at the end of the sample. A CPU would run them side
    by side and be slower for it (ten small SVDs: 0.3 s when waiting for each, 3.2 s at once), so it waits for each.
    """

    name: ClassVar[str] = "wall"
    device_time: ClassVar[bool] = False

    def __init__(self, *, wait_for_each: bool, sample_s: float = 1e-3) -> None:
        self.wait_for_each = wait_for_each
        self.sample_s = sample_s

    def measure(self, calls: Sequence[Call]) -> list[float]:
        return [repeat(lambda n, call=call: self._time(call, n), self.sample_s) for call in calls]

    def _time(self, call: Call, n: int) -> float:
        start = time.perf_counter()
        # All outputs are kept: freeing them inside the sample would be timed too.
        kept = [jax.block_until_ready(call()) if self.wait_for_each else call() for _ in range(n)]
        jax.block_until_ready(kept)
        return time.perf_counter() - start
