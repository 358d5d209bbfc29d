"""Grouped products for Hopper: the forward pass, which also computes dlhs.

Persistent blocks go through a list of tiles that is made on the device. One producer warpgroup loads tiles of both
operands into a ring of shared memory, consumers own a part of the tile each; loads of the next tile overlap the store
of this one. A consumer whose rows all belong to other groups computes nothing. `docs/hopper_grouped_matmul.md` has the
measured effect of each choice.
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

from ejkernel.kernels.grouped_matmul.config import ALIGNED_ROWS, STEP, MosaicConfig, space
from ejkernel.kernels.grouped_matmul.mosaic_schedule import (
    Item,
    Tiling,
    extent,
    item_of_group,
    item_of_zeros,
    items,
    zero_items,
)
from ejkernel.kernels.grouped_matmul.mosaic_store import copy_rows, put
from ejkernel.kernels.grouped_matmul.problem import product
from ejkernel.kernels.hopper.chip import SMS, WGMMA_ROWS
from ejkernel.kernels.hopper.cluster import AXIS, place_in_cluster, shared_barrier
from ejkernel.kernels.hopper.launch import launch, swizzled
from ejkernel.kernels.hopper.wgmma import layout_cast

Array = jax.Array


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
    rows = lhs.shape[0]
    n = rhs.shape[1] if transpose_rhs else rhs.shape[2]
    cfg = cfg or space(product(lhs, rhs, transpose_rhs=transpose_rhs, out_dtype=out_dtype))[0]
    if missing := -rows % ALIGNED_ROWS:
        lhs = jnp.pad(lhs, ((0, missing), (0, 0)))
    tiling = Tiling(cfg.block_m, -(-n // cfg.block_n), cfg.cluster, cfg.band, cfg.halves, cfg.order)
    table, facts = items(group_sizes, rows, tiling, first_row)
    blocks = min(blocks // cfg.cluster, table[0].shape[0])
    scratch = {
        "a_smem": swizzled((cfg.stages, cfg.block_m, STEP), lhs.dtype),
        "b_smem": swizzled((cfg.stages, *((cfg.block_n, STEP) if transpose_rhs else (STEP, cfg.block_n))), rhs.dtype),
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


def staging(cfg: Any, dtype: Any) -> Any:
    """Returns the shared memory for stores."""
    columns = 128 // jnp.dtype(dtype).itemsize
    shape = (cfg.consumers, cfg.store_slots, WGMMA_ROWS, cfg.store_columns)
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128)))


def store(
    out_ref: Any, value: Array, o_smem: Any, row: Any, column: Any, cfg: Any, *, keep: Any = None, interpret: bool
) -> None:
    """Stores a consumer's part of a tile through its shared memory, piece by piece.

    Skips what lies past the end of `out_ref`, and rows outside `keep`, a first row and an end.
    """
    pieces = [(r, c) for r in range(0, value.shape[0], WGMMA_ROWS) for c in range(0, value.shape[1], cfg.store_columns)]
    width = out_ref.shape[-1]

    def each(copy, in_flight):
        for i, (r, c) in enumerate(pieces):
            plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
            tile = o_smem.at[i % cfg.store_slots]
            put(tile, value[r : r + WGMMA_ROWS, c : c + cfg.store_columns], interpret=interpret)
            plgpu.commit_smem()
            copy(tile, row + r, column + c)
        if in_flight and len(pieces) % cfg.store_slots:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def copy_whole(tile, row, column):
        at = out_ref.at[pl.ds(row, WGMMA_ROWS), pl.ds(column, cfg.store_columns)]
        if width > cfg.store_columns:
            plgpu.copy_smem_to_gmem(tile, at)
        else:
            # If an array is one tile of memory wide, Mosaic GPU (seen with JAX 0.11.2) ignores the column index.
            pl.when(column < width)(lambda: plgpu.copy_smem_to_gmem(tile, at))

    def copy_kept(tile, row, column):
        copy_rows(tile, out_ref, row, column, *keep, interpret=interpret)

    # Pieces that the copy engine does not store do not count as in flight, so this waits for all others.
    in_flight = cfg.store_slots - 1 if width > cfg.store_columns else 0
    if keep is None:
        each(copy_whole, in_flight)
    else:
        whole = (row >= keep[0]) & (row + value.shape[0] <= keep[1])
        pl.when(whole)(lambda: each(copy_whole, in_flight))
        pl.when(~whole)(lambda: each(copy_kept, 0))


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
            row = row + jnp.where(item.alone, 0, place * cfg.block_m)
            column = column + jnp.where(item.alone, place, 0)
        return dataclasses.replace(item, row=row, column=column * cfg.block_n), loads

    @pl.when(wg == cfg.consumers)
    def _produce():
        plgpu.set_max_registers(cfg.producer_registers, action="decrease")

        def tile(item, loads, step):
            columns = pl.ds(item.column, cfg.block_n)

            def load(s, _):
                slot = slot_of(step + s)
                depth = pl.ds(s * STEP, STEP)
                a = lhs_ref.at[pl.ds(item.row, cfg.block_m), depth]
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
        by_rows = cfg.split == "rows"

        def operands(slot):
            a = a_smem.at[slot, pl.ds(wg * cfg.rows, cfg.rows)] if by_rows else a_smem.at[slot]
            if by_rows:
                b = b_smem.at[slot]
            else:
                part = pl.ds(wg * cfg.columns, cfg.columns)
                b = b_smem.at[slot, part] if transpose_rhs else b_smem.at[slot, :, part]
            return a, b.transpose((1, 0)) if transpose_rhs else b

        def tile(item, loads, step):
            row = item.row + (wg * cfg.rows if by_rows else 0)
            column = item.column + (0 if by_rows else wg * cfg.columns)
            seen = (row < item.end) & (row + cfg.rows > item.start) & (column < out_ref.shape[1])
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
                value = parts(cfg, step, steps, lambda s: lead(cfg, wg, ahead, s))
                save(value.astype(out_ref.dtype))

            @pl.when(~seen & (loads > 0))
            def _():
                lax.fori_loop(0, loads, drain, None)

            @pl.when(seen & (item.group < 0))
            def _():
                save(layout_cast(jnp.zeros((cfg.rows, cfg.columns), out_ref.dtype), plgpu.Layout.WGMMA))

        follow(cfg, wg, ahead)
        done = walk(mine, fetch, decode, tile)
        lead_out(cfg, wg, ahead, done)
        plgpu.wait_smem_to_gmem(0)


def walk(mine: Any, fetch: Any, decode: Any, tile: Any) -> Any:
    """Runs a warpgroup over the block's items, and returns the number of steps.

    `fetch(i)` reads from memory, one item ahead; `decode(i, ...)` turns what it read into an item and its number of
    steps.
    """

    def one(i, carry):
        step, fields = carry
        item, steps = decode(i, fields)
        fields = fetch(i + 1)
        tile(item, steps, step)
        return step + steps, fields

    return lax.fori_loop(0, mine, one, (jnp.int32(0), fetch(0)))[0]


def multiply(
    cfg: Any,
    step: Any,
    steps: Any,
    begun: Any,
    *,
    slot_of: Any,
    operands: Any,
    full: Any,
    free: Any,
    prepare: Any = lambda s, slot: None,
) -> Array:
    """Sums the products of `steps` steps from `step` on; a step's memory is released while the next one runs."""

    def body(acc):
        def product(s):
            slot = slot_of(step + s)
            plgpu.barrier_wait(full.at[slot])
            prepare(s, slot)
            plgpu.wgmma(acc, *operands(slot))
            begun(step + s)

        product(0)

        def advance(s, _):
            product(s)
            plgpu.wgmma_wait(1)
            plgpu.barrier_arrive(free.at[slot_of(step + s - 1)])

        lax.fori_loop(1, steps, advance, None)
        value = acc[...]
        plgpu.barrier_arrive(free.at[slot_of(step + steps - 1)])
        return value

    return pl.run_scoped(body, plgpu.ACC((cfg.rows, cfg.columns), jnp.float32))  # pyright: ignore[reportPrivateImportUsage]


# The first consumer is `cfg.lag` steps ahead from the start, and stays so: it computes while the others store.


def follow(cfg: Any, wg: Any, ahead: Any) -> None:
    """Makes the other consumers wait for the first."""
    if cfg.lag:
        pl.when(wg > 0)(lambda: plgpu.barrier_wait(ahead))


def lead(cfg: Any, wg: Any, ahead: Any, step: Any) -> None:
    """Lets the others begin once the first consumer is far enough."""
    if cfg.lag:
        pl.when((wg == 0) & (step == cfg.lag))(lambda: plgpu.barrier_arrive(ahead))


def lead_out(cfg: Any, wg: Any, ahead: Any, done: Any) -> None:
    """Lets the others begin if there were too few steps for `lead`."""
    if cfg.lag:
        pl.when((wg == 0) & (done <= cfg.lag))(lambda: plgpu.barrier_arrive(ahead))
