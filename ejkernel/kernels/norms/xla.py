"""Norms in plain JAX: XLA fuses them, also with the operations before and after them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array


def forward(
    x: Array, scale: Any, offset: Any, residual: Any, *, center: bool, epsilon: float, scale_offset: float = 0.0
) -> tuple[Any, tuple[Array | None, Array]]:
    """The norm, or the pair of it and the sum; and of each row the mean, if it is subtracted, and 1 / deviation."""
    dtype = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    total = x if residual is None else (x.astype(dtype) + residual.astype(dtype)).astype(x.dtype)
    wide = total.astype(dtype)
    mean = None
    if center:
        mean = jnp.mean(wide, axis=-1, keepdims=True)
        # What rounding left of the mean, which may be more than the deviation; its derivative is zero.
        rest = jax.lax.stop_gradient(jnp.mean(wide - mean, axis=-1, keepdims=True))
        wide, mean = wide - mean - rest, mean + rest
    rstd = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    out = wide * rstd
    if scale is not None:
        out *= scale.astype(dtype) + scale_offset
    if offset is not None:
        out += offset.astype(dtype)
    out = out.astype(x.dtype)
    return (out if residual is None else (out, total)), (None if mean is None else mean[..., 0], rstd[..., 0])
