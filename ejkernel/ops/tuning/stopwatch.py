"""Benchmarking: the time of one call."""

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, Literal

import jax

from ejkernel.errors import EjkernelError
from ejkernel.ops.tuning import timers


class BenchmarkError(EjkernelError, ValueError):
    """The arguments of a benchmark are invalid."""


def benchmark(
    fn: Callable[..., Any],
    *args: Any,
    num_warmup: int = 3,
    num_iters: int = 10,
    timer: Literal["auto", "wall"] | timers.Timer = "auto",
    **kwargs: Any,
) -> float:
    """Returns the median milliseconds of `fn(*args, **kwargs)`.

    `fn` is called as it is, never traced: arrays that it captures stay inputs, and whatever it does besides running
    kernels is done every time. The first of the warm-up calls compiles, so there is at least one.

    Args:
      fn: What to time; `lambda: kernel(a, b)` is fine.
      *args: Passed on.
      num_warmup: Calls before the first sample.
      num_iters: Samples. A sample of a short call is made of enough calls to be measurable.
      timer: `auto` uses device time if there is any and the host's clock otherwise; `wall` always the latter.
      **kwargs: Passed on.
    """
    if num_iters < 1:
        raise BenchmarkError(f"benchmark: num_iters must be at least 1, got {num_iters!r}.")
    call = partial(fn, *args, **kwargs)
    out = None
    for _ in range(max(1, num_warmup)):
        out = jax.block_until_ready(call())
    clock = _timer(timer, out)
    try:
        return 1e3 * median(clock.measure([call] * num_iters))
    except timers.TimerError:
        if timer != "auto":
            raise
        # No kernel was launched, or another profiler was started.
        return 1e3 * median(_timer("wall", out).measure([call] * num_iters))


def _timer(timer: str | timers.Timer, out: Any) -> timers.Timer:
    if not isinstance(timer, str):
        return timer
    if timer not in ("auto", "wall"):
        raise timers.TimerError(f'benchmark: timer must be "auto", "wall" or a Timer, got {timer!r}.')
    arrays = [leaf for leaf in jax.tree.leaves(out) if isinstance(leaf, jax.Array)]
    device = next(iter(arrays[0].devices())) if arrays else jax.local_devices()[0]
    return timers.choose(device) if timer == "auto" else timers.available(device)[-1]
