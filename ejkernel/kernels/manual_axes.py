"""Inside `jax.shard_map`: values that are combined in a loop or a kernel must vary over the same mesh axes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl

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


def pallas_call(kernel: Callable[..., None], out_shape: Any, **options: Any) -> Callable[..., Any]:
    """`pl.pallas_call` that can also be called inside `jax.shard_map`: results vary like the arguments."""

    def run(*arrays: Array) -> Any:
        axes = axes_of(arrays)
        manual: dict[str, Any] = {"manual_axis_type": jax.sharding.ManualAxisType(varying=axes)} if axes else {}
        outs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, **manual), out_shape)
        return pl.pallas_call(kernel, out_shape=outs, **options)(*(vary(x, axes) for x in arrays))

    return run
