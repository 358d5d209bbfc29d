"""The same chunks for NVIDIA GPUs, Ampere or newer, where a chunk of logits is read and written once.

Products are XLA's. Between them a program of Pallas' Triton dialect works on one row: it reads the logits for their
log-sum-exp, and again, from the cache, to put their derivative in their place.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ejkernel.kernels.linear_cross_entropy import xla
from ejkernel.kernels.linear_cross_entropy.triton_rule import TritonRule
from ejkernel.ops.core.kernel import Invocation

forward_space = xla.forward_space
run = partial(xla.run, rule=TritonRule)


def unsupported(inv: Invocation[Any, Any], *, backward: bool) -> str | None:
    """Why this backend does not support a call; None if it does."""
    x, weights = inv.args[:2]
    if inv.kwargs.get("axis_name") is not None:
        return "with axis_name, sums cross the mesh between reading the logits and writing their derivative"
    if x.dtype.itemsize > 4 or weights.dtype.itemsize > 4:
        return f"x and weights must be bfloat16, float16 or float32, got {x.dtype} and {weights.dtype}"
    if x.size == 0 or weights.size == 0:
        return f"x and weights must not be empty, got shapes {x.shape} and {weights.shape}"
    return None
