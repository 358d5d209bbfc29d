"""Norms for NVIDIA GPUs, Ampere or newer, in Pallas' Triton dialect: each row is read once, forward and backward."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.kernels import triton_rows as rows
from ejkernel.kernels.rows import RowParams
from ejkernel.kernels.triton_rows import Block
from ejkernel.ops.core.kernel import Invocation

Array = jax.Array


def unsupported(inv: Invocation[Any, Any], *, backward: bool) -> str | None:
    """Why this backend does not support a call; None if it does."""
    return rows.unsupported(inv.args[0])


def forward_space(inv: Invocation[Any, Any]) -> list[RowParams]:
    """The guess, and other blocks."""
    return rows.space(inv.args[0].shape[-1], sums=3 if _centers(inv) else 1)


def backward_space(inv: Invocation[Any, Any]) -> list[RowParams]:
    """As of the forward; a block holds two arrays, and programs stay."""
    return rows.staying_space(inv.args[0].shape[-1], more=_centers(inv) + (inv.args[-1] is not None))


def _centers(inv: Invocation[Any, Any]) -> bool:
    """Whether it is a norm with an offset, which subtracts the mean too."""
    return len(inv.args) == 4


def _weights(block: Block, refs: dict[str, Any], scale_offset: float) -> Any:
    return block.load(refs["scale"], "columns")[None, :] + scale_offset if "scale" in refs else 1.0


def forward(
    x: Array, scale: Any, offset: Any, residual: Any, *, center: bool, params: Any, epsilon: float,
    scale_offset: float = 0.0, interpret: bool,
) -> tuple[Any, tuple[Array | None, Array]]:  # fmt: skip
    """As `xla.forward`."""
    shape = rows.table(x)
    params = params or rows.space(shape[1], sums=3 if center else 1)[0]
    types = {"out": jax.ShapeDtypeStruct(shape, x.dtype), "rstd": jax.ShapeDtypeStruct(shape[:1], jnp.float32)}
    types |= {"mean": types["rstd"]} if center else {}
    types |= {} if residual is None else {"total": types["out"]}

    steps = pl.cdiv(shape[0], params.rows)
    programs = rows.programs_of(steps, params) if params.programs else steps

    def kernel(refs: dict[str, Any]) -> None:
        each = [name for name in ("x", "residual") if name in refs]
        fetch = lambda step: [Block(step, params.rows, shape).raw(refs[name]) for name in each]

        def work(step: Any, held: list[Array], carry: None) -> None:
            block, (total, *residual) = Block(step, params.rows, shape), map(rows.wide, held)
            if residual:
                # Rounded as it is stored, because the backward reads the stored value.
                total = (total + residual[0]).astype(x.dtype).astype(jnp.float32)
                block.store(refs["total"], total)
            if center:
                mean = jnp.sum(total, axis=1, keepdims=True) / shape[1]
                total = block.inside(total - mean)
                # What rounding left of the mean, which may be more than the deviation.
                rest = jnp.sum(total, axis=1, keepdims=True) / shape[1]
                total = block.inside(total - rest)
                block.store(refs["mean"], (mean + rest)[:, 0], "rows")
            rstd = jax.lax.rsqrt(jnp.sum(total * total, axis=1, keepdims=True) / shape[1] + epsilon)
            out = total * rstd * _weights(block, refs, scale_offset)
            block.store(refs["out"], out + block.load(refs["offset"], "columns")[None, :] if "offset" in refs else out)
            block.store(refs["rstd"], rstd[:, 0], "rows")

        rows.walk(shape[1], steps, programs, params, fetch, work, None)

    arrays = {"x": rows.flat(x), "residual": rows.flat(residual), "scale": scale, "offset": offset}
    outs = rows.call(kernel, arrays, types, programs, params, interpret)
    out = outs["out"].reshape(x.shape)
    statistics = (outs["mean"].reshape(x.shape[:-1]) if center else None, outs["rstd"].reshape(x.shape[:-1]))
    return (out if residual is None else (out, outs["total"].reshape(x.shape))), statistics


def backward(
    statistics: tuple[Any, Array], out: Any, dout: Any, x: Array, scale: Any, offset: Any, residual: Any, *,
    center: bool, params: Any, epsilon: float, scale_offset: float = 0.0, interpret: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """The gradients of x, scale, offset and residual.

    A program works on several blocks, one after the other, and adds up its part of the gradients of scale and offset.
    It loads a block while it works on the one before.
    """
    shape = rows.table(x)
    params = params or rows.staying_space(shape[1], more=center + (residual is not None))[0]
    total, dout, dtotal = (x, dout, None) if residual is None else (out[1], *dout)
    steps = pl.cdiv(shape[0], params.rows)
    programs = rows.programs_of(steps, params)
    sums = {"dscale": scale, "doffset": offset}
    part = jax.ShapeDtypeStruct((programs, shape[1]), jnp.float32)
    types = {"dx": jax.ShapeDtypeStruct(shape, x.dtype)} | {name: part for name, a in sums.items() if a is not None}

    def kernel(refs: dict[str, Any]) -> None:
        each = [name for name in ("total", "dout", "dtotal", "rstd", "mean") if name in refs]

        def fetch(step: Any) -> list[Array]:
            block = Block(step, params.rows, shape)
            return [block.raw(refs[name], "rows" if name in ("rstd", "mean") else "whole") for name in each]

        def work(step: Any, held: list[Array], added: dict[str, Array]) -> dict[str, Array]:
            block = Block(step, params.rows, shape)
            now = {name: rows.wide(a) for name, a in zip(each, held, strict=True)}
            rstd, wide = now["rstd"], now["dout"]
            normal = (now["total"] - now["mean"] if center else now["total"]) * rstd
            weighted = wide * _weights(block, refs, scale_offset)
            dx = weighted - normal * (jnp.sum(weighted * normal, axis=1, keepdims=True) / shape[1])
            if center:
                dx -= jnp.sum(weighted, axis=1, keepdims=True) / shape[1]
            block.store(refs["dx"], dx * rstd + now["dtotal"] if "dtotal" in now else dx * rstd)
            more = {"dscale": lambda: wide * normal, "doffset": lambda: wide}
            return {name: total + more[name]() for name, total in added.items()}

        block = (params.rows, pl.next_power_of_2(shape[1]))
        zeros = {name: jnp.zeros(block, jnp.float32) for name in types if name in sums}
        added = rows.walk(shape[1], steps, programs, params, fetch, work, zeros)
        for name, value in added.items():
            Block(pl.program_id(0), params.rows, shape).store(refs[name], jnp.sum(value, axis=0), "step")

    arrays = {"total": rows.flat(total), "dout": rows.flat(dout), "dtotal": rows.flat(dtotal), "scale": scale}
    arrays |= {"rstd": statistics[1].reshape(shape[0]), "mean": statistics[0].reshape(shape[0]) if center else None}
    outs = rows.call(kernel, arrays, types, programs, params, interpret)
    dx = outs["dx"].reshape(x.shape)
    dscale, doffset = (None if a is None else jnp.sum(outs[name], axis=0).astype(a.dtype) for name, a in sums.items())
    return dx, dscale, doffset, None if residual is None else dx.astype(residual.dtype)
