"""Hides the scores of keys that a query does not see, in the forward kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel._compat import load_with_layout
from ejkernel.kernels.flash_attention.mosaic_bits import BITS
from ejkernel.kernels.flash_attention.mosaic_mask import Band
from ejkernel.kernels.hopper.chip import WGMMA_ROWS

_ROWS = plgpu.Layout.WGMMA.reduce(1)
_COLS = plgpu.Layout.WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True, slots=True)
class Mask:
    """What hides keys: the band, the end of the keys, ids of segments, the bits of a mask.

    Vectors come from global memory, so they are loaded before the products whose result they hide.
    """

    band: Band
    block_kv: int
    ids: tuple[Any, ...]
    words: Any

    @property
    def needed(self) -> bool:
        """Whether any block may need it."""
        banded = self.band.lower is not None or self.band.upper is not None
        return banded or self.band.kv_len % self.block_kv != 0 or bool(self.ids) or self.words is not None

    def of_strip(self, batch: Any, row: Any) -> Any:
        """What belongs to the 64 queries from `row` on."""
        return _vector(self.ids[0].at[batch, pl.ds(row, WGMMA_ROWS)], _ROWS) if self.ids else None

    def of_block(self, batch: Any, row: Any, col: Any) -> Any:
        """What belongs to those queries and the keys from `col` on."""
        ids = _vector(self.ids[1].at[batch, pl.ds(col, self.block_kv)], _COLS) if self.ids else None
        if self.words is None:
            return ids, ()
        first, batch = lax.div(col, jnp.int32(BITS)), batch if self.words.shape[0] > 1 else 0
        rows = pl.ds(row, WGMMA_ROWS)
        return ids, tuple(_vector(self.words.at[batch, first + n, rows], _ROWS) for n in range(self.block_kv // BITS))

    def hide(self, s: jax.Array, row: Any, col: Any, of_strip: Any, of_block: Any) -> jax.Array:
        """Scores of a tile from query `row` and key `col` on, -inf where a query does not see a key."""
        band, (kv_ids, words) = self.band, of_block
        cols = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
        # The position of row 0 of the strip, in columns of this block; the bounds are vectors, two registers per
        # thread.
        rows = plgpu.broadcasted_iota(jnp.int32, (WGMMA_ROWS,), 0, layout=_ROWS) + (row - col)

        def along_rows(vector: jax.Array) -> jax.Array:
            return lax.broadcast_in_dim(vector, s.shape, [0])

        if band.upper is not None:
            s = jnp.where(cols <= along_rows(rows + band.upper), s, -jnp.inf)
        if band.lower is not None:
            s = jnp.where(cols >= along_rows(rows + band.lower), s, -jnp.inf)
        if band.kv_len % self.block_kv:
            s = jnp.where(cols < band.kv_len - col, s, -jnp.inf)
        if kv_ids is not None:
            s = jnp.where(along_rows(of_strip) == lax.broadcast_in_dim(kv_ids, s.shape, [1]), s, -jnp.inf)
        if words:
            # Which word a register needs is known to the compiler: no instruction is left of the choice.
            word = along_rows(words[0])
            for n, other in enumerate(words[1:], 1):
                word = jnp.where(cols >= n * BITS, along_rows(other), word)
            bit = lax.shift_right_logical(word, cols & (BITS - 1)) & 1
            s = jnp.where(bit != 0, s, -jnp.inf)
        return s


def _vector(ref: Any, layout: Any) -> jax.Array:
    return load_with_layout(ref, layout=layout, optimized=False)
