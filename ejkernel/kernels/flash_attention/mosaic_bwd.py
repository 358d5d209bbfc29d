"""Flash attention for Hopper: the backward pass.

One kernel computes all three gradients with five products per tile. A block owns a tile of keys, keeps its dK and dV in
registers and runs over the queries of every head that shares the keys, or over a part of them
(`mosaic_bwd_schedule.py`). Scores are computed transposed, keys by queries. dQ is added up in float32 in global memory
(`mosaic_dq.py`). `mosaic_bwd_keys.py` and `mosaic_bwd_columns.py` divide a tile among the consumer warpgroups.
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

from ejkernel.kernels.flash_attention import mosaic_bwd_columns, mosaic_bwd_keys
from ejkernel.kernels.flash_attention.config import MosaicBwdConfig, default_backward, is_full
from ejkernel.kernels.flash_attention.mosaic import padded
from ejkernel.kernels.flash_attention.mosaic_bwd_packed import key_table, packed_splits
from ejkernel.kernels.flash_attention.mosaic_bwd_queries import query_gradient
from ejkernel.kernels.flash_attention.mosaic_bwd_schedule import Work, item_table, plan
from ejkernel.kernels.flash_attention.mosaic_dq import GradientSum
from ejkernel.kernels.flash_attention.mosaic_mask import Band
from ejkernel.kernels.flash_attention.mosaic_scores import Scores, with_or_without_rest
from ejkernel.kernels.flash_attention.mosaic_walk import Walk
from ejkernel.kernels.hopper.chip import SMS, WGMMA_ROWS
from ejkernel.kernels.hopper.cluster import shared_barrier, shared_load
from ejkernel.kernels.hopper.launch import launch, swizzled
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
    cfg: MosaicBwdConfig | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of q, k and v, given what `flash_attention_forward` returned."""
    batch, q_len, heads, head_dim = q.shape
    _, kv_len, kv_heads, _ = k.shape
    group = heads // kv_heads
    # The interpreter (JAX 0.11 on) has no reductions, so only one block may run at a time.
    cfg = cfg or default_backward(head_dim, full=is_full(q_len, kv_len, lower, upper) and not interpret)
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
        head_bytes=group * q_len * head_dim * (2 * q.dtype.itemsize + 4),
        sum_bytes=2 * k.size * 4,
    )
    ids: tuple[jax.Array, ...] = ()
    segments: tuple[jax.Array, ...] = ()
    if q_segment_ids is not None and kv_segment_ids is not None:
        ids = q_segment_ids.astype(jnp.int32), kv_segment_ids.astype(jnp.int32)
        segments = (
            padded(ids[0], whole, -1),
            padded(ids[1], math.lcm(cfg.block_kv * cfg.cluster, cfg.dq_block_kv), -2),
        )
        splits = packed_splits(cfg, tiles=work.heads * len(work.steps), group=group, blocks=work.blocks)
        table = key_table(*ids, cfg=cfg, band=band, kv_heads=kv_heads, blocks=work.blocks, splits=splits)
    else:
        splits, head_group = plan(work, cfg.splits, cfg.head_group)
        table = jnp.asarray(item_table(work, splits, head_group, persistent=cfg.schedule == "persistent"))
    # dQ is divided among the warpgroups by query rows if there are enough of them, else by columns.
    dq_cols = head_dim if cfg.block_q > WGMMA_ROWS else head_dim // cfg.consumers
    total: GradientSum | None = None
    in_place: tuple[Any, ...] = ()
    if cfg.dq != "kernel":
        total = GradientSum(batch, q_len, heads, head_dim, dq_cols, cfg.block_q, cfg.dq == "bulk", bool(interpret))
        in_place = (jax.new_ref(total.zeros()),)
    key_sum: GradientSum | None = None
    out_type: tuple[Any, ...] = (jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype))
    if splits > 1:
        columns = head_dim // (cfg.consumers if cfg.split == "columns" else 1)
        rows = cfg.block_kv * cfg.cluster
        key_sum = GradientSum(batch, kv_len, kv_heads, head_dim, columns, rows, False, bool(interpret))
        in_place = (*in_place, jax.new_ref(key_sum.zeros()), jax.new_ref(key_sum.zeros()))
        out_type = ()
    body = functools.partial(
        _kernel,
        cfg=cfg,
        band=band,
        scale=factor,
        soft_cap=soft_cap,
        group=group,
        mma=MatrixUnit(bool(interpret)),
        splits=splits,
        total=total,
        key_sum=key_sum,
    )
    parts = cfg.block_kv // WGMMA_ROWS
    ids_smem = bool(ids) and cfg.split == "keys"
    kv_tile = (parts, WGMMA_ROWS, head_dim)
    q_tile = (cfg.stages, cfg.block_q, head_dim)
    scratch: dict[str, Any] = {
        "k_smem": swizzled(kv_tile, k.dtype),
        "v_smem": swizzled(kv_tile, v.dtype),
        "q_smem": swizzled(q_tile, q.dtype),
        "do_smem": swizzled(q_tile, dout.dtype),
        "p_smem": swizzled((2, WGMMA_ROWS, cfg.block_q), q.dtype) if cfg.split == "columns" else None,
        "ds_smem": swizzled((2, parts, WGMMA_ROWS, cfg.block_q), q.dtype),
        "dq_smem": None if total is None else total.staging(cfg.consumers),
        "lse_smem": plgpu.SMEM((cfg.stages, cfg.block_q), jnp.float32),
        "delta_smem": plgpu.SMEM((cfg.stages, cfg.block_q), jnp.float32),
        "q_ids": plgpu.SMEM((cfg.stages, cfg.block_q), jnp.int32) if ids_smem else None,
        "kv_ids": plgpu.SMEM((parts, WGMMA_ROWS), jnp.int32) if ids_smem else None,
        "k_full": plgpu.Barrier(num_barriers=parts, num_arrivals=2 if ids_smem else 1),
        "v_full": plgpu.Barrier(num_barriers=parts),
        "kv_free": plgpu.Barrier(num_arrivals=cfg.consumers),
        "q_full": plgpu.Barrier(num_barriers=cfg.stages, num_arrivals=3 if ids_smem else 2),
        "do_full": plgpu.Barrier(num_barriers=cfg.stages, num_arrivals=2),
        "q_free": shared_barrier(cfg.cluster, cfg.stages, cfg.consumers),
        "do_free": shared_barrier(cfg.cluster, cfg.stages, cfg.consumers),
        "ds_full": plgpu.Barrier(num_barriers=2, num_arrivals=cfg.consumers),
        "ds_free": plgpu.Barrier(num_barriers=2, num_arrivals=cfg.consumers),
        "tile_done": plgpu.Barrier(num_arrivals=cfg.consumers),
    }
    outs = launch(
        body,
        *(q, k, v, dout, lse, delta, rest, lost, table, *segments, *in_place),
        out_type=out_type,
        blocks=table.shape[0],
        cluster=cfg.cluster,
        consumers=cfg.consumers,
        scratch=scratch,
        interpret=interpret,
    )
    if key_sum is None:
        dk, dv = outs
    else:
        dk = key_sum.finish(in_place[-2][...], factor, k.dtype)
        dv = key_sum.finish(in_place[-1][...], 1.0, v.dtype)
    if total is not None:
        return total.finish(in_place[0][...], factor, q.dtype), dk, dv
    rules = {"band": band, "scale": factor, "soft_cap": soft_cap}
    dq = query_gradient(q, k, v, dout, lse, delta, rest, lost, ids, segments, **rules, cfg=cfg, interpret=interpret)
    return dq, dk, dv


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
    *refs: Any,
    cfg: MosaicBwdConfig,
    band: Band,
    scale: float,
    soft_cap: float | None,
    group: int,
    mma: MatrixUnit,
    splits: int,
    total: GradientSum | None,
    key_sum: GradientSum | None,
    **scratch: Any,
):
    *others, dk_ref, dv_ref = refs
    segment_refs = others if total is None else others[:-1]
    mem = types.SimpleNamespace(**scratch)
    wg = lax.axis_index("warpgroup")
    walk = Walk(table_ref, band, cfg, k_ref.shape[2], group, splits, bool(segment_refs))

    @pl.when(wg == cfg.consumers)
    def _produce():
        plgpu.set_max_registers(cfg.producer_registers, action="decrease")

        def tile(i, step):
            at = walk.tile(i)
            plgpu.barrier_wait(mem.kv_free)
            for part in range(cfg.block_kv // WGMMA_ROWS):
                rows = pl.ds(at.col + part * WGMMA_ROWS, WGMMA_ROWS)
                for ref, smem, full in ((k_ref, mem.k_smem, mem.k_full), (v_ref, mem.v_smem, mem.v_full)):
                    plgpu.copy_gmem_to_smem(ref.at[at.batch, rows, at.kv_head], smem.at[part], full.at[part])
                if mem.kv_ids is not None:
                    plgpu.copy_gmem_to_smem(
                        segment_refs[1].at[at.batch, rows], mem.kv_ids.at[part], mem.k_full.at[part]
                    )

            def load(n, _):
                slot = walk.slot(step + n)
                head, row = at.place(n)
                rows = pl.ds(row, cfg.block_q)
                plgpu.barrier_wait(mem.q_free.at[slot])
                shared_load(cfg.cluster, q_ref.at[at.batch, rows, head], mem.q_smem.at[slot], mem.q_full.at[slot])
                plgpu.copy_gmem_to_smem(lse_ref.at[at.batch, head, rows], mem.lse_smem.at[slot], mem.q_full.at[slot])
                if mem.q_ids is not None:
                    plgpu.copy_gmem_to_smem(segment_refs[0].at[at.batch, rows], mem.q_ids.at[slot], mem.q_full.at[slot])
                plgpu.barrier_wait(mem.do_free.at[slot])
                shared_load(cfg.cluster, do_ref.at[at.batch, rows, head], mem.do_smem.at[slot], mem.do_full.at[slot])
                plgpu.copy_gmem_to_smem(
                    delta_ref.at[at.batch, head, rows], mem.delta_smem.at[slot], mem.do_full.at[slot]
                )

            lax.fori_loop(0, at.steps, load, None)
            return step + at.steps

        lax.fori_loop(0, walk.tiles, tile, jnp.int32(0))
        # All barrier arrivals must be waited for before the block ends; JAX's interpreter checks it.
        plgpu.barrier_wait(mem.kv_free)
        for slot in range(cfg.stages):
            plgpu.barrier_wait(mem.q_free.at[slot])
            plgpu.barrier_wait(mem.do_free.at[slot])

    @pl.when(wg < cfg.consumers)
    def _consume():
        plgpu.set_max_registers(cfg.consumer_registers, action="increase")
        # Every buffer starts free.
        plgpu.barrier_arrive(mem.kv_free)
        for slot in range(cfg.stages):
            plgpu.barrier_arrive(mem.q_free.at[slot])
            plgpu.barrier_arrive(mem.do_free.at[slot])
        ragged = band.kv_len % (cfg.block_kv * cfg.cluster) != 0
        scores = Scores(band, scale, soft_cap, query_axis=1, ragged=ragged)

        def consume(scores: Scores):
            if total is None:
                mosaic_bwd_columns.consume(walk, scores, mma, cfg, mem, dk_ref, dv_ref, key_sum, segment_refs)
            else:
                mosaic_bwd_keys.consume(walk, scores, mma, cfg, mem, dk_ref, dv_ref, total, others[-1], key_sum)

        with_or_without_rest(consume, scores, rest_ref, lost_ref)
        plgpu.wait_smem_to_gmem(0)
