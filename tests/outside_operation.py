"""An operation as an author outside of this repository writes it: backends, argument rules and named workloads."""

from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp

from ejkernel.ops.core.backend import Backend
from ejkernel.ops.core.operation import DifferentiableOperation
from ejkernel.ops.core.workload import Workload


@dataclass(frozen=True)
class Rows:
    rows: int = 1


@dataclass(frozen=True)
class TakeConfig:
    fwd_params: Rows | None = None
    bwd_params: Rows | None = None
    platform: str | None = None


def forward(x, index, *, params):
    return jnp.take(x, index, axis=0), None


def backward(residuals, out, dout, x, index, *, params):
    return jnp.zeros_like(x).at[index].add(dout), None


plain = SimpleNamespace(
    forward=forward,
    backward=backward,
    forward_space=lambda inv: [Rows(1)],
    backward_space=lambda inv: [Rows(1)],
)


class Take(DifferentiableOperation[TakeConfig, jax.Array]):
    """Rows of x by their numbers."""

    backends = (Backend("xla", plain, Rows, Rows),)
    workload_module = "tests.outside_operation"

    def __init__(self, *, interpret: bool = False) -> None:
        super().__init__("outside.take", interpret=interpret)


def draw(key, args):
    x, index = args
    return jax.random.normal(key, x.shape, x.dtype), jax.random.randint(key, index.shape, 0, x.shape[0])


def rows(name, device, count):
    return Workload(name=name, device=device, shapes=(((count, 8), "float32"), ((4,), "int32")), draw=draw)


WORKLOADS = (rows("few rows", "cpu", 16), rows("many rows", "cpu", 64), rows("many rows", "gpu", 4096))
