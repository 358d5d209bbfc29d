"""The forward pass on Hopper with rows of lhs as the left operand of the matrix units: for groups of many rows.

Each consumer owns 64 rows of a tile. One whose rows all belong to other groups computes nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.grouped_matmul.config import ALIGNED_ROWS, STEP, MosaicConfig
from ejkernel.kernels.grouped_matmul.mosaic_pipeline import follow, lead, lead_out, multiply, walk
from ejkernel.kernels.grouped_matmul.mosaic_rows_items import (
    Item,
    Tiling,
    item_of_group,
    item_of_zeros,
    items,
    zero_items,
)
from ejkernel.kernels.grouped_matmul.mosaic_rows_store import staging, store
from ejkernel.kernels.grouped_matmul.mosaic_tables import extent
from ejkernel.kernels.hopper.chip import WGMMA_ROWS
from ejkernel.kernels.hopper.cluster import AXIS, place_in_cluster, shared_barrier
from ejkernel.kernels.hopper.launch import launch, swizzled
from ejkernel.kernels.hopper.wgmma import layout_cast

Array = jax.Array


def forward(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    *,
    transpose_rhs: bool,
    out_dtype: jnp.dtype,
    first_row: Array | None,
    cfg: MosaicConfig,
    interpret: Any,
    blocks: int,
) -> Array:
    """As `mosaic.forward`."""
    rows = lhs.shape[0]
    n = rhs.shape[1] if transpose_rhs else rhs.shape[2]
    if missing := -rows % ALIGNED_ROWS:
        lhs = jnp.pad(lhs, ((0, missing), (0, 0)))
    tiling = Tiling(cfg.height, -(-n // cfg.width), cfg.cluster, cfg.band, cfg.halves, cfg.order)
    table, facts = items(group_sizes, rows, tiling, first_row)
    blocks = min(blocks // cfg.cluster, table[0].shape[0])
    scratch = {
        "a_smem": swizzled((cfg.stages, cfg.height, STEP), lhs.dtype),
        "b_smem": swizzled((cfg.stages, *((cfg.width, STEP) if transpose_rhs else (STEP, cfg.width))), rhs.dtype),
        "o_smem": staging(cfg, out_dtype),
        "full": plgpu.Barrier(num_barriers=cfg.stages, num_arrivals=2),
        "free": shared_barrier(cfg.cluster, cfg.stages, cfg.consumers),
        "ahead": plgpu.Barrier(),
    }
    body = functools.partial(
        _kernel,
        cfg=cfg,
        tiling=tiling,
        rows=rows,
        transpose_rhs=transpose_rhs,
        blocks=blocks,
        interpret=bool(interpret),
    )
    out = launch(
        body,
        *(lhs, rhs, *table, *facts),
        out_type=jax.ShapeDtypeStruct((lhs.shape[0], n), out_dtype),
        blocks=blocks,
        cluster=cfg.cluster,
        consumers=cfg.consumers,
        scratch=scratch,
        interpret=interpret,
    )
    return out[:rows] if missing else out


def _kernel(
    lhs_ref,
    rhs_ref,
    *refs: Any,
    cfg: MosaicConfig,
    tiling: Tiling,
    rows: int,
    transpose_rhs: bool,
    blocks: int,
    interpret: bool,
    a_smem,
    b_smem,
    o_smem,
    full,
    free,
    ahead,
):
    *table_refs, total_ref, ends_ref, first_ref, out_ref = refs
    block, wg = lax.axis_index("block"), lax.axis_index("warpgroup")
    place = place_in_cluster(cfg.cluster)
    steps = lhs_ref.shape[1] // STEP
    count, first, end = extent(total_ref, ends_ref, first_ref, rows)
    mine = lax.div(count + zero_items(tiling, rows, first, end) - block + (blocks - 1), jnp.int32(blocks))
    last_item = table_refs[0].shape[0] - 1

    def slot_of(step):
        return lax.rem(step, jnp.int32(cfg.stages))

    def fetch(i):
        """Reads the table's row for this block's item `i`; it is used one tile later, so the load costs no time."""
        return tuple(ref[jnp.minimum(block + i * blocks, last_item)] for ref in table_refs)

    def decode(i, fields):
        """This block's part of its item `i`, and how many steps the whole cluster makes for it."""
        number = block + i * blocks
        item = item_of_group(tiling, fields, number)
        other = item_of_zeros(tiling, rows, first, end, number - count)
        pick = lambda a, b: jnp.where(number < count, a, b)
        item = Item(*(pick(getattr(item, f.name), getattr(other, f.name)) for f in dataclasses.fields(Item)))
        loads = jnp.where((number < count) & (item.row < item.end), jnp.int32(steps), 0)
        row, column = item.row, item.column
        if cfg.cluster > 1:
            row = row + jnp.where(item.alone, 0, place * cfg.height)
            column = column + jnp.where(item.alone, place, 0)
        return dataclasses.replace(item, row=row, column=column * cfg.width), loads

    @pl.when(wg == cfg.consumers)
    def _produce():
        plgpu.set_max_registers(cfg.producer_registers, action="decrease")

        def tile(item, loads, step):
            columns = pl.ds(item.column, cfg.width)

            def load(s, _):
                slot = slot_of(step + s)
                depth = pl.ds(s * STEP, STEP)
                a = lhs_ref.at[pl.ds(item.row, cfg.height), depth]
                b = rhs_ref.at[(item.group, columns, depth) if transpose_rhs else (item.group, depth, columns)]
                plgpu.barrier_wait(free.at[slot])
                a_copy = functools.partial(plgpu.copy_gmem_to_smem, a, a_smem.at[slot], full.at[slot])
                b_copy = functools.partial(plgpu.copy_gmem_to_smem, b, b_smem.at[slot], full.at[slot])
                if cfg.cluster == 1:
                    a_copy()
                    b_copy()
                    return

                @pl.when(~item.alone)
                def _():
                    a_copy()
                    b_copy(collective_axes=AXIS)

                @pl.when(item.alone)
                def _():
                    a_copy(collective_axes=AXIS)
                    b_copy()

            lax.fori_loop(0, loads, load, None)

        walk(mine, fetch, decode, tile)
        # All barrier arrivals must be waited for before a block ends, and so must data that other blocks still send.
        for s in range(cfg.stages):
            plgpu.barrier_wait(free.at[s])

    @pl.when(wg < cfg.consumers)
    def _consume():
        plgpu.set_max_registers(cfg.consumer_registers, action="increase")
        for s in range(cfg.stages):
            plgpu.barrier_arrive(free.at[s])

        def operands(slot):
            b = b_smem.at[slot]
            return a_smem.at[slot, pl.ds(wg * WGMMA_ROWS, WGMMA_ROWS)], b.transpose((1, 0)) if transpose_rhs else b

        def tile(item, loads, step):
            row, column = item.row + wg * WGMMA_ROWS, item.column
            seen = (row < item.end) & (row + WGMMA_ROWS > item.start) & (column < out_ref.shape[1])
            save = functools.partial(store, out_ref, o_smem=o_smem.at[wg], row=row, column=column, cfg=cfg)
            save = functools.partial(save, keep=(item.start, item.end), interpret=interpret)

            def drain(s, _):
                slot = slot_of(step + s)
                plgpu.barrier_wait(full.at[slot])
                lead(cfg, wg, ahead, step + s)
                plgpu.barrier_arrive(free.at[slot])

            @pl.when(seen & (loads > 0))
            def _():
                parts = functools.partial(multiply, slot_of=slot_of, operands=operands, full=full, free=free)
                value = parts((WGMMA_ROWS, cfg.width), step, steps, lambda s: lead(cfg, wg, ahead, s))
                save(value.astype(out_ref.dtype))

            @pl.when(~seen & (loads > 0))
            def _():
                lax.fori_loop(0, loads, drain, None)

            @pl.when(seen & (item.group < 0))
            def _():
                save(layout_cast(jnp.zeros((WGMMA_ROWS, cfg.width), out_ref.dtype), plgpu.Layout.WGMMA))

        follow(cfg, wg, ahead)
        done = walk(mine, fetch, decode, tile)
        lead_out(cfg, wg, ahead, done)
        plgpu.wait_smem_to_gmem(0)
