"""The losses of rows and all gradients for NVIDIA GPUs, Ampere or newer: see `triton`."""

from __future__ import annotations

from functools import partial

from ejkernel.kernels.linear_cross_entropy import xla_gradients
from ejkernel.kernels.linear_cross_entropy.triton import unsupported as unsupported
from ejkernel.kernels.linear_cross_entropy.triton_rule import TritonRule

forward_space = xla_gradients.forward_space
run = partial(xla_gradients.run, rule=TritonRule)
