"""Grouped products for Hopper: the forward pass, which is dlhs's too.

Persistent blocks walk a list of tiles made on the device. One producer warpgroup loads tiles of both operands into a
ring of shared memory, consumers own a part of the tile each; loads of the next tile run under the store of this one.
A consumer whose rows all belong to other groups computes nothing. `docs/hopper.md` says what each choice gave.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.flash_attention.mosaic_cluster import place_in_cluster, shared_barrier
from ejkernel.kernels.flash_attention.mosaic_launch import SMS, launch, swizzled
from ejkernel.kernels.grouped_matmul.config import ALIGNED_ROWS, STEP, WGMMA_ROWS, MosaicConfig, space
from ejkernel.kernels.grouped_matmul.mosaic_schedule import TOGETHER_COLUMNS, TOGETHER_ROWS, items
from ejkernel.kernels.grouped_matmul.mosaic_store import store_rows

Array = jax.Array
_CLUSTER = "together"


def unsupported(lhs: Any, rhs: Any, *, transpose_rhs: bool = False) -> str | None:
    """Why the forward kernel cannot serve these arrays; `None` if it can."""
    groups, k, n = rhs.shape if not transpose_rhs else (rhs.shape[0], rhs.shape[2], rhs.shape[1])
    if lhs.dtype != rhs.dtype or lhs.dtype not in (jnp.bfloat16, jnp.float16):
        return f"lhs and rhs must both be bfloat16 or both float16, got {lhs.dtype} and {rhs.dtype}"
    if k % STEP or n % STEP:
        return f"K and N must be multiples of {STEP} (columns of a memory tile), got {k} and {n}"
    if 0 in (groups, k, n, lhs.shape[0]):
        return "this kernel takes no empty arrays"
    return None


def forward(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    *,
    transpose_rhs: bool = False,
    out_dtype: Any = None,
    first_row: Array | None = None,
    cfg: MosaicConfig | None = None,
    interpret: Any = None,
    blocks: int = SMS,
) -> Array:
    """Returns `[M, N]`: rows of a group times its weights, zeros in rows of no group.

    `rhs` is `[G, K, N]`, with `transpose_rhs` `[G, N, K]`. The first group begins at `first_row`.
    """
    out_dtype = jnp.dtype(lhs.dtype if out_dtype is None else out_dtype)
    rows, k = lhs.shape
    n = rhs.shape[1] if transpose_rhs else rhs.shape[2]
    cfg = cfg or space(rows, rhs.shape[0], k, n, out_dtype.itemsize)[0]
    if missing := -rows % ALIGNED_ROWS:
        lhs = jnp.pad(lhs, ((0, missing), (0, 0)))
    table, count = items(
        group_sizes,
        rows,
        first_row=first_row,
        block_m=cfg.block_m,
        column_tiles=-(-n // cfg.block_n),
        cluster=cfg.cluster,
        band=cfg.band,
    )
    blocks = min(blocks // cfg.cluster, table.shape[0])
    scratch = {
        "a_smem": swizzled((cfg.stages, cfg.block_m, STEP), lhs.dtype),
        "b_smem": swizzled((cfg.stages, *((cfg.block_n, STEP) if transpose_rhs else (STEP, cfg.block_n))), rhs.dtype),
        "o_smem": staging(cfg, out_dtype),
        "full": plgpu.Barrier(num_barriers=cfg.stages, num_arrivals=2),
        "free": shared_barrier(cfg.cluster, cfg.stages, cfg.consumers),
    }
    body = functools.partial(
        _kernel, cfg=cfg, transpose_rhs=transpose_rhs, blocks=blocks, interpret=bool(interpret), bound=table.shape[0]
    )
    out = launch(
        body,
        *(lhs, rhs, table, count),
        out_type=jax.ShapeDtypeStruct((lhs.shape[0], n), out_dtype),
        blocks=blocks,
        cluster=cfg.cluster,
        consumers=cfg.consumers,
        scratch=scratch,
        interpret=interpret,
    )
    return out[:rows] if missing else out


def staging(cfg: Any, dtype: Any) -> Any:
    """Returns the shared memory that stores go through."""
    columns = 128 // jnp.dtype(dtype).itemsize
    shape = (cfg.consumers, cfg.store_slots, WGMMA_ROWS, cfg.store_columns)
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128)))


def store_whole(out_ref: Any, value: Array, o_smem: Any, row: Any, column: Any, cfg: Any) -> None:
    """Stores a consumer's part of a tile through its shared memory; what lies past the end of `out_ref` is left out."""
    pieces = [
        (r, c) for r in range(0, value.shape[0], WGMMA_ROWS) for c in range(0, value.shape[1], cfg.store_columns)
    ]
    for i, (r, c) in enumerate(pieces):
        plgpu.wait_smem_to_gmem(cfg.store_slots - 1, wait_read_only=True)
        tile = o_smem.at[i % cfg.store_slots]
        tile[...] = value[r : r + WGMMA_ROWS, c : c + cfg.store_columns]
        plgpu.commit_smem()
        at = (pl.ds(row + r, WGMMA_ROWS), pl.ds(column + c, cfg.store_columns))
        plgpu.copy_smem_to_gmem(tile, out_ref.at[at])
    if len(pieces) % cfg.store_slots:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _kernel(
    lhs_ref,
    rhs_ref,
    table_ref,
    count_ref,
    out_ref,
    *,
    cfg: MosaicConfig,
    transpose_rhs: bool,
    blocks: int,
    bound: int,
    interpret: bool,
    a_smem,
    b_smem,
    o_smem,
    full,
    free,
):
    block, wg = lax.axis_index("block"), lax.axis_index("warpgroup")
    place = place_in_cluster(cfg.cluster)
    steps = lhs_ref.shape[1] // STEP
    count = jnp.minimum(count_ref[0], bound)
    mine = lax.div(count - block + (blocks - 1), jnp.int32(blocks))

    def slot_of(step):
        return lax.rem(step, jnp.int32(cfg.stages))

    def tile_of(i):
        """Returns group, first row, and column tile of this block's part of its item `i`, and the item's number."""
        item = block + i * blocks
        group, row, column, mode = (table_ref[item, field] for field in (0, 1, 4, 5))
        if cfg.cluster > 1:
            row = row + jnp.where(mode == TOGETHER_ROWS, place * cfg.block_m, 0)
            column = column + jnp.where(mode == TOGETHER_COLUMNS, place, 0)
        return group, row, column, mode, item

    @pl.when(wg == cfg.consumers)
    def _produce():
        plgpu.set_max_registers(cfg.producer_registers, action="decrease")

        def tile(i, step):
            group, row, column, mode, _ = tile_of(i)
            columns = pl.ds(column * cfg.block_n, cfg.block_n)

            def load(s, _):
                slot = slot_of(step + s)
                depth = pl.ds(s * STEP, STEP)
                a = lhs_ref.at[pl.ds(row, cfg.block_m), depth]
                b = rhs_ref.at[(group, columns, depth) if transpose_rhs else (group, depth, columns)]
                plgpu.barrier_wait(free.at[slot])
                a_copy = functools.partial(plgpu.copy_gmem_to_smem, a, a_smem.at[slot], full.at[slot])
                b_copy = functools.partial(plgpu.copy_gmem_to_smem, b, b_smem.at[slot], full.at[slot])
                if cfg.cluster == 1:
                    a_copy()
                    b_copy()
                    return

                @pl.when(mode == TOGETHER_ROWS)
                def _():
                    a_copy()
                    b_copy(collective_axes=_CLUSTER)

                @pl.when(mode == TOGETHER_COLUMNS)
                def _():
                    a_copy(collective_axes=_CLUSTER)
                    b_copy()

            loads = jnp.where(group >= 0, jnp.int32(steps), 0)
            lax.fori_loop(0, loads, load, None)
            return step + loads

        lax.fori_loop(0, mine, tile, jnp.int32(0))
        # Nothing may be left unseen on a barrier when the block ends, nor may a block end that others still send to.
        for s in range(cfg.stages):
            plgpu.barrier_wait(free.at[s])

    @pl.when(wg < cfg.consumers)
    def _consume():
        plgpu.set_max_registers(cfg.consumer_registers, action="increase")
        for s in range(cfg.stages):
            plgpu.barrier_arrive(free.at[s])
        by_rows = cfg.split == "rows"

        def operands(slot):
            a = a_smem.at[slot, pl.ds(wg * cfg.rows, cfg.rows)] if by_rows else a_smem.at[slot]
            if by_rows:
                b = b_smem.at[slot]
            else:
                part = pl.ds(wg * cfg.columns, cfg.columns)
                b = b_smem.at[slot, part] if transpose_rhs else b_smem.at[slot, :, part]
            return a, b.transpose((1, 0)) if transpose_rhs else b

        def tile(i, step):
            group, row, column, _, item = tile_of(i)
            start, end = table_ref[item, 2], table_ref[item, 3]
            row = row + (wg * cfg.rows if by_rows else 0)
            column = column * cfg.block_n + (0 if by_rows else wg * cfg.columns)
            seen = (row < end) & (row + cfg.rows > start) & (column < out_ref.shape[1])

            def store(value):
                whole = (row >= start) & (row + cfg.rows <= end)
                pl.when(whole)(lambda: store_whole(out_ref, value, o_smem.at[wg], row, column, cfg))

                @pl.when(~whole)
                def _():
                    for r in range(0, cfg.rows, WGMMA_ROWS):
                        part = value[r : r + WGMMA_ROWS]
                        store_rows(out_ref, part, row + r, column, start, end, interpret=interpret)

            def multiply(acc):
                def product(s):
                    slot = slot_of(step + s)
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma(acc, *operands(slot))

                product(0)

                def advance(s, _):
                    product(s)
                    plgpu.wgmma_wait(1)
                    plgpu.barrier_arrive(free.at[slot_of(step + s - 1)])

                lax.fori_loop(1, steps, advance, None)
                value = acc[...]
                plgpu.barrier_arrive(free.at[slot_of(step + (steps - 1))])
                return value.astype(out_ref.dtype)

            def drain(s, _):
                slot = slot_of(step + s)
                plgpu.barrier_wait(full.at[slot])
                plgpu.barrier_arrive(free.at[slot])

            @pl.when(seen & (group >= 0))
            def _():
                store(pl.run_scoped(multiply, plgpu.ACC((cfg.rows, cfg.columns), jnp.float32)))

            @pl.when(~seen & (group >= 0))
            def _():
                lax.fori_loop(0, steps, drain, None)

            @pl.when(seen & (group < 0))
            def _():
                shape = (cfg.rows, cfg.columns)
                store(plgpu.layout_cast(jnp.zeros(shape, out_ref.dtype), plgpu.Layout.WGMMA))

            return step + jnp.where(group >= 0, jnp.int32(steps), 0)

        lax.fori_loop(0, mine, tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)
