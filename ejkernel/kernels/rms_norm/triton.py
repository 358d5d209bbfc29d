"""RMSNorm for NVIDIA GPUs, Ampere or newer, in Pallas' Triton dialect: each row is read once, forward and backward."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.kernels import triton_rows as rows
from ejkernel.kernels.rows import RowParams
from ejkernel.kernels.triton_rows import Block
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.utils.fingerprint import multiprocessors

Array = jax.Array


def unsupported(inv: Invocation[Any, Any], *, backward: bool) -> str | None:
    """Why this backend does not support a call; None if it does."""
    return rows.unsupported(inv.args[0])


def forward_space(inv: Invocation[Any, Any]) -> list[RowParams]:
    """The guess, and other blocks."""
    return rows.space(inv.args[0].shape[-1], arrays=1)


def backward_space(inv: Invocation[Any, Any]) -> list[RowParams]:
    """As of the forward; a block holds two arrays."""
    return rows.space(inv.args[0].shape[-1], arrays=2)


def _weights(block: Block, refs: dict[str, Any], offset: float) -> Any:
    return block.load(refs["scale"], "columns")[None, :] + offset if "scale" in refs else 1.0


def forward(
    x: Array, scale: Any, residual: Any, *, params: Any, epsilon: float, scale_offset: float, interpret: bool
) -> tuple[Any, Array]:
    """As `xla.forward`."""
    shape = rows.table(x)
    params = params or rows.space(shape[1], arrays=1)[0]
    types = {"out": jax.ShapeDtypeStruct(shape, x.dtype), "rstd": jax.ShapeDtypeStruct(shape[:1], jnp.float32)}
    types |= {} if residual is None else {"total": types["out"]}

    def kernel(refs: dict[str, Any]) -> None:
        block = Block(pl.program_id(0), params.rows, shape)
        total = block.load(refs["x"])
        if "residual" in refs:
            # Rounded as it is stored, because the backward reads the stored value.
            total = (total + block.load(refs["residual"])).astype(x.dtype).astype(jnp.float32)
            block.store(refs["total"], total)
        rstd = jax.lax.rsqrt(jnp.sum(total * total, axis=1, keepdims=True) / shape[1] + epsilon)
        block.store(refs["out"], total * rstd * _weights(block, refs, scale_offset))
        block.store(refs["rstd"], rstd[:, 0], "rows")

    arrays = {"x": x.reshape(shape), "residual": None if residual is None else residual.reshape(shape), "scale": scale}
    outs = rows.call(kernel, arrays, types, pl.cdiv(shape[0], params.rows), params, interpret)
    out = outs["out"].reshape(x.shape)
    return (out if residual is None else (out, outs["total"].reshape(x.shape))), outs["rstd"].reshape(x.shape[:-1])


def backward(
    rstd: Array, out: Any, dout: Any, x: Array, scale: Any, residual: Any, *, params: Any, epsilon: float,
    scale_offset: float, interpret: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """The gradients of x, scale and residual; a program adds up its part of the scale's over all of its blocks."""
    shape = rows.table(x)
    params = params or rows.space(shape[1], arrays=2)[0]
    total, dout, dtotal = (x, dout, None) if residual is None else (out[1], *dout)
    steps = pl.cdiv(shape[0], params.rows)
    programs = min(steps, 4 * multiprocessors())
    types = {"dx": jax.ShapeDtypeStruct(shape, x.dtype)}
    types |= {} if scale is None else {"dscale": jax.ShapeDtypeStruct((programs, shape[1]), jnp.float32)}

    def kernel(refs: dict[str, Any]) -> None:
        first = pl.program_id(0)

        def step(i: Any, dscale: Array) -> Array:
            block = Block(first + i * programs, params.rows, shape)
            rstd = block.load(refs["rstd"], "rows")
            normal, wide = block.load(refs["total"]) * rstd, block.load(refs["dout"])
            weighted = wide * _weights(block, refs, scale_offset)
            dx = rstd * (weighted - normal * (jnp.sum(weighted * normal, axis=1, keepdims=True) / shape[1]))
            block.store(refs["dx"], dx + block.load(refs["dtotal"]) if "dtotal" in refs else dx)
            return dscale + jnp.sum(wide * normal, axis=0)

        zeros = jnp.zeros(pl.next_power_of_2(shape[1]), jnp.float32)
        dscale = jax.lax.fori_loop(0, pl.cdiv(steps - first, programs), step, zeros)
        if "dscale" in refs:
            Block(first, params.rows, shape).store(refs["dscale"], dscale, "step")

    tables = {"total": total, "dout": dout, "dtotal": dtotal}
    arrays = {name: None if a is None else a.reshape(shape) for name, a in tables.items()}
    arrays |= {"scale": scale, "rstd": rstd.reshape(shape[0])}
    outs = rows.call(kernel, arrays, types, programs, params, interpret)
    dx = outs["dx"].reshape(x.shape)
    dscale = None if scale is None else jnp.sum(outs["dscale"], axis=0).astype(scale.dtype)
    return dx, dscale, None if residual is None else dx.astype(residual.dtype)
