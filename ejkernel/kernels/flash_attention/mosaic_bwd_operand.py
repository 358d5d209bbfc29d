"""How the columns of an array lie in shared memory, in the backward kernels.

Shared memory is tiled: 8 rows and 64, 32 or 16 columns, the widest that divides everything that is read by itself. A
tile may reach past the last column of its array: the copy engine fills that with zeros and writes nothing there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.flash_attention.config import MosaicBwdConfig, in_memory, key_width

_TILES = (64, 32, 16)


@dataclasses.dataclass(frozen=True, slots=True)
class Operand:
    """Rows with `dim` columns in memory, and `width` in shared memory, in tiles of `tile`."""

    dim: int
    width: int
    tile: int

    def memory(self, *shape: int, dtype: Any) -> Any:
        """Returns shared memory for rows of all columns."""
        return tiled((*shape, self.width), dtype, self.tile)

    def columns(self, rows: Any) -> Any:
        """Returns rows in global memory as copies from and to `memory` name them."""
        if self.width == self.dim:
            return rows
        # Pallas would not let a slice that it can see end past the last column.
        hidden = lax.axis_index("warpgroup") * 0
        return rows.at[:, pl.ds(hidden, self.width)]

    def padded(self, rows: jax.Array) -> jax.Array:
        """Returns an array with `dim` columns, the last of which may be zeros."""
        missing = self.dim - rows.shape[-1]
        return jnp.pad(rows, ((0, 0),) * (rows.ndim - 1) + ((0, missing),)) if missing else rows


def tiled(shape: tuple[int, ...], dtype: Any, tile: int) -> Any:
    """Returns shared memory of 16-bit elements that the matrix units read."""
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, tile)), plgpu.SwizzleTransform(2 * tile)))


def operands(head_dim: int, value_dim: int, cfg: MosaicBwdConfig, *, interpret: bool) -> tuple[Operand, Operand]:
    """Returns how Q and K lie in shared memory, and V and dO."""
    width, value_width = key_width(head_dim, cfg), in_memory(value_dim)
    # The interpreter has no copies past the end: there, arrays are as wide as shared memory.
    dim = width if interpret else in_memory(head_dim)
    alone = width // cfg.consumers if cfg.divides_columns else width
    value_alone = value_width // cfg.consumers if cfg.split == "columns" else value_width
    return (
        Operand(dim, width, next(tile for tile in _TILES if dim % tile == 0 and alone % tile == 0)),
        Operand(value_width, value_width, next(tile for tile in _TILES if value_alone % tile == 0)),
    )
