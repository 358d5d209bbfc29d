"""The losses of rows and all gradients in chunks of rows, in plain JAX: a chunk's logits are computed once."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel.kernels.linear_cross_entropy import params as chunking
from ejkernel.kernels.linear_cross_entropy.gradients import Gradients, InPlace, gradients, problem
from ejkernel.kernels.linear_cross_entropy.rule import Rows

Array = jax.Array
forward_space = chunking.gradients_space


def run(
    x: Array, weights: Array, labels: Array, bias: Any, factor: Array, *, params: Any, in_place: InPlace | None = None,
    **kind: Any,
) -> tuple[Rows, Gradients]:  # fmt: skip
    """The rows, and the gradients of `sum(factor · loss)`, in the dtypes in which they may wait for a cotangent."""
    call = problem(x, weights, labels, bias, kind)._replace(factor=factor.reshape(-1))
    return gradients(call, params or chunking.guess(max(len(call.x), 1), weights), in_place)
