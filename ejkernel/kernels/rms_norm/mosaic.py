"""RMSNorm for Hopper."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel.kernels.norms import mosaic
from ejkernel.kernels.norms.mosaic import backward_space as backward_space
from ejkernel.kernels.norms.mosaic import forward_space as forward_space
from ejkernel.kernels.norms.mosaic import unsupported as unsupported

Array = jax.Array


def forward(x: Array, scale: Any, residual: Any, **options: Any) -> tuple[Any, Array]:
    """As `xla.forward`."""
    out, (_, rstd) = mosaic.forward(x, scale, None, residual, center=False, **options)
    return out, rstd


def backward(rstd: Array, out: Any, dout: Any, x: Array, scale: Any, residual: Any, **options: Any) -> tuple[Any, ...]:
    """The gradients of x, scale and residual."""
    found = mosaic.backward((None, rstd), out, dout, x, scale, None, residual, center=False, **options)
    return found[0], found[1], found[3]
