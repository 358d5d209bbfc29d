"""Which rows belong to which group, for all backends."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array
_MOST = 2**31 - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Local:
    """The groups whose weights are on this device.

    Attributes:
      sizes: Rows of each of them.
      first_row: Row at which the first of them begins; `None` is row 0.
    """

    sizes: Array
    first_row: Array | None


def local_groups(group_sizes: Array, group_offset: Array | int | None, count: int, rows: int) -> Local:
    """The `count` groups from `group_offset` on; `group_sizes` covers all of them.

    Negative sizes count as 0. What lies past the last row does not count: no sum is more than `rows`, which the kernels
    rely on.
    """
    sizes = _inside(group_sizes, rows)
    if group_offset is None:
        return Local(sizes, None)
    offset = jnp.asarray(group_offset, jnp.int32).reshape(())
    before = jnp.where(jnp.arange(sizes.shape[0]) < offset, sizes, 0).sum(dtype=jnp.int32)
    # Padded on both sides: groups that do not exist have no rows, and a slice past an end would begin elsewhere.
    padded = jnp.pad(sizes, (count, count))
    first = jnp.clip(offset, -count, sizes.shape[0]) + count
    return Local(lax.dynamic_slice(padded, (first,), (count,)), before)


def _inside(group_sizes: Array, rows: int) -> Array:
    """The sizes of groups, cut where the rows end."""
    sizes = jnp.asarray(group_sizes)
    if jnp.iinfo(sizes.dtype).max > _MOST:
        sizes = jnp.minimum(sizes, _MOST)
    sizes = jnp.clip(sizes.astype(jnp.int32), 0, rows)
    count = sizes.shape[0]
    if isinstance(rows, int) and rows * count > _MOST:
        ends = lax.associative_scan(lambda a, b: jnp.minimum(a + b, rows), sizes.astype(jnp.uint32)).astype(jnp.int32)
        return jnp.diff(ends, prepend=jnp.zeros(1, jnp.int32))
    # One sum over pairs: of a scan, XLA makes several kernels.
    pairs = lax.broadcast_in_dim(sizes, (count, count), (1,))
    group, other = (lax.broadcasted_iota(jnp.int32, (count, count), axis) for axis in (0, 1))
    ends = jnp.sum(jnp.where(other <= group, pairs, 0), axis=1, dtype=jnp.int32)
    return jnp.minimum(ends, rows) - jnp.minimum(ends - sizes, rows)


def bounds(group_sizes: Array, rows: int, first_row: Array | None = None) -> tuple[Array, Array]:
    """First row of each group and the row after its last; none lies past `rows`."""
    sizes = jnp.asarray(group_sizes, jnp.int32)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    first = jnp.int32(0) if first_row is None else jnp.asarray(first_row, jnp.int32)
    starts = jnp.minimum(ends - sizes + first, rows)
    return starts, jnp.minimum(ends + first, rows)


def covered(group_sizes: Array, rows: int, first_row: Array | None = None) -> Array:
    """Whether a row belongs to any of the groups, `[rows]`."""
    first = jnp.int32(0) if first_row is None else jnp.asarray(first_row, jnp.int32)
    row = jnp.arange(rows, dtype=jnp.int32)
    return (row >= first) & (row < first + jnp.asarray(group_sizes, jnp.int32).sum(dtype=jnp.int32))


@dataclasses.dataclass(frozen=True, slots=True)
class RowTiles:
    """Tiles of rows in order, each of one group; as many entries as there can be, those past the last repeat it.

    Attributes:
      group: Of a tile's rows; -1 where they belong to none.
      row: The tile's first row.
      start: First row of the group.
      end: The row after the group's last; where `live` is false, no row of the tile counts.
      live: Whether the entry is a tile, and not a repetition.
    """

    group: Array
    row: Array
    start: Array
    end: Array
    live: Array


def row_tiles(
    group_sizes: Array, rows: int, block: int, *, first_row: Array | None, align: int, every_group: bool = False
) -> RowTiles:
    """Cuts the rows of each group into tiles of `block` that begin at multiples of `align`.

    Rows of no group get tiles too. With `every_group` they do not, but a group without rows gets one tile.
    """
    starts, ends = bounds(group_sizes, rows, first_row)
    group = jnp.arange(starts.shape[0], dtype=jnp.int32)
    if not every_group:
        edge = lambda x: jnp.full((1,), x, jnp.int32)
        group = jnp.concatenate([edge(-1), group, edge(-1)])
        starts, ends = jnp.concatenate([edge(0), starts, ends[-1:]]), jnp.concatenate([starts[:1], ends, edge(rows)])
    base = starts - starts % align
    tiles = jnp.where(ends > starts, -(-(ends - base) // block), int(every_group))
    cum = jnp.cumsum(tiles, dtype=jnp.int32)
    entries = rows // block + 2 * starts.shape[0]
    entry = jnp.arange(entries, dtype=jnp.int32)
    live = entry < cum[-1]
    entry = jnp.minimum(entry, jnp.maximum(cum[-1] - 1, 0))
    which = jnp.minimum(jnp.searchsorted(cum, entry, side="right"), starts.shape[0] - 1)
    row = base[which] + (entry - (cum - tiles)[which]) * block
    return RowTiles(group[which], row, starts[which], ends[which], live)
