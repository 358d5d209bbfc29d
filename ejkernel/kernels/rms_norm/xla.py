"""RMSNorm in plain JAX."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel.kernels.norms import xla

Array = jax.Array


def forward(x: Array, scale: Any, residual: Any, *, params: None, **options: Any) -> tuple[Any, Array]:
    """The norm, or the pair of it and the sum; and the inverse root mean square of each row."""
    out, (_, rstd) = xla.forward(x, scale, None, residual, center=False, **options)
    return out, rstd
