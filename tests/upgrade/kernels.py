"""The kernels of `kernels_then`, today: one was moved here as it is, one is written otherwise, one does other work."""

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
        once = 1.0  # A factor that is lowered, and that the compiler drops.
        return jnp.concatenate([part * once * 2 * power for part in jnp.split(x, cfg.parts)])


class Changed(Moved):
    def __init__(self):
        Kernel.__init__(self, "upgrade.changed")

    def run(self, x, *, cfg, power=2):
        return jnp.concatenate([part**power + 1 for part in jnp.split(x, cfg.parts)])
