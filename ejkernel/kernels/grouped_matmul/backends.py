"""The backends of two operations: the grouped product, and the gradient of its weights."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import jax

from ejkernel.kernels.grouped_matmul import config, dimensions, tiles, xla
from ejkernel.kernels.grouped_matmul.config import MosaicConfig, MosaicDrhsConfig
from ejkernel.kernels.grouped_matmul.dimensions import Dimensions
from ejkernel.kernels.grouped_matmul.groups import local_groups
from ejkernel.kernels.grouped_matmul.tiles import TpuConfig, TritonConfig
from ejkernel.kernels.grouped_matmul.xla import XlaConfig
from ejkernel.ops.core.backend import Backend
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.utils.fingerprint import compute_capability

Array = jax.Array
_HERE = "ejkernel.kernels.grouped_matmul"


@dataclass(frozen=True)
class _Functions:
    """What `Backend` needs of an implementation.

    Attributes:
      module: The module that holds the kernel; it is imported when it is first needed.
      unfit: Why the kernel cannot serve a call; None if it can.
      space: Params for a call, the guess first.
    """

    module: str
    unfit: Callable[[Dimensions], str | None]
    space: Callable[[Dimensions], list[Any]]

    @property
    def __name__(self) -> str:
        """The name of the module; its code is part of the operation's source hash."""
        return self.module

    @property
    def _kernels(self) -> ModuleType:
        return importlib.import_module(self.module)

    def dims(self, inv: Invocation[Any, Any]) -> Dimensions:
        """The sizes and dtypes of a call."""
        raise NotImplementedError

    def unsupported(self, inv: Invocation[Any, Any], *, backward: bool) -> str | None:
        """Why a call cannot be served; None if it can.

        Raises:
          ImportError: It could be, but the kernel cannot be imported.
        """
        if (reason := self.unfit(self.dims(inv))) is None:
            _ = self._kernels
        return reason

    def forward_space(self, inv: Invocation[Any, Any]) -> list[Any]:
        """The params to choose from, the guess first."""
        return self.space(self.dims(inv))

    def needed_steps(self, inv: Invocation[Any, Any], params: Any, *, backward: bool) -> int | None:
        """Steps of a TPU kernel's grid that compute something; None of other kernels."""
        return tiles.tpu_steps(self.dims(inv), params) if isinstance(params, TpuConfig) else None


class _Product(_Functions):
    """The forward; with transposed weights it also computes dlhs."""

    def dims(self, inv: Invocation[Any, Any]) -> Dimensions:
        """Of lhs and rhs."""
        lhs, rhs = inv.args[:2]
        return dimensions.product(
            lhs, rhs, transpose_rhs=inv.kwargs["transpose_rhs"], out_dtype=inv.kwargs["out_dtype"]
        )

    def run(self, lhs: Array, rhs: Array, sizes: Array, offset: Any, *, params: Any, **options: Any) -> Array:
        """Rows of the local groups times their weights, zeros elsewhere."""
        local = local_groups(sizes, offset, rhs.shape[0], lhs.shape[0])
        return self._kernels.forward(lhs, rhs, local.sizes, first_row=local.first_row, cfg=params, **options)


class _Contraction(_Functions):
    """The gradient of the weights."""

    def dims(self, inv: Invocation[Any, Any]) -> Dimensions:
        """Of lhs and dout."""
        lhs, dout = inv.args[:2]
        return dimensions.contraction(lhs, dout, inv.kwargs["groups"], out_dtype=inv.kwargs["out_dtype"])

    def run(
        self, lhs: Array, dout: Array, sizes: Array, offset: Any, *, params: Any, groups: int, **options: Any
    ) -> Array:
        """For each local group its rows of lhs, transposed, times its rows of dout."""
        local = local_groups(sizes, offset, groups, lhs.shape[0])
        return self._kernels.drhs(lhs, dout, local.sizes, first_row=local.first_row, cfg=params, **options)


def _hopper_unfit(dims: Dimensions) -> str | None:
    if (have := compute_capability())[0] != 9:
        return f"written for Hopper (compute capability 9.0), this device has {have[0]}.{have[1]}"
    return config.unsupported(dims)


def _backends(
    kind: type[_Functions], hopper: str, params: type, space: Callable[[Dimensions], list[Any]]
) -> tuple[Backend, ...]:
    """The backends of one operation; those for Hopper are two modules, the others one each."""
    triton = kind(f"{_HERE}.triton", tiles.triton_unsupported, tiles.triton_space)
    on_tpu = partial(tiles.tpu_space, contraction=kind is _Contraction)
    pallas = kind(f"{_HERE}.pallas", tiles.tpu_unsupported, on_tpu)
    return (
        Backend("mosaic", kind(hopper, _hopper_unfit, space), params, capability=(9, 0), thorough=True),
        Backend("triton", triton, TritonConfig, capability=(8, 0), interpret=True),
        Backend("pallas", pallas, TpuConfig, interpret=True),
        Backend("xla", kind(f"{_HERE}.xla", xla.unsupported, xla.space), XlaConfig),
    )


PRODUCT = _backends(_Product, f"{_HERE}.mosaic", MosaicConfig, config.space)
CONTRACTION = _backends(_Contraction, f"{_HERE}.mosaic_drhs", MosaicDrhsConfig, config.drhs_space)
