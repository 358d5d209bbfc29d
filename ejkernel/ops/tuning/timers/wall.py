"""Wall clock: the host's time, dispatch included."""

import math
import time
from collections.abc import Sequence
from typing import ClassVar

import jax

from ejkernel.ops.tuning.timers.base import Call, repeat

_LONG_S = 4e-3
"""A scheduler's time slice: longer calls share their core anyway, so one call is a sample."""

_LOST_S = 0.2
"""A process loses its core for a shorter time: time slices are short, and quotas of containers count per 0.1 s."""


class WallClock:
    """The host's clock around enough calls for a millisecond.

    Accelerators run calls one after the other, so there is one wait at the end of the sample. A CPU would run them in
    parallel and be slower (ten small SVDs: 0.3 s when waiting for each, 3.2 s at once), so it waits for each. Then each
    call has its own time, and the sample is the lower quartile: on a busy host, slower calls have waited for a core. At
    loads of 4 to 9 on 2 cores, tunings of candidates 10 % apart were right 150 times of 160 this way, and 7 times of 13
    by the mean. A call that seems long is called again, because the scheduler may have interrupted a short one: at a
    load of 6, this made 4 tunings of 150 drop their fastest candidate.
    """

    name: ClassVar[str] = "wall"
    device_time: ClassVar[bool] = False

    def __init__(self, *, wait_for_each: bool, sample_s: float = 1e-3) -> None:
        self.wait_for_each = wait_for_each
        self.sample_s = sample_s

    def measure(self, calls: Sequence[Call]) -> list[float]:
        if self.wait_for_each:
            return [self._quartile(call) for call in calls]
        return [repeat(lambda n, call=call: self._time(call, n), self.sample_s) for call in calls]

    def _quartile(self, call: Call) -> float:
        """Of the calls that fit into twice the sample, at least five unless they are long."""
        times = [self._time(call, 1)]
        if _LONG_S <= times[0] < _LOST_S:
            times.append(self._time(call, 1))
        if (shortest := min(times)) < _LONG_S:
            calls = max(5, math.ceil(2 * self.sample_s / max(shortest, 1e-7)))
            times += [self._time(call, 1) for _ in range(calls - len(times))]
        return sorted(times)[(len(times) - 1) // 4]

    def _time(self, call: Call, n: int) -> float:
        start = time.perf_counter()
        # All outputs are kept: freeing them inside the sample would be timed too.
        kept = [call() for _ in range(n)]
        jax.block_until_ready(kept)
        return time.perf_counter() - start
