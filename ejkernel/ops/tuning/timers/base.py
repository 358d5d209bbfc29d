"""What a timer is, and what all of them share."""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol

from ejkernel.errors import EjkernelError

Call = Callable[[], Any]


class TimerError(EjkernelError):
    """A timer cannot be used here, or not now."""


class Timer(Protocol):
    """Anything that can say how long calls take."""

    name: ClassVar[str]
    device_time: ClassVar[bool]  # Whether times exclude dispatch and the host.

    def measure(self, calls: Sequence[Call]) -> list[float]:
        """Runs the calls in this order, and returns one sample each: the seconds that one execution takes.

        Raises:
          TimerError: The timer does not work; another one may.
        """
        ...


def repeat(run: Callable[[int], float], sample_s: float) -> float:
    """Returns the seconds per call of `run(calls) -> seconds`, called with enough calls to take `sample_s`."""
    calls, elapsed = 1, run(1)
    for _ in range(8):
        if elapsed >= sample_s:
            break
        calls = math.ceil(1.1 * calls * sample_s / max(elapsed, 1e-9))
        elapsed = run(calls)
    return max(elapsed, 1e-9) / calls


_profiler_lock = threading.Lock()


@contextlib.contextmanager
def profiling(name: str, timeout_s: float = 120.0) -> Iterator[None]:
    """Holds the process's only profiler."""
    if not _profiler_lock.acquire(timeout=timeout_s):
        raise TimerError(f"{name}: another thread has been measuring for {timeout_s:.0f} s.")
    try:
        yield
    finally:
        _profiler_lock.release()
