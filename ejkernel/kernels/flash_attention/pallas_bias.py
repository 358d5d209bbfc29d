"""The gradient of a bias by a TPU kernel of its own: where nobody needs it, it is dead code.

The grid is (batch and heads of the bias, its blocks, the heads that share them and, of a bias that is the same for all
queries, the blocks of these). What the heads that share a block give is added up in scratch memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.flash_attention import masks, pallas_tile, tile
from ejkernel.kernels.flash_attention.arguments import Attention
from ejkernel.kernels.flash_attention.pallas_blocks import Cut, Inputs
from ejkernel.kernels.flash_attention.pallas_cut import PART, Part, Place
from ejkernel.kernels.flash_attention.pallas_memory import vmem_limit
from ejkernel.kernels.flash_attention.pallas_views import View

Array = jax.Array


class ByBias(View):
    """The grid is (batch, head and blocks of the bias, head that shares it, block of queries that does)."""

    def __init__(self, cut: Cut, bias: Array) -> None:
        super().__init__(cut)
        self.batches, self.heads, self.shared = bias.shape[0], bias.shape[1], cut.heads // bias.shape[1]
        self.by_rows = bias.shape[2] > 1
        walk = () if self.by_rows else (cut.q_blocks,)
        blocks = (cut.q_blocks if self.by_rows else 1, cut.kv_blocks)
        self.grid = (self.batches, self.heads, *blocks, cut.batch // self.batches * self.shared, *(walk or (1,)))

    def place(self, *grid: Any) -> tuple[Any, Any, Any, Any]:
        b, h, i, j, n, t = grid
        batch = b * (self._cut.batch // self.batches) + n // self.shared
        return batch, h * self.shared + n % self.shared, i if self.by_rows else t, j

    def own(self) -> pl.BlockSpec:
        """A block of the bias itself."""
        rows = self._cut.rows if self.by_rows else 1
        return pl.BlockSpec((None, None, rows, self._cut.cols), lambda b, h, i, j, n, t: (b, h, i, j))


def bias_gradient(cut: Cut, call: Attention, inputs: Callable[[View], Inputs], interpret: bool) -> Array:
    """The gradient of a bias that has a column for each key; `inputs` gives those of a backward."""
    bias = call.extras.bias
    view = ByBias(cut, bias)
    rows = cut.q_length if view.by_rows else 1
    # A single row of few bits cannot be stored.
    dtype = bias.dtype if view.by_rows and bias.dtype != jnp.float16 else jnp.float32
    limit = vmem_limit("dbias", cut.rows, cut.cols, call)
    (found,) = tile.call(
        partial(_kernel, cut=cut, view=view),
        inputs(view),
        [(((*bias.shape[:2], rows, cut.kv_length), dtype), view.own())],
        grid=view.grid,
        scratch_shapes=[pltpu.VMEM((cut.rows if view.by_rows else 1, cut.cols), jnp.float32)],
        name="flash_attention_dbias",
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 4 + ("arbitrary",) * 2, vmem_limit_bytes=limit
        ),
    )
    return found[:, :, : bias.shape[2], : bias.shape[3]].astype(bias.dtype)


def _kernel(refs: Any, out_ref: Any, acc: Any, *, cut: Cut, view: ByBias) -> None:
    grid = tuple(map(pl.program_id, range(6)))
    batch, head, i, j = view.place(*grid)
    place = Place(batch * cut.heads + head, i, j)
    n, t = grid[4:]

    @pl.when((n == 0) & (t == 0))
    def _start() -> None:
        acc[...] = jnp.zeros(acc.shape, jnp.float32)

    @pl.when(_in_band(cut, i, j))
    def _add() -> None:
        for start in range(0, cut.rows, PART):
            ds = _gradient(refs, cut, place, Part(start, min(PART, cut.rows - start), 0, cut.cols))
            if view.by_rows:
                acc[start : start + PART, :] += ds
            else:
                acc[...] += jnp.sum(ds, axis=0, keepdims=True)

    @pl.when((n == view.grid[4] - 1) & (t == view.grid[5] - 1))
    def _finish() -> None:
        out_ref[...] = acc[...].astype(out_ref.dtype)


def _in_band(cut: Cut, i: Any, j: Any) -> Any:
    lower, upper = cut.bounds
    spans = masks.spans(i * cut.rows, cut.rows, cut.cols, cut.kv_len, lower, upper)
    return (j >= spans.start) & (j < spans.end)


def _gradient(refs: Any, cut: Cut, place: Place, part: Part) -> Any:
    """Of the logits of a part of a tile, after the soft cap."""
    at = part.own_rows
    column = lambda name: pallas_tile.column(refs[name][:, at])
    seen = cut.seen(refs, cut.turned(refs, "q", part), place, part, 0)
    k, v = refs["k"][...], refs["v"][...]
    s, _ = pallas_tile.unscaled(refs["q"][at, :], k, seen, cut.rules, cut.plane(refs, "bias", part))
    dp = tile.dot(refs["dout"][at, :], v, (1, 1), cut.rules)
    top, mean = (pallas_tile.spread(column(name), part.others) for name in ("lse", "delta"))
    return pallas_tile.weights(s, None, top, mean, dp, cut.dropper(refs, place, part, 0), cut.unit)[1]
