"""Inside `jax.shard_map`: values that are combined in a loop or a kernel must vary over the same mesh axes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from jax import lax

from ejkernel import _compat

Array = jax.Array
Axes = frozenset[Any]


def axes_of(arrays: Iterable[Array]) -> Axes:
    """The mesh axes that any of the arrays varies over."""
    return frozenset[Any]().union(*map(_compat.varying_axes, arrays))


def vary(x: Array, axes: Axes) -> Array:
    """`x` as a value that varies over `axes`."""
    missing = axes - _compat.varying_axes(x)
    return lax.pcast(x, tuple(sorted(missing, key=str)), to="varying") if missing else x
