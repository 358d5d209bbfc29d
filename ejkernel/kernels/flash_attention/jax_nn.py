"""JAX's own attention, as it was when ejkernel was imported.

A program may put `ejkernel.modules.dot_product_attention` in its place. Where ejkernel itself needs JAX's, it must not
find itself there.
"""

from jax.nn import dot_product_attention as jax_attention

__all__ = ["jax_attention"]
