"""Flash attention for Hopper: the backward pass.

One kernel computes all three gradients with five products per tile. A block owns a tile of keys, keeps its dK and dV in
registers and runs over the queries of every head that shares the keys, or over a part of them
(`mosaic_bwd_schedule.py`). Scores are computed transposed, keys by queries. dQ is added up in float32 in global memory
(`mosaic_dq.py`). `mosaic_bwd_keys.py`, `mosaic_bwd_columns.py` and `mosaic_bwd_gradients.py` divide a tile among the
consumer warpgroups.
"""

from __future__ import annotations

import functools
import math
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.flash_attention import mosaic_bwd_columns, mosaic_bwd_gradients, mosaic_bwd_keys
from ejkernel.kernels.flash_attention.config import MosaicBwdConfig, clusters_pay, default_backward
from ejkernel.kernels.flash_attention.mosaic import padded
from ejkernel.kernels.flash_attention.mosaic_bias import Bias, in_tiles
from ejkernel.kernels.flash_attention.mosaic_bwd_memory import scratch
from ejkernel.kernels.flash_attention.mosaic_bwd_operand import Operand, operands
from ejkernel.kernels.flash_attention.mosaic_bwd_packed import Facts, facts_of, key_table, packed_splits
from ejkernel.kernels.flash_attention.mosaic_bwd_queries import query_gradient
from ejkernel.kernels.flash_attention.mosaic_bwd_schedule import Work, item_table, plan
from ejkernel.kernels.flash_attention.mosaic_dq import GradientSum
from ejkernel.kernels.flash_attention.mosaic_mask import Band
from ejkernel.kernels.flash_attention.mosaic_scores import Scores, with_or_without_rest
from ejkernel.kernels.flash_attention.mosaic_walk import Walk
from ejkernel.kernels.hopper.chip import SMS, WGMMA_ROWS
from ejkernel.kernels.hopper.cluster import shared_load
from ejkernel.kernels.hopper.launch import as_consumer, as_producer, launch
from ejkernel.kernels.hopper.wgmma import MatrixUnit

_LOST = 2.0**-12  # Errors of the log-sum-exp below this are hidden by the rounding of weights to 16 bits.


def flash_attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    rest: jax.Array,
    dout: jax.Array,
    *,
    scale: float | None = None,
    lower: int | None = None,
    upper: int | None = None,
    soft_cap: float | None = None,
    q_segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    cfg: MosaicBwdConfig | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of q, k and v, given what `flash_attention_forward` returned; not that of a bias."""
    shapes = q.shape, k.shape, v.shape
    batch, q_len, heads, head_dim = q.shape
    _, kv_len, kv_heads, value_dim = v.shape
    group = heads // kv_heads
    packed = q_segment_ids is not None or mask is not None
    # The interpreter (JAX 0.11 on) has no reductions, so only one block may run at a time.
    clusters = clusters_pay(q.shape, k.shape, lower, upper, packed=packed) and not interpret
    cfg = cfg or default_backward(head_dim, value_dim, clusters=clusters)
    factor: float = head_dim**-0.5 if scale is None else scale
    band = Band(q_len=q_len, kv_len=kv_len, lower=lower, upper=upper)
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    whole = cfg.dq_block_q * cfg.dq_cluster
    # Queries past the end get a log-sum-exp of +inf, so that their weights are zero.
    lse, delta, rest = padded(lse, whole, math.inf), padded(delta, whole, 0.0), padded(rest, whole, 0.0)
    lost = jnp.any(jnp.abs(rest) > _LOST).astype(jnp.int32)[None]
    work = Work(
        heads=batch * kv_heads,
        steps=tuple(group * n for n in band.query_steps(cfg.block_q, cfg.block_kv * cfg.cluster)),
        blocks=SMS // cfg.cluster,
        head_bytes=group * q_len * (head_dim + value_dim) * (q.dtype.itemsize + 2),
        sum_bytes=batch * kv_heads * kv_len * (head_dim + value_dim) * 4,
    )
    facts = facts_of(q_segment_ids, kv_segment_ids, mask, cfg, batch=batch, band=band)
    if facts.known:
        splits = packed_splits(cfg, tiles=work.heads * len(work.steps), group=group, blocks=work.blocks)
        places = {"batch": batch, "kv_heads": kv_heads, "blocks": work.blocks, "splits": splits}
        table = key_table(facts, cfg=cfg, band=band, **places)
    else:
        splits, head_group = plan(work, cfg.splits, cfg.head_group)
        table = jnp.asarray(item_table(work, splits, head_group, persistent=cfg.schedule == "persistent"))
    key_bias = in_tiles(bias, queries=cfg.block_q, keys=cfg.block_kv * cfg.cluster, keys_first=True)
    qk, vo = operands(head_dim, value_dim, cfg, interpret=bool(interpret))
    q, k, v, dout = (_whole_tiles(x.padded(y)) for x, y in ((qk, q), (qk, k), (vo, v), (vo, dout)))
    in_place: tuple[Any, ...] = ()
    dq_sum = key_sums = None
    if cfg.dq != "kernel":
        columns = cfg.dq_columns(head_dim)
        dq_sum = GradientSum(batch, q.shape[1], heads, qk, columns, cfg.block_q, cfg.dq == "bulk", bool(interpret))
        in_place = (jax.new_ref(dq_sum.zeros()),)
    if splits > 1:
        halves, rows = cfg.consumers if cfg.split == "columns" else 1, cfg.block_kv * cfg.cluster
        dk_sum, dv_sum = (
            GradientSum(batch, k.shape[1], kv_heads, x, x.width // halves, rows, False, bool(interpret))
            for x in (qk, vo)
        )
        key_sums = dk_sum, dv_sum
        in_place = (*in_place, *(jax.new_ref(key_sum.zeros()) for key_sum in key_sums))
    body = functools.partial(
        _kernel,
        cfg=cfg,
        band=band,
        scale=factor,
        soft_cap=soft_cap,
        group=group,
        mma=MatrixUnit(bool(interpret)),
        operands=(qk, vo),
        splits=splits,
        dq_sum=dq_sum,
        key_sums=key_sums,
    )
    outs = launch(
        body,
        *(q, k, v, dout, lse, delta, rest, lost, table, facts.whole_ids, facts.key_words, key_bias, *in_place),
        out_type=() if key_sums else tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)),
        blocks=table.shape[0],
        cluster=cfg.cluster,
        consumers=cfg.consumers,
        scratch=scratch(cfg, (qk, vo), q.dtype, dq_sum, ids=bool(facts.ids)),
        interpret=interpret,
    )
    if key_sums is not None:
        scales, refs = (factor, 1.0), in_place[-2:]
        outs = [x.finish(ref[...], y, q.dtype) for x, ref, y in zip(key_sums, refs, scales, strict=True)]
    if dq_sum is not None:
        dq = dq_sum.finish(in_place[0][...], factor, q.dtype)
    else:
        rules = {"band": band, "scale": factor, "soft_cap": soft_cap, "operands": (qk, vo)}
        query_bias = in_tiles(bias, queries=whole, keys=cfg.dq_block_kv)
        saved = lse, delta, rest, lost
        dq = query_gradient(q, k, v, dout, *saved, facts, query_bias, **rules, cfg=cfg, interpret=interpret)
    dq, dk, dv = (x[:, : shape[1], :, : shape[3]] for x, shape in zip((dq, *outs), shapes, strict=True))
    return dq, dk, dv


def _whole_tiles(rows: jax.Array) -> jax.Array:
    """Lengthens an array to a multiple of 8 rows, the height of a tile in shared memory."""
    missing = -rows.shape[1] % 8
    return jnp.pad(rows, ((0, 0), (0, missing), (0, 0), (0, 0))) if missing else rows


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
    *refs: Any,
    cfg: MosaicBwdConfig,
    band: Band,
    scale: float,
    soft_cap: float | None,
    group: int,
    mma: MatrixUnit,
    operands: tuple[Operand, Operand],
    splits: int,
    dq_sum: GradientSum | None,
    key_sums: tuple[GradientSum, GradientSum] | None,
    **memory: Any,
):
    *others, dk_ref, dv_ref = refs
    (qk, vo), facts = operands, Facts(whole_ids=segment_refs, ids=segment_refs, key_words=words_ref)
    mem = types.SimpleNamespace(**memory)
    wg = lax.axis_index("warpgroup")
    walk = Walk(table_ref, band, cfg, k_ref.shape[2], group, splits, facts.known)

    @pl.when(wg == cfg.consumers)
    def _produce():
        as_producer(cfg.consumers)

        def tile(i, step):
            at, keys = walk.tile(i), walk.keys(i)
            plgpu.barrier_wait(mem.kv_free.at[keys])
            parts = cfg.block_kv // WGMMA_ROWS
            for part in range(parts):
                rows, place = pl.ds(at.col + part * WGMMA_ROWS, WGMMA_ROWS), keys * parts + part
                k_rows, v_rows = (ref.at[at.batch, rows, at.kv_head] for ref in (k_ref, v_ref))
                plgpu.copy_gmem_to_smem(qk.columns(k_rows), mem.k_smem.at[place], mem.k_full.at[place])
                plgpu.copy_gmem_to_smem(vo.columns(v_rows), mem.v_smem.at[place], mem.v_full.at[place])
                if mem.kv_ids is not None:
                    ids = segment_refs[1].at[at.batch, rows]
                    plgpu.copy_gmem_to_smem(ids, mem.kv_ids.at[place], mem.k_full.at[place])

            def load(n, _):
                slot = walk.slot(step + n)
                head, row = at.place(n)
                rows = pl.ds(row, cfg.block_q)
                plgpu.barrier_wait(mem.q_free.at[slot])
                q_rows, do_rows = (ref.at[at.batch, rows, head] for ref in (q_ref, do_ref))
                shared_load(cfg.cluster, qk.columns(q_rows), mem.q_smem.at[slot], mem.q_full.at[slot])
                plgpu.copy_gmem_to_smem(lse_ref.at[at.batch, head, rows], mem.lse_smem.at[slot], mem.q_full.at[slot])
                if mem.q_ids is not None:
                    plgpu.copy_gmem_to_smem(segment_refs[0].at[at.batch, rows], mem.q_ids.at[slot], mem.q_full.at[slot])
                plgpu.barrier_wait(mem.do_free.at[slot])
                shared_load(cfg.cluster, vo.columns(do_rows), mem.do_smem.at[slot], mem.do_full.at[slot])
                plgpu.copy_gmem_to_smem(
                    delta_ref.at[at.batch, head, rows], mem.delta_smem.at[slot], mem.do_full.at[slot]
                )

            lax.fori_loop(0, at.steps, load, None)
            return step + at.steps

        lax.fori_loop(0, walk.tiles, tile, jnp.int32(0))
        # All barrier arrivals must be waited for before the block ends; JAX's interpreter checks it.
        for keys in range(cfg.kv_stages):
            plgpu.barrier_wait(mem.kv_free.at[keys])
        for slot in range(cfg.stages):
            plgpu.barrier_wait(mem.q_free.at[slot])
            plgpu.barrier_wait(mem.do_free.at[slot])

    @pl.when(wg < cfg.consumers)
    def _consume():
        as_consumer(cfg.consumers)
        # Every buffer starts free.
        for keys in range(cfg.kv_stages):
            plgpu.barrier_arrive(mem.kv_free.at[keys])
        for slot in range(cfg.stages):
            plgpu.barrier_arrive(mem.q_free.at[slot])
            plgpu.barrier_arrive(mem.do_free.at[slot])
        ragged = band.kv_len % (cfg.block_kv * cfg.cluster) != 0
        bias = None if bias_ref is None else Bias(bias_ref, key_axis=0)
        scores = Scores(band, scale, soft_cap, query_axis=1, ragged=ragged, bias=bias)

        grads = dk_ref, dv_ref

        def consume(scores: Scores):
            if cfg.split == "columns":
                mosaic_bwd_columns.consume(walk, scores, mma, cfg, mem, grads, key_sums, facts)
            elif cfg.split == "gradients":
                mosaic_bwd_gradients.consume(walk, scores, mma, cfg, mem, grads, operands, key_sums, facts)
            elif dq_sum is not None:
                mosaic_bwd_keys.consume(
                    walk, scores, mma, cfg, mem, grads, operands, dq_sum, others[-1], key_sums, facts
                )

        with_or_without_rest(consume, scores, rest_ref, lost_ref)
        plgpu.wait_smem_to_gmem(0)
