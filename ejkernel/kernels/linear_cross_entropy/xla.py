"""A linear layer and its cross entropy in chunks of rows, in plain JAX: every device, without all logits in memory."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel.kernels.linear_cross_entropy import params as chunking
from ejkernel.kernels.linear_cross_entropy.gradients import losses, problem

Array = jax.Array
forward_space = chunking.forward_space


def run(
    x: Array, weights: Array, labels: Array, bias: Any, *, params: Any, reduction: str, stats: bool, **kind: Any
) -> Any:
    """The loss, and with `stats` a pair of it and the log-sum-exp and correctness of each row."""
    call = problem(x, weights, labels, bias, kind)
    rows = losses(call, (params or chunking.guess(max(len(call.x), 1), weights)).loss_rows)
    return call.rule.outputs(rows, labels, reduction, stats)
