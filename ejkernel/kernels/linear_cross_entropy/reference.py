"""The same in plain JAX, with all logits in memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.linear_cross_entropy.rule import Rule

Array = jax.Array


def plain(x: Array, weights: Array, labels: Array, bias: Any = None, *, reduction: str, stats: bool, **kind: Any) -> Any:
    """As the operation's backends."""
    rule = Rule(**kind)
    logits = jnp.matmul(x, weights, precision=jax.lax.Precision.HIGHEST)
    flat = logits.reshape(-1, weights.shape[1])
    rows = rule.rows(flat, bias, labels.reshape(-1))
    loss = rows.loss.reshape(labels.shape)
    if reduction != "none":
        count = jnp.maximum(rule.total(jnp.sum(rule.counts(labels))), 1) if reduction == "mean" else 1
        loss = rule.total(jnp.sum(loss)) / count
    return (loss, (rows.log_sum_exp.reshape(labels.shape), rows.correct.reshape(labels.shape))) if stats else loss
