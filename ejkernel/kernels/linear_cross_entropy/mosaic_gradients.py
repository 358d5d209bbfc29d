"""The losses of rows and all gradients for Hopper: see `mosaic`."""

from __future__ import annotations

from functools import partial
from typing import Any

from ejkernel.kernels.linear_cross_entropy import mosaic_in_place, triton_gradients
from ejkernel.kernels.linear_cross_entropy.mosaic import unsupported as unsupported
from ejkernel.kernels.linear_cross_entropy.params import ChunkParams, guess_of
from ejkernel.ops.core.kernel import Invocation

run = partial(triton_gradients.run, in_place=mosaic_in_place.product)


def forward_space(inv: Invocation[Any, Any]) -> list[ChunkParams]:
    """All rows are one chunk, and the product has no other choice."""
    return [guess_of(inv)]
