"""How a call is cut into tiles for a TPU, and in which order they are computed.

The last axis of a grid walks over the blocks of the other side, one after the other. It is as long as the longest walk:
a few blocks if there is a window. Blocks that the mask leaves out are neither computed nor fetched: their index is that
of a block that is already loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.flash_attention import masks, tile
from ejkernel.kernels.flash_attention.arguments import Attention
from ejkernel.kernels.flash_attention.pallas_tile import LANES

Array = jax.Array


PART = 512
"""Rows of a tile that are computed together. With all 1024 of the largest tiles the compiler keeps up to 16 MiB of
values in memory, for want of registers; in two parts half of that, in about as many bundles (8 % fewer to 8 % more)."""


def fitted(block: int, length: int) -> int:
    """`block` in whole lanes, or less if the sequence is shorter."""
    whole = lambda n: -(-n // LANES) * LANES
    return min(whole(block), whole(max(length, 1)))


def bundles(rows: int, cols: int, call: Attention) -> float:
    """About how many bundles a head takes with such blocks, to compare them with each other.

    A round of the grid, whether it computes something or not, takes some 350; a tile 300 and one for 400 scores: by the
    schedules for v5e and v6e.
    """
    q_len, kv_len = call.query.shape[1], call.key.shape[1]
    blocks = max(-(-q_len // rows), 1)
    walk = Walk(rows, blocks, cols, kv_len, call.rules.lower, call.rules.upper, masked=False)
    return 350 * blocks * walk.width + walk.steps * (300 + rows * cols / 400)


class Walk:
    """Blocks of one side, of `own` rows each, of which each walks over blocks of `other` rows of the other side.

    Attributes:
      width: How many blocks the longest walk needs.
      steps: How many all walks need together.
    """

    def __init__(
        self, own: int, blocks: int, other: int, length: int, lower: int | None, upper: int | None, *, masked: bool
    ) -> None:
        self._own, self._other, self._length, self._lower, self._upper = own, other, length, lower, upper
        self._always = masked
        self._never = not masked and lower is None and upper is None and length % other == 0
        counts = [self._count(block) for block in range(blocks)]
        self.width, self.steps = max(1, *counts), sum(counts)

    def _count(self, block: int) -> int:
        """How many blocks a walk needs; as `masks.spans`, in whole numbers of Python."""
        blocks, first = max(-(-self._length // self._other), 1), block * self._own
        start = 0 if self._lower is None else min(max(first + self._lower, 0) // self._other, blocks)
        if self._upper is None:
            return blocks - start
        end = max(first + self._own - 1 + self._upper + self._other, 0) // self._other
        return min(max(end, start), blocks) - start

    def _spans(self, block: Any) -> masks.Spans:
        return masks.spans(block * self._own, self._own, self._other, self._length, self._lower, self._upper)

    def at(self, block: Any, step: Any) -> Any:
        """The block that a walk reaches with a step, or one that it does not need."""
        return self._spans(block).start + step

    def fetched(self, block: Any, step: Any) -> Any:
        """The block to load for a step: always one that the walk needs, if it needs any."""
        spans = self._spans(block)
        return jnp.maximum(jnp.minimum(spans.start + step, spans.end - 1), 0)

    def compute(self, block: Any, step: Any, body: Callable[[bool, Part], None]) -> None:
        """Calls `body` for the parts of a step that the walk needs, with whether the mask has to be applied."""
        spans = self._spans(block)
        there = spans.start + step
        if self._always or self._never:
            pl.when(there < spans.end)(lambda: self._each(body, self._always))
            return
        clear = (there >= spans.clear) & (there < spans.clear_end)
        pl.when(clear)(lambda: self._each(body, False))
        pl.when((there < spans.end) & ~clear)(lambda: self._each(body, True))

    def _each(self, body: Callable[[bool, Part], None], masked: bool) -> None:
        for start in range(0, self._own, PART):
            count = min(PART, self._own - start)
            body(masked, Part(start, count, *self._needed(start, start + count, masked)))

    def _needed(self, start: int, end: int, masked: bool) -> tuple[int, int]:
        """Where the columns begin that a part needs, and how many they are."""
        diagonal = masked and not self._always and self._own == self._other and self._length % self._other == 0
        # Such a tile is on the diagonal: half of it is not seen.
        if diagonal and (self._lower, self._upper) == (None, 0):
            return 0, end
        if diagonal and (self._lower, self._upper) == (0, None):
            return start, self._other - start
        return 0, self._other


class Part(NamedTuple):
    """Rows of a tile that are computed together, against those columns of it that they need."""

    start: int
    size: int
    other: int
    others: int

    @property
    def own_rows(self) -> slice:
        return slice(self.start, self.start + self.size)

    @property
    def other_rows(self) -> slice:
        return slice(self.other, self.other + self.others)


class Place(NamedTuple):
    """A tile: its head, counted over the batch, and its blocks of queries and keys."""

    head: Any
    i: Any
    j: Any


class Cut:
    """A call cut into tiles: arrays with heads first, lengths in whole blocks."""

    def __init__(self, call: Attention, block_q: int, block_kv: int) -> None:
        query, key, value, extras, rules = call
        self.rules = rules
        self.rows, self.cols = fitted(block_q, query.shape[1]), fitted(block_kv, key.shape[1])
        self.kv_len = key.shape[1]
        self.heads, self.group = query.shape[2], query.shape[2] // key.shape[2]
        self._arrays = tuple(
            tile.heads_first(x, block) for x, block in ((query, self.rows), (key, self.cols), (value, self.cols))
        )
        self._extras = extras
        self.q_length, self.kv_length = self._arrays[0].shape[2], self._arrays[1].shape[2]
        self.q_blocks, self.kv_blocks = self.q_length // self.rows, self.kv_length // self.cols
        lower, upper = rules.lower, rules.upper
        masked = extras.q_segment_ids is not None
        self.keys = Walk(self.rows, self.q_blocks, self.cols, self.kv_len, lower, upper, masked=masked)
        # Padding needs no mask here: what a key gets is its own, and queries that are none have no weights.
        other = None if upper is None else -upper, None if lower is None else -lower
        self.queries = Walk(self.cols, self.kv_blocks, self.rows, self.q_length, *other, masked=masked)
        self.by_query = View(self, lambda b, h, i, t: (b, h, i, self.keys.fetched(i, t)))
        self.by_key = View(self, lambda b, h, j, g, t: (b, h * self.group + g, self.queries.fetched(j, t), j))

    def inputs(self, view: View) -> dict[str, tuple[Array, pl.BlockSpec]]:
        """What every kernel reads."""
        q, k, v = self._arrays
        found = {"q": (q, view.queries(q.shape[3])), "k": (k, view.keys(k.shape[3])), "v": (v, view.keys(v.shape[3]))}
        extras = self._extras
        if extras.q_segment_ids is not None:
            found["q_ids"] = _ids(extras.q_segment_ids, self.q_length), view.query_ids()
            found["kv_ids"] = _ids(extras.kv_segment_ids, self.kv_length), view.key_ids()
        if extras.dropout_seed is not None:
            found["seed"] = extras.dropout_seed.reshape(1), pl.BlockSpec(memory_space=pltpu.SMEM)
        return found

    @property
    def has_ids(self) -> bool:
        return self._extras.q_segment_ids is not None

    def seen(self, place: Place, part: Part, ids: Any, axis: int) -> Any:
        """Which queries of a part see which keys; queries are along `axis`, as are `ids[0]`."""
        return tile.seen(*self._indices(place, part, axis), self.kv_len, ids, self.rules)

    def dropper(self, refs: Any, place: Place, part: Part, axis: int) -> Callable[[Any], Any]:
        seed = refs["seed"][0] if "seed" in refs else None
        return tile.dropper(seed, place.head, *self._indices(place, part, axis), self.rules)

    def _indices(self, place: Place, part: Part, axis: int) -> tuple[Any, Any]:
        """Where the queries of a part are, along `axis`, and its keys, along the other; its own rows are axis 0."""
        own, others = (part.start, part.size), (part.other, part.others)
        (row, rows), (col, cols) = (own, others) if axis == 0 else (others, own)
        return (
            tile.places(place.i * self.rows + row, rows, axis),
            tile.places(place.j * self.cols + col, cols, 1 - axis),
        )


class View:
    """Block specs for one kind of grid: `place` maps its indices to (batch, head, query block, key block)."""

    def __init__(self, cut: Cut, place: Any) -> None:
        self._cut = cut
        self._place = place

    def _spec(self, shape: tuple[Any, ...], at: Any) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda *grid: at(*self._place(*grid)))

    def queries(self, dim: int) -> pl.BlockSpec:
        return self._spec((None, None, self._cut.rows, dim), lambda b, h, i, j: (b, h, i, 0))

    def keys(self, dim: int) -> pl.BlockSpec:
        group = self._cut.group
        return self._spec((None, None, self._cut.cols, dim), lambda b, h, i, j: (b, h // group, j, 0))

    def per_query(self, count: int) -> pl.BlockSpec:
        """`count` numbers per query, as [batch, heads, count, q]."""
        return self._spec((None, None, count, self._cut.rows), lambda b, h, i, j: (b, h, 0, i))

    def query_ids(self) -> pl.BlockSpec:
        return self._spec((None, 1, self._cut.rows), lambda b, h, i, j: (b, 0, i))

    def key_ids(self) -> pl.BlockSpec:
        return self._spec((None, 1, self._cut.cols), lambda b, h, i, j: (b, 0, j))


def _ids(ids: Array, length: int) -> Array:
    return jnp.pad(ids.astype(jnp.int32), ((0, 0), (0, length - ids.shape[1])))[:, None, :]
