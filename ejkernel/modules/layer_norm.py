"""LayerNorm, with an optional residual sum, by the fastest backend that supports the call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ejkernel.kernels.layer_norm import xla
from ejkernel.kernels.rows import MosaicRows, RowParams
from ejkernel.modules import norms
from ejkernel.ops.core.backend import Backend, Platform


@dataclass(frozen=True)
class LayerNormConfig:
    """How a call is run: by which backend, in which blocks of rows."""

    fwd_params: RowParams | MosaicRows | None = None
    bwd_params: RowParams | MosaicRows | None = None
    platform: Platform | None = None


class LayerNorm(norms.NormOperation[LayerNormConfig], op_id="layer_norm"):
    """`(x - mean(x)) / sqrt(variance(x) + epsilon) · scale + offset`; positional: x, scale, offset, residual."""

    backends = (
        Backend(
            "triton", "ejkernel.kernels.layer_norm.triton", RowParams, RowParams, capability=(8, 0), interpret=True
        ),
        Backend("mosaic", "ejkernel.kernels.layer_norm.mosaic", MosaicRows, MosaicRows, capability=(9, 0)),
        Backend("pallas", "ejkernel.kernels.layer_norm.pallas", RowParams, RowParams, interpret=True),
        Backend("xla", xla),
    )
    workload_module = "ejkernel.kernels.layer_norm.workloads"

    def arguments(
        self, x: Any, scale: Any = None, offset: Any = None, residual: Any = None, *, epsilon: float = 1e-6
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Checks the arguments."""
        norms.check(self.op_id, x, residual, scale=scale, offset=offset)
        return (x, scale, offset, residual), {"epsilon": norms.number(self.op_id, "epsilon", epsilon)}

    def reference(self, *args: Any, platform: str | None = None, **kwargs: Any) -> Any:
        """Plain JAX."""
        return xla.forward(*args, params=None, **kwargs)[0]


_kernel = LayerNorm()


def layer_norm(
    x: Any,
    scale: Any = None,
    offset: Any = None,
    *,
    residual: Any = None,
    epsilon: float = 1e-6,
    axis: int = -1,
    platform: str | None = None,
    cfg: LayerNormConfig | None = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Any:
    """The mean subtracted and the deviation divided by, over one axis, with statistics in float32.

    Args:
      x: [..., columns], of a floating dtype.
      scale: [columns]; None is ones.
      offset: [columns]; None is zeros.
      residual: Added to x first; of the shape of x.
      epsilon: Added to the variance.
      axis: The axis to normalise.
      platform: "triton", "mosaic", "pallas" or "xla": this backend or an error.
      cfg: How to run it; by default what was tuned, else a guess.
      mesh: Run under `jax.shard_map` on this mesh.
      in_specs: With `mesh`: the PartitionSpecs of x, scale, offset and residual.
      out_specs: With `mesh`: that of the output.

    Returns:
      The norm, of the shape and dtype of x. With `residual` a pair: the norm of the sum, and the sum.
    """
    shared = {"cfg": cfg, "platform": platform, "mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}
    kwargs = {"epsilon": norms.number("layer_norm", "epsilon", epsilon)}
    return norms.over_axis(_kernel, x, (scale, offset), residual, axis, kwargs, **shared)
