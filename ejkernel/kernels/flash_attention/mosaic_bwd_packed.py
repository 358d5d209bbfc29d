"""Tables of the backward kernels for packed sequences, made by the device: only the ids say which tiles meet."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.flash_attention.config import MosaicBwdConfig
from ejkernel.kernels.flash_attention.mosaic_deal import deal
from ejkernel.kernels.flash_attention.mosaic_mask import Band
from ejkernel.kernels.flash_attention.mosaic_segments import segment_spans

Array = jax.Array
_ROUNDS = 4
ENTRY = 5  # Numbers of a tile in a table: its own, then start, clear, clear_end and end of what it visits.


def packed_splits(cfg: MosaicBwdConfig, *, tiles: int, group: int, blocks: int) -> int:
    """Returns into how many parts tiles of keys are cut: as many as give every block two, where few heads leave fewer.

    A part has at least the queries of one head.
    """
    return min(cfg.splits or -(-2 * blocks // tiles), group, 8)


def key_table(
    q_ids: Array, kv_ids: Array, *, cfg: MosaicBwdConfig, band: Band, kv_heads: int, blocks: int, splits: int
) -> Array:
    """Returns the tiles of keys of every block; tile `n` of a head in `splits` parts is `n * splits` and following."""
    spans = segment_spans(
        kv_ids,
        q_ids,
        rows=cfg.block_kv * cfg.cluster,
        cols=cfg.block_q,
        lower=None if band.upper is None else -band.upper,
        upper=None if band.lower is None else -band.lower,
    )
    return _table(jnp.repeat(spans, splits, axis=1), kv_heads, blocks, cfg)


def query_table(q_ids: Array, kv_ids: Array, *, cfg: MosaicBwdConfig, band: Band, heads: int, blocks: int) -> Array:
    """Returns the tiles of queries of every block, for the second kernel."""
    rows = cfg.dq_block_q * cfg.dq_cluster
    spans = segment_spans(q_ids, kv_ids, rows=rows, cols=cfg.dq_block_kv, lower=band.lower, upper=band.upper)
    return _table(spans, heads, blocks, cfg)


def _table(spans: Array, heads: int, blocks: int, cfg: MosaicBwdConfig) -> Array:
    """Returns for each block the number of its tiles, then the `ENTRY` numbers of each."""
    batch, count, _ = spans.shape
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
