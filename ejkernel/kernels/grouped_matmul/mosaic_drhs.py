"""Grouped products for Hopper: the gradient of the weights, whose contraction is over the rows of a group.

Blocks walk the tiles of all groups, those of the largest first: then tiles of about equal length run at a time. Rows of
neighbouring groups in the first and the last step of a group are made zeros in shared memory, in both operands: zero
times something that is not finite would not be zero.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.flash_attention.mosaic_cluster import place_in_cluster, shared_barrier, shared_load
from ejkernel.kernels.flash_attention.mosaic_launch import SMS, launch, swizzled
from ejkernel.kernels.flash_attention.mosaic_wgmma import layout_cast
from ejkernel.kernels.grouped_matmul.config import ALIGNED_ROWS, STEP, MosaicDrhsConfig, drhs_space
from ejkernel.kernels.grouped_matmul.groups import bounds
from ejkernel.kernels.grouped_matmul.mosaic import staging, store_whole

Array = jax.Array
_ROWS = plgpu.Layout.WGMMA.reduce(1)


def unsupported(lhs: Any, dout: Any) -> str | None:
    """Why the kernel cannot serve these arrays; `None` if it can."""
    (rows, k), n = lhs.shape, dout.shape[1]
    if lhs.dtype != dout.dtype or lhs.dtype not in (jnp.bfloat16, jnp.float16):
        return f"lhs and dout must both be bfloat16 or both float16, got {lhs.dtype} and {dout.dtype}"
    if k % STEP or n % STEP:
        return f"K and N must be multiples of {STEP} (columns of a memory tile), got {k} and {n}"
    if 0 in (rows, k, n):
        return "this kernel takes no empty arrays"
    return None


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
    cfg = cfg or drhs_space(rows, groups, k, n, out_dtype.itemsize)[0]
    if missing := -rows % ALIGNED_ROWS:
        lhs, dout = (jnp.pad(x, ((0, missing), (0, 0))) for x in (lhs, dout))
    row_tiles, column_tiles = -(-k // (cfg.block_m * cfg.cluster)), -(-n // cfg.block_n)
    blocks = min(blocks // cfg.cluster, groups * row_tiles * column_tiles)
    scratch = {
        "a_smem": swizzled((cfg.stages, STEP, cfg.block_m), lhs.dtype),
        "b_smem": swizzled((cfg.stages, STEP, cfg.block_n), dout.dtype),
        "o_smem": staging(cfg, out_dtype),
        "full": plgpu.Barrier(num_barriers=cfg.stages, num_arrivals=2),
        "free": shared_barrier(cfg.cluster, cfg.stages, cfg.consumers),
        "masked": plgpu.Barrier(num_arrivals=cfg.consumers),
    }
    body = functools.partial(_kernel, cfg=cfg, tiles=(row_tiles, column_tiles), blocks=blocks)
    return launch(
        body,
        *(lhs, dout, _largest_first(group_sizes, rows, first_row)),
        out_type=jax.ShapeDtypeStruct((groups, k, n), out_dtype),
        blocks=blocks,
        cluster=cfg.cluster,
        consumers=cfg.consumers,
        scratch=scratch,
        interpret=interpret,
    )


def _largest_first(group_sizes: Array, rows: int, first_row: Array | None) -> Array:
    """Group, first row and end of each group, `[G, 3]`, by falling size."""
    starts, ends = bounds(group_sizes, rows, first_row)
    sizes, index = ends - starts, jnp.arange(starts.shape[0], dtype=jnp.int32)
    # A sort would be several kernels; this is one.
    larger = (sizes[None] > sizes[:, None]) | ((sizes[None] == sizes[:, None]) & (index[None] < index[:, None]))
    rank = larger.sum(axis=1, dtype=jnp.int32)
    facts = jnp.stack([index, starts, ends], axis=1)
    return jnp.where((rank[None] == index[:, None])[:, :, None], facts[None], 0).sum(axis=1, dtype=jnp.int32)


def _kernel(
    lhs_ref,
    dout_ref,
    table_ref,
    out_ref,
    *,
    cfg: MosaicDrhsConfig,
    tiles: tuple[int, int],
    blocks: int,
    a_smem,
    b_smem,
    o_smem,
    full,
    free,
    masked,
):
    block, wg = lax.axis_index("block"), lax.axis_index("warpgroup")
    place = place_in_cluster(cfg.cluster)
    row_tiles, column_tiles = tiles
    per_group = row_tiles * column_tiles
    mine = lax.div(out_ref.shape[0] * per_group - block + (blocks - 1), jnp.int32(blocks))

    def slot_of(step):
        return lax.rem(step, jnp.int32(cfg.stages))

    def tile_of(i):
        """Returns group, its first row and end, the steps over them, and row and column of this block's tile."""
        item = block + i * blocks
        rank = lax.div(item, jnp.int32(per_group))
        group, start, end = (table_ref[rank, field] for field in range(3))
        local = item - rank * per_group
        band = lax.div(local, jnp.int32(cfg.band * column_tiles))
        height = jnp.minimum(row_tiles - band * cfg.band, cfg.band)
        local = local - band * (cfg.band * column_tiles)
        column = lax.div(local, height)
        row = (band * cfg.band + (local - column * height)) * cfg.cluster + place
        base = start - lax.rem(start, jnp.int32(ALIGNED_ROWS))
        steps = jnp.where(end > start, lax.div(end - base + (STEP - 1), jnp.int32(STEP)), 0)
        return group, start, end, base, steps, row * cfg.block_m, column * cfg.block_n

    @pl.when(wg == cfg.consumers)
    def _produce():
        plgpu.set_max_registers(cfg.producer_registers, action="decrease")

        def tile(i, step):
            _, _, _, base, steps, row, column = tile_of(i)

            def load(s, _):
                slot = slot_of(step + s)
                depth = pl.ds(base + s * STEP, STEP)
                plgpu.barrier_wait(free.at[slot])
                a, b = lhs_ref.at[depth, pl.ds(row, cfg.block_m)], dout_ref.at[depth, pl.ds(column, cfg.block_n)]
                plgpu.copy_gmem_to_smem(a, a_smem.at[slot], full.at[slot])
                shared_load(cfg.cluster, b, b_smem.at[slot], full.at[slot])

            lax.fori_loop(0, steps, load, None)
            return step + steps

        lax.fori_loop(0, mine, tile, jnp.int32(0))
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
            """Makes rows before `first` and from `last` on zeros; the consumers share out the pieces of 64 columns."""
            row = plgpu.broadcasted_iota(jnp.int32, (STEP,), 0, layout=_ROWS)
            inside = lax.broadcast_in_dim((row >= first) & (row < last), (STEP, 64), [0])
            for smem, width in ((a_smem, cfg.block_m), (b_smem, cfg.block_n)):
                for c in range(0, width, 64):

                    @pl.when(wg == (c // 64) % cfg.consumers)
                    def _(smem=smem, c=c):
                        piece = smem.at[slot, :, pl.ds(c, 64)]
                        value = plgpu.load(piece, layout=plgpu.Layout.WGMMA)
                        piece[...] = jnp.where(inside, value, jnp.zeros_like(value))

            plgpu.commit_smem()
            plgpu.barrier_arrive(masked)
            plgpu.barrier_wait(masked)

        def tile(i, step):
            group, start, end, base, steps, row, column = tile_of(i)
            row = row + (wg * cfg.rows if by_rows else 0)
            column = column + (0 if by_rows else wg * cfg.columns)

            def multiply(acc):
                def product(s):
                    slot = slot_of(step + s)
                    plgpu.barrier_wait(full.at[slot])
                    first, last = start - base - s * STEP, end - base - s * STEP
                    pl.when((first > 0) | (last < STEP))(lambda: mask(slot, first, last))
                    plgpu.wgmma(acc, *operands(slot))

                product(0)

                def advance(s, _):
                    product(s)
                    plgpu.wgmma_wait(1)
                    plgpu.barrier_arrive(free.at[slot_of(step + s - 1)])

                lax.fori_loop(1, steps, advance, None)
                value = acc[...]
                plgpu.barrier_arrive(free.at[slot_of(step + steps - 1)])
                return value.astype(out_ref.dtype)

            def store(value):
                store_whole(out_ref.at[group], value, o_smem.at[wg], row, column, cfg)

            shape = (cfg.rows, cfg.columns)

            @pl.when(steps > 0)
            def _():
                store(pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32)))

            @pl.when(steps == 0)
            def _():
                store(layout_cast(jnp.zeros(shape, out_ref.dtype), plgpu.Layout.WGMMA))

            return step + steps

        lax.fori_loop(0, mine, tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)
