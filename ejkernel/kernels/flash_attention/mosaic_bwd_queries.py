"""The second backward kernel, for dQ where it does not fit into the first.

It computes scores and their gradient again, 64 queries per warpgroup, and runs over the keys as the forward kernel
does: dQ stays in registers, and nothing is added up in memory. Warpgroups do not wait for each other: the exponentials
  of one overlap the products of another. Pairs of blocks may share the loads of K and V.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.flash_attention.config import MosaicBwdConfig
from ejkernel.kernels.flash_attention.mosaic_bias import Bias
from ejkernel.kernels.flash_attention.mosaic_bwd_operand import Operand
from ejkernel.kernels.flash_attention.mosaic_bwd_packed import Facts, is_cut, query_table, read_entry
from ejkernel.kernels.flash_attention.mosaic_mask import Band
from ejkernel.kernels.flash_attention.mosaic_schedule import tile_table
from ejkernel.kernels.flash_attention.mosaic_scores import Hides, Scores, load_words, with_or_without_rest
from ejkernel.kernels.hopper.chip import SMS, WGMMA_ROWS
from ejkernel.kernels.hopper.cluster import place_in_cluster, shared_barrier, shared_load
from ejkernel.kernels.hopper.launch import as_consumer, as_producer, launch
from ejkernel.kernels.hopper.wgmma import MatrixUnit, layout_cast, unhoisted

_HEAD_GROUP = 4  # As in the forward kernel.


def query_gradient(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    rest: jax.Array,
    lost: jax.Array,
    facts: Facts,
    bias: jax.Array | None,
    *,
    band: Band,
    scale: float,
    soft_cap: float | None,
    operands: tuple[Operand, Operand],
    cfg: MosaicBwdConfig,
    interpret: Any,
) -> jax.Array:
    """Returns dQ; vectors along the queries must be padded to whole tiles, as `facts.whole_ids` are."""
    batch, _, heads, _ = q.shape
    qk, vo = operands
    blocks = SMS // cfg.dq_cluster
    ids = bool(facts.ids)
    if facts.known:
        table = query_table(facts, cfg=cfg, band=band, batch=batch, heads=heads, blocks=blocks)
    else:
        steps = band.steps(cfg.dq_block_q * cfg.dq_cluster, cfg.dq_block_kv)
        group, persistent = cfg.head_group or _HEAD_GROUP, cfg.schedule == "persistent"
        table = tile_table(heads=batch * heads, steps=steps, blocks=blocks, head_group=group, persistent=persistent)
        table = jnp.asarray(table)
    body = functools.partial(
        _kernel, cfg=cfg, band=band, scale=scale, soft_cap=soft_cap, operands=operands, mma=MatrixUnit(bool(interpret))
    )
    return launch(
        body,
        *(q, k, v, dout, lse, delta, rest, lost, table, facts.whole_ids, facts.query_words, bias),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        blocks=table.shape[0],
        cluster=cfg.dq_cluster,
        consumers=cfg.consumers,
        scratch={
            "q_smem": qk.memory(cfg.consumers, WGMMA_ROWS, dtype=q.dtype),
            "do_smem": vo.memory(cfg.consumers, WGMMA_ROWS, dtype=dout.dtype),
            "k_smem": qk.memory(cfg.dq_k_stages, cfg.dq_block_kv, dtype=k.dtype),
            "v_smem": vo.memory(cfg.dq_v_stages, cfg.dq_block_kv, dtype=v.dtype),
            "q_ids": plgpu.SMEM((cfg.consumers, WGMMA_ROWS), jnp.int32) if ids else None,
            "kv_ids": plgpu.SMEM((cfg.dq_k_stages, cfg.dq_block_kv), jnp.int32) if ids else None,
            "q_full": plgpu.Barrier(num_barriers=cfg.consumers, num_arrivals=2 if ids else 1),
            "do_full": plgpu.Barrier(num_barriers=cfg.consumers),
            "q_free": plgpu.Barrier(num_barriers=cfg.consumers),
            "k_full": plgpu.Barrier(num_barriers=cfg.dq_k_stages, num_arrivals=2 if ids else 1),
            "k_free": shared_barrier(cfg.dq_cluster, cfg.dq_k_stages, cfg.consumers),
            "v_full": plgpu.Barrier(num_barriers=cfg.dq_v_stages),
            "v_free": shared_barrier(cfg.dq_cluster, cfg.dq_v_stages, cfg.consumers),
        },
        interpret=interpret,
    )


def _kernel(
    q_ref,
    k_ref,
    v_ref,
    do_ref,
    lse_ref,
    delta_ref,
    rest_ref,
    lost_ref,
    table_ref,
    segment_refs,
    words_ref,
    bias_ref,
    dq_ref,
    cfg: MosaicBwdConfig,
    band: Band,
    scale: float,
    soft_cap: float | None,
    operands: tuple[Operand, Operand],
    mma: MatrixUnit,
    **scratch: Any,
):
    packed = bool(segment_refs) or words_ref is not None
    mem = types.SimpleNamespace(**scratch)
    block, wg = lax.axis_index("block"), lax.axis_index("warpgroup")
    heads, (qk, vo) = q_ref.shape[2], operands
    block_q = cfg.dq_block_q * cfg.dq_cluster
    rows_per_head = -(-band.q_len // block_q)
    block_kv = cfg.dq_block_kv

    def decode(i):
        """Returns batch, head, first query, first key block and number of key blocks of the block's tile `i`.

        For packed sequences also the first key block that all its queries see, and the one after the last.
        """
        start = end = clear = clear_end = None
        if packed:
            tile, start, clear, clear_end, end = read_entry(table_ref, block, i)
        else:
            tile = table_ref[block, i + 1]
        flat = lax.div(tile, jnp.int32(rows_per_head))
        row = lax.rem(tile, jnp.int32(rows_per_head)) * block_q
        if start is None or end is None:
            start, end = band.blocks(row, block_q, block_kv)
        row = row + place_in_cluster(cfg.dq_cluster) * cfg.dq_block_q
        batch, head = lax.div(flat, jnp.int32(heads)), lax.rem(flat, jnp.int32(heads))
        count = end - start
        if band.lower is None and band.upper is None:
            count = unhoisted(count, tile)  # As in `Walk.tile`.
        return batch, head, row, start, count, clear, clear_end

    def k_slot(step):
        return lax.rem(step, jnp.int32(cfg.dq_k_stages))

    def v_slot(step):
        return lax.rem(step, jnp.int32(cfg.dq_v_stages))

    @pl.when(wg == cfg.consumers)
    def _produce():
        as_producer(cfg.consumers)

        def tile(i, step):
            batch, head, row, start, count, *_ = decode(i)
            kv_head = lax.div(head, jnp.int32(heads // k_ref.shape[2]))

            def load(operand, ref, smem, full, free, slot, n):
                plgpu.barrier_wait(free.at[slot])
                rows = pl.ds((start + n) * block_kv, block_kv)
                source = operand.columns(ref.at[batch, rows, kv_head])
                shared_load(cfg.dq_cluster, source, smem.at[slot], full.at[slot])

            def load_both(n, _):
                slot = k_slot(step + n)
                load(qk, k_ref, mem.k_smem, mem.k_full, mem.k_free, slot, n)
                if segment_refs:
                    keys = pl.ds((start + n) * block_kv, block_kv)
                    plgpu.copy_gmem_to_smem(segment_refs[1].at[batch, keys], mem.kv_ids.at[slot], mem.k_full.at[slot])
                load(vo, v_ref, mem.v_smem, mem.v_full, mem.v_free, v_slot(step + n), n)

            for c in range(cfg.consumers):
                rows = pl.ds(row + c * WGMMA_ROWS, WGMMA_ROWS)
                plgpu.barrier_wait(mem.q_free.at[c])
                q_rows, do_rows = qk.columns(q_ref.at[batch, rows, head]), vo.columns(do_ref.at[batch, rows, head])
                plgpu.copy_gmem_to_smem(q_rows, mem.q_smem.at[c], mem.q_full.at[c])
                if segment_refs:
                    plgpu.copy_gmem_to_smem(segment_refs[0].at[batch, rows], mem.q_ids.at[c], mem.q_full.at[c])
                plgpu.copy_gmem_to_smem(do_rows, mem.do_smem.at[c], mem.do_full.at[c])
            lax.fori_loop(0, count, load_both, None)
            return step + count

        lax.fori_loop(0, table_ref[block, 0], tile, jnp.int32(0))
        # All barrier arrivals must be waited for before the block ends; JAX's interpreter checks it.
        for free in (mem.k_free, mem.v_free, mem.q_free):
            for slot in range(free.shape[0]):
                plgpu.barrier_wait(free.at[slot])

    @pl.when(wg < cfg.consumers)
    def _consume():
        as_consumer(cfg.consumers)
        plgpu.barrier_arrive(mem.q_free.at[wg])
        for free in (mem.k_free, mem.v_free):
            for slot in range(free.shape[0]):
                plgpu.barrier_arrive(free.at[slot])
        q_tile = mem.q_smem.at[wg]
        narrow, wide = (WGMMA_ROWS, block_kv), (WGMMA_ROWS, qk.width)

        def tile(scores: Scores, i, step):
            batch, head, row, start, count, clear, clear_end = decode(i)
            row = row + wg * WGMMA_ROWS
            rows = pl.ds(row, WGMMA_ROWS)
            lse = scores.of_queries(lse_ref.at[batch, head, rows], optimized=False)
            delta = scores.of_queries(delta_ref.at[batch, head, rows], optimized=False)
            plgpu.barrier_wait(mem.q_full.at[wg])
            plgpu.barrier_wait(mem.do_full.at[wg])

            def advance(n, dq):
                k, v = k_slot(step + n), v_slot(step + n)
                q_tile, do_tile = mem.q_smem.at[unhoisted(wg, n)], mem.do_smem.at[unhoisted(wg, n)]
                hides = None
                if packed:
                    ids = (mem.q_ids.at[wg], mem.kv_ids.at[k]) if segment_refs else ()
                    words = load_words(words_ref, batch, (start + n) * block_kv, row, narrow)
                    hides = Hides(is_cut(start + n, clear, clear_end), *ids, words=words)
                plgpu.barrier_wait(mem.k_full.at[k])

                def gradient(s_acc, dp_acc):
                    mma.multiply(s_acc, q_tile, mem.k_smem.at[k], b_t=True)
                    plgpu.barrier_wait(mem.v_full.at[v])
                    mma.multiply(dp_acc, do_tile, mem.v_smem.at[v], b_t=True)
                    s = mma.result(s_acc, in_flight=1)
                    p = scores.weights(s, lse, batch, head, (start + n) * block_kv, row, hides)
                    dp = mma.result(dp_acc)
                    plgpu.barrier_arrive(mem.v_free.at[v])
                    p = scores.restored(p, batch, head, row)
                    return scores.gradient(p, dp, delta).astype(q_ref.dtype)

                ds = mma.scoped(gradient, narrow, narrow)

                def add(dq_acc):
                    mma.start_from(dq_acc, dq)
                    mma.multiply(dq_acc, ds, mem.k_smem.at[k])
                    return mma.result(dq_acc)

                dq = mma.scoped(add, wide)
                plgpu.barrier_arrive(mem.k_free.at[k])
                return dq

            zeros = layout_cast(jnp.zeros(wide, jnp.float32), plgpu.Layout.WGMMA)
            dq = lax.fori_loop(0, count, advance, zeros)
            # The gradient is stored through the memory of Q.
            q_tile[...] = (dq * scale).astype(dq_ref.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_tile, qk.columns(dq_ref.at[batch, rows, head]))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(mem.q_free.at[wg])
            return step + count

        def consume(scores: Scores):
            lax.fori_loop(0, table_ref[block, 0], functools.partial(tile, scores), jnp.int32(0))

        bias = None if bias_ref is None else Bias(bias_ref, key_axis=1)
        scores = Scores(band, scale, soft_cap, query_axis=0, ragged=band.kv_len % block_kv != 0, bias=bias)
        with_or_without_rest(consume, scores, rest_ref, lost_ref)
        plgpu.wait_smem_to_gmem(0)
