"""Block specs of the TPU kernels: which blocks of the arrays a step of a grid gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.kernels.flash_attention import needed
from ejkernel.kernels.flash_attention.pallas_cut import Course, Found, Walk

if TYPE_CHECKING:
    from ejkernel.kernels.flash_attention.pallas_blocks import Cut

Array = jax.Array


class View:
    """Block specs for one kind of grid: `place` maps its indices to (batch, head, query block, key block)."""

    turned = False
    """Whether keys are the rows of a tile."""

    def __init__(self, cut: Cut) -> None:
        self._cut = cut

    def place(self, *grid: Any) -> tuple[Any, Any, Any, Any]:
        """Batch, head, and blocks of queries and keys; what is in scalar memory follows the indices of the grid."""
        raise NotImplementedError

    def _spec(self, shape: tuple[Any, ...], at: Any) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda *grid: at(*self.place(*grid)))

    def queries(self, dim: int) -> pl.BlockSpec:
        return self._spec((None, None, self._cut.rows, dim), lambda b, h, i, j: (b, h, i, 0))

    def keys(self, dim: int) -> pl.BlockSpec:
        group = self._cut.group
        return self._spec((None, None, self._cut.cols, dim), lambda b, h, i, j: (b, h // group, j, 0))

    def per_query(self, count: int) -> pl.BlockSpec:
        """`count` numbers per query, as [batch, heads, count, q]."""
        return self._spec((None, None, count, self._cut.rows), lambda b, h, i, j: (b, h, 0, i))

    def query_row(self) -> pl.BlockSpec:
        return self._spec((None, 1, self._cut.rows), lambda b, h, i, j: (b, 0, i))

    def key_row(self) -> pl.BlockSpec:
        return self._spec((None, 1, self._cut.cols), lambda b, h, i, j: (b, 0, j))

    def plane(self, x: Array) -> pl.BlockSpec:
        """Of a bias or a mask, whose axes may be 1."""
        many = [n > 1 for n in x.shape]
        shape = [self._cut.rows if many[2] else 1, self._cut.cols if many[3] else 1]

        def at(*place: Any) -> tuple[Any, ...]:
            b, h, i, j = (n if m else 0 for m, n in zip(many, place, strict=True))
            return (b, h, j, i) if self.turned else (b, h, i, j)

        return self._spec((None, None, *(shape[::-1] if self.turned else shape)), at)


class Walking(View):
    """A view of a grid whose last axis walks over the blocks of the other side."""

    def __init__(self, cut: Cut, walk: Walk) -> None:
        super().__init__(cut)
        self._walk, self._visits = walk, cut.visits(turned=self.turned)

    @property
    def scalars(self) -> dict[str, Array]:
        """What is to be in scalar memory."""
        found = {} if self._visits is None else self._visits._asdict()
        return {name: x.reshape(-1) for name, x in found.items() if x is not None}

    @property
    def width(self) -> Any:
        """How long the longest walk is: of those that are needed, if that was found."""
        if self._visits is None:
            return self._walk.width
        spans = self._visits.spans
        last = spans[..., -1] if self._visits.order is not None else spans[..., 3] - spans[..., 0]
        return jnp.maximum(last.max(), 1)

    def course(self, scalars: Sequence[Any], batch: Any, head: Any, block: Any) -> Course:
        """The walk of a block, read from scalar memory if it was found."""
        if self._visits is None:
            return self._walk.course(block)
        spans, order = self._visits
        batches, heads, blocks, count = spans.shape
        line = ((batch if batches > 1 else 0) * heads + (head if heads > 1 else 0)) * blocks + block
        steps = needed.steps(lambda n: scalars[0][line * count + n], listed=order is not None)
        if order is None:
            return self._walk.course(block, Found(steps, None))
        return self._walk.course(block, Found(steps, lambda step: scalars[1][line * order.shape[3] + step]))

    def read(self, refs: Any, batch: Any, head: Any, block: Any) -> Course:
        """The same inside a kernel."""
        return self.course([refs[name] for name in ("spans", "order") if name in refs], batch, head, block)

    def last(self, axis: int) -> Any:
        """The last step of all walks, inside a kernel."""
        return (self._walk.width if self._visits is None else pl.num_programs(axis)) - 1


class ByQuery(Walking):
    """A block of queries walks over keys: the grid is (batch, head, block of queries, step)."""

    def place(self, *grid: Any) -> tuple[Any, Any, Any, Any]:
        b, h, i, t, *scalars = grid
        return b, h, i, self.course(scalars, b, h, i).fetched(t)


class ByKey(Walking):
    """A block of keys walks over queries: (batch, key head, block of keys, head of the group, step)."""

    turned = True

    def place(self, *grid: Any) -> tuple[Any, Any, Any, Any]:
        b, h, j, g, t, *scalars = grid
        head = h * self._cut.group + g
        return b, head, self.course(scalars, b, head, j).fetched(t), j
