"""The forward pass on Hopper with weights as the left operand of the matrix units: for groups of any number of rows.

Rows of lhs are the right operand, whose width goes in steps of 8: a group's last tiles are as narrow as its rows allow.
Each consumer owns 64 columns of the result. Nothing has to be aligned but rows of memory, to 16 bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.grouped_matmul.config import STEP, MosaicConfig
from ejkernel.kernels.grouped_matmul.mosaic_pipeline import Ring
from ejkernel.kernels.grouped_matmul.mosaic_weights_items import Tiling
from ejkernel.kernels.grouped_matmul.mosaic_weights_store import copy_rows, put, widen
from ejkernel.kernels.grouped_matmul.mosaic_work import Work
from ejkernel.kernels.hopper.chip import WGMMA_ROWS
from ejkernel.kernels.hopper.cluster import AXIS, place_in_cluster
from ejkernel.kernels.hopper.launch import SWIZZLED
from ejkernel.kernels.hopper.wgmma import layout_cast

Array = jax.Array
_PLAIN = (plgpu.SwizzleTransform(128),)


def tiling(cfg: MosaicConfig, n: int) -> Tiling:
    """How the result is cut."""
    return Tiling(cfg.width, cfg.grain, -(-n // (cfg.height * cfg.cluster)), cfg.band, cfg.order)


def scratch(cfg: MosaicConfig, dtype: Any, out_dtype: Any, *, transpose_rhs: bool, interpret: Any) -> dict[str, Any]:
    """The memory of a block, and the barriers on which its producer arrives."""
    across = 128 // out_dtype.itemsize
    return {
        "weights": _two_views((cfg.stages, cfg.consumers, WGMMA_ROWS, STEP), dtype, interpret),
        "tokens": _two_views((cfg.stages, cfg.width, STEP), dtype, interpret),
        "o_smem": plgpu.SMEM(
            (cfg.consumers, cfg.slots, WGMMA_ROWS // across, cfg.store, across), out_dtype, transforms=_PLAIN
        ),
        "full": plgpu.Barrier(num_barriers=cfg.stages, num_arrivals=1 + cfg.consumers),
    }


def _two_views(shape: tuple[int, ...], dtype: Any, interpret: Any) -> Any:
    """Shared memory for tiles of 128 bytes in a row, as the copy engine and as the matrix units see it.

    The bytes are the same. But a copy to a tiled view would have to begin at a multiple of 8 rows, and end within the
    array's whole tiles.
    """
    plain = plgpu.SMEM(shape, dtype, transforms=_PLAIN)
    return plain if interpret else plgpu.RefUnion(plain, plgpu.SMEM(shape, dtype, transforms=SWIZZLED))


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
    weights,
    tokens,
    o_smem,
    full,
    free,
    ahead,
) -> None:
    """What a warpgroup does."""
    *table_refs, out_ref = refs
    # The interpreter keeps the two views of a union apart; there, one serves both.
    (weights_in, weights), (tokens_in, tokens) = ((x, x) if interpret else x for x in (weights, tokens))
    block, wg = lax.axis_index("block"), lax.axis_index("warpgroup")
    place = place_in_cluster(cfg.cluster)
    steps = -(-lhs_ref.shape[1] // STEP)
    work, ring = Work(tiling, table_refs, rows, block, blocks), Ring(cfg, wg, full, free, ahead)

    def decode(_, item):
        """This block's part of an item, and how many steps it makes for it."""
        loads = jnp.where((item.group >= 0) & (item.row < item.end), jnp.int32(steps), 0)
        return dataclasses.replace(item, column=(item.column * cfg.cluster + place) * cfg.height), loads

    def by_width(width, widths, run):
        """Calls `run` with the least of `widths` that is no less than `width`, as a constant."""
        for less, most in itertools.pairwise((0, *widths)):
            pl.when((width > less) & (width <= most))(functools.partial(run, most))

    @ring.produce
    def _():
        def tile(item, loads, step, _):
            def load_all(width):
                def load(s, _):
                    slot = ring.slot(step + s)
                    depth = pl.ds(s * STEP, STEP)
                    plgpu.barrier_wait(free.at[slot])
                    for c in range(cfg.consumers):
                        columns = pl.ds(item.column + c * WGMMA_ROWS, WGMMA_ROWS)
                        part = rhs_ref.at[
                            (item.group, columns, depth) if transpose_rhs else (item.group, depth, columns)
                        ]
                        plgpu.copy_gmem_to_smem(part, weights_in.at[slot, c], full.at[slot])
                    plgpu.copy_gmem_to_smem(
                        lhs_ref.at[pl.ds(item.row, width), depth],
                        tokens_in.at[slot, pl.ds(0, width)],
                        full.at[slot],
                        collective_axes=AXIS if cfg.cluster > 1 else None,
                    )

                lax.fori_loop(0, loads, load, None)

            by_width(item.width, cfg.load_widths, load_all)

        work.walk(decode, tile)
        ring.wait()

    @ring.consume
    def _():
        def save(held):
            """Stores what is held, if anything is."""
            value, row, end, column = held
            _store(value, o_smem.at[wg], out_ref, row, end, column, interpret=interpret)

        def zeros(dtype=out_ref.dtype):
            return layout_cast(jnp.zeros((WGMMA_ROWS, cfg.width), dtype), plgpu.Layout.WGMMA)

        def multiply(width, step, steps, meanwhile=lambda: None, start=None):
            def operands(slot):
                left = weights.at[slot, wg]
                right = tokens.at[slot, pl.ds(0, width)].transpose((1, 0))
                return left if transpose_rhs else left.transpose((1, 0)), right

            # The interpreter knows no accumulator that starts from a value.
            begin, add = (None, start) if interpret else (start, None)
            value = ring.multiply((WGMMA_ROWS, width), step, steps, operands, meanwhile=meanwhile, start=begin)
            return value if add is None else value + add

        def tile(item, loads, step, held, before):
            start = None
            if cfg.hold:
                # The first step has the largest width for all tiles, so that the store is one piece of code again.
                first = lambda: multiply(cfg.width, step, 1, before)
                start = lax.cond(loads > 0, first, lambda: (before(), zeros(jnp.float32))[1])

            def compute(width):
                if start is None:
                    value = multiply(width, step, steps)
                elif steps > 1:
                    value = multiply(width, step + 1, steps - 1, start=start[:, :width])
                else:
                    value = start[:, :width]
                return widen(value.astype(out_ref.dtype), cfg.width, interpret=interpret)

            branches = [zeros, *(functools.partial(compute, width) for width in tiling.widths)]
            which = jnp.where(loads > 0, lax.div(item.width, jnp.int32(tiling.grain)), 0)
            # The store is one piece of code for all widths: one for each would not fit the instruction cache.
            value = lax.switch(which, branches)
            last = jnp.minimum(item.end, item.row + item.width)
            return value, item.row, last, item.column + wg * WGMMA_ROWS

        none = zeros(), *(jnp.int32(x) for x in (0, 0, 0))
        return ring.tiles(functools.partial(work.walk, decode), tile, save, none)


def _store(value: Array, o_smem: Any, out_ref: Any, row: Any, end: Any, column: Any, *, interpret: bool) -> None:
    """Stores a consumer's part of a tile, `[64, rows]`, to the rows of `out_ref` from `row` to `end`.

    It goes through shared memory, `[slots, parts, rows, 128 bytes]`, piece by piece. Skips what lies past the last
    column of `out_ref`.
    """
    slots, parts, height, across = o_smem.shape
    for i, r in enumerate(range(0, value.shape[1], height)):
        tile, first = o_smem.at[i % slots], row + r

        @pl.when(first < end)
        def _(i=i, tile=tile, first=first, r=r):
            # What was stored before from the same memory must have been read; in an earlier tile it may be the last.
            plgpu.wait_smem_to_gmem((slots - 1) * parts if i else 0, wait_read_only=True)
            put(tile, value[:, r : r + height], interpret=interpret)
            plgpu.commit_smem()
            whole = (first + height <= end) & (column < out_ref.shape[1])
            for part in range(parts):
                at = out_ref.at[pl.ds(first, height), pl.ds(column + part * across, across)]
                pl.when(whole)(functools.partial(plgpu.copy_smem_to_gmem, tile.at[part], at))

            @pl.when(~whole)
            def _():
                for part in range(parts):
                    copy_rows(tile.at[part], out_ref, first, column + part * across, end, interpret=interpret)
