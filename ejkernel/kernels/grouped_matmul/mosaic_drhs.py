"""Grouped products for Hopper: the gradient of the weights, whose contraction is over the rows of a group.

Blocks go through the tiles of all groups, those of the largest first, so that tiles of similar length run at the same
time. Rows of neighbouring groups in the first and the last step of a group are made zeros in shared memory, in both
operands: zero times infinity or NaN is not zero.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.grouped_matmul.config import ALIGNED_ROWS, STEP, MosaicDrhsConfig, drhs_space
from ejkernel.kernels.grouped_matmul.mosaic import (
    follow,
    lead,
    lead_out,
    multiply,
    staging,
    store,
    walk,
)
from ejkernel.kernels.grouped_matmul.mosaic_schedule import largest_first
from ejkernel.kernels.grouped_matmul.mosaic_store import zero_rows
from ejkernel.kernels.grouped_matmul.problem import contraction
from ejkernel.kernels.hopper.chip import SMS
from ejkernel.kernels.hopper.cluster import place_in_cluster, shared_barrier, shared_load
from ejkernel.kernels.hopper.launch import launch, swizzled
from ejkernel.kernels.hopper.wgmma import layout_cast

Array = jax.Array


def drhs(
    lhs: Array,
    dout: Array,
    group_sizes: Array,
    *,
    out_dtype: Any = None,
    first_row: Array | None = None,
    cfg: MosaicDrhsConfig | None = None,
    interpret: Any = None,
    blocks: int = SMS,
) -> Array:
    """Returns `[G, K, N]`: rows of lhs of each group, transposed, times its rows of dout."""
    out_dtype = jnp.dtype(lhs.dtype if out_dtype is None else out_dtype)
    (rows, k), n, groups = lhs.shape, dout.shape[1], group_sizes.shape[0]
    cfg = cfg or drhs_space(contraction(lhs, dout, groups, out_dtype=out_dtype))[0]
    if missing := -rows % ALIGNED_ROWS:
        lhs, dout = (jnp.pad(x, ((0, missing), (0, 0))) for x in (lhs, dout))
    row_tiles, column_tiles = -(-k // (cfg.block_m * cfg.cluster)), -(-n // cfg.block_n)
    blocks = min(blocks // cfg.cluster, groups * row_tiles * column_tiles)
    scratch = {
        "a_smem": swizzled((cfg.stages, STEP, cfg.block_m), lhs.dtype),
        "b_smem": swizzled((cfg.stages, STEP, cfg.block_n), dout.dtype),
        "o_smem": staging(cfg, out_dtype),
        "full": plgpu.Barrier(num_barriers=cfg.stages, num_arrivals=2),
        "masked": plgpu.Barrier(num_barriers=cfg.stages),
        "free": shared_barrier(cfg.cluster, cfg.stages, cfg.consumers),
        "ahead": plgpu.Barrier(),
    }
    body = functools.partial(
        _kernel, cfg=cfg, tiles=(row_tiles, column_tiles), blocks=blocks, interpret=bool(interpret)
    )
    return launch(
        body,
        *(lhs, dout, *largest_first(group_sizes, rows, first_row)),
        out_type=jax.ShapeDtypeStruct((groups, k, n), out_dtype),
        blocks=blocks,
        cluster=cfg.cluster,
        consumers=cfg.consumers,
        scratch=scratch,
        interpret=interpret,
    )


def _kernel(
    lhs_ref,
    dout_ref,
    group_ref,
    start_ref,
    end_ref,
    out_ref,
    *,
    cfg: MosaicDrhsConfig,
    tiles: tuple[int, int],
    blocks: int,
    interpret: bool,
    a_smem,
    b_smem,
    o_smem,
    full,
    masked,
    free,
    ahead,
):
    block, wg = lax.axis_index("block"), lax.axis_index("warpgroup")
    place = place_in_cluster(cfg.cluster)
    row_tiles, column_tiles = tiles
    groups, per_group = out_ref.shape[0], row_tiles * column_tiles
    mine = lax.div(groups * per_group - block + (blocks - 1), jnp.int32(blocks))

    def slot_of(step):
        return lax.rem(step, jnp.int32(cfg.stages))

    def fetch(i):
        """Reads the group of this block's item `i`; it is used one tile later, so the load costs no time."""
        rank = jnp.minimum(lax.div(block + i * blocks, jnp.int32(per_group)), groups - 1)
        return group_ref[rank], start_ref[rank], end_ref[rank]

    def decode(i, fields):
        """This block's part of its item `i`, and the steps over the group's rows."""
        group, start, end = fields
        local = lax.rem(block + i * blocks, jnp.int32(per_group))
        band = lax.div(local, jnp.int32(cfg.band * column_tiles))
        height = jnp.minimum(row_tiles - band * cfg.band, cfg.band)
        local = local - band * (cfg.band * column_tiles)
        column = lax.div(local, height)
        row = (band * cfg.band + (local - column * height)) * cfg.cluster + place
        base = start - lax.rem(start, jnp.int32(ALIGNED_ROWS))
        steps = jnp.where(end > start, lax.div(end - base + (STEP - 1), jnp.int32(STEP)), 0)
        return (group, start, end, base, row * cfg.block_m, column * cfg.block_n), steps

    @pl.when(wg == cfg.consumers)
    def _produce():
        plgpu.set_max_registers(cfg.producer_registers, action="decrease")

        def tile(item, steps, step):
            _, _, _, base, row, column = item

            def load(s, _):
                slot = slot_of(step + s)
                depth = pl.ds(base + s * STEP, STEP)
                plgpu.barrier_wait(free.at[slot])
                a, b = lhs_ref.at[depth, pl.ds(row, cfg.block_m)], dout_ref.at[depth, pl.ds(column, cfg.block_n)]
                plgpu.copy_gmem_to_smem(a, a_smem.at[slot], full.at[slot])
                shared_load(cfg.cluster, b, b_smem.at[slot], full.at[slot])

            lax.fori_loop(0, steps, load, None)

        walk(mine, fetch, decode, tile)
        for s in range(cfg.stages):
            plgpu.barrier_wait(free.at[s])

    @pl.when(wg < cfg.consumers)
    def _consume():
        plgpu.set_max_registers(cfg.consumer_registers, action="increase")
        for s in range(cfg.stages):
            plgpu.barrier_arrive(free.at[s])
        by_rows = cfg.split == "rows"

        def operands(slot):
            if by_rows:
                return a_smem.at[slot, :, pl.ds(wg * cfg.rows, cfg.rows)].transpose((1, 0)), b_smem.at[slot]
            return a_smem.at[slot].transpose((1, 0)), b_smem.at[slot, :, pl.ds(wg * cfg.columns, cfg.columns)]

        def mask(slot, first, last):
            """Zeroes rows before `first` and from `last` on: each its own part, the first also the shared operand."""
            own, shared = (a_smem, b_smem) if by_rows else (b_smem, a_smem)
            width = cfg.rows if by_rows else cfg.columns
            zero_rows(own.at[slot, :, pl.ds(wg * width, width)], first, last, interpret=interpret)
            pl.when(wg == 0)(lambda: zero_rows(shared.at[slot], first, last, interpret=interpret))
            plgpu.commit_smem()
            if cfg.consumers > 1:
                pl.when(wg == 0)(lambda: plgpu.barrier_arrive(masked.at[slot]))
                pl.when(wg > 0)(lambda: plgpu.barrier_wait(masked.at[slot]))

        def tile(item, steps, step):
            group, start, end, base, row, column = item
            row = row + (wg * cfg.rows if by_rows else 0)
            column = column + (0 if by_rows else wg * cfg.columns)
            save = functools.partial(store, out_ref.at[group], o_smem=o_smem.at[wg], row=row, column=column, cfg=cfg)

            @pl.when(steps > 0)
            def _():
                def prepare(s, slot):
                    first, last = start - base - s * STEP, end - base - s * STEP
                    pl.when((first > 0) | (last < STEP))(lambda: mask(slot, first, last))

                parts = functools.partial(multiply, slot_of=slot_of, operands=operands, full=full, free=free)
                value = parts(cfg, step, steps, lambda s: lead(cfg, wg, ahead, s), prepare=prepare)
                save(value.astype(out_ref.dtype), interpret=interpret)

            @pl.when(steps == 0)
            def _():
                zeros = layout_cast(jnp.zeros((cfg.rows, cfg.columns), out_ref.dtype), plgpu.Layout.WGMMA)
                save(zeros, interpret=interpret)

        follow(cfg, wg, ahead)
        done = walk(mine, fetch, decode, tile)
        lead_out(cfg, wg, ahead, done)
        plgpu.wait_smem_to_gmem(0)
