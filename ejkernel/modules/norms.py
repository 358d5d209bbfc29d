"""What the norms share: their errors, and axes other than the last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.errors import EjkernelError
from ejkernel.modules import static
from ejkernel.ops.core.backend import Backend
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.core.operation import RowOperation
from ejkernel.ops.core.types import Cfg


class NormOperation(RowOperation[Cfg, Any]):
    """A norm; on TPUs an untuned call is left to XLA, which fuses it with what is around it."""

    def ranked(self, inv: Invocation[Any, Any], *, backward: bool) -> Sequence[Backend]:
        """The backends, the most promising first."""
        return sorted(self.backends, key=lambda b: b.platform == "pallas")


class NormArgumentError(EjkernelError, ValueError):
    """An argument of a norm does not fit the others."""


def check(x: Any, residual: Any, **per_column: Any) -> None:
    """The arguments fit each other."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise NormArgumentError(f"x must be of a floating dtype, got {x.dtype}.")
    for name, a in per_column.items():
        if a is not None and a.shape != x.shape[-1:]:
            raise NormArgumentError(f"{name} must have shape {x.shape[-1:]}, got {a.shape}.")
    if residual is not None and residual.shape != x.shape:
        raise NormArgumentError(f"residual must have the shape of x, {x.shape}, got {residual.shape}.")


def number(name: str, x: Any) -> float:
    """A number that is known while tracing."""
    return static.number(name, x, NormArgumentError)


def over_axis(
    kernel: NormOperation[Any], x: Any, per_column: tuple[Any, ...], residual: Any, axis: int, kwargs: dict[str, Any],
    **shared: Any,
) -> Any:  # fmt: skip
    """The call with the axis as the last, and its results with the axis where it was."""
    if not -x.ndim <= axis < x.ndim:
        raise NormArgumentError(f"axis must be in [{-x.ndim}, {x.ndim}), got {axis}.")
    if axis % x.ndim == x.ndim - 1:
        return kernel.call((x, *per_column, residual), kwargs, **shared)
    x, residual = (None if a is None else jnp.moveaxis(a, axis, -1) for a in (x, residual))
    out = kernel.call((x, *per_column, residual), kwargs, **shared)
    return jax.tree.map(lambda a: jnp.moveaxis(a, -1, axis), out)
