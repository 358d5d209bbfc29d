"""What the norms share: their errors, and axes other than the last."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ejkernel.errors import EjkernelError
from ejkernel.modules import static
from ejkernel.ops.core.backend import Backend
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.core.operation import RowOperation
from ejkernel.ops.core.types import Cfg
from ejkernel.ops.utils import arguments


class NormOperation(RowOperation[Cfg, Any]):
    """A norm; on TPUs an untuned call is left to XLA, which fuses it with what is around it."""

    def ranked(self, inv: Invocation[Any, Any], *, backward: bool) -> Sequence[Backend]:
        """The backends, the most promising first."""
        return sorted(self.backends, key=lambda b: b.platform == "pallas")


class NormArgumentError(EjkernelError, ValueError):
    """An argument of a norm does not fit the others."""

    def __init__(self, message: str, where: str) -> None:
        super().__init__(f"{where}: {message}")


def check(where: str, x: Any, residual: Any, **per_column: Any) -> None:
    """The arguments fit each other."""
    check_x(where, x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise NormArgumentError(f"x must be of a floating dtype, got {x.dtype}.", where)
    for name, a in (*per_column.items(), ("residual", residual)):
        if a is not None and not hasattr(a, "shape"):
            raise NormArgumentError(f"{name} must be an array or None, got {type(a).__name__}.", where)
        if a is not None and jnp.issubdtype(a.dtype, jnp.complexfloating):
            raise NormArgumentError(f"{name} must be real, got {a.dtype}.", where)
    for name, a in per_column.items():
        if a is not None and a.shape != x.shape[-1:]:
            raise NormArgumentError(f"{name} must have shape {x.shape[-1:]}, got {a.shape}.", where)
    if residual is not None and residual.shape != x.shape:
        raise NormArgumentError(f"residual must have the shape of x, {x.shape}, got {residual.shape}.", where)


def check_x(where: str, x: Any) -> None:
    """There is an axis to normalise."""
    if not arguments.is_array(x):
        raise NormArgumentError(f"x must be an array, got {type(x).__name__}.", where)
    if x.ndim == 0:
        raise NormArgumentError("x must have at least one axis, got a scalar.", where)


def number(where: str, name: str, x: Any) -> float:
    """A number that is known while tracing; of what is added under a root, not below 0."""
    found = static.number(name, x, partial(NormArgumentError, where=where))
    least = 0.0 if name == "epsilon" else -sys.float_info.max
    if not least <= found < math.inf:
        rule = "at least 0 and finite" if least == 0.0 else "finite"
        raise NormArgumentError(f"{name} must be {rule}, got {found}.", where)
    return found


def over_axis(
    kernel: NormOperation[Any], x: Any, per_column: tuple[Any, ...], residual: Any, axis: int, kwargs: dict[str, Any],
    **shared: Any,
) -> Any:  # fmt: skip
    """The call with the axis as the last, and its results with the axis where it was."""
    check_x(kernel.op_id, x)
    if not -x.ndim <= (axis := static.integer("axis", axis, partial(NormArgumentError, where=kernel.op_id))) < x.ndim:
        raise NormArgumentError(f"axis must be in [{-x.ndim}, {x.ndim}), got {axis}.", kernel.op_id)
    axis %= x.ndim
    if shared["mesh"] is not None:
        shared |= _moved_specs(kernel.op_id, axis, x.ndim, len(per_column), shared)
    if axis == x.ndim - 1:
        return kernel.call((x, *per_column, residual), kwargs, **shared)
    x, residual = (None if a is None else jnp.moveaxis(a, axis, -1) for a in (x, residual))
    out = kernel.call((x, *per_column, residual), kwargs, **shared)
    return jax.tree.map(lambda a: jnp.moveaxis(a, -1, axis), out)


def _moved_specs(where: str, axis: int, ndim: int, per_column: int, shared: dict[str, Any]) -> dict[str, Any]:
    """The specs of a call whose axis becomes the last: those of x, the residual and results; others have one axis."""
    ins, outs = shared["in_specs"], shared["out_specs"]
    if isinstance(ins, PartitionSpec):
        ins = (ins,) * (per_column + 2)
    if isinstance(ins, (tuple, list)):
        ins = tuple(_moved(where, s, axis, ndim) if i in (0, per_column + 1) else s for i, s in enumerate(ins))
    is_spec = lambda s: isinstance(s, PartitionSpec)
    return {"in_specs": ins, "out_specs": jax.tree.map(lambda s: _moved(where, s, axis, ndim), outs, is_leaf=is_spec)}


def _moved(where: str, spec: Any, axis: int, ndim: int) -> Any:
    if not isinstance(spec, PartitionSpec):
        return spec
    entries = [*spec, *(None,) * (ndim - len(spec))]
    if entries[axis] is not None:
        raise NormArgumentError(
            f"in_specs and out_specs must leave the axis that is normalised, {axis}, whole, got {spec}: "
            "each device would normalise its part. Without mesh, the compiler splits it.",
            where,
        )
    return PartitionSpec(*entries[:axis], *entries[axis + 1 :], None)
