"""The items of work of a grouped product, as the blocks go through them: those of groups, then those of zeros."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.grouped_matmul.mosaic_pipeline import walk
from ejkernel.kernels.grouped_matmul.mosaic_tables import extent


def zero_items(tiling: Any, rows: int, first: Any, end: Any) -> Any:
    """How many items the rows of no group take: those before `first`, and those from `end` on."""
    return tiling.zero_items(jnp.int32(0), first) + tiling.zero_items(end, jnp.int32(rows))


def item_of_zeros(tiling: Any, rows: int, first: Any, end: Any, number: Any) -> Any:
    """Item `number` of those for rows of no group."""
    before = tiling.zero_items(jnp.int32(0), first)
    early = number < before
    local = jnp.where(early, number, number - before)
    start, stop = jnp.where(early, 0, end), jnp.where(early, first, rows)
    return tiling.item_of_zeros(local, start, stop)


class Work:
    """What one of `blocks` blocks does: every `blocks`-th item of a tiling's table.

    Attributes:
      count: How many items the groups have.
    """

    def __init__(self, tiling: Any, refs: list[Any], rows: int, block: Any, blocks: int) -> None:
        *self._table, total_ref, ends_ref, first_ref = refs
        self._tiling, self._rows, self._block, self._blocks = tiling, rows, block, blocks
        self.count, self._first, self._end = extent(total_ref, ends_ref, first_ref, rows)
        all_items = self.count + zero_items(tiling, rows, self._first, self._end)
        self._mine = lax.div(all_items - block + (blocks - 1), jnp.int32(blocks))

    def walk(self, decode: Any, tile: Any, held: Any = None) -> Any:
        """As the function `walk`, but with `decode(number, item)`; items of zeros have the numbers from `count` on."""
        return walk(self._mine, self._fetch, lambda i, fields: decode(*self._item(i, fields)), tile, held)

    def _fetch(self, i: Any) -> tuple[Any, ...]:
        """Reads the table's row for this block's item `i`; it is used one tile later, so the load costs no time."""
        last = self._table[0].shape[0] - 1
        return tuple(ref[jnp.minimum(self._block + i * self._blocks, last)] for ref in self._table)

    def _item(self, i: Any, fields: tuple[Any, ...]) -> tuple[Any, Any]:
        number = self._block + i * self._blocks
        item = self._tiling.item_of_group(fields, number)
        other = item_of_zeros(self._tiling, self._rows, self._first, self._end, number - self.count)
        pick = lambda name: jnp.where(number < self.count, getattr(item, name), getattr(other, name))
        return number, type(item)(*(pick(f.name) for f in dataclasses.fields(item)))
