"""RMSNorm for Hopper."""

from __future__ import annotations

from ejkernel.kernels.norms import mosaic
from ejkernel.kernels.norms.mosaic import backward_space as backward_space
from ejkernel.kernels.norms.mosaic import forward_space as forward_space
from ejkernel.kernels.norms.mosaic import unsupported as unsupported
from ejkernel.kernels.rms_norm.no_mean import backward_by, forward_by

forward, backward = forward_by(mosaic), backward_by(mosaic)
