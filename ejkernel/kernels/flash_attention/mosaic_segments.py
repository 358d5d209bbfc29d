"""Which tiles of packed sequences meet, computed by XLA before a kernel starts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


def segment_spans(
    row_ids: Array, col_ids: Array, *, rows: int, cols: int, lower: int | None = None, upper: int | None = None
) -> Array:
    """Returns `[batch, row blocks, 4]`: which blocks of `cols` columns each block of `rows` rows has to visit.

    The four are `start, clear, clear_end, end`, in blocks of columns: those from `start` to `end` may hold a pair of
    the same segment with `lower <= column - row <= upper`, and between `clear` and `clear_end` every pair is one, so
    that no mask is needed. There is at least one block to visit, and `start <= clear <= clear_end <= end`. Sorted ids
    give exact spans; those of other ids also cover the blocks between two that meet.
    """
    sizes = {"rows": rows, "cols": cols}
    meet, clear = segment_pairs(row_ids, col_ids, **sizes)
    near, inside = band_pairs(row_ids.shape[1], col_ids.shape[1], lower=lower, upper=upper, **sizes)
    return visited(meet & near, clear & inside)


def segment_pairs(row_ids: Array, col_ids: Array, *, rows: int, cols: int) -> tuple[Array, Array]:
    """Which tiles may hold a pair of one segment, and which hold only such pairs: `[batch, row blocks, col blocks]`."""
    low, high = (x[:, :, None] for x in _ranges(row_ids, rows))
    other_low, other_high = (x[:, None, :] for x in _ranges(col_ids, cols))
    meet = (low <= other_high) & (other_low <= high)
    return meet, (low == high) & (other_low == other_high) & (low == other_low)


def band_pairs(
    row_len: int, col_len: int, *, rows: int, cols: int, lower: int | None, upper: int | None
) -> tuple[Array, Array]:
    """The same for pairs with `lower <= column - row <= upper`; a tile that reaches past the last column has others."""
    row = jnp.arange(-(-row_len // rows), dtype=jnp.int32)[:, None] * rows
    col = jnp.arange(-(-col_len // cols), dtype=jnp.int32)[None, :] * cols
    row_end, col_end = jnp.minimum(row + rows, row_len) - 1, jnp.minimum(col + cols, col_len) - 1
    meet, clear = (row >= 0) & (col >= 0), (row >= 0) & (col + cols <= col_len)
    if upper is not None:
        meet &= col - row_end <= upper
        clear &= col_end - row <= upper
    if lower is not None:
        meet &= col_end - row >= lower
        clear &= col - row_end >= lower
    return meet, clear


def visited(meet: Array, clear: Array) -> Array:
    """Returns `start, clear, clear_end, end` of two tables of pairs of tiles, in a last axis; at least one block."""
    start, clear_start, clear_end, end = extents(meet, clear)
    return jnp.stack([start, clear_start, clear_end, jnp.maximum(end, start + 1)], axis=-1)


def extents(meet: Array, clear: Array) -> tuple[Array, Array, Array, Array]:
    """The same four, all 0 where nothing meets.

    Tiles count as `clear` only if all between the first and the last clear one are.
    """
    start, end, _ = _extent(meet)
    clear_start, clear_end, count = _extent(clear)
    whole = (count > 0) & (count == clear_end - clear_start)
    return start, jnp.where(whole, clear_start, end), jnp.where(whole, clear_end, end), end


def _extent(pairs: Array) -> tuple[Array, Array, Array]:
    """The first True along the last axis, the one after the last, and how many there are; 0 where there is none."""
    index = lax.broadcasted_iota(jnp.int32, pairs.shape, pairs.ndim - 1)
    end = jnp.max(jnp.where(pairs, index + 1, 0), axis=-1)
    start = jnp.min(jnp.where(pairs, index, pairs.shape[-1]), axis=-1)
    return jnp.minimum(start, end), end, jnp.sum(pairs, axis=-1, dtype=jnp.int32)


def _ranges(ids: Array, block: int) -> tuple[Array, Array]:
    """The least and the largest id of each block; the last block may be shorter."""
    missing = -ids.shape[1] % block
    if missing:
        ids = jnp.concatenate([ids, jnp.broadcast_to(ids[:, -1:], (ids.shape[0], missing))], axis=1)
    blocks = ids.reshape(ids.shape[0], -1, block)
    return blocks.min(axis=2), blocks.max(axis=2)
