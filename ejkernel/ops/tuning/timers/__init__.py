"""Timers: how long a compiled call takes, by the best clock that the device offers. One file each.

A timer measures calls without arguments; bind them with `functools.partial` and compile them first. Times of two
different timers are never compared: each result carries its timer's name.
"""

import logging
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel import _compat
from ejkernel.ops.tuning.timers.base import Call as Call
from ejkernel.ops.tuning.timers.base import Timer as Timer
from ejkernel.ops.tuning.timers.base import TimerError as TimerError
from ejkernel.ops.tuning.timers.cupti import Cupti as Cupti
from ejkernel.ops.tuning.timers.rotation import cold as cold
from ejkernel.ops.tuning.timers.wall import WallClock as WallClock
from ejkernel.ops.tuning.timers.xplane import Xplane as Xplane

Device = Any  # `jax.Device` is a value to type checkers.

logger = logging.getLogger(__name__)


def choose(device: Device | None = None, *, exclusive: bool = False, skip: Collection[str] = ()) -> Timer:
    """Returns the best timer that works on `device`; the wall clock always does.

    Args:
      device: The first local one by default.
      exclusive: Whether this process only measures, so that no other code profiles in it, before or after: allows
        CUPTI.
      skip: Names of timers to leave out.
    """
    device = device or jax.local_devices()[0]
    *others, wall = available(device, exclusive=exclusive)
    for timer in others:
        if timer.name in skip:
            continue
        try:
            timer.measure([_trivial(device)])
        except TimerError as error:
            logger.warning("Timing without %s: %s", timer.name, error)
        else:
            return timer
    return wall


def available(device: Device, *, exclusive: bool = False) -> list[Timer]:
    """Returns the timers for a device's kind, best first; the last is the wall clock."""
    wall = WallClock(wait_for_each=device.platform == "cpu")
    if device.platform == "cpu":
        return [wall]
    if exclusive and _compat.cupti() is not None:
        # Not Xplane as well: with JAX 0.11.2, CUPTI after a profiler trace ends the process (see `cupti.py`).
        return [Cupti(), wall]
    return [Xplane(), wall]


def _trivial(device: Device) -> Call:
    """Returns a compiled call that is just long enough to see."""
    x = jax.device_put(jnp.ones((256, 256)), device)
    double = jax.jit(lambda x: x * 2)
    jax.block_until_ready(double(x))
    return lambda: double(x)
