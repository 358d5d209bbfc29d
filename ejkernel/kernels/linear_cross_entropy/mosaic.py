"""The same for Hopper, where the weights' gradient takes the place of the logits' in one product."""

from __future__ import annotations

import math
from typing import Any

import jax

from ejkernel._compat import mosaic_kernels_take_refs
from ejkernel.kernels.linear_cross_entropy import mosaic_in_place, triton
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.utils.fingerprint import compute_capability, is_here

forward_space, run = triton.forward_space, triton.run


def unsupported(inv: Invocation[Any, Any], *, backward: bool) -> str | None:
    """Why this backend does not support a call; None if it does."""
    if (capability := compute_capability())[0] != 9:
        return f"written for Hopper (compute capability 9.0), this device has {'.'.join(map(str, capability))}"
    if not mosaic_kernels_take_refs():
        return "its product takes the place of an operand, which Mosaic GPU kernels of JAX 0.10 cannot do"
    if is_here() and jax.device_count() > 1:
        return (
            "its blocks wait for each other, and a collective that runs at the same time could keep some of them from "
            f"starting: it is for programs with one device, got {jax.device_count()}"
        )
    x, weights = inv.args[:2]
    rows = math.prod(x.shape[:-1])
    return triton.unsupported(inv, backward=backward) or mosaic_in_place.unsupported(
        rows, *weights.shape, x.dtype, weights.dtype
    )
