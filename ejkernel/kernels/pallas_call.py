"""`pl.pallas_call` for calls inside `jax.shard_map` too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl

from ejkernel.kernels.manual_axes import axes_of, vary

Array = jax.Array


def pallas_call(kernel: Callable[..., None], out_shape: Any, **options: Any) -> Callable[..., Any]:
    """`pl.pallas_call` that can also be called inside `jax.shard_map`: results vary like the arguments."""

    def run(*arrays: Array) -> Any:
        axes = axes_of(arrays)
        manual: dict[str, Any] = {"manual_axis_type": jax.sharding.ManualAxisType(varying=axes)} if axes else {}
        outs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, **manual), out_shape)
        return pl.pallas_call(kernel, out_shape=outs, **options)(*(vary(x, axes) for x in arrays))

    return run
