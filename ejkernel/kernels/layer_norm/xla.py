"""LayerNorm in plain JAX."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel.kernels.norms import xla

Array = jax.Array


def forward(x: Array, scale: Any, offset: Any, residual: Any, *, params: None, **options: Any) -> tuple[Any, Any]:
    """The norm, or the pair of it and the sum; and the mean and inverse deviation of each row."""
    return xla.forward(x, scale, offset, residual, center=True, **options)
