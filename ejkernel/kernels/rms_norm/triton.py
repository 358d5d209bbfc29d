"""RMSNorm for NVIDIA GPUs, Ampere or newer."""

from __future__ import annotations

from ejkernel.kernels.norms import triton
from ejkernel.kernels.norms.triton import backward_space as backward_space
from ejkernel.kernels.norms.triton import forward_space as forward_space
from ejkernel.kernels.norms.triton import unsupported as unsupported
from ejkernel.kernels.rms_norm.no_mean import backward_by, forward_by

forward, backward = forward_by(triton), backward_by(triton)
