"""Tables of the backward kernels where only the device knows which tiles meet: packed sequences, masks."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.flash_attention.config import MosaicBwdConfig
from ejkernel.kernels.flash_attention.mosaic import ids_of_mask, padded
from ejkernel.kernels.flash_attention.mosaic_bits import bit_pairs, packed_bits
from ejkernel.kernels.flash_attention.mosaic_deal import deal
from ejkernel.kernels.flash_attention.mosaic_mask import Band
from ejkernel.kernels.flash_attention.mosaic_segments import band_pairs, segment_pairs, visited

Array = jax.Array
_ROUNDS = 4
ENTRY = 5  # Numbers of a tile in a table: its own, then start, clear, clear_end and end of what it visits.


class Facts(NamedTuple):
    """Who sees whom, besides the band: ids of segments, and a mask as bits.

    `ids` are of queries and keys, `whole_ids` the same in whole tiles. In `key_words` a row of bits is a key, in
    `query_words` it is a query.
    """

    ids: tuple[Array, ...] = ()
    whole_ids: tuple[Array, ...] = ()
    key_words: Array | None = None
    query_words: Array | None = None

    @property
    def known(self) -> bool:
        """Whether there are any."""
        return bool(self.ids) or self.key_words is not None


def facts_of(
    q_ids: Array | None, kv_ids: Array | None, mask: Array | None, cfg: MosaicBwdConfig, *, batch: int, band: Band
) -> Facts:
    """Returns what the kernels read of segments and a mask; one for all queries, or all keys, is like two segments."""
    ids, key_words, query_words = (), None, None
    keys, queries = cfg.block_kv * cfg.cluster, cfg.dq_block_q * cfg.dq_cluster
    if q_ids is not None and kv_ids is not None:
        ids = q_ids.astype(jnp.int32), kv_ids.astype(jnp.int32)
    if mask is not None and 1 in mask.shape[2:]:
        ids = ids_of_mask(mask, batch, band.q_len, band.kv_len)
    elif mask is not None:
        key_words = packed_bits(mask[:, 0].swapaxes(1, 2), rows=keys, cols=cfg.block_q)
        if cfg.dq == "kernel":
            query_words = packed_bits(mask[:, 0], rows=queries, cols=cfg.dq_block_kv)
    whole = (padded(ids[0], queries, -1), padded(ids[1], math.lcm(keys, cfg.dq_block_kv), -2)) if ids else ()
    return Facts(ids, whole, key_words, query_words)


def packed_splits(cfg: MosaicBwdConfig, *, tiles: int, group: int, blocks: int) -> int:
    """Returns into how many parts tiles of keys are cut: as many as give every block two, where few heads leave fewer.

    A part has at least the queries of one head.
    """
    return min(cfg.splits or -(-2 * blocks // tiles), group, 8)


def key_table(
    facts: Facts, *, cfg: MosaicBwdConfig, band: Band, batch: int, kv_heads: int, blocks: int, splits: int
) -> Array:
    """Returns the tiles of keys of every block; tile `n` of a head in `splits` parts is `n * splits` and following."""
    turned = Band(
        q_len=band.kv_len,
        kv_len=band.q_len,
        lower=None if band.upper is None else -band.upper,
        upper=None if band.lower is None else -band.lower,
    )
    spans = _spans(facts.ids[::-1], facts.key_words, turned, rows=cfg.block_kv * cfg.cluster, cols=cfg.block_q)
    return _table(jnp.repeat(spans, splits, axis=1), batch, kv_heads, blocks, cfg)


def query_table(facts: Facts, *, cfg: MosaicBwdConfig, band: Band, batch: int, heads: int, blocks: int) -> Array:
    """Returns the tiles of queries of every block, for the second kernel."""
    rows = cfg.dq_block_q * cfg.dq_cluster
    spans = _spans(facts.ids, facts.query_words, band, rows=rows, cols=cfg.dq_block_kv)
    return _table(spans, batch, heads, blocks, cfg)


def _spans(ids: tuple[Array, ...], words: Array | None, band: Band, *, rows: int, cols: int) -> Array:
    """Returns `[batch or 1, row blocks, 4]`: start, clear, clear_end and end of the blocks of columns to visit."""
    sizes = {"rows": rows, "cols": cols}
    pairs = [band_pairs(band.q_len, band.kv_len, lower=band.lower, upper=band.upper, **sizes)]
    if ids:
        pairs.append(segment_pairs(*ids, **sizes))
    if words is not None:
        pairs.append(bit_pairs(words, **sizes))
    meet, clear = (functools.reduce(operator.and_, tables) for tables in zip(*pairs, strict=True))
    return visited(meet, clear)


def _table(spans: Array, batch: int, heads: int, blocks: int, cfg: MosaicBwdConfig) -> Array:
    """Returns for each block the number of its tiles, then the `ENTRY` numbers of each."""
    count = spans.shape[1]
    spans = jnp.broadcast_to(spans, (batch, count, 4))
    if cfg.schedule == "grid":
        blocks = batch * heads * count
    # A few rounds of each group: with more, tiles of a segment are far apart and find its queries in memory; with less,
    # some blocks have more work than others.
    group = cfg.head_group or max(_ROUNDS * blocks // count, 1)
    counts, numbers = deal(spans[:, :, 3] - spans[:, :, 0], heads=heads, blocks=blocks, head_group=group)
    places = numbers // (count * heads) * count + numbers % count
    lines = jnp.concatenate([numbers[..., None], spans.reshape(batch * count, -1)[places]], axis=-1)
    return jnp.concatenate([counts[:, None], lines.reshape(counts.shape[0], -1)], axis=1)


def read_entry(table: Any, block: Any, i: Any) -> list[Any]:
    """Returns the `ENTRY` numbers of the block's tile `i`."""
    return [table[block, 1 + i * ENTRY + n] for n in range(ENTRY)]


def is_cut(block: Any, clear: Any, clear_end: Any) -> Any:
    """Returns whether a tile holds pairs that do not see each other."""
    return lax.bitwise_or(block < clear, block >= clear_end)
