"""Kernels whose calls are recorded here and made again in another process."""

from dataclasses import dataclass

import jax

from ejkernel.ops import Kernel


@dataclass(frozen=True)
class Rows:
    rows: int = 1


class Anything(Kernel[Rows, jax.Array]):
    """Takes any arguments and keeps any attributes."""

    def __init__(self, **attributes):
        super().__init__("anything")
        for name, value in attributes.items():
            setattr(self, name, value)

    def run(self, x, *args, cfg, **kwargs):
        return x

    def heuristic_cfg(self, inv):
        return Rows(1)


@dataclass(frozen=True, slots=True)
class Slotted(Kernel[Rows, jax.Array]):
    power: float = 2.0

    def run(self, x, *, cfg):
        return x**self.power

    def heuristic_cfg(self, inv):
        return Rows(1)
