"""RMSNorm for NVIDIA GPUs, Ampere or newer, in Pallas' Triton dialect: each row is read once, forward and backward."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ejkernel.kernels.manual_axes import pallas_call
from ejkernel.kernels.rms_norm.config import RowParams
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.utils.fingerprint import multiprocessors

Array = jax.Array
MOST_COLUMNS = 32768


def unsupported(inv: Invocation[Any, Any], *, backward: bool) -> str | None:
    """Why a call cannot be served; None if it can."""
    x = inv.args[0]
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"x must be bfloat16, float16 or float32, got {x.dtype}"
    if x.size == 0 or x.shape[-1] > MOST_COLUMNS:
        return f"x must have some rows, of at most {MOST_COLUMNS} columns, got shape {x.shape}"
    return None


def forward_space(inv: Invocation[Any, Any]) -> list[RowParams]:
    """About 32 elements per thread first, then fewer and more."""
    return _space(inv.args[0].shape[-1], 1)


def backward_space(inv: Invocation[Any, Any]) -> list[RowParams]:
    """As for the forward, but a block holds two arrays."""
    return _space(inv.args[0].shape[-1], 2)


def _space(columns: int, arrays: int) -> list[RowParams]:
    width = pl.next_power_of_2(columns)
    warps, rows = min(max(width * arrays // 1024, 1), 16), max(2048 // (width * arrays), 1)
    sizes = [(rows, warps), *((r, w) for r in (1, 2, 4, rows) for w in (warps // 2, warps, 2 * warps))]
    return [RowParams(rows=r, num_warps=w) for r, w in sizes if 0 < w <= 32 and (r == rows or r * width <= 16384)]


class _Block:
    """The rows of one step of a program; rows outside the array are masked."""

    def __init__(self, step: Any, rows: int, shape: tuple[int, int]) -> None:
        row, column = step * rows + jnp.arange(rows), jnp.arange(pl.next_power_of_2(shape[1]))
        inside = row < shape[0], column < shape[1]
        self._places = {
            "whole": ((row[:, None], column[None, :]), inside[0][:, None] & inside[1][None, :]),
            "rows": (row, inside[0]),
            "columns": (column, inside[1]),
            "step": ((step, column), inside[1]),
        }

    def load(self, ref: Any, what: str = "whole") -> Array:
        at, mask = self._places[what]
        found = plgpu.load(ref.at[at], mask=mask, other=0.0).astype(jnp.float32)
        return found[:, None] if what == "rows" else found

    def store(self, ref: Any, value: Array, what: str = "whole") -> None:
        at, mask = self._places[what]
        plgpu.store(ref.at[at], value.astype(ref.dtype), mask=mask)

    def weights(self, refs: dict[str, Any], offset: float) -> Any:
        return self.load(refs["scale"], "columns")[None, :] + offset if "scale" in refs else 1.0


def forward(
    x: Array, scale: Any, residual: Any, *, params: Any, epsilon: float, scale_offset: float, interpret: bool
) -> tuple[Any, Array]:
    """As `xla.forward`."""
    shape = (x.size // x.shape[-1], x.shape[-1])
    params = params or _space(shape[1], 1)[0]
    types = {"out": jax.ShapeDtypeStruct(shape, x.dtype), "rstd": jax.ShapeDtypeStruct(shape[:1], jnp.float32)}
    types |= {} if residual is None else {"total": types["out"]}

    def kernel(refs: dict[str, Any]) -> None:
        block = _Block(pl.program_id(0), params.rows, shape)
        total = block.load(refs["x"])
        if "residual" in refs:
            # Rounded as it is stored, because the backward reads the stored value.
            total = (total + block.load(refs["residual"])).astype(x.dtype).astype(jnp.float32)
            block.store(refs["total"], total)
        rstd = jax.lax.rsqrt(jnp.sum(total * total, axis=1, keepdims=True) / shape[1] + epsilon)
        block.store(refs["out"], total * rstd * block.weights(refs, scale_offset))
        block.store(refs["rstd"], rstd[:, 0], "rows")

    arrays = {"x": x, "residual": residual, "scale": scale}
    outs = _call(kernel, shape, arrays, types, pl.cdiv(shape[0], params.rows), params, interpret)
    out = outs["out"].reshape(x.shape)
    return (out if residual is None else (out, outs["total"].reshape(x.shape))), outs["rstd"].reshape(x.shape[:-1])


def backward(
    rstd: Array, out: Any, dout: Any, x: Array, scale: Any, residual: Any, *, params: Any, epsilon: float,
    scale_offset: float, interpret: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """The gradients of x, scale and residual; a program adds up its part of the scale's over all of its blocks."""
    shape = (x.size // x.shape[-1], x.shape[-1])
    params = params or _space(shape[1], 2)[0]
    total, dout, dtotal = (x, dout, None) if residual is None else (out[1], *dout)
    steps = pl.cdiv(shape[0], params.rows)
    programs = min(steps, 4 * multiprocessors())
    types = {"dx": jax.ShapeDtypeStruct(shape, x.dtype)}
    types |= {} if scale is None else {"dscale": jax.ShapeDtypeStruct((programs, shape[1]), jnp.float32)}

    def kernel(refs: dict[str, Any]) -> None:
        first = pl.program_id(0)

        def step(i: Any, dscale: Array) -> Array:
            block = _Block(first + i * programs, params.rows, shape)
            rstd = block.load(refs["rstd"], "rows")
            normal, wide = block.load(refs["total"]) * rstd, block.load(refs["dout"])
            weighted = wide * block.weights(refs, scale_offset)
            dx = rstd * (weighted - normal * (jnp.sum(weighted * normal, axis=1, keepdims=True) / shape[1]))
            block.store(refs["dx"], dx + block.load(refs["dtotal"]) if "dtotal" in refs else dx)
            return dscale + jnp.sum(wide * normal, axis=0)

        zeros = jnp.zeros(pl.next_power_of_2(shape[1]), jnp.float32)
        dscale = jax.lax.fori_loop(0, pl.cdiv(steps - first, programs), step, zeros)
        if "dscale" in refs:
            _Block(first, params.rows, shape).store(refs["dscale"], dscale, "step")

    arrays = {"total": total, "dout": dout, "dtotal": dtotal, "scale": scale, "rstd": rstd}
    outs = _call(kernel, shape, arrays, types, programs, params, interpret)
    dx = outs["dx"].reshape(x.shape)
    dscale = None if scale is None else jnp.sum(outs["dscale"], axis=0).astype(scale.dtype)
    return dx, dscale, None if residual is None else dx.astype(residual.dtype)


def _call(
    kernel: Any, shape: tuple[int, int], arrays: Any, types: Any, programs: int, params: RowParams, interpret: bool
) -> dict[str, Array]:
    """Runs a kernel on the arrays that are given, with rows flattened; it gets all references by name."""
    flat = {name: x if x.ndim == 1 and name == "scale" else x.reshape(shape[:1] if name == "rstd" else shape)
            for name, x in arrays.items() if x is not None}  # fmt: skip
    options = plgpu.CompilerParams(num_warps=params.num_warps, num_stages=1)
    body = lambda *refs: kernel(dict(zip([*flat, *types], refs, strict=True)))
    outs = pallas_call(body, list(types.values()), grid=(programs,), interpret=interpret, compiler_params=options)(
        *flat.values()
    )
    return dict(zip(types, outs, strict=True))
