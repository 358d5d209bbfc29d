"""The gradient of a bias by a Triton kernel of its own: where nobody needs it, it is dead code.

A program owns a tile of the bias and adds up what all heads give that share it; of a bias that is the same for all
queries, it owns a block of keys.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels.flash_attention import masks, tile
from ejkernel.kernels.flash_attention.triton_cut import Cut

Array = jax.Array


def bias_gradient(cut: Cut, bias: Array, saved: dict[str, Array], interpret: bool) -> Array:
    """The gradient of `bias`, which has a column for each key; `saved` are the arrays of a backward."""
    batches, heads, rows, _ = bias.shape
    q_length, block = (cut.q_length, cut.rows) if rows > 1 else (1, 1)
    whole = lambda x: (x, pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim))
    (found,) = tile.call(
        partial(_kernel, cut=cut, shared=(cut.q.shape[0] // batches, cut.heads // heads), heads=heads),
        {name: whole(x) for name, x in {**cut.whole_inputs(), **saved}.items()},
        [
            (
                ((batches, heads, q_length, cut.kv_length), bias.dtype),
                pl.BlockSpec((None, None, block, cut.cols), lambda j, i, n: (*_place(n, heads), i, j)),
            )
        ],
        grid=(cut.kv_length // cut.cols, q_length // block, batches * heads),
        **cut.options(interpret),
    )
    return found[:, :, :rows, : bias.shape[3]]


def _kernel(refs: Any, out_ref: Any, *, cut: Cut, shared: tuple[int, int], heads: int) -> None:
    j, i, n = (pl.program_id(axis) for axis in range(3))
    whole_rows = out_ref.shape[0] > 1
    spans = _spans(cut, j)
    # Of one block of queries, or of all that see these keys.
    start, end = (i, jnp.where((i >= spans.start) & (i < spans.end), i + 1, i)) if whole_rows else spans[::3]

    def of_head(m: Any, carry: Any) -> Any:
        # Those that share a bias of all heads are adjacent; those that share one of a whole batch are not.
        batch, head = (
            a * count + b for a, b, count in zip(_place(n, heads), _place(m, shared[1]), shared, strict=True)
        )
        return lax.fori_loop(start, end, partial(_step, refs, cut, batch, head, j), carry)

    zeros = jnp.zeros((cut.rows, cut.cols), jnp.float32)
    found = lax.fori_loop(0, shared[0] * shared[1], of_head, zeros)
    found = found if whole_rows else jnp.sum(found, axis=0, keepdims=True)
    out_ref[...] = found.astype(out_ref.dtype)


def _place(n: Any, each: int) -> tuple[Any, Any]:
    """Quotient and remainder, in the dtype of `n`."""
    n = jnp.asarray(n)
    by = jnp.asarray(each, n.dtype)
    return lax.div(n, by), lax.rem(n, by)


def _spans(cut: Cut, j: Any) -> masks.Spans:
    lower, upper = cut.bounds()
    other = None if upper is None else -upper, None if lower is None else -lower
    return masks.spans(j * cut.cols, cut.cols, cut.rows, cut.q_length, *other)


def _step(refs: Any, cut: Cut, batch: Any, head: Any, j: Any, i: Any, carry: Any) -> Any:
    """Adds the gradient of one tile of logits of one head."""
    at, there = pl.ds(i * cut.rows, cut.rows), pl.ds(j * cut.cols, cut.cols)
    rows, cols = cut.queries(refs, i, (batch, at)), cut.keys(refs, j, (batch, there))
    plane = partial(cut.tile_of, refs, batch, head, at, there)
    seen = tile.seen(rows, cols, cut.kv_len, cut.rules, plane("mask"))
    of_key = head // cut.group
    k, v = refs["k"][batch, of_key, there, :], refs["v"][batch, of_key, there, :]
    s, _ = tile.scores(refs["q"][batch, head, at, :], k, seen, cut.rules, plane("bias"))
    seed = refs["seed"][0] if "seed" in refs else None
    drop = tile.dropper(seed, batch * cut.heads + head, rows.places, cols.places, cut.rules)
    lse, delta = refs["lse"][batch, head, at][:, None], refs["delta"][batch, head, at][:, None]
    # Of the logits after the soft cap: no slope.
    return carry + tile.weights(s, 1.0, lse, delta, refs["dout"][batch, head, at, :], v, drop, cut.rules)[1]
