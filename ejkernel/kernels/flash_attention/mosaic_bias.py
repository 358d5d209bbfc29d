"""A bias in the Hopper kernels: how it lies in memory, and the part of it that a tile of scores needs.

With a bias, logits are in natural units and not in those of log2: times log2(e), `finfo.min` is minus infinity.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel._compat import load_with_layout

Array = jax.Array
_VECTORS = (plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0))  # Along the rows, along the columns.


def in_tiles(bias: Array | None, *, queries: int, keys: int, keys_first: bool = False) -> Array | None:
    """A bias `[batch or 1, heads or 1, q or 1, kv]` in whole blocks; one that is the same for all queries has no `q`.

    It is read without a check of bounds. With `keys_first` it is transposed: only neighbours in memory are loaded
    together.
    """
    if bias is None:
        return None
    last = (0, -bias.shape[3] % keys)
    if bias.shape[2] == 1:
        return jnp.pad(bias[:, :, 0].astype(jnp.float32), ((0, 0), (0, 0), last))
    widths = ((0, 0), (0, 0), (0, -bias.shape[2] % queries), last)
    bias = jnp.pad(bias, widths) if any(high for _, high in widths) else bias
    return bias.swapaxes(2, 3) if keys_first else bias


@dataclasses.dataclass(frozen=True, slots=True)
class Bias:
    """Reads a bias; `key_axis` is the axis of a tile's keys."""

    ref: Any
    key_axis: int

    def of_tile(self, batch: Any, head: Any, row: Any, col: Any, shape: tuple[int, ...]) -> Array:
        """Loads what a tile of `shape`, from `row` and `col` on, needs: all of it, or a vector along its keys."""
        ref = self.ref.at[batch if self.ref.shape[0] > 1 else 0, head if self.ref.shape[1] > 1 else 0]
        places = pl.ds(row, shape[0]), pl.ds(col, shape[1])
        if len(self.ref.shape) == 3:
            return load_with_layout(ref.at[places[self.key_axis]], layout=_VECTORS[self.key_axis], optimized=False)
        return load_with_layout(ref.at[places], layout=plgpu.Layout.WGMMA, optimized=False)

    def added(self, s: Array, found: Array) -> Array:
        """Logits with what `of_tile` found."""
        found = found.astype(jnp.float32)
        return s + (found if found.ndim == 2 else lax.broadcast_in_dim(found, s.shape, [self.key_axis]))
