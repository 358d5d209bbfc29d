"""Grouped products for Hopper: the gradient of the weights, whose contraction is over the rows of a group.

Blocks go through the tiles of all groups, by default those of the largest first, so that tiles of similar length run at
the same time. Rows of neighbouring groups in the first and the last step of a group are made zeros in shared memory, in
both operands: zero times infinity or NaN is not zero. One warp loads, one makes zeros, two warpgroups compute and
store.
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
from ejkernel.kernels.grouped_matmul.dimensions import contraction
from ejkernel.kernels.grouped_matmul.mosaic_pipeline import Ring, walk
from ejkernel.kernels.grouped_matmul.mosaic_rows_store import staging, store, zero_rows
from ejkernel.kernels.grouped_matmul.mosaic_tables import ordered
from ejkernel.kernels.hopper.chip import SMS, WGMMA_ROWS
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
    if rows % ALIGNED_ROWS or k % STEP or n % STEP:
        # The copy engine takes whole memory tiles only: odd sizes cost a copy.
        lhs, dout = (
            jnp.pad(x, [(0, -d % by) for d, by in zip(x.shape, (ALIGNED_ROWS, STEP), strict=True)]) for x in (lhs, dout)
        )
    k_aligned, n_aligned = lhs.shape[1], dout.shape[1]
    row_tiles, column_tiles = -(-k_aligned // (cfg.height * cfg.cluster)), -(-n_aligned // cfg.width)
    blocks = min(blocks // cfg.cluster, groups * row_tiles * column_tiles)
    scratch = {
        "a_smem": swizzled((cfg.stages, STEP, cfg.height), lhs.dtype),
        "b_smem": swizzled((cfg.stages, STEP, cfg.width), dout.dtype),
        "o_smem": staging(cfg, out_dtype),
        "full": plgpu.Barrier(num_barriers=cfg.stages, num_arrivals=2),
        "ready": plgpu.Barrier(num_barriers=cfg.stages),
        "free": shared_barrier(cfg.cluster, cfg.stages, cfg.consumers),
        "ahead": plgpu.Barrier(),
    }
    body = functools.partial(
        _kernel, cfg=cfg, tiles=(row_tiles, column_tiles), blocks=blocks, interpret=bool(interpret)
    )
    out = launch(
        body,
        *(lhs, dout, *ordered(group_sizes, rows, first_row, cfg.order)),
        out_type=jax.ShapeDtypeStruct((groups, k_aligned, n_aligned), out_dtype),
        blocks=blocks,
        cluster=cfg.cluster,
        consumers=cfg.consumers,
        scratch=scratch,
        interpret=interpret,
    )
    return out if out.shape == (groups, k, n) else out[:, :k, :n]


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
    ready,
    free,
    ahead,
):
    block, wg = lax.axis_index("block"), lax.axis_index("warpgroup")
    ring = Ring(cfg, wg, full, free, ahead)
    place = place_in_cluster(cfg.cluster)
    row_tiles, column_tiles = tiles
    groups, per_group = out_ref.shape[0], row_tiles * column_tiles
    mine = lax.div(groups * per_group - block + (blocks - 1), jnp.int32(blocks))

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
        return (group, start, end, base, row * cfg.height, column * cfg.width), steps

    @ring.produce
    def _():
        def load_tile(item, steps, step, _):
            _, _, _, base, row, column = item

            def load(s, _):
                slot = ring.slot(step + s)
                depth = pl.ds(base + s * STEP, STEP)
                plgpu.barrier_wait(free.at[slot])
                a, b = lhs_ref.at[depth, pl.ds(row, cfg.height)], dout_ref.at[depth, pl.ds(column, cfg.width)]
                plgpu.copy_gmem_to_smem(a, a_smem.at[slot], full.at[slot])
                shared_load(cfg.cluster, b, b_smem.at[slot], full.at[slot])

            lax.fori_loop(0, steps, load, None)

        def mask_tile(item, steps, step, _):
            _, start, end, base, _, _ = item

            def mask(s, _):
                slot = ring.slot(step + s)
                first, last = start - base - s * STEP, end - base - s * STEP
                plgpu.barrier_wait(full.at[slot])

                @pl.when((first > 0) | (last < STEP))
                def _():
                    for ref in (a_smem, b_smem):
                        zero_rows(ref.at[slot], first, last, interpret=interpret)

                plgpu.barrier_arrive(ready.at[slot])

            lax.fori_loop(0, steps, mask, None)

        @plgpu.warp_map
        def _(warp):
            @pl.when(warp == 0)
            def _():
                walk(mine, fetch, decode, load_tile)
                ring.wait()

            @pl.when(warp == 1)
            def _():
                walk(mine, fetch, decode, mask_tile)

    @ring.consume
    def _():
        def operands(slot):
            return a_smem.at[slot, :, pl.ds(wg * WGMMA_ROWS, WGMMA_ROWS)].transpose((1, 0)), b_smem.at[slot]

        def save(held):
            """Stores what is held, if anything is."""
            value, group, row, column = held
            at = {"row": row, "column": column, "o_smem": o_smem.at[wg], "cfg": cfg}
            pl.when(row >= 0)(lambda: store(out_ref.at[group], value, **at, interpret=interpret))

        def zeros():
            return layout_cast(jnp.zeros((WGMMA_ROWS, cfg.width), out_ref.dtype), plgpu.Layout.WGMMA)

        def tile(item, steps, step, held, before):
            group, _, _, _, row, column = item

            def compute():
                masked = lambda slot: plgpu.barrier_wait(ready.at[slot])
                value = ring.multiply((WGMMA_ROWS, cfg.width), step, steps, operands, masked, before)
                return value.astype(out_ref.dtype)

            def nothing():
                before()
                return zeros()

            return lax.cond(steps > 0, compute, nothing), group, row + wg * WGMMA_ROWS, column

        none = zeros(), jnp.int32(0), jnp.int32(-1), jnp.int32(0)
        return ring.tiles(functools.partial(walk, mine, fetch, decode), tile, save, none)
