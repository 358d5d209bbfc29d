"""A linear layer and its cross entropy in chunks of rows, in plain JAX: every device, without all logits in memory.

Where gradients are wanted, a chunk's logits are computed once, and its part of all gradients at once: three products.
A scalar cotangent scales them afterwards. With `reduction="none"` the cotangent is one number per row, and the weights'
gradient sums over rows, so it cannot be scaled afterwards. Keeping all logits is what this operation is there to avoid,
so the backward computes them again: four products.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.linear_cross_entropy import params as chunking
from ejkernel.kernels.linear_cross_entropy.gradients import Gradients, Problem, gradients, losses
from ejkernel.kernels.linear_cross_entropy.rule import Rule

Array = jax.Array
forward_space, backward_space = chunking.forward_space, chunking.backward_space


def run(
    x: Array, weights: Array, labels: Array, bias: Any, *, params: Any, reduction: str, stats: bool, **kind: Any
) -> Any:
    """The loss, and with `stats` a pair of it and the log-sum-exp and correctness of each row."""
    call = _problem(x, weights, labels, bias, kind)
    rows = losses(call, (params or _guess(call)).loss_rows)
    return call.rule.outputs(rows, labels, reduction, stats)


def forward(
    x: Array, weights: Array, labels: Array, bias: Any, *, params: Any, reduction: str, stats: bool, **kind: Any
) -> tuple[Any, Gradients | None]:
    """As `run`, with the gradients for a cotangent of 1; none where the cotangent has one number per row."""
    if reduction == "none":
        return run(x, weights, labels, bias, params=params, reduction=reduction, stats=stats, **kind), None
    call = _problem(x, weights, labels, bias, kind)
    each = 1 / call.rule.count(labels) if reduction == "mean" else 1.0
    # Of many rows, a probability's part of the mean is less than any float16, and no cotangent brings it back.
    late = call.stored == jnp.float16
    call = call._replace(factor=jnp.full(call.labels.shape, 1.0 if late else each, call.wide))
    rows, grads = gradients(call, params or _guess(call))
    grads = jax.tree.map(lambda g: g * each, grads) if late else grads
    return call.rule.outputs(rows, labels, reduction, stats), grads


def backward(
    residuals: Gradients | None, out: Any, dout: Any, x: Array, weights: Array, labels: Array, bias: Any, *,
    params: Any, reduction: str, stats: bool, **kind: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """The gradients of x, weights, labels (none) and bias."""
    call = _problem(x, weights, labels, bias, kind)
    dout = call.rule.cotangent(dout[0] if stats else dout, reduced=reduction != "none")
    if residuals is None:
        call = call._replace(factor=dout.reshape(-1).astype(call.wide))
        found, dout = gradients(call, params or _guess(call))[1], None
    else:
        found = residuals
    scaled = lambda g: g if dout is None else g.astype(call.wide) * dout
    pairs = ((found.x, x), (found.weights, weights), (None, labels), (found.bias, bias))
    return tuple(None if g is None else scaled(g).astype(like.dtype).reshape(like.shape) for g, like in pairs)


def _problem(x: Array, weights: Array, labels: Array, bias: Any, kind: dict[str, Any]) -> Problem:
    rule = kind.pop("rule", Rule)
    return Problem(x.reshape(-1, x.shape[-1]), weights, labels.reshape(-1), bias, rule(**kind))


def _guess(call: Problem) -> chunking.ChunkParams:
    return chunking.guess(max(len(call.x), 1), call.weights)
