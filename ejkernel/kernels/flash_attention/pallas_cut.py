"""In which order the tiles of a call are computed on a TPU.

The last axis of a grid walks over the blocks of the other side, one after the other. It is as long as the longest walk:
a few blocks if there is a window. Blocks that the mask leaves out are neither computed nor fetched: their index is that
of a block that is already loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.kernels.flash_attention import masks
from ejkernel.kernels.flash_attention.arguments import Attention
from ejkernel.kernels.flash_attention.pallas_tile import LANES

PART = 512
"""Rows of a tile that are computed together. With all 1024 of the largest tiles the compiler keeps up to 16 MiB of
values in memory, for want of registers; in two parts half of that, in about as many bundles (8 % fewer to 8 % more)."""


def fitted(block: int, length: int) -> int:
    """`block` in whole lanes, or less if the sequence is shorter."""
    whole = lambda n: -(-n // LANES) * LANES
    return min(whole(block), whole(max(length, 1)))


def bundles(rows: int, cols: int, call: Attention) -> float:
    """About how many bundles a head takes with such blocks, to compare them with each other.

    A round of the grid counts as 350, whether it computes something or not: some 160 bundles, and about as long a wait.
    A tile takes 300 bundles and one for 400 scores, by the schedules for v5e and v6e.
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
      always: Whether every tile is masked.
      never: Whether none is.
    """

    def __init__(
        self,
        own: int,
        blocks: int,
        other: int,
        length: int,
        lower: int | None,
        upper: int | None,
        *,
        masked: bool,
        placed: bool = True,
    ) -> None:
        self._own, self._other, self._length, self._lower, self._upper = own, other, length, lower, upper
        # Only where nothing but places decides is it known where in a tile the mask is.
        self._placed = placed and not masked
        self.always = masked
        self.never = self._placed and lower is None and upper is None and length % other == 0
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

    def course(self, block: Any, found: Found | None = None) -> Course:
        """The walk of one block; `found` is what was found out about it before the kernel, if anything was."""
        if found is not None:
            return Course(self, found.spans, found.order)
        spans = masks.spans(block * self._own, self._own, self._other, self._length, self._lower, self._upper)
        return Course(self, spans, None)

    def each(self, body: Callable[[bool, Part], None], masked: bool) -> None:
        for start in range(0, self._own, PART):
            count = min(PART, self._own - start)
            body(masked, Part(start, count, *self._needed(start, start + count, masked)))

    def _needed(self, start: int, end: int, masked: bool) -> tuple[int, int]:
        """Where the columns begin that a part needs, and how many they are."""
        diagonal = masked and self._placed and self._own == self._other and self._length % self._other == 0
        # Such a tile is on the diagonal: half of it is not seen.
        if diagonal and (self._lower, self._upper) == (None, 0):
            return 0, end
        if diagonal and (self._lower, self._upper) == (0, None):
            return start, self._other - start
        return 0, self._other


class Found(NamedTuple):
    """A walk that is read from memory; see `needed.Visits`."""

    spans: masks.Spans
    order: Callable[[Any], Any] | None


class Course(NamedTuple):
    """The walk of one block, step by step."""

    walk: Walk
    spans: masks.Spans
    order: Callable[[Any], Any] | None

    def at(self, step: Any) -> Any:
        """The block that a step reaches, or one that the walk does not need."""
        return self._block(self.spans.start + step)

    def fetched(self, step: Any) -> Any:
        """The block to load for a step: always one that the walk needs, if it needs any."""
        spans = self.spans
        return self._block(jnp.maximum(jnp.minimum(spans.start + step, spans.end - 1), 0))

    def _block(self, there: Any) -> Any:
        return there if self.order is None else self.order(there)

    def compute(self, step: Any, body: Callable[[bool, Part], None]) -> None:
        """Calls `body` for the parts of a step that the walk needs, with whether the mask has to be applied."""
        spans, walk = self.spans, self.walk
        there = spans.start + step
        if walk.always or walk.never:
            pl.when(there < spans.end)(lambda: walk.each(body, walk.always))
            return
        clear = (there >= spans.clear) & (there < spans.clear_end)
        pl.when(clear)(lambda: walk.each(body, False))
        pl.when((there < spans.end) & ~clear)(lambda: walk.each(body, True))


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
