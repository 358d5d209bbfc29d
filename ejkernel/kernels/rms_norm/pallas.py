"""RMSNorm for TPUs."""

from __future__ import annotations

from ejkernel.kernels.norms import pallas
from ejkernel.kernels.norms.pallas import backward_space as backward_space
from ejkernel.kernels.norms.pallas import forward_space as forward_space
from ejkernel.kernels.norms.pallas import unsupported as unsupported
from ejkernel.kernels.rms_norm.no_mean import backward_by, forward_by

forward, backward = forward_by(pallas), backward_by(pallas)
