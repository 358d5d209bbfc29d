"""What else computes LayerNorm: plain JAX."""

import jax
import jax.numpy as jnp


def peers(workload):
    def plain(x, scale, offset):
        wide = x.astype(jnp.float32)
        wide -= jnp.mean(wide, axis=-1, keepdims=True)
        rstd = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
        return (wide * rstd).astype(x.dtype) * scale + offset

    return {"plain JAX": plain}
