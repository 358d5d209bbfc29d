"""Which tiles are computed, and in which order, if weights are the left operand."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.grouped_matmul.config import Order
from ejkernel.kernels.grouped_matmul.mosaic_tables import ZEROS, divided, first_of, sums

Array = jax.Array


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """An item of work: its tile's first row and width, and the group's rows."""

    group: Any
    row: Any
    width: Any
    start: Any
    end: Any
    column: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Tiling:
    """How rows and columns of the result are cut; an item of work is what a cluster computes at a time.

    Tiles of a group have the same number of rows, a multiple of `grain`, but the last one may have less.

    Attributes:
      rows: Of the largest tile.
      grain: Rows of the smallest tile, and by which tiles differ.
      column_items: How many items the columns are cut into.
      band: Tiles of rows that are computed for each item of columns.
      order: Which groups come first.
    """

    rows: int
    grain: int
    column_items: int
    band: int
    order: Order

    @property
    def widths(self) -> tuple[int, ...]:
        """Rows that a tile may have."""
        return tuple(range(self.grain, self.rows + 1, self.grain))

    def tiles(self, size: Any) -> Any:
        """How many tiles `size` rows take."""
        return divided(size + (self.rows - 1), self.rows)

    def width(self, size: Any, tiles: Any) -> Any:
        """How many rows each of a group's `tiles` has, but the last one."""
        each = lax.div(size + (tiles - 1), jnp.maximum(tiles, 1))
        return jnp.maximum(divided(each + (self.grain - 1), self.grain), 1) * self.grain

    def bound(self, rows: int, groups: int) -> int:
        """How many items there can be, without those of zeros."""
        return (rows // self.rows + groups) * self.column_items

    def items(
        self, group_sizes: Array, rows: int, first_row: Array | None
    ) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """The table of items; and their number and the rows that belong to no group, for `extent`.

        The table has four columns: the group, its first row, its end, and its first item.
        """
        sizes, first = jnp.asarray(group_sizes, jnp.int32), first_of(first_row)
        groups = sizes.shape[0]
        counts = self.tiles(sizes) * self.column_items
        square = (groups, groups)
        my_group, my_size = (
            lax.broadcast_in_dim(x, square, (0,)) for x in (jnp.arange(groups, dtype=jnp.int32), sizes)
        )
        its_group, its_size, counted = (
            lax.broadcast_in_dim(x, square, (1,)) for x in (jnp.arange(groups, dtype=jnp.int32), sizes, counts)
        )
        sooner = its_group < my_group
        if self.order != "as given":
            mine, its = my_size, its_size
            if self.order == "wide first":
                # One number for each group: comparisons of rounded products would not always agree with each other.
                mean = sizes.astype(jnp.float32) / jnp.maximum(self.tiles(sizes), 1).astype(jnp.float32)
                mine, its = (lax.broadcast_in_dim(mean, square, axis) for axis in ((0,), (1,)))
            sooner = (its > mine) | ((its == mine) & sooner)
        before, ends = sums([jnp.where(sooner, counted, 0), jnp.where(its_group <= my_group, its_size, 0)], (1,))
        starts, stops = jnp.minimum(ends - sizes + first, rows), jnp.minimum(ends + first, rows)
        bound = self.bound(rows, groups)
        item = lax.broadcasted_iota(jnp.int32, (bound, groups), 0)
        group = lax.broadcasted_iota(jnp.int32, (bound, groups), 1)
        here = (before[None] <= item) & (item < (before + counts)[None])
        facts = [jnp.where(here, x, 0) for x in (group, starts[None], stops[None], before[None])]
        # Every item holds the number of all items: a separate sum would be one more kernel.
        facts.append(jnp.broadcast_to(counts[None], here.shape))
        group, start, stop, offset, total = sums(facts, (1,))
        return (group, start, stop, offset), (total, ends, first.reshape(1))

    def item_of_group(self, fields: tuple[Any, ...], number: Any) -> Item:
        """What a row of the table says of item `number`."""
        group, start, end, before = fields
        local = number - before
        size = end - start
        tiles = self.tiles(size)
        per_band = self.band * self.column_items
        band = lax.div(local, jnp.int32(per_band))
        height = jnp.clip(tiles - band * self.band, 1, self.band)
        inside = local - band * per_band
        column = lax.div(inside, height)
        tile = band * self.band + (inside - column * height)
        width = self.width(size, tiles)
        row = tile * width
        left = jnp.maximum(divided(jnp.maximum(size - row, 0) + (self.grain - 1), self.grain), 1) * self.grain
        return Item(group, start + row, jnp.minimum(width, left), start, end, column)

    def zero_items(self, start: Any, end: Any) -> Any:
        """How many items rows of no group take, from `start` to `end`."""
        return jnp.where(end > start, self.tiles(end - start) * self.column_items, 0)

    def item_of_zeros(self, number: Any, start: Any, end: Any) -> Item:
        """Item `number` of those."""
        tile = lax.div(number, jnp.int32(self.column_items))
        row = start + tile * self.rows
        return Item(jnp.int32(ZEROS), row, jnp.int32(self.rows), start, end, number - tile * self.column_items)
