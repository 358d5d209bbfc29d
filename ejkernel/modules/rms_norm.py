"""RMSNorm, with an optional residual sum, by the fastest backend that supports the call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ejkernel.kernels.rms_norm import xla
from ejkernel.kernels.rows import MosaicRows, RowParams
from ejkernel.modules import norms
from ejkernel.ops.core.backend import Backend, Platform


@dataclass(frozen=True)
class RmsNormConfig:
    """How a call is run: by which backend, in which blocks of rows."""

    fwd_params: RowParams | MosaicRows | None = None
    bwd_params: RowParams | MosaicRows | None = None
    platform: Platform | None = None


class RmsNorm(norms.NormOperation[RmsNormConfig], op_id="rms_norm"):
    """`x / sqrt(mean(x²) + epsilon) · (scale + scale_offset)` over the last axis; positional: x, scale, residual."""

    backends = (
        Backend("triton", "ejkernel.kernels.rms_norm.triton", RowParams, RowParams, capability=(8, 0), interpret=True),
        Backend("mosaic", "ejkernel.kernels.rms_norm.mosaic", MosaicRows, MosaicRows, capability=(9, 0)),
        Backend("pallas", "ejkernel.kernels.rms_norm.pallas", RowParams, RowParams, interpret=True),
        Backend("xla", xla),
    )
    workload_module = "ejkernel.kernels.rms_norm.workloads"

    def arguments(
        self, x: Any, scale: Any = None, residual: Any = None, *, epsilon: float = 1e-6, scale_offset: float = 0.0
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Checks the arguments."""
        norms.check(self.op_id, x, residual, scale=scale)
        numbers = {"epsilon": epsilon, "scale_offset": scale_offset}
        return (x, scale, residual), {name: norms.number(self.op_id, name, a) for name, a in numbers.items()}

    def reference(self, *args: Any, platform: str | None = None, **kwargs: Any) -> Any:
        """Plain JAX."""
        return xla.forward(*args, params=None, **kwargs)[0]


_kernel = RmsNorm()


def rms_norm(
    x: Any,
    scale: Any = None,
    *,
    residual: Any = None,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    axis: int = -1,
    platform: str | None = None,
    cfg: RmsNormConfig | None = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Any:
    """Root mean square norm over one axis, with statistics in float32.

    Args:
      x: [..., columns], of a floating dtype.
      scale: [columns]; None is no factor, also with scale_offset.
      residual: Added to x first; of the shape of x.
      epsilon: Added to the mean square.
      scale_offset: Added to scale: 1.0 for models that store the scale minus one.
      axis: The axis to normalise.
      platform: "triton", "mosaic", "pallas" or "xla": this backend or an error.
      cfg: How to run it; by default what was tuned, else a guess.
      mesh: Run under `jax.shard_map` on this mesh.
      in_specs: With `mesh`: the PartitionSpecs of x, scale and residual.
      out_specs: With `mesh`: that of the output.

    Returns:
      The norm, of the shape and dtype of x. With `residual` a pair: the norm of the sum, and the sum.
    """
    kwargs = {"epsilon": norms.number("rms_norm", "epsilon", epsilon)}
    if (moved := norms.number("rms_norm", "scale_offset", scale_offset)) != 0.0:
        kwargs["scale_offset"] = moved
    shared = {"cfg": cfg, "platform": platform, "mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}
    return norms.over_axis(_kernel, x, (scale,), residual, axis, kwargs, **shared)
