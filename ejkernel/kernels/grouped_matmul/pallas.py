"""Grouped products for TPUs, in Pallas' Mosaic dialect.

Tiles of rows begin at multiples of their size, so that a tile with rows of several groups is visited once for each of
them, one after the other, and stays in fast memory; each visit changes only its own rows.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.grouped_matmul.dimensions import contraction, product
from ejkernel.kernels.grouped_matmul.groups import row_tiles
from ejkernel.kernels.grouped_matmul.tiles import TpuConfig, tpu_space
from ejkernel.kernels.pallas_call import pallas_call

Array = jax.Array
LEAST_ROWS = 8
"""Of four rows or fewer, of 16 bits, Mosaic cannot mask the columns (libtpu 0.0.50)."""


def forward(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    *,
    transpose_rhs: bool = False,
    out_dtype: Any = None,
    first_row: Array | None = None,
    cfg: TpuConfig | None = None,
    interpret: Any = False,
) -> Array:
    """Returns `[M, N]`: rows of a group times its weights, zeros in rows of no group."""
    rows, k = lhs.shape
    if rows < LEAST_ROWS:
        options = {"transpose_rhs": transpose_rhs, "out_dtype": out_dtype, "first_row": first_row, "cfg": cfg}
        padded = jnp.pad(lhs, ((0, LEAST_ROWS - rows), (0, 0)))
        return forward(padded, rhs, group_sizes, **options, interpret=interpret)[:rows]
    n = rhs.shape[1] if transpose_rhs else rhs.shape[2]
    cfg = cfg or tpu_space(product(lhs, rhs, transpose_rhs=transpose_rhs, out_dtype=out_dtype))[0]
    out_dtype = jnp.dtype(lhs.dtype if out_dtype is None else out_dtype)
    tiles = row_tiles(group_sizes, rows, cfg.block_m, first_row=first_row, align=cfg.block_m)
    scalars = (jnp.where(tiles.live, tiles.group, -1), tiles.row // cfg.block_m, tiles.start, tiles.end)
    steps = pl.cdiv(k, cfg.block_k)

    def weights(j, i, s, group, *_: Any):
        return (jnp.maximum(group[i], 0), j, s) if transpose_rhs else (jnp.maximum(group[i], 0), s, j)

    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=4,
        grid=(pl.cdiv(n, cfg.block_n), tiles.row.shape[0], steps),
        in_specs=[
            pl.BlockSpec((cfg.block_m, cfg.block_k), lambda j, i, s, group, row, *_: (row[i], s)),
            pl.BlockSpec(
                (None, *((cfg.block_n, cfg.block_k) if transpose_rhs else (cfg.block_k, cfg.block_n))), weights
            ),
        ],
        out_specs=pl.BlockSpec((cfg.block_m, cfg.block_n), lambda j, i, s, group, row, *_: (row[i], j)),
        scratch_shapes=[pltpu.VMEM((cfg.block_m, cfg.block_n), jnp.float32)],
    )
    kernel = functools.partial(_forward_kernel, cfg=cfg, k=k, transpose_rhs=transpose_rhs)
    return _call(kernel, grid, (rows, n), out_dtype, interpret)(*scalars, lhs, rhs)


def drhs(
    lhs: Array,
    dout: Array,
    group_sizes: Array,
    *,
    out_dtype: Any = None,
    first_row: Array | None = None,
    cfg: TpuConfig | None = None,
    interpret: Any = False,
) -> Array:
    """Returns `[G, K, N]`: rows of lhs of each group, transposed, times its rows of dout."""
    (rows, k), n, groups = lhs.shape, dout.shape[1], group_sizes.shape[0]
    dims = contraction(lhs, dout, groups, out_dtype=out_dtype)
    cfg = cfg or tpu_space(dims, contraction=True)[0]
    out_dtype = jnp.dtype(lhs.dtype if out_dtype is None else out_dtype)
    tiles = row_tiles(group_sizes, rows, cfg.block_m, first_row=first_row, align=cfg.block_m, every_group=True)
    end = jnp.where(tiles.live, tiles.end, 0)
    # An empty group at the very end may begin past the last tile.
    row = jnp.minimum(tiles.row // cfg.block_m, pl.cdiv(rows, cfg.block_m) - 1)
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=4,
        grid=(pl.cdiv(n, cfg.block_n), pl.cdiv(k, cfg.block_k), tiles.row.shape[0]),
        in_specs=[
            pl.BlockSpec((cfg.block_m, cfg.block_k), lambda j, i, t, group, row, *_: (row[t], i)),
            pl.BlockSpec((cfg.block_m, cfg.block_n), lambda j, i, t, group, row, *_: (row[t], j)),
        ],
        out_specs=pl.BlockSpec((None, cfg.block_k, cfg.block_n), lambda j, i, t, group, *_: (group[t], i, j)),
        scratch_shapes=[pltpu.VMEM((cfg.block_k, cfg.block_n), jnp.float32)],
    )
    kernel = functools.partial(_drhs_kernel, cfg=cfg)
    return _call(kernel, grid, (groups, k, n), out_dtype, interpret)(tiles.group, row, tiles.start, end, lhs, dout)


def _call(kernel: Any, grid: Any, shape: tuple[int, ...], dtype: Any, interpret: Any) -> Any:
    order = pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary"))
    out = jax.ShapeDtypeStruct(shape, dtype)
    return pallas_call(kernel, out, grid_spec=grid, compiler_params=order, interpret=interpret)


def _dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    # Of 16 bits each product is exact, and Mosaic refuses to be asked for more: None is what JAX's default asks for.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    numbers = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, numbers, precision=precision, preferred_element_type=jnp.float32)


def _kept(value: Array, axis: int, begin: Any, first: Any, end: Any) -> Array:
    """`value` with zeros where its place along `axis`, from `begin` on, is not between `first` and `end`."""
    place = begin + lax.broadcasted_iota(jnp.int32, value.shape, axis)
    return jnp.where((place >= first) & (place < end), value, jnp.zeros_like(value))


def _forward_kernel(
    group_ref, row_ref, start_ref, end_ref, lhs_ref, rhs_ref, out_ref, acc_ref, *, cfg, k, transpose_rhs
):
    entry, step = pl.program_id(1), pl.program_id(2)
    row = row_ref[entry] * cfg.block_m

    @pl.when(step == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    @pl.when(group_ref[entry] >= 0)
    def _():
        a, b = lhs_ref[...], rhs_ref[...]
        if k % cfg.block_k:
            a = _kept(a, 1, step * cfg.block_k, 0, k)
            b = _kept(b, 1 if transpose_rhs else 0, step * cfg.block_k, 0, k)
        acc_ref[...] += _dot(a, b, (1, 1 if transpose_rhs else 0))

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        place = row + lax.broadcasted_iota(jnp.int32, out_ref.shape, 0)
        mine = (place >= start_ref[entry]) & (place < end_ref[entry])
        # A repeated last entry has the same rows and no group: it must not change them.
        fresh = (entry == 0) | (row_ref[jnp.maximum(entry - 1, 0)] != row_ref[entry])
        again = (entry > 0) & (group_ref[entry] < 0) & ~fresh
        old = jnp.where(fresh, jnp.zeros_like(out_ref), out_ref[...])
        new = jnp.where(mine, acc_ref[...].astype(out_ref.dtype), old)
        out_ref[...] = jnp.where(again, old, new)


def _drhs_kernel(group_ref, row_ref, start_ref, end_ref, lhs_ref, dout_ref, out_ref, acc_ref, *, cfg):
    entry = pl.program_id(2)
    row = row_ref[entry] * cfg.block_m
    last = pl.num_programs(2) - 1

    @pl.when((entry == 0) | (group_ref[jnp.maximum(entry - 1, 0)] != group_ref[entry]))
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    # Both operands: values outside the group need not be finite.
    bounds = (row, start_ref[entry], end_ref[entry])
    acc_ref[...] += _dot(_kept(lhs_ref[...], 0, *bounds), _kept(dout_ref[...], 0, *bounds), (0, 0))

    @pl.when((entry == last) | (group_ref[jnp.minimum(entry + 1, last)] != group_ref[entry]))
    def _():
        out_ref[...] = acc_ref[...].astype(out_ref.dtype)
