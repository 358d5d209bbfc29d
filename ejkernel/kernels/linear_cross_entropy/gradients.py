"""Losses of rows, and the gradients of their sum, chunk by chunk of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from ejkernel.kernels.linear_cross_entropy.chunks import Chunks, over_columns
from ejkernel.kernels.linear_cross_entropy.params import ChunkParams, kept_dtype
from ejkernel.kernels.linear_cross_entropy.rule import Rows, Rule
from ejkernel.kernels.manual_axes import Axes, axes_of, vary
from ejkernel.ops.utils.fingerprint import device_kind

Array = jax.Array
InPlace = Callable[[Array, Array], Array]
"""`x.T @ held`, in the memory of `held`."""


class Gradients(NamedTuple):
    """Those of a sum of losses; None for a bias that there is not."""

    x: Array
    weights: Array
    bias: Array | None


class Problem(NamedTuple):
    """Rows, what they are multiplied with, and the kind of loss; `factor` is a number for each row's loss."""

    x: Array
    weights: Array
    labels: Array
    bias: Array | None
    rule: Rule
    factor: Array | None = None

    @property
    def axes(self) -> Axes:
        """The mesh axes over which any of it varies."""
        arrays = (self.x, self.weights, self.labels, self.bias, self.factor)
        return axes_of([a for a in arrays if a is not None])

    @property
    def wide(self) -> Any:
        """The dtype of sums."""
        return jnp.promote_types(self.stored, jnp.float32)

    @property
    def stored(self) -> Any:
        """The dtype in which logits are in memory: that of plain `x @ weights`."""
        return jnp.result_type(self.x.dtype, self.weights.dtype)

    def no_rows(self) -> Rows:
        """For as many rows as there are, nothing."""
        empty = jnp.zeros(len(self.x), self.wide)
        return Rows(empty, empty, empty.astype(bool))

    def typed(self, rows: Rows, *rest: Any) -> tuple[Any, ...]:
        """A loop's values: rows are the same on all devices of the vocabulary's axis, gradients are not."""
        axes = self.axes
        outer = self.rule.without_vocabulary(axes)
        return jax.tree.map(lambda a: vary(a, outer), rows), *jax.tree.map(lambda a: vary(a, axes), rest)


def problem(x: Array, weights: Array, labels: Array, bias: Any, kind: dict[str, Any]) -> Problem:
    """The arguments of a call, of which `kind` has the fields of a rule, and perhaps its class."""
    rule = kind.pop("rule", Rule)
    return Problem(x.reshape(-1, x.shape[-1]), weights, labels.reshape(-1), bias, rule(**kind))


def losses(call: Problem, size: int) -> Rows:
    """The rows, in chunks of so many."""
    rows = call.no_rows()
    if not len(call.x):
        return rows
    chunks = Chunks(len(call.x), size)

    def step(i: Array, rows: Rows) -> Rows:
        logits = product(chunks.take(call.x, i), call.weights, (1, 0), call.stored)
        found = call.rule.rows(logits, call.bias, chunks.take(call.labels, i))
        return call.typed(jax.tree.map(lambda a, b: chunks.put(a, i, b), rows, found))[0]

    return lax.fori_loop(0, chunks.steps, step, call.typed(rows)[0])


def gradients(call: Problem, params: ChunkParams, in_place: InPlace | None = None) -> tuple[Rows, Gradients]:
    """The rows, and the gradients of `sum(factor · loss)`, in the dtypes in which they may wait for a cotangent."""
    if not len(call.x):
        bias = None if call.bias is None else jnp.zeros_like(call.bias)
        return call.no_rows(), Gradients(jnp.zeros_like(call.x), jnp.zeros_like(call.weights), bias)
    return _at_once(call, params, in_place) if params.rows >= len(call.x) else _in_turn(call, params)


def _at_once(call: Problem, params: ChunkParams, in_place: InPlace | None) -> tuple[Rows, Gradients]:
    """All rows as one chunk: no sum over chunks."""
    x, weights, labels, bias, rule, factor = call
    assert factor is not None
    kept = kept_dtype(weights)
    logits = product(x, weights, (1, 0), call.stored)
    rows, dlogits = rule.rows_and_derivative(logits, bias, labels, factor)
    dx = product(dlogits, weights, (1, 1), kept_dtype(x))
    dbias = None if bias is None else jnp.sum(dlogits, axis=0, dtype=call.wide)
    if device_kind() == "tpu":
        # Its compiler would make the transpose of this and copy it, and a loop that replaces the logits copies them.
        return rows, Gradients(dx, with_layout_constraint(product(x, dlogits, (0, 0), kept), Layout((0, 1))), dbias)
    if (x.shape[0], dlogits.dtype) != (weights.shape[0], kept):
        return rows, Gradients(dx, product(x, dlogits, (0, 0), kept), dbias)
    # The weights' gradient takes the place of the logits', once nothing else reads them.
    dlogits, dx, dbias = lax.optimization_barrier((dlogits, dx, dbias))
    if in_place is not None:
        return rows, Gradients(dx, in_place(x, dlogits), dbias)

    def replace(first: Any, columns: int, held: Array) -> Array:
        part = lax.dynamic_slice_in_dim(held, first, columns, axis=1)
        return lax.dynamic_update_slice_in_dim(held, product(x, part, (0, 0), kept), first, axis=1)

    held = vary(dlogits, call.axes)
    return rows, Gradients(dx, over_columns(replace, weights.shape[1], params.columns, held), dbias)


def _in_turn(call: Problem, params: ChunkParams) -> tuple[Rows, Gradients]:
    """Chunk by chunk: the weights' gradient is a sum in float32."""
    x, weights, labels, bias, rule, factor = call
    assert factor is not None
    chunks, kept, stored = Chunks(len(x), params.rows), kept_dtype(weights), call.stored
    # The last chunk's gradient of the logits stays where the weights' gradient will be.
    on_tpu = device_kind() == "tpu"
    held = chunks.rows == weights.shape[0] and stored == kept and kept.itemsize == 2 and not on_tpu

    def step(i: Array, carry: Any) -> Any:
        rows, dx, dweights, dbias, _ = carry
        x_, labels_, factor_ = (chunks.take(a, i) for a in (x, labels, factor))
        logits = product(x_, weights, (1, 0), stored)
        factor_ = jnp.where(chunks.fresh(i), factor_, 0.0)
        found, dlogits = rule.rows_and_derivative(logits, bias, labels_, factor_)
        rows = jax.tree.map(lambda a, b: chunks.put(a, i, b), rows, found)
        dx = chunks.put(dx, i, product(dlogits, weights, (1, 1), dx.dtype))
        dweights = _added(dweights, x_, dlogits, None if held or on_tpu else params.columns, call.wide)
        if bias is not None:
            dbias = (0.0 if dbias is None else dbias) + jnp.sum(dlogits, axis=0, dtype=call.wide)
        return call.typed(rows, dx, dweights, dbias, dlogits if held else None)

    start = call.no_rows(), jnp.zeros(x.shape, kept_dtype(x)), None, None, None
    if on_tpu:
        # Products are added to the sum as they are made. A sum that starts with one is a copy of its transpose.
        types = jax.eval_shape(lambda: step(jnp.int32(0), start))
        start = call.typed(*jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), types))
    else:
        # The first chunk's products are the sum so far: there is no need to fill arrays with zeros and to add to them.
        start = step(jnp.int32(0), start)
    rows, dx, dweights, dbias, place = lax.fori_loop(0 if on_tpu else 1, chunks.steps, step, start)
    if place is None:
        return rows, Gradients(dx, dweights.astype(kept), dbias)

    def rounded(first: Any, columns: int, place: Array) -> Array:
        part = lax.dynamic_slice_in_dim(dweights, first, columns, axis=1)
        return lax.dynamic_update_slice_in_dim(place, part.astype(kept), first, axis=1)

    return rows, Gradients(dx, over_columns(rounded, weights.shape[1], params.columns, place), dbias)


def _added(total: Array | None, x: Array, dlogits: Array, columns: int | None, dtype: Any) -> Array:
    """`total + x.T @ dlogits`, some columns at a time."""
    if columns is None:
        found = product(x, dlogits, (0, 0), dtype)
        return found if total is None else total + found

    def add(first: Any, columns: int, total: Array) -> Array:
        part, old = (lax.dynamic_slice_in_dim(a, first, columns, axis=1) for a in (dlogits, total))
        return lax.dynamic_update_slice_in_dim(total, old + product(x, part, (0, 0), dtype), first, axis=1)

    if total is None:
        total = vary(jnp.zeros((x.shape[1], dlogits.shape[1]), dtype), axes_of((x, dlogits)))
    return over_columns(add, total.shape[1], columns, total)


def product(a: Array, b: Array, contract: tuple[int, int], dtype: Any) -> Array:
    """Summed in float32; of float32 itself at the highest precision, which is not the default of accelerators."""
    common = jnp.result_type(a.dtype, b.dtype)
    precision = lax.Precision.HIGHEST if common.itemsize > 2 else None
    asked = dtype if jnp.dtype(dtype).itemsize <= 2 else jnp.promote_types(common, jnp.float32)
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a.astype(common), b.astype(common), dims, precision, asked).astype(dtype)
