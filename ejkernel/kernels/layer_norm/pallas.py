"""LayerNorm for TPUs."""

from __future__ import annotations

from functools import partial

from ejkernel.kernels.norms import pallas
from ejkernel.kernels.norms.pallas import backward_space as backward_space
from ejkernel.kernels.norms.pallas import forward_space as forward_space
from ejkernel.kernels.norms.pallas import unsupported as unsupported

forward = partial(pallas.forward, center=True)
backward = partial(pallas.backward, center=True)
