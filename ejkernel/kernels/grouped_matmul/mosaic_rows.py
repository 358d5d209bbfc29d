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

from ejkernel.kernels.grouped_matmul.config import STEP, MosaicConfig
from ejkernel.kernels.grouped_matmul.mosaic_pipeline import Ring
from ejkernel.kernels.grouped_matmul.mosaic_rows_items import Tiling
from ejkernel.kernels.grouped_matmul.mosaic_rows_store import staging, store
from ejkernel.kernels.grouped_matmul.mosaic_work import Work
from ejkernel.kernels.hopper.chip import WGMMA_ROWS
from ejkernel.kernels.hopper.cluster import AXIS, place_in_cluster
from ejkernel.kernels.hopper.launch import swizzled
from ejkernel.kernels.hopper.wgmma import layout_cast

Array = jax.Array


def tiling(cfg: MosaicConfig, n: int) -> Tiling:
    """How the result is cut."""
    return Tiling(cfg.height, -(-n // cfg.width), cfg.cluster, cfg.band, cfg.halves, cfg.order)


def scratch(cfg: MosaicConfig, dtype: Any, out_dtype: Any, *, transpose_rhs: bool, interpret: Any) -> dict[str, Any]:
    """The memory of a block, and the barriers on which its producer arrives."""
    return {
        "a_smem": swizzled((cfg.stages, cfg.height, STEP), dtype),
        "b_smem": swizzled((cfg.stages, *((cfg.width, STEP) if transpose_rhs else (STEP, cfg.width))), dtype),
        "o_smem": staging(cfg, out_dtype),
        "full": plgpu.Barrier(num_barriers=cfg.stages, num_arrivals=2),
    }


def kernel(
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
) -> None:
    """What a warpgroup does."""
    *table_refs, out_ref = refs
    block, wg = lax.axis_index("block"), lax.axis_index("warpgroup")
    place = place_in_cluster(cfg.cluster)
    steps = lhs_ref.shape[1] // STEP
    work, ring = Work(tiling, table_refs, rows, block, blocks), Ring(cfg, wg, full, free, ahead)

    def decode(number, item):
        """This block's part of an item, and how many steps the whole cluster makes for it."""
        loads = jnp.where((number < work.count) & (item.row < item.end), jnp.int32(steps), 0)
        row, column = item.row, item.column
        if cfg.cluster > 1:
            row = row + jnp.where(item.alone, 0, place * cfg.height)
            column = column + jnp.where(item.alone, place, 0)
        return dataclasses.replace(item, row=row, column=column * cfg.width), loads

    @ring.produce
    def _():
        def tile(item, loads, step, _):
            columns = pl.ds(item.column, cfg.width)

            def load(s, _):
                slot = ring.slot(step + s)
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

        work.walk(decode, tile)
        ring.wait()

    @ring.consume
    def _():
        def operands(slot):
            b = b_smem.at[slot]
            return a_smem.at[slot, pl.ds(wg * WGMMA_ROWS, WGMMA_ROWS)], b.transpose((1, 0)) if transpose_rhs else b

        def save(held):
            """Stores what is held, if anything is."""
            value, row, column, *keep = held
            at = {"row": row, "column": column, "keep": keep, "o_smem": o_smem.at[wg], "cfg": cfg}
            pl.when(row >= 0)(lambda: store(out_ref, value, **at, interpret=interpret))

        def zeros():
            return layout_cast(jnp.zeros((WGMMA_ROWS, cfg.width), out_ref.dtype), plgpu.Layout.WGMMA)

        def tile(item, loads, step, held, before):
            row, column = item.row + wg * WGMMA_ROWS, item.column
            seen = (row < item.end) & (row + WGMMA_ROWS > item.start) & (column < out_ref.shape[1])
            pl.when(~seen & (loads > 0))(functools.partial(ring.skip, step, loads))

            def compute():
                value = ring.multiply((WGMMA_ROWS, cfg.width), step, steps, operands, meanwhile=before)
                return value.astype(out_ref.dtype), row, column, item.start, item.end

            def nothing():
                before()
                return zeros(), row, column, item.start, item.end

            which = jnp.where(loads > 0, 1, jnp.where(item.group < 0, 2, 0))
            return lax.switch(jnp.where(seen, which, 0), [lambda: held, compute, nothing])

        none = zeros(), *(jnp.int32(x) for x in (-1, 0, 0, 0))
        return ring.tiles(functools.partial(work.walk, decode), tile, save, none)
