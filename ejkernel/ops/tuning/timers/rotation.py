"""Rotation: calls with a cold cache, because every call has its own copy of the inputs."""

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops.utils import devices

Device = Any  # `jax.Device` is a value to type checkers.

logger = logging.getLogger(__name__)

MAX_COPIES = 64
_LARGEST_CACHE_BYTES = 256 << 20
"""Of all devices today."""


def cold(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    cache_bytes: int | None = None,
) -> Callable[[], Any]:
    """Returns a call of `fn` that uses other copies of its arrays each time, together three times the cache.

    The copies are made here, once. Inputs so small that 64 copies do not fill the cache stay warm, with a log line.
    """
    leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs or {})))
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    wanted = 3 * (cache_bytes or last_level_cache_bytes(_device(arrays)))
    size = sum(array.nbytes for array in arrays)
    copies = min(MAX_COPIES, math.ceil(wanted / max(size, 1)) + 1)
    if copies * size < wanted:
        logger.info("Cold timing of %d bytes of inputs is warm: %d copies do not fill the cache.", size, copies)
    sets = [tree.unflatten([jnp.copy(x) if isinstance(x, jax.Array) else x for x in leaves]) for _ in range(copies)]
    jax.block_until_ready(sets)
    turn = itertools.cycle(sets)

    def call() -> Any:
        positional, named = next(turn)
        return fn(*positional, **named)

    return call


def last_level_cache_bytes(device: Device) -> int:
    """Returns the size of the cache that inputs stay warm in; a generous guess for unknown devices."""
    if device.platform == "cpu":
        return _host_cache_bytes()
    return devices.find(device.device_kind).cache_bytes or _LARGEST_CACHE_BYTES


def _host_cache_bytes() -> int:
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 1 << 10, "M": 1 << 20}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=32 << 20)


def _device(arrays: list[jax.Array]) -> Device:
    return next(iter(arrays[0].devices())) if arrays else jax.local_devices()[0]
