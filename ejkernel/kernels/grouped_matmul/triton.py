"""Grouped products for NVIDIA GPUs, Ampere or newer, in Pallas' Triton dialect.

A program owns a tile of rows of one group and a tile of columns (forward), or a tile of one group's gradient, and loops
over the contraction. The tiles of rows are listed on the device; there are as many programs as there can be tiles.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ejkernel.kernels.grouped_matmul.dimensions import contraction, product
from ejkernel.kernels.grouped_matmul.groups import bounds, row_tiles
from ejkernel.kernels.grouped_matmul.tiles import TritonConfig, triton_space
from ejkernel.kernels.pallas_call import pallas_call

Array = jax.Array


def forward(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    *,
    transpose_rhs: bool = False,
    out_dtype: Any = None,
    first_row: Array | None = None,
    cfg: TritonConfig | None = None,
    interpret: bool = False,
) -> Array:
    """Returns `[M, N]`: rows of a group times its weights, zeros in rows of no group."""
    rows, k = lhs.shape
    n = rhs.shape[1] if transpose_rhs else rhs.shape[2]
    cfg = cfg or triton_space(product(lhs, rhs, transpose_rhs=transpose_rhs, out_dtype=out_dtype))[0]
    tiles = row_tiles(group_sizes, rows, cfg.block_m, first_row=first_row, align=1)
    last = jnp.where(tiles.live, tiles.end, 0)
    kernel = functools.partial(_forward_kernel, cfg=cfg, transpose_rhs=transpose_rhs, sizes=(rows, k, n))
    out_shape = jax.ShapeDtypeStruct((rows, n), jnp.dtype(lhs.dtype if out_dtype is None else out_dtype))
    grid = (tiles.row.shape[0], pl.cdiv(n, cfg.block_n))
    return _call(kernel, (lhs, rhs, tiles.group, tiles.row, last), out_shape, grid, cfg, interpret)


def drhs(
    lhs: Array,
    dout: Array,
    group_sizes: Array,
    *,
    out_dtype: Any = None,
    first_row: Array | None = None,
    cfg: TritonConfig | None = None,
    interpret: bool = False,
) -> Array:
    """Returns `[G, K, N]`: rows of lhs of each group, transposed, times its rows of dout."""
    (rows, k), n, groups = lhs.shape, dout.shape[1], group_sizes.shape[0]
    cfg = cfg or triton_space(contraction(lhs, dout, groups, out_dtype=out_dtype))[0]
    starts, ends = bounds(group_sizes, rows, first_row)
    kernel = functools.partial(_drhs_kernel, cfg=cfg, sizes=(rows, k, n))
    out_shape = jax.ShapeDtypeStruct((groups, k, n), jnp.dtype(lhs.dtype if out_dtype is None else out_dtype))
    grid = (pl.cdiv(k, cfg.block_m), pl.cdiv(n, cfg.block_n), groups)
    return _call(kernel, (lhs, dout, starts, ends), out_shape, grid, cfg, interpret)


def _call(kernel: Any, arrays: Any, out_shape: Any, grid: Any, cfg: TritonConfig, interpret: bool) -> Array:
    options = plgpu.CompilerParams(num_warps=cfg.num_warps, num_stages=cfg.num_stages)
    specs: dict[str, Any] = {"grid": grid, "compiler_params": options, "interpret": interpret}
    return pallas_call(kernel, out_shape, **specs)(*arrays)


def _dot(a: Array, b: Array, **transposed: bool) -> Array:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return plgpu.dot(a, b, precision=precision, **transposed)


def _load(ref: Any, rows: Any, columns: Any, *group: Any) -> Array:
    """Loads where both masks are true, zeros elsewhere; each mask comes with its index."""
    (row_index, row_mask), (column_index, column_mask) = rows, columns
    # All indices at once: this dialect of Pallas cannot index a part of a reference (seen with JAX 0.11.2).
    at = ref.at[(*group, row_index, column_index)]
    return plgpu.load(at, mask=row_mask[:, None] & column_mask[None, :], other=0.0)


def _span(begin: Any, size: int, first: Any, end: Any) -> Any:
    """A slice of `size`, and which of its elements lie between `first` and `end`."""
    index = begin + jnp.arange(size, dtype=jnp.int32)
    return pl.ds(begin, size), (index >= first) & (index < end)


def _forward_kernel(lhs_ref, rhs_ref, group_ref, row_ref, end_ref, out_ref, *, cfg, transpose_rhs, sizes):
    _, k, n = sizes
    entry = pl.program_id(0)
    group, row, end = group_ref[entry], row_ref[entry], end_ref[entry]
    rows = _span(row, cfg.block_m, row, end)
    columns = _span(pl.program_id(1) * cfg.block_n, cfg.block_n, 0, n)

    @pl.when(row < end)
    def _():
        own = jnp.maximum(group, 0)

        def step(s, acc):
            depth = _span(s * cfg.block_k, cfg.block_k, 0, k)
            a = _load(lhs_ref, rows, depth)
            if transpose_rhs:
                return acc + _dot(a, _load(rhs_ref, columns, depth, own), trans_b=True)
            return acc + _dot(a, _load(rhs_ref, depth, columns, own))

        steps = jnp.where(group >= 0, jnp.int32(pl.cdiv(k, cfg.block_k)), jnp.int32(0))
        acc = lax.fori_loop(0, steps, step, jnp.zeros((cfg.block_m, cfg.block_n), jnp.float32))
        target = out_ref.at[rows[0], columns[0]]
        plgpu.store(target, acc.astype(out_ref.dtype), mask=rows[1][:, None] & columns[1][None, :])


def _drhs_kernel(lhs_ref, dout_ref, start_ref, end_ref, out_ref, *, cfg, sizes):
    _, k, n = sizes
    group = pl.program_id(2)
    start, end = start_ref[group], end_ref[group]
    rows = _span(pl.program_id(0) * cfg.block_m, cfg.block_m, 0, k)
    columns = _span(pl.program_id(1) * cfg.block_n, cfg.block_n, 0, n)

    def step(s, acc):
        depth = _span(start + s * cfg.block_k, cfg.block_k, start, end)
        return acc + _dot(_load(lhs_ref, depth, rows), _load(dout_ref, depth, columns), trans_a=True)

    steps = lax.div(end - start + (cfg.block_k - 1), jnp.int32(cfg.block_k))
    acc = lax.fori_loop(0, steps, step, jnp.zeros((cfg.block_m, cfg.block_n), jnp.float32))
    target = out_ref.at[group, rows[0], columns[0]]
    plgpu.store(target, acc.astype(out_ref.dtype), mask=rows[1][:, None] & columns[1][None, :])
