"""Consumers of the backward kernel that divide a tile by columns of dK and dV: 64 keys, half the columns each.

For head dims whose dK and dV of 64 keys do not fit one warpgroup. Scores are divided by queries; weights and their
gradient go through shared memory to the other consumers. The products of one step run while the next scores are
computed:

1. issue dV and dK of the step before, then the scores of this step and the gradient of the weights;
2. when dV and dK are finished, release the queries' memory; compute and store weights and gradient.

dQ has a separate kernel (`mosaic_bwd_queries.py`): with 64 keys per tile there would be twice as much to add up in
memory as with 128, and that alone took longer than two more products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.flash_attention.config import MosaicBwdConfig
from ejkernel.kernels.flash_attention.mosaic_bwd_packed import Facts
from ejkernel.kernels.flash_attention.mosaic_dq import GradientSum
from ejkernel.kernels.flash_attention.mosaic_scores import Scores, facts_hide
from ejkernel.kernels.flash_attention.mosaic_store import store_columns
from ejkernel.kernels.flash_attention.mosaic_walk import Walk
from ejkernel.kernels.hopper.chip import WGMMA_ROWS
from ejkernel.kernels.hopper.wgmma import MatrixUnit, layout_cast, unhoisted


def consume(
    walk: Walk,
    scores: Scores,
    mma: MatrixUnit,
    cfg: MosaicBwdConfig,
    mem: Any,
    grad_refs: tuple[Any, Any],
    key_sums: tuple[GradientSum, GradientSum] | None,
    facts: Facts,
) -> None:
    wg = lax.axis_index("warpgroup")
    (dk_ref, dv_ref), dtype = grad_refs, mem.k_smem.dtype
    halves = dk_half, dv_half = [(WGMMA_ROWS, x.shape[2] // cfg.consumers) for x in (mem.k_smem, mem.v_smem)]
    k_tile, v_tile = mem.k_smem.at[0], mem.v_smem.at[0]
    queries = cfg.block_q // cfg.consumers
    own_queries = pl.ds(wg * queries, queries)
    dk_cols, dv_cols = (pl.ds(wg * columns, columns) for _, columns in halves)

    def meet():
        plgpu.barrier_arrive(mem.tile_done)
        plgpu.barrier_wait(mem.tile_done)

    def tile(i, step):
        at = walk.tile(i)
        plgpu.barrier_wait(mem.k_full.at[0])
        plgpu.barrier_wait(mem.v_full.at[0])

        def buffer_of(n):
            return lax.rem(step + n, jnp.int32(2))

        def make_scores(n, meanwhile: Callable[[], Any]):
            """Stores the weights of step `n` and the gradient of its scores; two products run during `meanwhile`."""
            slot, buffer = walk.slot(step + n), buffer_of(n)
            head, row = at.place(n)
            cut = at.cut(row)
            row = row + wg * queries
            hides = facts_hide(facts, cut, at.batch, at.col, row, (WGMMA_ROWS, queries))
            plgpu.barrier_wait(mem.q_full.at[slot])
            k_tile, v_tile = mem.k_smem.at[unhoisted(0, n)], mem.v_smem.at[unhoisted(0, n)]

            def body(s_acc, dp_acc):
                mma.multiply(s_acc, k_tile, mem.q_smem.at[slot, own_queries], b_t=True)
                plgpu.barrier_wait(mem.do_full.at[slot])
                mma.multiply(dp_acc, v_tile, mem.do_smem.at[slot, own_queries], b_t=True)
                held = meanwhile()
                s = mma.result(s_acc, in_flight=1)
                lse = scores.of_queries(mem.lse_smem.at[slot, own_queries])
                p = scores.weights(s, lse, at.batch, head, at.col, row, hides)
                # Waiting here also keeps ptxas (CUDA 13.0) from moving the wait for the product up, over the
                # exponentials.
                plgpu.barrier_wait(mem.ds_free.at[buffer])
                p = scores.restored(p, at.batch, head, row)
                store_columns(mem.p_smem.at[buffer], wg, p.plain.astype(dtype), interpret=mma.interpret)
                ds = scores.gradient(p, mma.result(dp_acc), scores.of_queries(mem.delta_smem.at[slot, own_queries]))
                store_columns(mem.ds_smem.at[buffer, 0], wg, ds.astype(dtype), interpret=mma.interpret)
                plgpu.commit_smem()
                plgpu.barrier_arrive(mem.ds_full.at[buffer])
                return held

            return mma.scoped(body, (WGMMA_ROWS, queries), (WGMMA_ROWS, queries))

        def add_keys(n, carry: tuple[jax.Array, jax.Array], then: Callable[[Callable[[int], Any]], Any]):
            """Adds step `n` to dK and dV; `then` returns how many products it issued before the sums are needed."""
            slot, buffer = walk.slot(step + n), buffer_of(n)
            plgpu.barrier_wait(mem.ds_full.at[buffer])

            def body(dv_acc, dk_acc):
                dk, dv = carry
                mma.start_from(dv_acc, dv)
                mma.multiply(dv_acc, mem.p_smem.at[buffer], mem.do_smem.at[slot, :, dv_cols])
                mma.start_from(dk_acc, dk)
                mma.multiply(dk_acc, mem.ds_smem.at[buffer, 0], mem.q_smem.at[slot, :, dk_cols])

                def sums(issued: int):
                    dv = mma.result(dv_acc, in_flight=issued + 1)
                    plgpu.barrier_arrive(mem.do_free.at[slot])
                    dk = mma.result(dk_acc, in_flight=issued)
                    plgpu.barrier_arrive(mem.q_free.at[slot])
                    plgpu.barrier_arrive(mem.ds_free.at[buffer])
                    return dk, dv

                return then(sums)

            return mma.scoped(body, dv_half, dk_half)

        def advance(n, carry):
            return add_keys(n - 1, carry, lambda sums: make_scores(n, lambda: sums(2)))

        zeros = tuple(layout_cast(jnp.zeros(half, jnp.float32), plgpu.Layout.WGMMA) for half in halves)
        make_scores(jnp.int32(0), lambda: ())
        carry = lax.fori_loop(1, at.steps, advance, zeros)
        dk, dv = add_keys(at.steps - 1, carry, lambda sums: sums(0))
        if key_sums is not None:
            plgpu.barrier_arrive(mem.kv_free.at[0])
            for key_sum, ref, grad in zip(key_sums, grad_refs, (dk, dv), strict=True):
                key_sum.add(key_sum.piece(ref, at.batch, at.kv_head, at.col, wg), grad, None)
            return step + at.steps
        # The gradients are stored through the memory of K and V, after its last read and after both halves are written.
        meet()
        v_tile.at[:, dv_cols][...] = dv.astype(dtype)
        k_tile.at[:, dk_cols][...] = (dk * scores.scale).astype(dtype)
        plgpu.commit_smem()
        meet()
        rows = pl.ds(at.col, WGMMA_ROWS)
        pl.when(wg == 0)(lambda: plgpu.copy_smem_to_gmem(v_tile, dv_ref.at[at.batch, rows, at.kv_head]))
        pl.when(wg == 1)(lambda: plgpu.copy_smem_to_gmem(k_tile, dk_ref.at[at.batch, rows, at.kv_head]))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(mem.kv_free.at[0])
        return step + at.steps

    for buffer in range(2):
        plgpu.barrier_arrive(mem.ds_free.at[buffer])
    lax.fori_loop(0, walk.tiles, tile, jnp.int32(0))
    for buffer in range(2):
        plgpu.barrier_wait(mem.ds_free.at[buffer])
