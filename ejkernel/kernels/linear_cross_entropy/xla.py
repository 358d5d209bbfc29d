"""A linear layer and its cross entropy in chunks of rows, in plain JAX: every device, without all logits in memory.

Where gradients are wanted, a chunk's logits are computed once, and its part of all gradients at once: three products.
A scalar cotangent scales them afterwards. With `reduction="none"` the cotangent is one number per row, and the weights'
gradient sums over rows, so it cannot be scaled afterwards. Keeping all logits is what this operation is there to avoid,
so the backward computes them again: four products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.linear_cross_entropy import params as chunking
from ejkernel.kernels.linear_cross_entropy.chunks import Chunks, over_columns
from ejkernel.kernels.linear_cross_entropy.params import ChunkParams
from ejkernel.kernels.linear_cross_entropy.rule import Rows, Rule
from ejkernel.kernels.manual_axes import Axes, axes_of, vary

Array = jax.Array
forward_space, backward_space = chunking.forward_space, chunking.backward_space


class Gradients(NamedTuple):
    """Those of a sum of losses; None for a bias that there is not."""

    x: Array
    weights: Array
    bias: Array | None


def run(x: Array, weights: Array, labels: Array, bias: Any, *, params: Any, reduction: str, stats: bool, **kind: Any) -> Any:
    """The loss, and with `stats` a pair of it and the log-sum-exp and correctness of each row."""
    rule, flat = Rule(**kind), x.reshape(-1, x.shape[-1])
    params = params or chunking.guess(max(len(flat), 1), weights)
    rows = _losses(flat, weights, labels.reshape(-1), bias, rule, params.loss_rows)
    return _outputs(rows, rule, labels, reduction, stats)


def forward(
    x: Array, weights: Array, labels: Array, bias: Any, *, params: Any, reduction: str, stats: bool, **kind: Any
) -> tuple[Any, Gradients | None]:
    """As `run`, with the gradients for a cotangent of 1; none where the cotangent has one number per row."""
    if reduction == "none" or x.size == 0:
        return run(x, weights, labels, bias, params=params, reduction=reduction, stats=stats, **kind), None
    rule, flat, names = Rule(**kind), x.reshape(-1, x.shape[-1]), labels.reshape(-1)
    params = params or chunking.guess(len(flat), weights)
    factor = jnp.ones(names.shape, _wide(x)) / (_count(rule, names) if reduction == "mean" else 1)
    rows, grads = gradients(flat, weights, names, bias, factor, rule, params)
    return _outputs(rows, rule, labels, reduction, stats), grads


def backward(
    residuals: Gradients | None, out: Any, dout: Any, x: Array, weights: Array, labels: Array, bias: Any, *,
    params: Any, reduction: str, stats: bool, **kind: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """The gradients of x, weights, labels (none) and bias."""
    rule = Rule(**kind)
    dout = rule.cotangent(dout[0] if stats else dout, reduced=reduction != "none")
    if residuals is None:
        flat = x.reshape(-1, x.shape[-1])
        params = params or chunking.guess(max(len(flat), 1), weights)
        factor = jnp.broadcast_to(dout, labels.shape).reshape(-1).astype(_wide(x))
        found, dout = gradients(flat, weights, labels.reshape(-1), bias, factor, rule, params)[1], None
    else:
        found = residuals
    scaled = lambda g, like: (g if dout is None else g.astype(_wide(g)) * dout).astype(like.dtype).reshape(like.shape)
    return scaled(found.x, x), scaled(found.weights, weights), None, None if bias is None else scaled(found.bias, bias)


def gradients(
    x: Array, weights: Array, labels: Array, bias: Array | None, factor: Array, rule: Rule, params: ChunkParams
) -> tuple[Rows, Gradients]:
    """The rows, and the gradients of `sum(factor · loss)`, in the dtypes in which they may wait for a cotangent."""
    varying = axes_of([a for a in (x, weights, labels, bias, factor) if a is not None])
    if not len(x):
        empty = jnp.zeros(0, _wide(x))
        grads = Gradients(jnp.zeros_like(x), jnp.zeros_like(weights), None if bias is None else jnp.zeros_like(bias))
        return Rows(empty, empty, empty.astype(bool)), grads
    whole = params.rows >= len(x)
    return (_at_once if whole else _in_turn)(x, weights, labels, bias, factor, rule, params, varying)


def _at_once(x, weights, labels, bias, factor, rule, params, varying):  # noqa: ANN001, ANN202
    """All rows as one chunk: no sum over chunks."""
    kept = chunking.kept_dtype(weights)
    logits = _product(x, weights, (1, 0), _stored(x, weights))
    rows = rule.rows(logits, bias, labels)
    slope = rule.derivative(logits, bias, labels, rows.log_sum_exp, factor)
    dlogits = slope.astype(logits.dtype)
    dx = _product(dlogits, weights, (1, 1), chunking.kept_dtype(x))
    dbias = None if bias is None else jnp.sum(dlogits, axis=0, dtype=_wide(x))
    if (x.shape[0], dlogits.dtype) != (weights.shape[0], kept):
        return rows, Gradients(dx, _product(x, dlogits, (0, 0), kept), dbias)
    # The weights' gradient takes the place of the logits', chunk by chunk, once nothing else reads them.
    dlogits, dx, dbias = lax.optimization_barrier((dlogits, dx, dbias))

    def replace(first: Any, columns: int, held: Array) -> Array:
        part = lax.dynamic_slice_in_dim(held, first, columns, axis=1)
        return lax.dynamic_update_slice_in_dim(held, _product(x, part, (0, 0), kept), first, axis=1)

    held = vary(dlogits, varying)
    return rows, Gradients(dx, over_columns(replace, weights.shape[1], params.columns, held), dbias)


def _in_turn(x, weights, labels, bias, factor, rule, params, varying):  # noqa: ANN001, ANN202
    """Chunk by chunk: the weights' gradient is a sum in float32."""
    chunks, kept = Chunks(len(x), params.rows), chunking.kept_dtype(weights)
    wide, stored = _wide(x), _stored(x, weights)
    # The last chunk's gradient of the logits stays where the weights' gradient will be.
    held = chunks.rows == weights.shape[0] and stored == kept and kept.itemsize == 2

    def step(i: Array, carry: Any) -> Any:
        rows, dx, dweights, dbias, _ = carry
        x_, labels_, factor_ = (chunks.take(a, i) for a in (x, labels, factor))
        logits = _product(x_, weights, (1, 0), stored)
        found = rule.rows(logits, bias, labels_)
        factor_ = jnp.where(chunks.fresh(i), factor_, 0.0)
        dlogits = rule.derivative(logits, bias, labels_, found.log_sum_exp, factor_).astype(stored)
        rows = jax.tree.map(lambda a, b: chunks.put(a, i, b), rows, found)
        dx = chunks.put(dx, i, _product(dlogits, weights, (1, 1), dx.dtype))
        dweights = _added(dweights, x_, dlogits, None if held else params.columns)
        dbias = None if dbias is None else dbias + jnp.sum(dlogits, axis=0, dtype=wide)
        return _typed(rows, (dx, dweights, dbias, dlogits if held else None), rule, varying)

    empty = jnp.zeros(len(x), wide)
    rows = Rows(empty, empty, empty.astype(bool))
    dx = jnp.zeros(x.shape, chunking.kept_dtype(x))
    dweights = jnp.zeros(weights.shape, wide)
    dbias = None if bias is None else jnp.zeros(bias.shape, wide)
    place = jnp.zeros(weights.shape, stored) if held else None
    start = _typed(rows, (dx, dweights, dbias, place), rule, varying)
    rows, dx, dweights, dbias, place = lax.fori_loop(0, chunks.steps, step, start)
    if place is None:
        return rows, Gradients(dx, dweights.astype(kept), dbias)

    def rounded(first: Any, columns: int, place: Array) -> Array:
        part = lax.dynamic_slice_in_dim(dweights, first, columns, axis=1)
        return lax.dynamic_update_slice_in_dim(place, part.astype(kept), first, axis=1)

    return rows, Gradients(dx, over_columns(rounded, weights.shape[1], params.columns, place), dbias)


def _added(total: Array, x: Array, dlogits: Array, columns: int | None) -> Array:
    """`total + x.T @ dlogits`, some columns at a time."""
    if columns is None:
        return total + _product(x, dlogits, (0, 0), total.dtype)

    def add(first: Any, columns: int, total: Array) -> Array:
        part, old = (lax.dynamic_slice_in_dim(a, first, columns, axis=1) for a in (dlogits, total))
        return lax.dynamic_update_slice_in_dim(total, old + _product(x, part, (0, 0), total.dtype), first, axis=1)

    return over_columns(add, total.shape[1], columns, total)


def _losses(x: Array, weights: Array, labels: Array, bias: Array | None, rule: Rule, size: int) -> Rows:
    empty = jnp.zeros(len(x), _wide(x))
    rows = Rows(empty, empty, empty.astype(bool))
    if not len(x):
        return rows
    chunks, varying = Chunks(len(x), size), axes_of([a for a in (x, weights, labels, bias) if a is not None])

    def step(i: Array, rows: Rows) -> Rows:
        logits = _product(chunks.take(x, i), weights, (1, 0), _stored(x, weights))
        found = rule.rows(logits, bias, chunks.take(labels, i))
        return _typed(jax.tree.map(lambda a, b: chunks.put(a, i, b), rows, found), (), rule, varying)[0]

    return lax.fori_loop(0, chunks.steps, step, _typed(rows, (), rule, varying)[0])


def _outputs(rows: Rows, rule: Rule, labels: Array, reduction: str, stats: bool) -> Any:
    loss = rows.loss.reshape(labels.shape)
    if reduction != "none":
        loss = rule.total(jnp.sum(loss)) / (_count(rule, labels) if reduction == "mean" else 1)
    return (loss, (rows.log_sum_exp.reshape(labels.shape), rows.correct.reshape(labels.shape))) if stats else loss


def _count(rule: Rule, labels: Array) -> Array:
    """Rows that count; 1 if none does, whose mean is then 0."""
    return jnp.maximum(rule.total(jnp.sum(rule.counts(labels))), 1)


def _typed(rows: Rows, rest: tuple[Any, ...], rule: Rule, axes: Axes) -> tuple[Any, ...]:
    """A loop's values: rows are the same on all devices of the vocabulary's axis, gradients are not."""
    outer = rule.without_vocabulary(axes)
    return jax.tree.map(lambda a: vary(a, outer), rows), *jax.tree.map(lambda a: vary(a, axes), rest)


def _wide(x: Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _stored(x: Array, weights: Array) -> Any:
    """The dtype in which logits are in memory: that of plain `x @ weights`."""
    return jnp.result_type(x.dtype, weights.dtype)


def _product(a: Array, b: Array, contract: tuple[int, int], dtype: Any) -> Array:
    """Summed in float32; of float32 itself at the highest precision, which is not the default of accelerators."""
    common = jnp.result_type(a.dtype, b.dtype)
    precision = lax.Precision.HIGHEST if common.itemsize > 2 else None
    wide = jnp.promote_types(common, jnp.float32)
    asked = dtype if jnp.dtype(dtype).itemsize <= 2 else wide
    dims = (((contract[0],), (contract[1],)), ((), ()))
    out = lax.dot_general(a.astype(common), b.astype(common), dims, precision, asked)
    return out.astype(dtype)
