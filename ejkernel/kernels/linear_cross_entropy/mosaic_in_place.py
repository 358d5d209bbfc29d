"""A product in the memory of one of its operands, for Hopper: `x.T @ held`, where x is square.

A panel is some columns of `held`. Its tiles of the result lie where the panel was, and each of them needs all of it: so
as many blocks work on a panel at the same time as it has tiles, and none stores a tile before all have read the panel.
A tile waits for that in registers, while its block computes one of the next panel.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from ejkernel.kernels.grouped_matmul.config import STEP, MosaicDrhsConfig
from ejkernel.kernels.grouped_matmul.mosaic_pipeline import Ring, walk
from ejkernel.kernels.grouped_matmul.mosaic_rows_store import staging, store
from ejkernel.kernels.hopper.chip import WGMMA_ROWS
from ejkernel.kernels.hopper.cluster import place_in_cluster, shared_barrier, shared_load
from ejkernel.kernels.hopper.launch import launch, swizzled
from ejkernel.kernels.hopper.wgmma import inline_mgpu, layout_cast
from ejkernel.ops.utils.fingerprint import multiprocessors

Array = jax.Array
TILE = MosaicDrhsConfig(cluster=1, store=64, slots=2, hold=True)


def unsupported(rows: Any, height: int, width: int, *dtypes: Any) -> str | None:
    """Why the product of `[rows, height]` and `[rows, width]` cannot take the place of the second; None if it can."""
    if rows != height:
        return f"x must have as many rows as columns, got {rows} and {height}"
    if any(dtype != jnp.bfloat16 for dtype in dtypes):
        return f"x and weights must be bfloat16, got {' and '.join(str(jnp.dtype(d)) for d in dtypes)}"
    if height % STEP or width % STEP:
        return f"columns of x and the vocabulary must be multiples of {STEP}, got {height} and {width}"
    if (needed := _tiles(height, TILE) * TILE.cluster) > multiprocessors():
        return f"a panel of {height} rows needs {needed} multiprocessors, this device has {multiprocessors()}"
    return None


def _tiles(height: int, cfg: MosaicDrhsConfig) -> int:
    """Of a panel; a cluster computes several."""
    return -(-height // (cfg.height * cfg.cluster))


def product(x: Array, held: Array, *, cfg: MosaicDrhsConfig = TILE, interpret: Any = None) -> Array:
    """Returns `x.T @ held`, in the memory of `held` if nothing else needs that."""
    tiles, panels = _tiles(x.shape[1], cfg), -(-held.shape[1] // cfg.width)
    # All blocks must run at the same time, because they wait for each other.
    at_once = min(multiprocessors() // (tiles * cfg.cluster), panels)
    place, readers = jax.new_ref(held), jax.new_ref(jnp.zeros(panels, jnp.int32))
    launch(
        functools.partial(_kernel, cfg=cfg, tiles=tiles, panels=panels, at_once=at_once, interpret=bool(interpret)),
        *(x, place, readers),
        out_type=(),
        blocks=at_once * tiles,
        cluster=cfg.cluster,
        consumers=cfg.consumers,
        scratch={
            "a_smem": swizzled((cfg.stages, STEP, cfg.height), x.dtype),
            "b_smem": swizzled((cfg.stages, STEP, cfg.width), held.dtype),
            "o_smem": staging(cfg, held.dtype),
            "full": plgpu.Barrier(num_barriers=cfg.stages, num_arrivals=2),
            "free": shared_barrier(cfg.cluster, cfg.stages, cfg.consumers),
            "ahead": plgpu.Barrier(),
        },
        interpret=interpret,
    )
    return place[...]


def _kernel(
    x_ref,
    place_ref,
    readers_ref,
    *,
    cfg: MosaicDrhsConfig,
    tiles: int,
    panels: int,
    at_once: int,
    interpret: bool,
    a_smem,
    b_smem,
    o_smem,
    full,
    free,
    ahead,
):
    block, wg = lax.axis_index("block"), lax.axis_index("warpgroup")
    ring = Ring(cfg, wg, full, free, ahead)
    first, tile_row = lax.div(block, jnp.int32(tiles)), lax.rem(block, jnp.int32(tiles))
    row = (tile_row * cfg.cluster + place_in_cluster(cfg.cluster)) * cfg.height
    mine = lax.div(panels - first + (at_once - 1), jnp.int32(at_once))
    steps = -(-x_ref.shape[0] // STEP)
    through = functools.partial(walk, mine, lambda i: (), lambda i, _: (first + i * at_once, jnp.int32(steps)))

    @ring.produce
    def _():
        def load_tile(panel, steps, step, _):
            def load(s, _):
                slot, depth = ring.slot(step + s), pl.ds(s * STEP, STEP)
                plgpu.barrier_wait(free.at[slot])
                a, b = x_ref.at[depth, pl.ds(row, cfg.height)], place_ref.at[depth, pl.ds(panel * cfg.width, cfg.width)]
                plgpu.copy_gmem_to_smem(a, a_smem.at[slot], full.at[slot])
                shared_load(cfg.cluster, b, b_smem.at[slot], full.at[slot])

            lax.fori_loop(0, steps, load, None)

        through(load_tile)
        ring.wait()

    @ring.consume
    def _():
        def operands(slot):
            return a_smem.at[slot, :, pl.ds(wg * WGMMA_ROWS, WGMMA_ROWS)].transpose((1, 0)), b_smem.at[slot]

        def save(held):
            """Stores what is held, if anything is, once all blocks have read its panel."""
            value, panel = held

            @pl.when(panel >= 0)
            def _():
                _await(readers_ref.at[panel], tiles * cfg.cluster * cfg.consumers, interpret=interpret)
                at = {"row": row + wg * WGMMA_ROWS, "column": panel * cfg.width, "o_smem": o_smem.at[wg], "cfg": cfg}
                store(place_ref, value, **at, interpret=interpret)

        def tile(panel, steps, step, held, before):
            value = ring.multiply((WGMMA_ROWS, cfg.width), step, steps, operands, meanwhile=before)
            _count(readers_ref.at[panel], interpret=interpret)
            return value.astype(place_ref.dtype), panel

        none = layout_cast(jnp.zeros((WGMMA_ROWS, cfg.width), place_ref.dtype), plgpu.Layout.WGMMA), jnp.int32(-1)
        return ring.tiles(through, tile, save, none)


# --- Counters in memory; in the interpreter there is one block, which waits for nobody ---


def _count(ref: Any, *, interpret: bool) -> None:
    """Adds one for this warpgroup."""
    _inline(
        ref,
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.u32 p, t, 0; "
        "@p red.release.gpu.global.add.u32 [$0], 1; }",
        interpret=interpret,
    )


def _await(ref: Any, count: int, *, interpret: bool) -> None:
    """Waits for a counter."""
    _inline(
        ref,
        "{ .reg .pred p; .reg .b32 v; again_${:uid}: ld.acquire.gpu.global.u32 v, [$0]; "
        f"setp.lt.u32 p, v, {count}; @p bra again_${{:uid}}; }}",
        interpret=interpret,
    )


def _inline(ref: Any, text: str, *, interpret: bool) -> None:
    """Runs PTX for the address of `ref` in memory."""
    if interpret:
        return

    @inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(_, ref):
        address = llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu.utils.memref_ptr(ref))
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"), [address], text, "l,~{memory}", has_side_effects=True, asm_dialect=0
        )

    run(ref)
