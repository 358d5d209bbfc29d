"""The same in plain JAX, with all logits in memory."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.linear_cross_entropy.gradients import Gradients
from ejkernel.kernels.linear_cross_entropy.params import kept_dtype
from ejkernel.kernels.linear_cross_entropy.rule import Rows, Rule

Array = jax.Array
KIND = tuple(field.name for field in fields(Rule))


# One program, like a backend's: XLA does not round logits that it fuses with what reads them.
@partial(jax.jit, static_argnames=("reduction", "stats", *KIND))
def plain(x: Array, weights: Array, labels: Array, bias: Any, *, reduction: str, stats: bool, **kind: Any) -> Any:
    """As the operation's backends."""
    rule = Rule(**kind)
    logits = jnp.matmul(x, weights, precision=jax.lax.Precision.HIGHEST).reshape(-1, weights.shape[1])
    return rule.outputs(rule.rows(logits, bias, labels.reshape(-1)), labels, reduction, stats)


@partial(jax.jit, static_argnames=KIND)
def plain_gradients(
    x: Array, weights: Array, labels: Array, bias: Any, factor: Array, **kind: Any
) -> tuple[Rows, Gradients]:
    """The rows, and what JAX takes for the gradients of `sum(factor · loss)`."""
    rule = Rule(**kind)

    def total(x: Array, weights: Array, bias: Any) -> tuple[Array, Rows]:
        logits = jnp.matmul(x, weights, precision=jax.lax.Precision.HIGHEST).reshape(-1, weights.shape[1])
        rows = rule.rows(logits, bias, labels.reshape(-1))
        return jnp.sum(rows.loss * factor.reshape(-1)), rows

    moving = (0, 1) if bias is None else (0, 1, 2)
    (dx, dweights, *rest), rows = jax.grad(total, moving, has_aux=True)(x, weights, bias)
    dx, dweights = dx.reshape(-1, x.shape[-1]).astype(kept_dtype(x)), dweights.astype(kept_dtype(weights))
    return rows, Gradients(dx, dweights, rest[0].astype(rows.loss.dtype) if rest else None)
