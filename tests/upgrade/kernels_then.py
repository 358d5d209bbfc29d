"""Kernels as they were when the store beside this file was written, by ejkernel before its rooms were moved."""

from dataclasses import dataclass

import jax.numpy as jnp

from ejkernel.ops import Kernel


@dataclass(frozen=True)
class Split:
    parts: int = 1


class Moved(Kernel[Split, object]):
    def __init__(self):
        super().__init__("upgrade.moved")

    def run(self, x, *, cfg, power=2):
        return jnp.concatenate([part**power for part in jnp.split(x, cfg.parts)])

    def heuristic_cfg(self, inv):
        return Split(64)

    def config_space(self, inv):
        return [Split(64), Split(1)]


class Reworded(Moved):
    def __init__(self):
        Kernel.__init__(self, "upgrade.reworded")

    def run(self, x, *, cfg, power=2):
        parts = jnp.split(x, cfg.parts)
        return jnp.concatenate([part * 2 * power for part in parts])


class Changed(Moved):
    def __init__(self):
        Kernel.__init__(self, "upgrade.changed")
