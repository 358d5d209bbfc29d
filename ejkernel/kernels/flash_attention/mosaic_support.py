"""Which calls the Hopper kernels support, and why they refuse the others."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel._compat import mosaic_kernels_take_refs
from ejkernel.kernels.flash_attention.config import default_backward, default_forward

_HEAD_DIMS = (64, 128, 256)
_DTYPES = (jnp.bfloat16, jnp.float16)


def unsupported(
    q: jax.Array | jax.ShapeDtypeStruct,
    k: jax.Array | jax.ShapeDtypeStruct,
    v: jax.Array | jax.ShapeDtypeStruct,
    *,
    backward: bool = False,
    scale: float | None = None,
    compute_capability: str | None = None,
) -> str | None:
    """Returns why these arrays are not supported, or `None` if they are.

    Reads shapes and dtypes only. Bias, boolean masks, dropout and attention sinks have no argument here: a call that
    needs them uses another backend. `compute_capability` is the device's, such as "9.0"; `None` leaves it unchecked.
    """
    if compute_capability is not None and not compute_capability.startswith("9."):
        return f"written for Hopper (compute capability 9.0), this device has {compute_capability}"
    if any(x.ndim != 4 for x in (q, k, v)):
        return f"q, k and v must be [batch, length, heads, dim], got {q.shape}, {k.shape}, {v.shape}"
    batch, q_len, heads, head_dim = q.shape
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != head_dim:
        return f"k and v must have one shape, and q's batch and dim, got {q.shape}, {k.shape}, {v.shape}"
    if head_dim not in _HEAD_DIMS:
        return f"head dim must be 64, 128 or 256, got {head_dim}"
    if heads % k.shape[2]:
        return f"{heads} query heads cannot share {k.shape[2]} key heads evenly"
    if len({x.dtype for x in (q, k, v)}) > 1 or q.dtype not in _DTYPES:
        return f"q, k and v must all be bfloat16 or all float16, got {q.dtype}, {k.dtype}, {v.dtype}"
    if q_len % 8 or k.shape[1] % 8:
        return f"lengths must be multiples of 8 (the rows of a memory tile), got {q_len} and {k.shape[1]}"
    if scale is not None and scale <= 0:
        return f"scale must be positive, got {scale}"
    if (reason := default_forward(head_dim).unfit(head_dim)) is not None:
        return reason
    return unsupported_backward(head_dim) if backward else None


def unsupported_backward(head_dim: int) -> str | None:
    """Returns why there is no backward pass at `head_dim`, or `None` if there is one."""
    if not mosaic_kernels_take_refs():
        return "no backward pass on JAX 0.10: its Mosaic GPU kernels cannot add to an array in place"
    reason = default_backward(head_dim).unfit(head_dim)
    return None if reason is None else f"no backward pass at head dim {head_dim}: {reason}"
