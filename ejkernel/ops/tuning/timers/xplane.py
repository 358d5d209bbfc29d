"""Xplane: device times from JAX's own profiler, for every device that has one.

Each call of a trace is wrapped in an annotation and waited for, so what a device did between two annotations belongs to
the call before. Overlapping work of one device counts once, and the slowest device counts.
"""

import bisect
import itertools
import math
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax

from ejkernel.ops.tuning.timers.base import Call, TimerError, profiling

_MARK = "ejkernel.sample"
_DEVICE = re.compile(r"/device:(GPU|TPU|CUSTOM)\b")


class Xplane:
    """One profiler trace for a whole round of calls; nothing else in the process may trace at the same time.

    Calls shorter than `sample_s` are traced again, often enough to fill it: a single launch of a few microseconds
    varies by one per cent, the mean of many does not.
    """

    name: ClassVar[str] = "xplane"
    device_time: ClassVar[bool] = True

    def __init__(self, *, sample_s: float = 2e-4, max_repeats: int = 64) -> None:
        self.sample_s = sample_s
        self.max_repeats = max_repeats

    def measure(self, calls: Sequence[Call]) -> list[float]:
        with profiling(self.name):
            once = _traced([(call, 1) for call in calls])
            repeats = [min(self.max_repeats, math.ceil(self.sample_s / seconds)) for seconds in once]
            short = [(call, n) for call, n in zip(calls, repeats, strict=True) if n > 1]
            again = iter(_traced(short) if short else [])
            return [next(again) / n if n > 1 else seconds for seconds, n in zip(once, repeats, strict=True)]


def _traced(samples: Sequence[tuple[Call, int]]) -> list[float]:
    """Returns the device time of each sample, a call repeated so many times."""
    with tempfile.TemporaryDirectory(prefix="ejkernel-trace-") as folder:
        _trace(samples, folder)
        (path,) = Path(folder).rglob("*.xplane.pb")
        return device_seconds(jax.profiler.ProfileData.from_file(str(path)), len(samples))


def _trace(samples: Sequence[tuple[Call, int]], folder: str) -> None:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1  # The lowest that keeps annotations.
    try:
        jax.profiler.start_trace(folder, profiler_options=options)
    except RuntimeError as error:
        raise TimerError(f"xplane: the profiler is in use ({error}). End its trace to get device times.") from error
    try:
        for i, (call, n) in enumerate(samples):
            with jax.profiler.TraceAnnotation(f"{_MARK}.{i}"):
                jax.block_until_ready([call() for _ in range(n)])
    finally:
        jax.profiler.stop_trace()


def device_seconds(profile: Any, calls: int) -> list[float]:
    """Returns the device time of each annotated sample in a profile."""
    marks = sorted(
        (event.start_ns, event.end_ns)
        for plane in profile.planes
        if plane.name.startswith("/host")
        for line in plane.lines
        for event in line.events
        if event.name.startswith(f"{_MARK}.")
    )
    if len(marks) != calls:
        raise TimerError(f"xplane: {calls} calls left {len(marks)} annotations in the trace.")
    # The cut is half-way between two calls, so that clocks of host and device may differ a little.
    cuts = [(end + start) / 2 for (_, end), (start, _) in itertools.pairwise(marks)]
    devices = [_busy(plane, cuts) for plane in profile.planes if _DEVICE.match(plane.name)]
    seconds = [max(times, default=0.0) for times in zip(*devices, strict=True)] if devices else []
    if not seconds or min(seconds) <= 0:
        raise TimerError("xplane: the trace has calls without device events.")
    return seconds


def _busy(plane: Any, cuts: list[float]) -> list[float]:
    """Returns how long a device was busy in each of the intervals between the cuts."""
    spans: list[list[tuple[float, float]]] = [[] for _ in range(len(cuts) + 1)]
    for line in _work(plane):
        for event in line.events:
            spans[bisect.bisect(cuts, event.start_ns)].append((event.start_ns, event.end_ns))
    return [_union_ns(sorted(part)) / 1e9 for part in spans]


def _work(plane: Any) -> list[Any]:
    """Returns a device's lines that show execution: whole modules on a TPU, streams on a GPU."""
    lines = list(plane.lines)
    modules = [line for line in lines if line.name == "XLA Modules"]
    return modules or [line for line in lines if line.name.startswith("Stream")]


def _union_ns(spans: Iterable[tuple[float, float]]) -> float:
    total, reach = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total
