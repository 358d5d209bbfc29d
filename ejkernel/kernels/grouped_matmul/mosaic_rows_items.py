"""Which tiles are computed, and in which order, if rows are the left operand.

A tile begins at a multiple of `ALIGNED_ROWS`, so that the copy engine can load it; up to seven rows before a group's
first, and those after its last, are loaded and not stored. How many tiles a group gets does not depend on where it
begins, so some get a tile without rows, which is skipped. This way two small kernels make the whole table.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.grouped_matmul.config import ALIGNED_ROWS, Halves, Order
from ejkernel.kernels.grouped_matmul.mosaic_tables import ZEROS, divided, first_of, sums

Array = jax.Array


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """An item of work: where it begins, which rows it may store, and how its tiles are arranged."""

    group: Any
    row: Any
    start: Any
    end: Any
    column: Any
    alone: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Tiling:
    """How rows and columns of the result are cut; an item of work is what a cluster computes at a time.

    Attributes:
      block_m: Rows of a tile.
      column_tiles: How many tiles of columns there are.
      cluster: Tiles in an item: adjacent in rows, or, for an odd last one, in columns.
      band: Tiles (or pairs) of rows that are computed for each tile of columns.
      halves: As in the config.
      order: As in the config.
    """

    block_m: int
    column_tiles: int
    cluster: int
    band: int
    halves: Halves
    order: Order

    @property
    def odd_items(self) -> int:
        return -(-self.column_tiles // self.cluster)

    def split(self, size: Any) -> tuple[Any, Any, Any]:
        """Pairs of row tiles (or tiles, without clusters), left-over tiles of full cost, and of half cost."""
        reach = size + (ALIGNED_ROWS - 1)
        tiles = jnp.where(size > 0, divided(reach + (self.block_m - 1), self.block_m), 0)
        half = jnp.int32(0)
        if self.halves != "no":
            last = reach - (tiles - 1) * self.block_m
            half = ((size > 0) & (last <= self.block_m // 2)).astype(jnp.int32)
        full = tiles - half
        whole = divided(full, self.cluster)
        return whole, full - whole * self.cluster, half

    def bound(self, rows: int, groups: int) -> int:
        """How many items there can be, without those of zeros."""
        tiles = rows // self.block_m + 2 * groups
        if self.cluster == 1:
            return tiles * self.column_tiles
        return tiles // 2 * self.column_tiles + 2 * groups * self.odd_items

    def items(
        self, group_sizes: Array, rows: int, first_row: Array | None
    ) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """The table of items; and their number and the rows that belong to no group, for `extent`.

        The table has four columns: twice the group, plus one for a tile of half cost; the group's first row; its end;
        and the first item of the same group and cost. `order` says which come first.
        """
        sizes, first = jnp.asarray(group_sizes, jnp.int32), first_of(first_row)
        groups = sizes.shape[0]
        whole, odd, half = self.split(sizes)
        full = whole * self.column_tiles + odd * self.odd_items
        # Costs before groups: this needs no concatenation, for which XLA would make a separate kernel.
        costs = 1 if self.halves == "no" else 2
        late, group = (lax.broadcasted_iota(jnp.int32, (costs, groups), axis) for axis in (0, 1))
        sized = jnp.broadcast_to(sizes[None], late.shape)
        counts = jnp.where(late == 0, full[None], (half * self.odd_items)[None])
        square = (costs, groups, costs, groups)
        my_late, mine, my_size = (lax.broadcast_in_dim(x, square, (0, 1)) for x in (late, group, sized))
        its_late, other, its_size, counted = (
            lax.broadcast_in_dim(x, square, (2, 3)) for x in (late, group, sized, counts)
        )
        same = (its_late == my_late) & (other == mine)
        sooner = other < mine
        if self.order == "large first":
            sooner = (its_size > my_size) | ((its_size == my_size) & sooner)
        earlier = sooner | ((other == mine) & (its_late < my_late))
        cum, before, ends = sums(
            [
                jnp.where(earlier | same, counted, 0),
                jnp.where(earlier, counted, 0),
                jnp.where((its_late == 0) & (other <= mine), its_size, 0),
            ],
            (2, 3),
        )
        starts, stops = jnp.minimum(ends - sizes + first, rows), jnp.minimum(ends + first, rows)
        bound = self.bound(rows, groups)
        item = lax.broadcasted_iota(jnp.int32, (bound, costs, groups), 0)
        here = (before[None] <= item) & (item < cum[None])
        facts = [2 * group + late, starts, stops, before]
        # Every item holds the number of all items: a separate sum would be one more kernel.
        facts = [jnp.where(here, x[None], 0) for x in facts] + [jnp.broadcast_to(counts[None], here.shape)]
        code, start, stop, offset, total = sums(facts, (1, 2))
        return (code, start, stop, offset), (total, ends.reshape(-1), first.reshape(1))

    def item_of_group(self, fields: tuple[Any, ...], number: Any) -> Item:
        """What a row of the table says of item `number`."""
        code, start, end, before = fields
        local = number - before
        last = lax.rem(code, jnp.int32(2)) == 1
        whole, odd, _ = self.split(end - start)
        width = self.band * self.column_tiles
        band = lax.div(local, jnp.int32(width))
        height = jnp.clip(whole - band * self.band, 1, self.band)
        inside = local - band * width
        column = lax.div(inside, height)
        row = (band * self.band + (inside - column * height)) * self.cluster
        left = local - whole * self.column_tiles
        alone = last | (left >= 0)
        column = jnp.where(alone, jnp.where(last, local, left) * self.cluster, column)
        row = jnp.where(alone, whole * self.cluster + jnp.where(last, odd, 0), row)
        return Item(lax.div(code, jnp.int32(2)), _aligned(start) + row * self.block_m, start, end, column, alone)

    def zero_items(self, start: Any, end: Any) -> Any:
        """How many items rows of no group take, from `start` to `end`."""
        height = self.block_m * self.cluster
        tiles = lax.div(end - _aligned(start) + (height - 1), jnp.int32(height))
        return jnp.where(end > start, tiles * self.column_tiles, 0)

    def item_of_zeros(self, number: Any, start: Any, end: Any) -> Item:
        """Item `number` of those."""
        tile = lax.div(number, jnp.int32(self.column_tiles))
        row = _aligned(start) + tile * (self.block_m * self.cluster)
        return Item(jnp.int32(ZEROS), row, start, end, number - tile * self.column_tiles, jnp.bool_(False))


def _aligned(row: Any) -> Any:
    return row - lax.rem(row, jnp.int32(ALIGNED_ROWS))
