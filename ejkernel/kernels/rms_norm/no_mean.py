"""A norm's kernels as those of RMSNorm: without a mean and an offset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

Array = jax.Array


def forward_by(kernels: Any) -> Callable[..., tuple[Any, Array]]:
    """The forward of a module of `ejkernel.kernels.norms`."""

    def forward(x: Array, scale: Any, residual: Any, **options: Any) -> tuple[Any, Array]:
        """As `xla.forward`."""
        out, (_, rstd) = kernels.forward(x, scale, None, residual, center=False, **options)
        return out, rstd

    return forward


def backward_by(kernels: Any) -> Callable[..., tuple[Any, ...]]:
    """The backward of a module of `ejkernel.kernels.norms`."""

    def backward(
        rstd: Array, out: Any, dout: Any, x: Array, scale: Any, residual: Any, **options: Any
    ) -> tuple[Any, ...]:
        """The gradients of x, scale and residual."""
        found = kernels.backward((None, rstd), out, dout, x, scale, None, residual, center=False, **options)
        return found[0], found[1], found[3]

    return backward
