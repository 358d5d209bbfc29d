"""RMSNorm in plain JAX: XLA fuses it, also with the operations before and after it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array


def forward(
    x: Array, scale: Array | None, residual: Array | None, *, params: None, epsilon: float, scale_offset: float
) -> tuple[Any, Array]:
    """The norm, or the pair of it and the sum; and the inverse root mean square of each row."""
    total = x if residual is None else (x.astype(jnp.float32) + residual.astype(jnp.float32)).astype(x.dtype)
    wide = total.astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    weights = 1.0 if scale is None else scale.astype(jnp.float32) + scale_offset
    out = (wide * rstd * weights).astype(x.dtype)
    return (out if residual is None else (out, total)), rstd[..., 0]
