"""A kernel that communicates, outside the user's program: on a separate mesh, every device with the same data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ejkernel.errors import EjkernelError
from ejkernel.ops.core import dispatch
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.kernel import Invocation, Kernel
from ejkernel.ops.utils import arguments

_RUNS = ("run", "fwd_with_residuals", "vjp", "custom_vjp", "reference")


class MeshError(EjkernelError, RuntimeError):
    """There are too few devices to run a kernel as it was called."""


class MeshedKernel(Kernel[Any, Any]):
    """A kernel inside `jax.shard_map` over axes of the given sizes."""

    def __init__(self, inner: Kernel[Any, Any], mesh: Mesh) -> None:
        super().__init__(op_id=inner.op_id)
        self.inner = inner
        self.mesh = mesh
        self.version = inner.version

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> Any:
        """The kernel's own guess."""
        return dispatch.guess(self.inner, inv)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self.inner, name)
        is_run = any(name == kind or name.startswith(f"{kind}_") for kind in _RUNS)
        return self._mapped(found) if is_run else found

    def __dir__(self) -> Iterable[str]:
        return {*super().__dir__(), *dir(self.inner)}

    def _mapped(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            local, arrays = arguments.on_arrays(lambda args, kwargs: method(*args, **kwargs), (args, kwargs))
            whole = PartitionSpec()
            return jax.shard_map(local, mesh=self.mesh, in_specs=whole, out_specs=whole, check_vma=False)(*arrays)

        return run


def on_mesh(kernel: Kernel[Any, Any], axes: Mapping[str, int]) -> tuple[Kernel[Any, Any], Callable[[Any], Any]]:
    """A kernel, forward or backward, on a mesh with these axes; and a function that puts its arguments there."""
    needed, have = math.prod(axes.values()), len(jax.devices())
    if needed > have:
        raise MeshError(f"{kernel.op_id}: was called on a mesh of {dict(axes)}, {needed} devices; there are {have}.")
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), devices=jax.devices()[:needed])
    everywhere = NamedSharding(mesh, PartitionSpec())

    def place(x: Any) -> Any:
        # From each process's own copy: no process has the devices of the others.
        value = np.asarray(x)
        return jax.make_array_from_callback(value.shape, everywhere, lambda index: value[index])

    if isinstance(kernel, BackwardKernel):
        return BackwardKernel(MeshedKernel(kernel.forward, mesh)), place
    return MeshedKernel(kernel, mesh), place
