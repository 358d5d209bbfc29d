"""Grouped products for Hopper: the forward pass, which is dlhs's too.

Persistent blocks walk a list of tiles made on the device. One producer warpgroup loads tiles of both operands into a
ring of shared memory, consumers own a part of the tile each; loads of the next tile run under the store of this one.
A consumer whose rows all belong to other groups computes nothing. `docs/hopper.md` says what each choice gave.
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

from ejkernel.kernels.flash_attention.mosaic_cluster import place_in_cluster, shared_barrier
from ejkernel.kernels.flash_attention.mosaic_launch import SMS, launch, swizzled
from ejkernel.kernels.flash_attention.mosaic_wgmma import layout_cast
from ejkernel.kernels.grouped_matmul.config import ALIGNED_ROWS, STEP, WGMMA_ROWS, MosaicConfig, space
from ejkernel.kernels.grouped_matmul.mosaic_schedule import (
    Item,
    Tiling,
    extent,
    item_of_group,
    item_of_zeros,
    items,
    zero_items,
)
from ejkernel.kernels.grouped_matmul.mosaic_store import put, store_rows

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
    tiling = Tiling(cfg.block_m, -(-n // cfg.block_n), cfg.cluster, cfg.band, halves=cfg.split == "rows")
    table, facts = items(group_sizes, rows, tiling, first_row)
    blocks = min(blocks // cfg.cluster, table[0].shape[0])
    scratch = {
        "a_smem": swizzled((cfg.slots, cfg.block_m, STEP), lhs.dtype),
        "b_smem": swizzled((cfg.slots, *((cfg.block_n, STEP) if transpose_rhs else (STEP, cfg.block_n))), rhs.dtype),
        "o_smem": staging(cfg, out_dtype),
        "full": plgpu.Barrier(num_barriers=cfg.slots, num_arrivals=2),
        "free": shared_barrier(cfg.cluster, cfg.slots, cfg.consumers // cfg.rings),
    }
    body = functools.partial(
        _kernel, cfg=cfg, tiling=tiling, rows=rows, transpose_rhs=transpose_rhs, blocks=blocks, interpret=bool(interpret)
    )
    out = launch(
        body,
        *(lhs, rhs, *table, *facts),
        out_type=jax.ShapeDtypeStruct((lhs.shape[0], n), out_dtype),
        blocks=blocks,
        cluster=cfg.cluster,
        consumers=cfg.consumers + cfg.rings - 1,
        scratch=scratch,
        interpret=interpret,
    )
    return out[:rows] if missing else out


def staging(cfg: Any, dtype: Any) -> Any:
    """Returns the shared memory that stores go through."""
    columns = 128 // jnp.dtype(dtype).itemsize
    shape = (cfg.consumers, cfg.store_slots, WGMMA_ROWS, cfg.store_columns)
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128)))


def store_whole(out_ref: Any, value: Array, o_smem: Any, row: Any, column: Any, cfg: Any, *, interpret: bool) -> None:
    """Stores a consumer's part of a tile through its shared memory; what lies past the end of `out_ref` is left out."""
    pieces = [
        (r, c) for r in range(0, value.shape[0], WGMMA_ROWS) for c in range(0, value.shape[1], cfg.store_columns)
    ]
    for i, (r, c) in enumerate(pieces):
        plgpu.wait_smem_to_gmem(cfg.store_slots - 1, wait_read_only=True)
        tile = o_smem.at[i % cfg.store_slots]
        put(tile, value[r : r + WGMMA_ROWS, c : c + cfg.store_columns], interpret=interpret)
        plgpu.commit_smem()
        at = (pl.ds(row + r, WGMMA_ROWS), pl.ds(column + c, cfg.store_columns))
        plgpu.copy_smem_to_gmem(tile, out_ref.at[at])
    if len(pieces) % cfg.store_slots:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


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
):
    *table_refs, cum_ref, ends_ref, first_ref, out_ref = refs
    block, wg = lax.axis_index("block"), lax.axis_index("warpgroup")
    place = place_in_cluster(cfg.cluster)
    steps = lhs_ref.shape[1] // STEP
    count, first, end = extent(cum_ref, ends_ref, first_ref, rows)
    total = count + zero_items(tiling, rows, first, end)
    mine = lax.div(total - block + (blocks - 1), jnp.int32(blocks))
    last_item = table_refs[0].shape[0] - 1

    ring, slot_of = ring_of(cfg, wg)

    def fetch(i):
        """Reads the table's row for this block's item `i`; not used before a tile later, it costs no time."""
        return tuple(ref[jnp.minimum(block + i * blocks, last_item)] for ref in table_refs)

    def decode(i, fields):
        """This block's part of its item `i`, and how many steps the whole cluster makes for it."""
        number = block + i * blocks
        item = item_of_group(tiling, fields, number)
        other = item_of_zeros(tiling, rows, first, end, number - count)
        pick = lambda a, b: jnp.where(number < count, a, b)
        item = Item(*(pick(getattr(item, f.name), getattr(other, f.name)) for f in dataclasses.fields(Item)))
        loads = jnp.where((number < count) & (i < mine) & (item.row < item.end), jnp.int32(steps), 0)
        row, column = item.row, item.column
        if cfg.cluster > 1:
            row = row + jnp.where(item.alone, 0, place * cfg.block_m)
            column = column + jnp.where(item.alone, place, 0)
        return dataclasses.replace(item, row=row, column=column * cfg.block_n), loads

    @pl.when(wg >= cfg.consumers)
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
                    b_copy(collective_axes=_CLUSTER)

                @pl.when(item.alone)
                def _():
                    a_copy(collective_axes=_CLUSTER)
                    b_copy()

            lax.fori_loop(0, loads, load, None)

        walk(cfg, ring, mine, fetch, decode, tile)
        # Nothing may be left unseen on a barrier when the block ends, nor may a block end that others still send to.
        for s in range(cfg.stages):
            plgpu.barrier_wait(free.at[slot_of(s)])

    @pl.when(wg < cfg.consumers)
    def _consume():
        plgpu.set_max_registers(cfg.consumer_registers, action="increase")
        for s in range(cfg.stages):
            plgpu.barrier_arrive(free.at[slot_of(s)])

        def operands(slot):
            a, b = a_smem.at[slot], b_smem.at[slot]
            if cfg.split == "rows":
                a = a_smem.at[slot, pl.ds(wg * cfg.rows, cfg.rows)]
            elif cfg.split == "columns":
                part = pl.ds(wg * cfg.columns, cfg.columns)
                b = b_smem.at[slot, part] if transpose_rhs else b_smem.at[slot, :, part]
            return a, b.transpose((1, 0)) if transpose_rhs else b

        def tile(item, loads, step):
            row = item.row + (wg * cfg.rows if cfg.split == "rows" else 0)
            column = item.column + (wg * cfg.columns if cfg.split == "columns" else 0)
            seen = (row < item.end) & (row + cfg.rows > item.start) & (column < out_ref.shape[1])

            def store(value):
                whole = (row >= item.start) & (row + cfg.rows <= item.end)

                @pl.when(whole)
                def _():
                    store_whole(out_ref, value, o_smem.at[wg], row, column, cfg, interpret=interpret)

                @pl.when(~whole)
                def _():
                    for r in range(0, cfg.rows, WGMMA_ROWS):
                        part = value[r : r + WGMMA_ROWS]
                        store_rows(out_ref, part, row + r, column, item.start, item.end, interpret=interpret)

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

            @pl.when(seen & (loads > 0))
            def _():
                store(pl.run_scoped(multiply, plgpu.ACC((cfg.rows, cfg.columns), jnp.float32)))

            @pl.when(~seen & (loads > 0))
            def _():
                lax.fori_loop(0, loads, drain, None)

            @pl.when(seen & (item.group < 0))
            def _():
                store(layout_cast(jnp.zeros((cfg.rows, cfg.columns), out_ref.dtype), plgpu.Layout.WGMMA))

        walk(cfg, ring, mine, fetch, decode, tile)
        plgpu.wait_smem_to_gmem(0)


def ring_of(cfg: Any, wg: Any) -> tuple[Any, Any]:
    """Which ring of shared memory a warpgroup works on, and the slot of a step in it."""
    ring = lax.rem(wg, jnp.int32(cfg.consumers)) if cfg.rings > 1 else jnp.int32(0)

    def slot_of(step):
        return ring * cfg.stages + lax.rem(step, jnp.int32(cfg.stages))

    return ring, slot_of


def walk(cfg: Any, ring: Any, mine: Any, fetch: Any, decode: Any, tile: Any) -> None:
    """Has a warpgroup do the block's items, or its ring's share of them.

    `fetch(i)` reads what `decode(i, ...)` makes an item and its number of steps of; it is called an item ahead.
    """

    def one(n, carry):
        step, fields = carry
        i = ring + n * cfg.rings
        item, steps = decode(i, fields)
        fields = fetch(i + cfg.rings)
        tile(item, steps, step)
        return step + steps, fields

    count = lax.div(mine - ring + (cfg.rings - 1), jnp.int32(cfg.rings))
    lax.fori_loop(0, count, one, (jnp.int32(0), fetch(ring)))
