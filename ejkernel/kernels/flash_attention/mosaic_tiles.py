"""The tiles of queries that a block of the forward kernel runs, and the key blocks that each of them needs."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.flash_attention.config import MosaicFwdConfig
from ejkernel.kernels.flash_attention.mosaic_bits import bit_pairs
from ejkernel.kernels.flash_attention.mosaic_deal import deal
from ejkernel.kernels.flash_attention.mosaic_mask import Band
from ejkernel.kernels.flash_attention.mosaic_segments import band_pairs, extents, segment_pairs
from ejkernel.kernels.hopper.chip import WGMMA_ROWS
from ejkernel.kernels.hopper.cluster import place_in_cluster
from ejkernel.kernels.hopper.wgmma import unhoisted

Array = jax.Array
_STRIP = 4  # Numbers of a strip in the table: start, clear, clear_end, end.


class Piece(NamedTuple):
    """A tile of queries, or the strip of it that one warpgroup owns; key blocks are counted from the first key.

    The tile needs the blocks from `start` to `end`, the strip those from `own_start` to `own_end`. `clear` is which of
    them need no mask, if a table says so.
    """

    batch: Any
    head: Any
    row: Any
    start: Any
    end: Any
    own_start: Any
    own_end: Any
    clear: tuple[Any, Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of the running block, read from a table; `spans` says that the table has the key blocks, too.

    Without them, they follow from the band. `wide` is whether a head has so many columns that
    addresses must not be held over the loop.
    """

    table: Any
    band: Band
    cfg: MosaicFwdConfig
    heads: int
    spans: bool
    wide: bool = False

    @property
    def count(self) -> Any:
        return self.table[lax.axis_index("block"), 0]

    @property
    def uneven(self) -> bool:
        """Whether the strips of a tile need different blocks."""
        banded = self.band.lower is not None or self.band.upper is not None
        return (banded or self.spans) and self.cfg.consumers * self.cfg.cluster > 1

    @property
    def cut_above(self) -> bool:
        """Whether blocks besides a strip's last one may hold keys after those that it sees."""
        upper, block = self.band.upper, self.cfg.block_kv
        return self.spans or (upper is not None and (upper % WGMMA_ROWS != 0 or block % WGMMA_ROWS != 0))

    @property
    def cut_below(self) -> bool:
        """Whether blocks may hold keys before those that a strip sees."""
        return self.spans or self.band.lower is not None

    def tile(self, i: Any) -> Piece:
        """The block's tile `i`, as its producer needs it."""
        at = self._place(i)
        number = self._read(at)
        row, batch, head = self._split(number)
        if self.spans:
            start, end = self._read(at + 1), self._read(at + 2)
        else:
            start, end = self.band.blocks(row, self._rows, self.cfg.block_kv)
            if self._hidden_length:
                end = unhoisted(end, number)
        row = row + place_in_cluster(self.cfg.cluster) * self.cfg.block_q
        return Piece(batch, head, row, start, end, start, end)

    def strip(self, i: Any, wg: Any) -> Piece:
        """The part of tile `i` that warpgroup `wg` owns."""
        tile = self.tile(i)
        row, clear = tile.row + wg * WGMMA_ROWS, None
        if self.spans:
            number = place_in_cluster(self.cfg.cluster) * self.cfg.consumers + wg
            at = self._place(i) + 3 + number * _STRIP
            own_start, *clear, own_end = (self._read(at + n) for n in range(_STRIP))
            clear = tuple(clear)
        else:
            own_start, own_end = self.band.blocks(row, WGMMA_ROWS, self.cfg.block_kv)
            own_end = tile.end if self._hidden_length else jnp.minimum(own_end, tile.end)
            own_start = jnp.minimum(own_start, own_end - 1)
        return tile._replace(row=row, own_start=own_start, own_end=own_end, clear=clear)

    def clear_of(self, strip: Piece) -> tuple[Any, Any]:
        """The first block that needs no mask, and the one after the last; computed where the registers are free."""
        if strip.clear is not None:
            return strip.clear
        band, block, row = self.band, jnp.int32(self.cfg.block_kv), strip.row
        start, end = strip.own_start, strip.own_end
        if self.cut_above and band.upper is not None:
            end = lax.div(jnp.clip(row + (band.upper + 1), 0, band.kv_len), block)
        if self.cut_below and band.lower is not None:
            start = lax.div(jnp.maximum(row + (WGMMA_ROWS - 1 + band.lower), 0) + (block - 1), block)
        return start, end

    @property
    def _hidden_length(self) -> bool:
        """Whether ptxas must not know how many blocks there are: it would hoist addresses, and spill them."""
        return self.wide and self.band.lower is None and self.band.upper is None

    @property
    def _rows(self) -> int:
        return self.cfg.block_q * self.cfg.cluster

    def _split(self, number: Any) -> tuple[Any, Any, Any]:
        """The first row of a tile, its batch and its head."""
        per_head = -(-self.band.q_len // self._rows)
        flat, row = lax.div(number, jnp.int32(per_head)), lax.rem(number, jnp.int32(per_head)) * self._rows
        return row, lax.div(flat, jnp.int32(self.heads)), lax.rem(flat, jnp.int32(self.heads))

    def _place(self, i: Any) -> Any:
        return 1 + i * (3 + _STRIP * self.cfg.consumers * self.cfg.cluster) if self.spans else 1 + i

    def _read(self, at: Any) -> Any:
        return self.table[lax.axis_index("block"), at]


def packed_table(
    ids: tuple[Array, ...],
    words: Array | None,
    *,
    cfg: MosaicFwdConfig,
    band: Band,
    batch: int,
    heads: int,
    blocks: int,
    head_group: int,
) -> Array:
    """The table where ids or bits decide: each tile's number, its key blocks and those of its strips."""
    per_tile = cfg.consumers * cfg.cluster
    count = -(-band.q_len // (per_tile * WGMMA_ROWS))
    strips = _strips(ids, words, cfg.block_kv, band)
    missing = count * per_tile - strips[0].shape[1]
    own_start, clear, clear_end, own_end = (
        jnp.broadcast_to(jnp.pad(x, ((0, 0), (0, missing))), (batch, count * per_tile)).reshape(batch, count, per_tile)
        for x in strips
    )
    # Strip by strip: XLA makes a kernel of every sum, and there are two or three strips.
    end = functools.reduce(jnp.maximum, (own_end[:, :, n : n + 1] for n in range(per_tile)), 1)
    first = jnp.where(own_end > 0, own_start, end - 1)
    start = functools.reduce(jnp.minimum, (first[:, :, n : n + 1] for n in range(per_tile)))
    # A strip that sees nothing visits a block all the same, one of its tile's.
    own_start = jnp.clip(own_start, start, end - 1)
    own_end = jnp.clip(own_end, own_start + 1, end)
    clear = jnp.clip(clear, own_start, own_end)
    clear_end = jnp.clip(clear_end, clear, own_end)
    strips = jnp.stack([own_start, clear, clear_end, own_end], axis=-1).reshape(batch, count, -1)
    facts = jnp.concatenate([start, end, strips], axis=-1).reshape(batch * count, -1)
    if cfg.schedule == "grid":
        blocks = batch * heads * count
    counts, numbers = deal((end - start)[..., 0], heads=heads, blocks=blocks, head_group=head_group)
    places = numbers // (count * heads) * count + numbers % count
    lines = jnp.concatenate([numbers[..., None], facts[places]], axis=-1)
    return jnp.concatenate([counts[:, None], lines.reshape(counts.shape[0], -1)], axis=1)


def _strips(ids: tuple[Array, ...], words: Array | None, block_kv: int, band: Band) -> tuple[Array, ...]:
    """`start, clear, clear_end, end` of every 64 queries, 0 where they see nothing."""
    sizes = {"rows": WGMMA_ROWS, "cols": block_kv}
    pairs = [band_pairs(band.q_len, band.kv_len, lower=band.lower, upper=band.upper, **sizes)]
    if ids:
        pairs.append(segment_pairs(*ids, **sizes))
    if words is not None:
        count = -(-band.q_len // WGMMA_ROWS)
        some, every = bit_pairs(words, **sizes)
        pairs.append((some[:, :count], every[:, :count]))
    return extents(*(functools.reduce(operator.and_, tables) for tables in zip(*pairs, strict=True)))
