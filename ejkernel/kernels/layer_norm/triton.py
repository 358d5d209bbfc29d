"""LayerNorm for NVIDIA GPUs, Ampere or newer."""

from __future__ import annotations

from functools import partial

from ejkernel.kernels.norms import triton
from ejkernel.kernels.norms.triton import backward_space as backward_space
from ejkernel.kernels.norms.triton import forward_space as forward_space
from ejkernel.kernels.norms.triton import unsupported as unsupported

forward = partial(triton.forward, center=True)
backward = partial(triton.backward, center=True)
