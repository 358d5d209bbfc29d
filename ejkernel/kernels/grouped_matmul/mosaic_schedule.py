"""The list of tiles that the Hopper kernels walk, made on the device: group sizes are data.

A tile begins at a multiple of `ALIGNED_ROWS`, so that the copy engine can load it; up to seven rows before a group's
first, and those after its last, are loaded and not stored.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel.kernels.grouped_matmul.config import ALIGNED_ROWS
from ejkernel.kernels.grouped_matmul.groups import bounds

Array = jax.Array
ZEROS = -1  # The group of rows that belong to none.
FIELDS = 6  # Of a row of the table: group, first row of the tile, first and end row to store, column tile, mode.
TOGETHER_ROWS, TOGETHER_COLUMNS = 0, 1  # What the blocks of a cluster have side by side.


def item_bound(rows: int, groups: int, *, block_m: int, column_tiles: int, cluster: int) -> int:
    """How many items `items` can return at most."""
    # Each range of rows (the groups, what is before and what is after) adds a part of a tile at either end.
    ranges = groups + 2
    if cluster == 1:
        return (rows // block_m + 2 * ranges) * column_tiles
    pairs = rows // (2 * block_m) + ranges
    return pairs * column_tiles + ranges * -(-column_tiles // 2)


def items(
    group_sizes: Array, rows: int, *, first_row: Array | None, block_m: int, column_tiles: int, cluster: int, band: int
) -> tuple[Array, Array]:
    """The items of work, `[bound, FIELDS]`, and how many of them there are, `[1]`.

    An item is a tile of `block_m` rows and one tile of columns; with clusters, two tiles of rows and one of columns,
    or, of a range with an odd number of tiles, the last one and two tiles of columns (`TOGETHER_COLUMNS`).
    Within a range, `band` tiles (or pairs) of rows are walked for each tile of columns.
    """
    starts, ends = bounds(group_sizes, rows, first_row)
    groups = starts.shape[0]
    zero, last = jnp.zeros((1,), jnp.int32), jnp.full((1,), rows, jnp.int32)
    starts, ends = jnp.concatenate([zero, starts, ends[-1:]]), jnp.concatenate([starts[:1], ends, last])
    group = jnp.concatenate([zero + ZEROS, jnp.arange(groups, dtype=jnp.int32), zero + ZEROS])
    base = starts - starts % ALIGNED_ROWS
    tiles = jnp.where(ends > starts, -(-(ends - base) // block_m), 0)
    whole = tiles // cluster
    odd_items = -(-column_tiles // 2)
    counts = whole * column_tiles + (tiles - whole * cluster) * odd_items
    cum = jnp.cumsum(counts, dtype=jnp.int32)
    bound = item_bound(rows, groups, block_m=block_m, column_tiles=column_tiles, cluster=cluster)
    item = jnp.arange(bound, dtype=jnp.int32)
    which = jnp.minimum((item[:, None] >= cum[None, :]).sum(axis=1, dtype=jnp.int32), groups + 1)
    facts = jnp.stack([group, base, starts, ends, whole, cum - counts], axis=1)[which]
    group, base, start, end, whole, before = (facts[:, i] for i in range(6))
    local = item - before
    # In bands of row tiles, columns outside, rows inside.
    in_band = local // (band * column_tiles)
    height = jnp.clip(whole - in_band * band, 1, band)
    place = local - in_band * band * column_tiles
    column, row = place // height, in_band * band + place % height
    odd = local >= whole * column_tiles
    column = jnp.where(odd, 2 * (local - whole * column_tiles), column)
    row = base + jnp.where(odd, whole, row) * (cluster * block_m)
    table = jnp.stack([group, row, start, end, column, odd.astype(jnp.int32)], axis=1)
    return table, cum[-1:]
