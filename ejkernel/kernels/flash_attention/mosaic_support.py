"""Which calls the Hopper kernels support, and why they refuse the others."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel._compat import mosaic_kernels_take_refs
from ejkernel.kernels.flash_attention.config import default_backward, default_forward

_MAX_DIM = 256
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

    Reads shapes and dtypes only; `hopper.unsupported` looks at what else a call has. `compute_capability` is the
    device's, such as "9.0"; `None` leaves it unchecked.
    """
    if compute_capability is not None and not compute_capability.startswith("9."):
        return f"written for Hopper (compute capability 9.0), this device has {compute_capability}"
    if any(x.ndim != 4 for x in (q, k, v)):
        return f"q, k and v must be [batch, length, heads, dim], got {q.shape}, {k.shape}, {v.shape}"
    batch, _, heads, head_dim = q.shape
    value_dim = v.shape[3]
    if k.shape[:3] != v.shape[:3] or k.shape[0] != batch or k.shape[3] != head_dim:
        return f"k must have q's batch and dim, v k's batch, length and heads, got {q.shape}, {k.shape}, {v.shape}"
    if any(dim % 8 or not 8 <= dim <= _MAX_DIM for dim in (head_dim, value_dim)):
        return f"head dims must be multiples of 8 (rows of 16 bytes) up to {_MAX_DIM}, got {head_dim} and {value_dim}"
    if heads % k.shape[2]:
        return f"{heads} query heads cannot share {k.shape[2]} key heads evenly"
    if len({x.dtype for x in (q, k, v)}) > 1 or q.dtype not in _DTYPES:
        return f"q, k and v must all be bfloat16 or all float16, got {q.dtype}, {k.dtype}, {v.dtype}"
    if scale is not None and scale <= 0:
        return f"scale must be positive, got {scale}"
    if (reason := default_forward(head_dim, value_dim).unfit(head_dim, value_dim)) is not None:
        return reason
    return unsupported_backward(head_dim, value_dim) if backward else None


def unsupported_backward(head_dim: int, value_dim: int | None = None) -> str | None:
    """Returns why there is no backward pass at these dims, or `None` if there is one."""
    if not mosaic_kernels_take_refs():
        return "no backward pass on JAX 0.10: its Mosaic GPU kernels cannot add to an array in place"
    reason = default_backward(head_dim, value_dim).unfit(head_dim, value_dim)
    return None if reason is None else f"no backward pass at head dims {head_dim} and {value_dim}: {reason}"
