"""Consumers of the backward kernel of which one computes dK of 64 keys and the other dV.

For head dims whose dK and dV of 64 keys do not fit one warpgroup. The one for dV computes the weights, from S; the one
for dK the gradient of the weights, and gets the weights through shared memory. Both do as much: S and dK have the
columns of the keys, the gradient of the weights and dV those of the values. Each operand of a product is read once,
and weights and gradient are left operands straight from registers. A step of either:

1. issue its product of scores, then its gradient of the step before;
2. wait for the scores alone, and compute with them while the gradient is still being multiplied.

dQ has a separate kernel (`mosaic_bwd_queries.py`), for the reason given in `mosaic_bwd_columns.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel._compat import load_with_layout
from ejkernel.kernels.flash_attention.config import MosaicBwdConfig
from ejkernel.kernels.flash_attention.mosaic_bwd_operand import Operand
from ejkernel.kernels.flash_attention.mosaic_bwd_packed import Facts
from ejkernel.kernels.flash_attention.mosaic_dq import GradientSum
from ejkernel.kernels.flash_attention.mosaic_scores import Scores, facts_hide
from ejkernel.kernels.flash_attention.mosaic_walk import Tile, Walk
from ejkernel.kernels.hopper.chip import WGMMA_ROWS
from ejkernel.kernels.hopper.wgmma import MatrixUnit, layout_cast, unhoisted


class _Side(NamedTuple):
    """What one warpgroup works with.

    Its scores are the product of `tile`, its keys or values, with `rows`; what it adds to its gradient, of those with
    `other_rows`. `vector` has a number for each query that the scores need.
    """

    tile: Any
    vector: Any
    full: Any
    free: Any
    rows: Any
    other_full: Any
    other_free: Any
    other_rows: Any


def consume(
    walk: Walk,
    scores: Scores,
    mma: MatrixUnit,
    cfg: MosaicBwdConfig,
    mem: Any,
    grad_refs: tuple[Any, Any],
    operands: tuple[Operand, Operand],
    key_sums: tuple[GradientSum, GradientSum] | None,
    facts: Facts,
) -> None:
    wg = lax.axis_index("warpgroup")
    dtype = mem.k_smem.dtype
    shape = (WGMMA_ROWS, cfg.block_q)

    def weights(at: Tile, n: Any, step: Any, s: jax.Array, lse: jax.Array) -> jax.Array:
        """Returns the weights of a step, after giving them to the other warpgroup."""
        buffer = lax.rem(step + n, jnp.int32(2))
        head, row = at.place(n)
        hides = facts_hide(facts, at.cut(row), at.batch, at.col, row, shape)
        p = scores.weights(s, lse, at.batch, head, at.col, row, hides)
        p = scores.restored(p, at.batch, head, row)
        plgpu.barrier_wait(mem.ds_free.at[buffer])
        mem.p_smem.at[buffer][...] = p.sloped
        plgpu.barrier_arrive(mem.ds_full.at[buffer])
        return p.plain.astype(dtype)

    def gradient(n: Any, step: Any, dp: jax.Array, delta: jax.Array) -> jax.Array:
        """Returns the gradient of the scores of a step."""
        buffer = lax.rem(step + n, jnp.int32(2))
        plgpu.barrier_wait(mem.ds_full.at[buffer])
        p = load_with_layout(mem.p_smem.at[buffer], layout=plgpu.Layout.WGMMA)
        plgpu.barrier_arrive(mem.ds_free.at[buffer])
        return (p * (dp - lax.broadcast_in_dim(delta, dp.shape, [scores.query_axis]))).astype(dtype)

    def steps(at: Tile, step: Any, side: _Side, left: Callable[..., jax.Array], width: int) -> jax.Array:
        """Runs over the queries and returns the gradient of the tile's keys or values."""

        def product(n, also: Callable[[Any], Any]):
            """Issues the scores of step `n` and calls `also`, which may issue another product."""
            slot = walk.slot(step + n)
            plgpu.barrier_wait(side.full.at[slot])

            def body(acc):
                mma.multiply(acc, side.tile.at[unhoisted(0, n)], side.rows.at[slot], b_t=True)
                return also(acc)

            return mma.scoped(body, shape)

        def finish(n, acc, in_flight: int):
            slot = walk.slot(step + n)
            value, vector = mma.result(acc, in_flight=in_flight), scores.of_queries(side.vector.at[slot])
            if cfg.cluster > 1:
                # A warp arrives for all four, at the barrier of a cluster: all must have read the vector.
                plgpu.commit_smem()
            plgpu.barrier_arrive(side.free.at[slot])
            return left(n, value, vector)

        def add(n, total, operand, then: Callable[[], Any]):
            """Adds step `n` to the gradient; `then` runs meanwhile."""
            slot = walk.slot(step + n)

            def body(acc):
                mma.start_from(acc, total)
                plgpu.barrier_wait(side.other_full.at[slot])
                mma.multiply(acc, operand, side.other_rows.at[slot])
                held = then()
                new = mma.result(acc)
                plgpu.barrier_arrive(side.other_free.at[slot])
                return new, held

            return mma.scoped(body, (WGMMA_ROWS, width))

        def advance(n, carry):
            total, operand = carry
            return product(n, lambda acc: add(n - 1, total, operand, lambda: finish(n, acc, 1)))

        zeros = layout_cast(jnp.zeros((WGMMA_ROWS, width), jnp.float32), plgpu.Layout.WGMMA)
        first = jnp.int32(0)
        operand = product(first, lambda acc: finish(first, acc, 0))
        total, operand = lax.fori_loop(1, at.steps, advance, (zeros, operand))
        return add(at.steps - 1, total, operand, lambda: ())[0]

    def run(number: int, side: _Side, left: Callable[..., Any], own_full: Any, smem: Any, scale: float | None):
        """Runs all tiles; `smem` is where the gradient is stored through, once nobody reads it any more."""
        operand, ref = operands[number], grad_refs[number]

        def tile(i, step):
            at = walk.tile(i)
            plgpu.barrier_wait(own_full.at[0])
            total = steps(at, step, side, lambda n, *values: left(at, n, step, *values), operand.width)
            if key_sums is not None:
                plgpu.barrier_arrive(mem.kv_free.at[0])
                key_sum = key_sums[number]
                key_sum.add(key_sum.piece(ref, at.batch, at.kv_head, at.col, 0), total, None)
                return step + at.steps
            plgpu.barrier_arrive(mem.tile_done)
            plgpu.barrier_wait(mem.tile_done)
            smem[...] = (total if scale is None else total * scale).astype(dtype)
            plgpu.commit_smem()
            rows = pl.ds(at.col, WGMMA_ROWS)
            plgpu.copy_smem_to_gmem(smem, operand.columns(ref.at[at.batch, rows, at.kv_head]))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(mem.kv_free.at[0])
            return step + at.steps

        lax.fori_loop(0, walk.tiles, tile, jnp.int32(0))

    queries = (mem.q_full, mem.q_free, mem.q_smem)
    outputs = (mem.do_full, mem.do_free, mem.do_smem)

    @pl.when(wg == 0)
    def _keys():
        for buffer in range(2):
            plgpu.barrier_arrive(mem.ds_free.at[buffer])
        side = _Side(mem.v_smem, mem.delta_smem, *outputs, *queries)
        run(0, side, lambda at, *args: gradient(*args), mem.v_full, mem.k_smem.at[0], scores.scale)

    @pl.when(wg == 1)
    def _values():
        run(1, _Side(mem.k_smem, mem.lse_smem, *queries, *outputs), weights, mem.k_full, mem.v_smem.at[0], None)
        for buffer in range(2):
            plgpu.barrier_wait(mem.ds_free.at[buffer])
