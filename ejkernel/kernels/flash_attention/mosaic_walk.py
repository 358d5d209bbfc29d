"""The loop of a block of the backward kernel: its tiles of keys, and the queries for each."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.flash_attention.config import MosaicBwdConfig
from ejkernel.kernels.flash_attention.mosaic_bwd_packed import is_cut, read_entry
from ejkernel.kernels.flash_attention.mosaic_bwd_schedule import decode_item
from ejkernel.kernels.flash_attention.mosaic_mask import Band
from ejkernel.kernels.hopper.cluster import place_in_cluster
from ejkernel.kernels.hopper.wgmma import unhoisted


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """A tile of keys of one key head; `count` blocks of queries, from `start` on, see it in each of `group` heads.

    Of those steps, the running block does `steps`, from `first` on. Of packed sequences, blocks of queries from `clear`
    to `clear_end` see all keys of the tile.
    """

    batch: Any
    kv_head: Any
    col: Any
    start: Any
    count: Any
    first: Any
    steps: Any
    block_q: int
    group: int
    clear: Any = None
    clear_end: Any = None

    def place(self, n: Any) -> tuple[Any, Any]:
        """Returns the query head and the first query of step `n`."""
        head, n = unhoisted(self.kv_head, n) * self.group, n + self.first
        if self.group == 1:
            return head, (self.start + n) * self.block_q
        return (
            head + lax.div(n, self.count),
            (self.start + lax.rem(n, self.count)) * self.block_q,
        )

    def cut(self, row: Any) -> Any:
        """Returns whether ids cut the tile of the block of queries at `row`; None if there are no ids."""
        if self.clear is None:
            return None
        return is_cut(lax.div(row, jnp.int32(self.block_q)), self.clear, self.clear_end)


@dataclasses.dataclass(frozen=True, slots=True)
class Walk:
    """The tiles of the running block, read from the table."""

    table: Any
    band: Band
    cfg: MosaicBwdConfig
    kv_heads: int
    group: int
    splits: int
    packed: bool

    @property
    def tiles(self) -> Any:
        return self.table[lax.axis_index("block"), 0]

    def tile(self, i: Any) -> Tile:
        block, keys = lax.axis_index("block"), self.cfg.block_kv * self.cfg.cluster
        clear = clear_end = start = end = None
        if self.packed:
            number, start, clear, clear_end, end = read_entry(self.table, block, i)
            parts = jnp.int32(self.splits)
            number, part = lax.div(number, parts), lax.rem(number, parts)
        else:
            number, part, parts = decode_item(self.table[block, i + 1], self.splits)
        per_head = jnp.int32(-(-self.band.kv_len // keys))
        head, col = lax.div(number, per_head), lax.rem(number, per_head) * keys
        if start is None or end is None:
            start, end = self.band.query_blocks(col, keys, self.cfg.block_q)
        count = end - start
        if self.band.lower is None and self.band.upper is None:
            # Loops of a length that ptxas knows have more addresses in registers than there are (JAX 0.11.2).
            count = unhoisted(count, number)
        first, steps = 0, self.group * count
        if self.splits > 1:
            first = lax.div(steps * part, parts)
            steps = lax.div(steps * (part + 1), parts) - first
        heads = jnp.int32(self.kv_heads)
        return Tile(
            batch=lax.div(head, heads),
            kv_head=lax.rem(head, heads),
            col=col + place_in_cluster(self.cfg.cluster) * self.cfg.block_kv,
            start=start,
            count=count,
            first=first,
            steps=steps,
            block_q=self.cfg.block_q,
            group=self.group,
            clear=clear,
            clear_end=clear_end,
        )

    def keys(self, i: Any) -> Any:
        """Returns which of the `kv_stages` places holds the keys of tile `i`."""
        return lax.rem(i, jnp.int32(self.cfg.kv_stages)) if self.cfg.kv_stages > 1 else 0

    def slot(self, step: Any) -> Any:
        """Returns which of the `stages` slots holds the queries of `step`."""
        return lax.rem(step, jnp.int32(self.cfg.stages))
