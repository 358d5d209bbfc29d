"""The same in plain JAX, with all logits in memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.linear_cross_entropy.rule import Rule

Array = jax.Array


def plain(x: Array, weights: Array, labels: Array, bias: Any, *, reduction: str, stats: bool, **kind: Any) -> Any:
    """As the operation's backends."""
    rule = Rule(**kind)
    logits = jnp.matmul(x, weights, precision=jax.lax.Precision.HIGHEST).reshape(-1, weights.shape[1])
    return rule.outputs(rule.rows(logits, bias, labels.reshape(-1)), labels, reduction, stats)
