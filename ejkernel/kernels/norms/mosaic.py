"""Norms for Hopper, in Pallas' Mosaic GPU dialect: the copy engine brings rows and takes results away.

A block is one warpgroup that works on every n-th row, in a ring of slots: while it works on a row, the next ones are on
their way, and need no registers. A result takes the place of its row in the slot. Rows are tables of at most 256
columns, which is what the copy engine takes at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel._compat import is_symbolic, load_with_layout
from ejkernel.kernels.hopper.chip import BARRIER_BYTES, WARPGROUP
from ejkernel.kernels.rows import MosaicRows
from ejkernel.kernels.triton_rows import REGISTERS, table
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.utils.devices import HOPPER
from ejkernel.ops.utils.fingerprint import compute_capability, multiprocessors

Array = jax.Array
MOST_AT_ONCE = 2048
"""Columns that a warpgroup has in registers; between sums it reads them again from shared memory."""
MOST_SUMS = 64
"""Registers of a thread for the gradients of scale and offset."""


def unsupported(inv: Invocation[Any, Any], *, backward: bool) -> str | None:
    """Why this backend does not support a call; None if it does."""
    x, residual = inv.args[0], inv.args[-1]
    if (capability := compute_capability())[0] != 9:
        return f"written for Hopper (compute capability 9.0), this device has {'.'.join(map(str, capability))}"
    if is_symbolic(x):
        return f"the shape of x must be known, got {x.shape}"
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"x must be bfloat16, float16 or float32, got {x.dtype}"
    if x.size == 0 or x.shape[-1] % WARPGROUP:
        return f"x must have some rows, of a multiple of {WARPGROUP} columns, got shape {x.shape}"
    if residual is not None and residual.dtype != x.dtype:
        return f"residual must have the dtype of x, {x.dtype}, got {residual.dtype}"
    if not _space(inv.args, backward=backward):
        return f"rows of {x.shape[-1]} columns do not fit into shared memory and registers"
    return None


def forward_space(inv: Invocation[Any, Any]) -> list[MosaicRows]:
    """The guess, and other depths and numbers of blocks."""
    return _space(inv.args, backward=False)


def backward_space(inv: Invocation[Any, Any]) -> list[MosaicRows]:
    """As of the forward, with more arrays in a slot."""
    return _space(inv.args, backward=True)


def _space(args: tuple[Any, ...], *, backward: bool) -> list[MosaicRows]:
    """What fits into shared memory and registers; many blocks and deep rings first."""
    x, *per_column, residual = args
    columns, arrays = x.shape[-1], 1 + backward + (residual is not None)
    of_row = columns // WARPGROUP
    sums = of_row * len(per_column) if backward else 0
    if sums > MOST_SUMS:
        return []
    registers = min(56 + 7 * sums // 2 if backward else 36 + of_row, 255)  # As ptxas counts them, or more.
    most = REGISTERS // (WARPGROUP * registers)
    sizes = [MosaicRows(stages=s, blocks=b) for b in (4, 8, 2, 1, 16) for s in (4, 3, 6, 2) if b <= most]
    slot = arrays * columns * x.dtype.itemsize
    return [p for p in sizes if p.blocks * (p.stages * slot + BARRIER_BYTES) <= HOPPER.block_bytes]


def forward(
    x: Array, scale: Any, offset: Any, residual: Any, *, center: bool, params: Any, epsilon: float,
    scale_offset: float = 0.0, interpret: Any = False,
) -> tuple[Any, tuple[Array | None, Array]]:  # fmt: skip
    """As `xla.forward`."""
    (count, columns), parts = table(x), _parts(x.shape[-1])
    per_row = jax.ShapeDtypeStruct((count,), jnp.float32)
    types = {"out": _like(x), "rstd": per_row} | ({"mean": per_row} if center else {})
    types |= {} if residual is None else {"total": _like(x)}

    def work(refs: dict[str, Any], row: Any, slot: dict[str, Any], carry: Any) -> Any:
        for part in parts if residual is not None else ():
            # Rounded as it is stored, because the backward reads the stored value.
            total = _wide(slot["out"], part) + _wide(slot["total"], part)
            slot["total"].at[part][...] = total.astype(x.dtype)
        source = slot["out" if residual is None else "total"]
        value = lambda part: _wide(source, part)
        if center:
            mean = _sum(value, parts) / columns
            # What rounding left of the mean, which may be more than the deviation.
            rest = _sum(lambda part: _wide(source, part) - mean, parts) / columns
            refs["mean"][row] = mean + rest
            value = lambda part: _wide(source, part) - mean - rest
        rstd = lax.rsqrt(_sum(lambda part: value(part) * value(part), parts) / columns + epsilon)
        for part in parts:
            out = value(part) * rstd
            out = out if scale is None else out * (_wide(refs["scale"], part) + scale_offset)
            out = out if offset is None else out + _wide(refs["offset"], part)
            slot["out"].at[part][...] = out.astype(x.dtype)
        refs["rstd"][row] = rstd
        return carry

    # A result takes the slot of what it is made of.
    params = params or _space((x, scale, *([offset] if center else []), residual), backward=False)[0]
    rows = {"out": x} | ({} if residual is None else {"total": residual})
    outs = _call(work, rows, {"scale": scale, "offset": offset}, {}, types, {}, params, interpret)
    out = outs["out"].reshape(x.shape)
    statistics = (outs["mean"].reshape(x.shape[:-1]) if center else None, outs["rstd"].reshape(x.shape[:-1]))
    return (out if residual is None else (out, outs["total"].reshape(x.shape))), statistics


def backward(
    statistics: tuple[Any, Array], out: Any, dout: Any, x: Array, scale: Any, offset: Any, residual: Any, *,
    center: bool, params: Any, epsilon: float, scale_offset: float = 0.0, interpret: Any = False,
) -> tuple[Any, ...]:  # fmt: skip
    """The gradients of x, scale, offset and residual; a block adds up its part of those of scale and offset."""
    (count, columns), parts = table(x), _parts(x.shape[-1])
    params = params or _space((x, scale, *([offset] if center else []), residual), backward=True)[0]
    total, dout, dtotal = (x, dout, None) if residual is None else (out[1], *dout)
    rows = {"dx": total, "dout": dout} | ({} if dtotal is None else {"dtotal": dtotal})
    per_row = {"rstd": statistics[1].reshape(count)} | ({"mean": statistics[0].reshape(count)} if center else {})
    sums = {name: a for name, a in (("dscale", scale), ("doffset", offset)) if a is not None}

    def work(refs: dict[str, Any], row: Any, slot: dict[str, Any], carry: dict[str, list[Array]]) -> Any:
        rstd, mean = refs["rstd"][row], refs["mean"][row] if center else 0.0
        normal = lambda part: (_wide(slot["dx"], part) - mean) * rstd

        def weighted(part: Any) -> Array:
            wide = _wide(slot["dout"], part)
            return wide if scale is None else wide * (_wide(refs["scale"], part) + scale_offset)

        more = {"dscale": lambda part: _wide(slot["dout"], part) * normal(part)}
        more["doffset"] = lambda part: _wide(slot["dout"], part)
        for name, before in carry.items():
            carry = carry | {name: [a + more[name](part) for a, part in zip(before, parts, strict=True)]}
        along = _sum(lambda part: weighted(part) * normal(part), parts) / columns
        level = _sum(weighted, parts) / columns if center else 0.0
        for part in parts:
            dx = (weighted(part) - normal(part) * along - level) * rstd
            dx = dx if dtotal is None else dx + _wide(slot["dtotal"], part)
            slot["dx"].at[part][...] = dx.astype(x.dtype)
        return carry

    outs = _call(work, rows, {"scale": scale}, per_row, {"dx": _like(x)}, sums, params, interpret)
    dx = outs["dx"].reshape(x.shape)
    found = [_sum_of(outs[name], a) if (a := sums.get(name)) is not None else None for name in ("dscale", "doffset")]
    return dx, *found, None if residual is None else dx.astype(residual.dtype)


def _sum_of(parts: Array, like: Array) -> Array:
    """The parts of all blocks together."""
    return jnp.sum(parts, axis=0).reshape(like.shape).astype(like.dtype)


def _call(
    work: Callable[[dict[str, Any], Any, dict[str, Any], Any], Any],
    rows: dict[str, Array],
    columns: dict[str, Any],
    per_row: dict[str, Array],
    types: dict[str, Any],
    sums: dict[str, Any],
    params: MosaicRows,
    interpret: Any,
) -> dict[str, Array]:
    """Runs `work` on each row.

    Args:
      work: `carry = work(refs, row, slot, carry)`; a slot has references to a row of each of `rows`, of which those
        that are also `types` are stored after it.
      rows: Arrays that go through slots.
      columns: Arrays with a value per column, or None.
      per_row: Arrays with a value per row.
      types: Those of the results.
      sums: Names of sums, for each of which blocks give a part.
      params: How rows are dealt out.
      interpret: As for `plgpu.kernel`.
    """
    first = next(iter(rows.values()))
    (count, _), cut = table(first), _cut(first.shape[-1])
    blocks, stages = min(params.blocks * multiprocessors(), count), params.stages
    given = {name: a.reshape(count, *cut) for name, a in rows.items()} | per_row
    given |= {name: a.reshape(cut) for name, a in columns.items() if a is not None}
    types = types | {name: jax.ShapeDtypeStruct((blocks, *cut), jnp.float32) for name in sums}

    def kernel(*refs: Any, ring: dict[str, Any], full: Any) -> None:
        ins, outs = dict(zip(given, refs, strict=False)), dict(zip(types, refs[len(given) :], strict=True))
        block = lax.axis_index("block")
        mine = pl.cdiv(count - block, blocks)
        row_of = lambda i: block + i * blocks

        def fetch(i: Any) -> None:
            slot = lax.rem(i, stages)
            for name in rows:
                plgpu.copy_gmem_to_smem(ins[name].at[row_of(i)], ring[name].at[slot], full.at[slot])

        def step(i: Any, carry: Any) -> Any:
            slot = lax.rem(i, stages)
            plgpu.barrier_wait(full.at[slot])
            carry = work(ins | outs, row_of(i), {name: ring[name].at[slot] for name in rows}, carry)
            plgpu.commit_smem()
            for name in rows:
                if name in outs:
                    plgpu.copy_smem_to_gmem(ring[name].at[slot], outs[name].at[row_of(i)], commit_group=False)
            plgpu.commit_smem_to_gmem_group()
            # The slot of the row before is free once that is stored; this row's store may go on.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            pl.when((i > 0) & (i - 1 + stages < mine))(lambda: fetch(i - 1 + stages))
            return carry

        for i in range(stages):
            pl.when(i < mine)(lambda i=i: fetch(jnp.int32(i)))
        parts = _parts(first.shape[-1])
        shape = parts[0].size, cut[1]
        zeros = lambda: plgpu.layout_cast(jnp.zeros(shape, jnp.float32), _layout(shape))
        carry = lax.fori_loop(0, mine, step, {name: [zeros() for _ in parts] for name in sums})
        for name, values in carry.items():
            for part, value in zip(parts, values, strict=True):
                outs[name].at[block, part][...] = value
        plgpu.wait_smem_to_gmem(0)

    results = plgpu.kernel(
        kernel,
        out_type=list(types.values()),
        grid=(blocks,),
        grid_names=("block",),
        scratch_types={
            "ring": {name: plgpu.SMEM((stages, *cut), a.dtype) for name, a in rows.items()},
            "full": plgpu.Barrier(num_arrivals=len(rows), num_barriers=stages),
        },
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,  # A thread reads and writes elements of its own.
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=interpret,
    )(*given.values())
    return dict(zip(types, results, strict=True))


def _cut(columns: int) -> tuple[int, int]:
    """A row as a table that the copy engine takes at once."""
    width = next(width for width in (256, 128) if columns % width == 0)
    return columns // width, width


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((table(x)[0], *_cut(x.shape[-1])), x.dtype)


def _parts(columns: int) -> list[Any]:
    """A row in parts that are worked on one after the other: few registers, and accesses as wide as they can be."""
    count, width = _cut(columns)
    sizes = [n for n in range(1, count + 1) if count % n == 0 and n * width <= MOST_AT_ONCE]
    size = max(sizes, key=lambda n: (_vector(n * width), n))
    return [pl.ds(first, size) for first in range(0, count, size)]


def _vector(elements: int) -> int:
    """Neighbouring elements of a thread: as many as the memory's ports take, the same for all dtypes."""
    return next(n for n in (8, 4, 2, 1) if elements % (n * WARPGROUP) == 0)


def _layout(shape: tuple[int, int]) -> Any:
    return plgpu.Layout.WG_STRIDED(shape, _vector(shape[0] * shape[1]))


def _wide(ref: Any, part: Any) -> Array:
    """Part of a row, or of what columns have, in float32."""
    return load_with_layout(ref.at[part], layout=_layout((part.size, ref.shape[1]))).astype(jnp.float32)


def _sum(of: Callable[[Any], Array], parts: list[Any]) -> Array:
    """The sum over a row."""
    total = of(parts[0])
    for part in parts[1:]:
        total += of(part)
    return jnp.sum(total)
