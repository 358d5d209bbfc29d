"""Which tiles a call needs, as its arrays say: segments, positions and masks, looked at before a kernel runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.flash_attention import masks
from ejkernel.kernels.flash_attention.arguments import Extras, Rules

Array = jax.Array


class Blocks(NamedTuple):
    """How a call is cut: `q_blocks` of `rows` queries by `kv_blocks` of `cols` keys, of which `kv_len` are real."""

    rows: int
    cols: int
    q_blocks: int
    kv_blocks: int
    kv_len: int


class Needed(NamedTuple):
    """Tiles, [batch or 1, heads or 1, query blocks, key blocks]."""

    some: Array
    """Whether a query may see a key; certain to be True where one does."""
    whole: Array
    """Whether every query sees every key; certain to be False where one does not."""

    def turned(self) -> Needed:
        """The same for blocks of keys, which then come first."""
        return Needed(*(x.swapaxes(2, 3) for x in self))

    def together(self) -> Needed:
        """The same for a loop that all heads of the batch go through at once."""
        return Needed(self.some.any(axis=(0, 1), keepdims=True), self.whole.all(axis=(0, 1), keepdims=True))


class Visits(NamedTuple):
    """The walk of each block over those of the other side, in steps."""

    spans: Array
    """[batch or 1, heads or 1, blocks, numbers]: the numbers that `steps` wants."""
    order: Array | None
    """[batch or 1, heads or 1, blocks, others]: where a step leads to; None: to the block of its number."""

    def of(self, block: Any) -> tuple[masks.Spans, Any]:
        """The steps of one block's walk and where each leads to; for a batch and heads that share their walks."""
        spans = steps(lambda n: self.spans[0, 0, block, n], listed=self.order is not None)
        if self.order is None:
            return spans, lambda step: step
        order = self.order[0, 0, block]
        return spans, lambda step: order[step]


def steps(read: Callable[[int], Any], *, listed: bool) -> masks.Spans:
    """The steps of a walk; `read(n)` is the n-th of its numbers, of which a list has two, a range four."""
    if listed:
        masked, end = read(0), read(1)
        return masks.Spans(0, masked, end, end, blocks=0)
    return masks.Spans(*(read(n) for n in range(4)), blocks=0)


def find(extras: Extras, rules: Rules, blocks: Blocks) -> Needed | None:
    """The tiles that are needed; None if only the places of queries and keys decide, which needs no array."""
    if extras.q_segment_ids is None and extras.q_positions is None and extras.mask is None:
        return None
    found = [_in_band(extras, rules, blocks)]
    if extras.q_segment_ids is not None:
        found.append(_of_one_segment(extras, blocks))
    if extras.mask is not None:
        found.append(_in_mask(extras.mask, blocks))
    some, whole = found[0]
    for other in found[1:]:
        some, whole = some & other.some, whole & other.whole
    some, whole = (jnp.broadcast_to(x, (*x.shape[:2], blocks.q_blocks, blocks.kv_blocks)) for x in (some, whole))
    return Needed(some, some & whole)


def ranges(needed: Needed) -> Visits:
    """Walks from the first tile that is needed to the last; one run of whole tiles is known as such."""
    count = needed.some.shape[3]
    place = jnp.arange(count, dtype=jnp.int32)
    first = lambda where, other: jnp.min(jnp.where(where, place, other), axis=3, keepdims=True)
    end = jnp.max(jnp.where(needed.some, place + 1, 0), axis=3, keepdims=True)
    start = jnp.minimum(first(needed.some, count), end)
    clear = first(needed.whole, end)
    clear_end = jnp.minimum(first(~needed.whole & (place >= clear), count), end)
    return Visits(jnp.concatenate([start, clear, clear_end, end], axis=3), None)


def listed(needed: Needed) -> Visits:
    """Walks over exactly the tiles that are needed: those to be masked, then whole ones."""
    kind = jnp.where(needed.some, needed.whole.astype(jnp.int32), 2)
    order = jnp.argsort(kind, axis=3, stable=True).astype(jnp.int32)
    counts = [(kind < n).sum(axis=3, keepdims=True, dtype=jnp.int32) for n in (1, 2)]
    return Visits(jnp.concatenate(counts, axis=3), order)


# --- What each array says ---


def _in_band(extras: Extras, rules: Rules, blocks: Blocks) -> Needed:
    """Tiles inside of the causal or window bounds, by places or by positions in packed sequences."""
    here = jnp.arange(blocks.kv_blocks, dtype=jnp.int32) * blocks.cols
    if extras.q_positions is None:
        rows = jnp.arange(blocks.q_blocks, dtype=jnp.int32) * blocks.rows
        rows, cols = (rows[None], rows[None] + (blocks.rows - 1)), (here[None], here[None] + (blocks.cols - 1))
    else:
        rows = _ends(extras.q_positions, blocks.rows, blocks.q_blocks)
        cols = _ends(extras.kv_positions, blocks.cols, blocks.kv_blocks)
    (q_low, q_high), (k_low, k_high) = _crossed(rows, cols)
    some = jnp.ones((1, 1, blocks.q_blocks, blocks.kv_blocks), jnp.bool_)
    whole = some & (here + blocks.cols <= blocks.kv_len)
    if rules.upper is not None:
        some, whole = some & (k_low <= q_high + rules.upper), whole & (k_high <= q_low + rules.upper)
    if rules.lower is not None:
        some, whole = some & (k_high >= q_low + rules.lower), whole & (k_low >= q_high + rules.lower)
    return Needed(some, whole)


def _of_one_segment(extras: Extras, blocks: Blocks) -> Needed:
    """By the least and the largest id of each block: exact for sorted ids, and right for others."""
    rows = _ends(extras.q_segment_ids, blocks.rows, blocks.q_blocks)
    cols = _ends(extras.kv_segment_ids, blocks.cols, blocks.kv_blocks)
    (q_low, q_high), (k_low, k_high) = _crossed(rows, cols)
    return Needed((q_low <= k_high) & (k_low <= q_high), (q_low == q_high) & (k_low == k_high) & (q_low == k_low))


def _in_mask(mask: Array, blocks: Blocks) -> Needed:
    """Whether a mask has anything, and everything, of a tile."""
    for axis, size, count in ((2, blocks.rows, blocks.q_blocks), (4, blocks.cols, blocks.kv_blocks)):
        length = mask.shape[axis]
        # One row or column for all stays one; it may also be all that there is.
        split = (1, 1) if length == 1 else (count, size)
        widths = [(0, 0)] * mask.ndim
        widths[axis] = (0, split[0] * split[1] - length)
        mask = jnp.pad(mask, widths) if widths[axis][1] else mask
        mask = mask.reshape(*mask.shape[:axis], *split, *mask.shape[axis + 1 :])
    return Needed(mask.any(axis=(3, 5)), mask.all(axis=(3, 5)))


def _ends(values: Array, size: int, count: int) -> tuple[Array, Array]:
    """The least and the largest value of each block, [batch, count]; padding is like the last value."""
    missing = size * count - values.shape[1]
    if missing:
        values = jnp.pad(values, ((0, 0), (0, missing)), mode="edge" if values.shape[1] else "constant")
    values = values.reshape(values.shape[0], count, size)
    return values.min(axis=2), values.max(axis=2)


def _crossed(rows: tuple[Array, Array], cols: tuple[Array, Array]) -> Any:
    """Values of blocks of queries and of keys, so that they broadcast to tiles."""
    return [x[:, None, :, None] for x in rows], [x[:, None, None, :] for x in cols]
