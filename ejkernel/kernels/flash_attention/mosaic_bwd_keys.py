"""Consumers of the backward kernel that divide a tile by keys: 64 each, with all columns of their dK and dV.

Weights and their gradient are then left operands of dV and dK straight from registers. Only dQ needs the gradient of
all keys: it goes through shared memory, and each warpgroup computes its share of dQ and adds it to the sum.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.flash_attention.config import MosaicBwdConfig
from ejkernel.kernels.flash_attention.mosaic_bwd_operand import Operand
from ejkernel.kernels.flash_attention.mosaic_bwd_packed import Facts
from ejkernel.kernels.flash_attention.mosaic_dq import GradientSum
from ejkernel.kernels.flash_attention.mosaic_scores import Hides, Scores, load_words
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
    operands: tuple[Operand, Operand],
    total: GradientSum,
    dq_ref: Any,
    key_sums: tuple[GradientSum, GradientSum] | None,
    facts: Facts,
) -> None:
    wg = lax.axis_index("warpgroup")
    (dk_ref, dv_ref), dtype = grad_refs, mem.k_smem.dtype
    widths = [operand.width for operand in operands]
    scores_shape = (WGMMA_ROWS, cfg.block_q)
    dk_shape, dv_shape = ((WGMMA_ROWS, width) for width in widths)

    def tile(i, step):
        at = walk.tile(i)
        own_col = at.col + wg * WGMMA_ROWS
        keys = walk.keys(i)
        first = keys * cfg.consumers
        own = first + wg
        # Every warpgroup reads all keys for dQ.
        for c in range(cfg.consumers):
            plgpu.barrier_wait(mem.k_full.at[first + c])
            plgpu.barrier_wait(mem.v_full.at[first + c])

        def advance(n, carry):
            dk, dv = carry
            slot, buffer = walk.slot(step + n), lax.rem(step + n, jnp.int32(2))
            head, row = at.place(n)
            q_tile, do_tile = mem.q_smem.at[slot], mem.do_smem.at[slot]
            k_tile, v_tile = mem.k_smem.at[unhoisted(own, n)], mem.v_smem.at[unhoisted(own, n)]
            plgpu.barrier_wait(mem.q_full.at[slot])
            hides = None
            if facts.known:
                ids = () if mem.q_ids is None else (mem.q_ids.at[slot], mem.kv_ids.at[own])
                words = load_words(facts.key_words, at.batch, row, own_col, scores_shape)
                hides = Hides(at.cut(row), *ids, words=words)

            # Accumulators are opened as late as possible: each holds its registers from there on.
            def weights(s_acc, dp_acc):
                """Returns the weights and the gradient of the scores."""
                mma.multiply(s_acc, k_tile, q_tile, b_t=True)
                plgpu.barrier_wait(mem.do_full.at[slot])
                mma.multiply(dp_acc, v_tile, do_tile, b_t=True)
                s = mma.result(s_acc, in_flight=1)
                lse = scores.of_queries(mem.lse_smem.at[slot])
                p = scores.weights(s, lse, at.batch, head, own_col, row, hides)
                dp = mma.result(dp_acc)
                p = scores.restored(p, at.batch, head, row)
                ds = scores.gradient(p, dp, scores.of_queries(mem.delta_smem.at[slot]))
                return p.plain.astype(dtype), ds.astype(dtype)

            p, ds = mma.scoped(weights, scores_shape, scores_shape)

            def gradients(dv_acc, dq_acc):
                mma.start_from(dv_acc, dv)
                mma.multiply(dv_acc, p, do_tile)
                mem.ds_smem.at[buffer, wg][...] = ds
                plgpu.commit_smem()
                plgpu.barrier_arrive(mem.ds_full.at[buffer])
                plgpu.barrier_wait(mem.ds_full.at[buffer])
                for c in range(cfg.consumers):
                    if total.cols == widths[0]:
                        rows = pl.ds(wg * WGMMA_ROWS, WGMMA_ROWS)
                        mma.multiply(
                            dq_acc, mem.ds_smem.at[buffer, c, :, rows], mem.k_smem.at[unhoisted(first + c, n)], a_t=True
                        )
                    else:
                        cols = pl.ds(wg * total.cols, total.cols)
                        mma.multiply(
                            dq_acc, mem.ds_smem.at[buffer, c], mem.k_smem.at[unhoisted(first + c, n), :, cols], a_t=True
                        )

                def rest(dk_acc):
                    mma.start_from(dk_acc, dk)
                    mma.multiply(dk_acc, ds, q_tile)
                    dq = mma.result(dq_acc, in_flight=1)
                    plgpu.barrier_arrive(mem.do_free.at[slot])
                    staging = None if mem.dq_smem is None else mem.dq_smem.at[wg]
                    total.add(total.piece(dq_ref, at.batch, head, row, wg), dq, staging)
                    dk_new = mma.result(dk_acc)
                    plgpu.barrier_arrive(mem.q_free.at[slot])
                    return dk_new

                dk_new = mma.scoped(rest, dk_shape)
                return dk_new, mma.result(dv_acc)

            return mma.scoped(gradients, dv_shape, (WGMMA_ROWS, total.cols))

        dk, dv = (layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA) for shape in (dk_shape, dv_shape))
        dk, dv = lax.fori_loop(0, at.steps, advance, (dk, dv))
        if key_sums is not None:
            plgpu.barrier_arrive(mem.kv_free.at[keys])
            for key_sum, ref, grad in zip(key_sums, grad_refs, (dk, dv), strict=True):
                key_sum.add(key_sum.piece(ref, at.batch, at.kv_head, at.col, wg), grad, None)
            return step + at.steps
        # The gradients are stored through the memory of K and V; other warpgroups may still be reading K.
        k_tile, v_tile = mem.k_smem.at[own], mem.v_smem.at[own]
        plgpu.barrier_arrive(mem.tile_done)
        v_tile[...] = dv.astype(dtype)
        plgpu.barrier_wait(mem.tile_done)
        k_tile[...] = (dk * scores.scale).astype(dtype)
        plgpu.commit_smem()
        rows = pl.ds(own_col, WGMMA_ROWS)
        plgpu.copy_smem_to_gmem(v_tile, operands[1].columns(dv_ref.at[at.batch, rows, at.kv_head]))
        plgpu.copy_smem_to_gmem(k_tile, operands[0].columns(dk_ref.at[at.batch, rows, at.kv_head]))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(mem.kv_free.at[keys])
        return step + at.steps

    lax.fori_loop(0, walk.tiles, tile, jnp.int32(0))
