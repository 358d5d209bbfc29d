"""Norms for TPUs, in Pallas' Mosaic dialect: each row is read once, forward and backward.

The grid walks over blocks of rows. In the backward its steps run one after the other, so that the gradients of scale
and offset are summed in fast memory, and written once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas_call import pallas_call
from ejkernel.kernels.rows import RowParams
from ejkernel.kernels.triton_rows import flat, table
from ejkernel.ops.core.kernel import Invocation

Array = jax.Array
LANES = 128
BLOCK_BYTES = 10 << 20
"""For the blocks of all arrays, twice because the next ones are loaded meanwhile, and for values between."""


def unsupported(inv: Invocation[Any, Any], *, backward: bool) -> str | None:
    """Why this backend does not support a call; None if it does."""
    x = inv.args[0]
    dtypes = [a.dtype for a in inv.args if a is not None and jnp.issubdtype(a.dtype, jnp.floating)]
    if odd := [d.name for d in dtypes if d not in (jnp.bfloat16, jnp.float32)]:
        return f"floats must be bfloat16 or float32, got {odd[0]}"
    if x.size == 0 or x.shape[-1] % LANES:
        return f"x must have some rows, of a multiple of {LANES} columns, got shape {x.shape}"
    if not _sizes(x.shape[-1], x.dtype.itemsize, backward):
        return f"not even 16 rows of {x.shape[-1]} columns fit into fast memory"
    return None


def forward_space(inv: Invocation[Any, Any]) -> list[RowParams]:
    """The guess, and smaller blocks."""
    return _space(inv.args[0], backward=False)


def backward_space(inv: Invocation[Any, Any]) -> list[RowParams]:
    """As of the forward, with more arrays in a block."""
    return _space(inv.args[0], backward=True)


def _space(x: Any, *, backward: bool) -> list[RowParams]:
    return [RowParams(rows=rows) for rows in _sizes(x.shape[-1], x.dtype.itemsize, backward)]


def _sizes(columns: int, itemsize: int, backward: bool) -> list[int]:
    """Rows of a block, most first: with a residual there are four arrays of the size of x, and float32 values."""
    row = columns * (4 * 2 * itemsize + (6 if backward else 4) * 4)
    return [rows for rows in (512, 256, 128, 64, 32, 16) if rows * row <= BLOCK_BYTES]


def forward(
    x: Array, scale: Any, offset: Any, residual: Any, *, center: bool, params: Any, epsilon: float,
    scale_offset: float = 0.0, interpret: bool,
) -> tuple[Any, tuple[Array | None, Array]]:  # fmt: skip
    """As `xla.forward`."""
    shape = table(x)
    like, column = jax.ShapeDtypeStruct(shape, x.dtype), jax.ShapeDtypeStruct((shape[0], 1), jnp.float32)
    types = {"out": like, "rstd": column} | ({"mean": column} if center else {})
    types |= {} if residual is None else {"total": like}

    def kernel(refs: dict[str, Any]) -> None:
        total = _wide(refs["x"])
        if "residual" in refs:
            # Rounded as it is stored, because the backward reads the stored value.
            refs["total"][...] = (total + _wide(refs["residual"])).astype(x.dtype)
            total = _wide(refs["total"])
        if center:
            mean = jnp.mean(total, axis=1, keepdims=True)
            total -= mean
            # What rounding left of the mean, which may be more than the deviation.
            rest = jnp.mean(total, axis=1, keepdims=True)
            total -= rest
            refs["mean"][...] = mean + rest
        rstd = lax.rsqrt(jnp.mean(total * total, axis=1, keepdims=True) + epsilon)
        out = total * rstd * _weights(refs, scale_offset)
        refs["out"][...] = (out + _wide(refs["offset"]) if "offset" in refs else out).astype(x.dtype)
        refs["rstd"][...] = rstd

    arrays = {"x": flat(x), "residual": flat(residual), "scale": _row(scale), "offset": _row(offset)}
    rows = min((params or _space(x, backward=False)[0]).rows, shape[0])
    outs = _call(kernel, arrays, types, shape, rows, interpret, parallel=True)
    statistics = (outs["mean"].reshape(x.shape[:-1]) if center else None, outs["rstd"].reshape(x.shape[:-1]))
    out = outs["out"].reshape(x.shape)
    return (out if residual is None else (out, outs["total"].reshape(x.shape))), statistics


def backward(
    statistics: tuple[Any, Array], out: Any, dout: Any, x: Array, scale: Any, offset: Any, residual: Any, *,
    center: bool, params: Any, epsilon: float, scale_offset: float = 0.0, interpret: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """The gradients of x, scale, offset and residual."""
    shape = table(x)
    rows = min((params or _space(x, backward=True)[0]).rows, shape[0])
    total, dout, dtotal = (x, dout, None) if residual is None else (out[1], *dout)
    sums = {"dscale": scale, "doffset": offset}
    whole = jax.ShapeDtypeStruct((1, shape[1]), jnp.float32)
    types = {"dx": jax.ShapeDtypeStruct(shape, x.dtype)} | {name: whole for name, a in sums.items() if a is not None}

    def kernel(refs: dict[str, Any]) -> None:
        rstd, wide = refs["rstd"][...], _wide(refs["dout"])
        normal = (_wide(refs["total"]) - refs["mean"][...] if center else _wide(refs["total"])) * rstd
        weighted = wide * _weights(refs, scale_offset)
        dx = weighted - normal * jnp.mean(weighted * normal, axis=1, keepdims=True)
        if center:
            dx -= jnp.mean(weighted, axis=1, keepdims=True)
        dx *= rstd
        refs["dx"][...] = (dx + _wide(refs["dtotal"]) if "dtotal" in refs else dx).astype(x.dtype)
        # What lies past the last row is not zero.
        row = lax.broadcasted_iota(jnp.int32, (rows, 1), 0) + pl.program_id(0) * rows
        for name, more in (("dscale", wide * normal), ("doffset", wide)):
            if name in refs:
                _add(refs[name], jnp.sum(jnp.where(row < shape[0], more, 0.0), axis=0, keepdims=True))

    arrays = {"total": flat(total), "dout": flat(dout), "dtotal": flat(dtotal), "scale": _row(scale)}
    arrays |= {"rstd": statistics[1].reshape(-1, 1), "mean": statistics[0].reshape(-1, 1) if center else None}
    outs = _call(kernel, arrays, types, shape, rows, interpret, parallel=False)
    dx = outs["dx"].reshape(x.shape)
    dscale, doffset = (None if a is None else outs[name][0].astype(a.dtype) for name, a in sums.items())
    return dx, dscale, doffset, None if residual is None else dx.astype(residual.dtype)


def _call(
    kernel: Callable[[dict[str, Any]], None], arrays: dict[str, Any], types: dict[str, Any], shape: tuple[int, int],
    rows: int, interpret: bool, *, parallel: bool,
) -> dict[str, Array]:  # fmt: skip
    """Runs a kernel on the arrays that there are; it gets references by name."""
    given = {name: a for name, a in arrays.items() if a is not None}
    body = lambda *refs: kernel(dict(zip([*given, *types], refs, strict=True)))
    spec = lambda a: _spec(a.shape, shape, rows)
    run = pallas_call(
        body,
        list(types.values()),
        grid=(pl.cdiv(shape[0], rows),),
        in_specs=[spec(a) for a in given.values()],
        out_specs=[spec(a) for a in types.values()],
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel" if parallel else "arbitrary",)),
    )
    return dict(zip(types, run(*given.values()), strict=True))


def _spec(own: tuple[int, ...], shape: tuple[int, int], rows: int) -> pl.BlockSpec:
    """Some rows of an array that has rows; all of one that has columns only."""
    if own[0] == shape[0]:
        return pl.BlockSpec((rows, own[1]), lambda i: (i, 0))
    return pl.BlockSpec(own, lambda i: (0, 0))


def _add(ref: Any, value: Array) -> None:
    """Adds to what earlier steps of the grid left."""

    @pl.when(pl.program_id(0) == 0)
    def _first() -> None:
        ref[...] = jnp.zeros_like(ref)

    ref[...] += value


def _wide(ref: Any) -> Array:
    return ref[...].astype(jnp.float32)


def _row(x: Any) -> Any:
    return None if x is None else x.reshape(1, -1)


def _weights(refs: dict[str, Any], scale_offset: float) -> Any:
    return _wide(refs["scale"]) + scale_offset if "scale" in refs else 1.0
