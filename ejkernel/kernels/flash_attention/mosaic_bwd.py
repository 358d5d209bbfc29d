"""Flash attention for Hopper: the backward pass.

One kernel computes all three gradients with five products a tile. A block owns a tile of keys; its consumer
warpgroups own 64 keys each, keep dK and dV in registers and run over the queries of every head that shares the keys.
Scores are computed transposed, keys by queries, so that the weights and their gradient are already in the registers
where dV and dK need them as left operands. Only dQ needs the gradient the other way round: it goes through shared
memory, and each warpgroup computes its share of dQ and adds it to float32 in global memory (`mosaic_dq.py`).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel._compat import load_with_layout
from ejkernel.kernels.flash_attention.config import WGMMA_ROWS, MosaicBwdConfig, default_backward
from ejkernel.kernels.flash_attention.mosaic import padded
from ejkernel.kernels.flash_attention.mosaic_dq import QueryGradient
from ejkernel.kernels.flash_attention.mosaic_mask import Band
from ejkernel.kernels.flash_attention.mosaic_schedule import tile_table
from ejkernel.kernels.flash_attention.mosaic_wgmma import MatrixUnit, layout_cast

_LOG2E = math.log2(math.e)
_SMS = 132
_L2_BUDGET_BYTES = 32 << 20  # For Q, dO and the float32 dQ of the heads in work.
_SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_ROWS = plgpu.Layout.WGMMA.reduce(1)
_COLS = plgpu.Layout.WGMMA.reduce(0)


def flash_attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
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
    cfg = cfg or default_backward(head_dim)
    factor: float = head_dim**-0.5 if scale is None else scale
    band = Band(q_len=q_len, kv_len=kv_len, lower=lower, upper=upper)
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    # Queries past the end get a log-sum-exp of +inf, so that their weights are zero.
    lse, delta = padded(lse, cfg.block_q, math.inf), padded(delta, cfg.block_q, 0.0)
    table = tile_table(
        heads=batch * kv_heads,
        steps=tuple(group * n for n in band.query_steps(cfg.block_q, cfg.block_kv)),
        blocks=_SMS,
        head_group=cfg.head_group
        or max(_L2_BUDGET_BYTES // (group * q_len * head_dim * (2 * q.dtype.itemsize + 4)), 1),
        persistent=cfg.schedule == "persistent",
    )
    # dQ is shared out among the warpgroups by query rows where there are enough of them, else by columns.
    dq_cols = head_dim if cfg.block_q == cfg.block_kv else head_dim // cfg.consumers
    total = QueryGradient(batch, q_len, heads, head_dim, dq_cols, cfg.block_q, cfg.dq == "bulk", bool(interpret))
    dq_ref = jax.new_ref(total.zeros())
    body = functools.partial(
        _kernel,
        cfg=cfg,
        band=band,
        scale=factor,
        soft_cap=soft_cap,
        group=group,
        mma=MatrixUnit(bool(interpret)),
        total=total,
    )
    segments = ()
    if q_segment_ids is not None and kv_segment_ids is not None:
        segments = (
            padded(q_segment_ids.astype(jnp.int32), cfg.block_q, -1),
            padded(kv_segment_ids.astype(jnp.int32), cfg.block_kv, -2),
        )
    kv_tile = (cfg.consumers, WGMMA_ROWS, head_dim)
    q_tile = (cfg.stages, cfg.block_q, head_dim)
    scratch: dict[str, Any] = {
        "k_smem": plgpu.SMEM(kv_tile, k.dtype, transforms=_SWIZZLED),
        "v_smem": plgpu.SMEM(kv_tile, v.dtype, transforms=_SWIZZLED),
        "q_smem": plgpu.SMEM(q_tile, q.dtype, transforms=_SWIZZLED),
        "do_smem": plgpu.SMEM(q_tile, dout.dtype, transforms=_SWIZZLED),
        "ds_smem": plgpu.SMEM((2, cfg.consumers, WGMMA_ROWS, cfg.block_q), q.dtype, transforms=_SWIZZLED),
        "dq_smem": total.staging(cfg.consumers),
        "lse_smem": plgpu.SMEM((cfg.stages, cfg.block_q), jnp.float32),
        "delta_smem": plgpu.SMEM((cfg.stages, cfg.block_q), jnp.float32),
        "k_full": plgpu.Barrier(num_barriers=cfg.consumers),
        "v_full": plgpu.Barrier(num_barriers=cfg.consumers),
        "kv_free": plgpu.Barrier(num_arrivals=cfg.consumers),
        "q_full": plgpu.Barrier(num_barriers=cfg.stages, num_arrivals=2),
        "do_full": plgpu.Barrier(num_barriers=cfg.stages, num_arrivals=2),
        "q_free": plgpu.Barrier(num_barriers=cfg.stages, num_arrivals=cfg.consumers),
        "do_free": plgpu.Barrier(num_barriers=cfg.stages, num_arrivals=cfg.consumers),
        "ds_full": plgpu.Barrier(num_barriers=2, num_arrivals=cfg.consumers),
        "tile_done": plgpu.Barrier(num_arrivals=cfg.consumers),
    }
    dk, dv = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)),
        grid=(table.shape[0],),
        grid_names=("block",),
        num_threads=cfg.consumers + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=interpret,
    )(q, k, v, dout, lse, delta, jnp.asarray(table), dq_ref, *segments)
    return total.finish(dq_ref[...], factor, q.dtype), dk, dv


def _kernel(
    q_ref,
    k_ref,
    v_ref,
    do_ref,
    lse_ref,
    delta_ref,
    table_ref,
    dq_ref,
    *refs: Any,
    cfg: MosaicBwdConfig,
    band: Band,
    scale: float,
    soft_cap: float | None,
    group: int,
    mma: MatrixUnit,
    total: QueryGradient,
    k_smem,
    v_smem,
    q_smem,
    do_smem,
    ds_smem,
    dq_smem,
    lse_smem,
    delta_smem,
    k_full,
    v_full,
    kv_free,
    q_full,
    do_full,
    q_free,
    do_free,
    ds_full,
    tile_done,
):
    *segment_refs, dk_ref, dv_ref = refs
    block = lax.axis_index("block")
    wg = lax.axis_index("warpgroup")
    tiles = table_ref[block, 0]
    kv_heads, head_dim = k_ref.shape[2], k_ref.shape[3]
    tiles_per_head = -(-band.kv_len // cfg.block_kv)
    block_q, stages, consumers = cfg.block_q, cfg.stages, cfg.consumers

    def decode(i):
        """Returns batch, kv head, first key, first query block, and how many query blocks a head has."""
        tile = table_ref[block, i + 1]
        flat = lax.div(tile, jnp.int32(tiles_per_head))
        col = lax.rem(tile, jnp.int32(tiles_per_head)) * cfg.block_kv
        start, end = band.query_blocks(col, cfg.block_kv, block_q)
        return lax.div(flat, jnp.int32(kv_heads)), lax.rem(flat, jnp.int32(kv_heads)), col, start, end - start

    def slot_of(step):
        return lax.rem(step, jnp.int32(stages))

    def place(s, kv_head, start, count):
        """Returns query head and first query row of step `s` of a tile."""
        return kv_head * group + lax.div(s, count), (start + lax.rem(s, count)) * block_q

    @pl.when(wg == consumers)
    def _produce():
        plgpu.set_max_registers(cfg.producer_registers, action="decrease")

        def tile(i, step):
            batch, kv_head, col, start, count = decode(i)
            plgpu.barrier_wait(kv_free)
            for c in range(consumers):
                rows = pl.ds(col + c * WGMMA_ROWS, WGMMA_ROWS)
                plgpu.copy_gmem_to_smem(k_ref.at[batch, rows, kv_head], k_smem.at[c], k_full.at[c])
                plgpu.copy_gmem_to_smem(v_ref.at[batch, rows, kv_head], v_smem.at[c], v_full.at[c])

            def load(s, _):
                slot = slot_of(step + s)
                head, row = place(s, kv_head, start, count)
                rows = pl.ds(row, block_q)
                plgpu.barrier_wait(q_free.at[slot])
                plgpu.copy_gmem_to_smem(q_ref.at[batch, rows, head], q_smem.at[slot], q_full.at[slot])
                plgpu.copy_gmem_to_smem(lse_ref.at[batch, head, rows], lse_smem.at[slot], q_full.at[slot])
                plgpu.barrier_wait(do_free.at[slot])
                plgpu.copy_gmem_to_smem(do_ref.at[batch, rows, head], do_smem.at[slot], do_full.at[slot])
                plgpu.copy_gmem_to_smem(delta_ref.at[batch, head, rows], delta_smem.at[slot], do_full.at[slot])

            lax.fori_loop(0, group * count, load, None)
            return step + group * count

        lax.fori_loop(0, tiles, tile, jnp.int32(0))
        plgpu.barrier_wait(kv_free)
        for s in range(stages):
            plgpu.barrier_wait(q_free.at[s])
            plgpu.barrier_wait(do_free.at[s])

    @pl.when(wg < consumers)
    def _consume():
        plgpu.set_max_registers(cfg.consumer_registers, action="increase")
        k_tile, v_tile = k_smem.at[wg], v_smem.at[wg]
        plgpu.barrier_arrive(kv_free)
        for s in range(stages):
            plgpu.barrier_arrive(q_free.at[s])
            plgpu.barrier_arrive(do_free.at[s])
        exponent_scale = _LOG2E if soft_cap is not None else scale * _LOG2E
        scores_shape, wide = (WGMMA_ROWS, block_q), (WGMMA_ROWS, head_dim)
        dq_by_rows, dq_cols = total.cols == head_dim, total.cols

        def unseen(s, batch, col, row):
            """Masks keys (rows of `s`) that queries (columns) may not see."""
            queries = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
            keys = plgpu.broadcasted_iota(jnp.int32, (WGMMA_ROWS,), 0, layout=_ROWS) + (col - row)

            def bound(offset):
                return lax.broadcast_in_dim(keys - offset, s.shape, [0])

            if band.upper is not None:
                s = jnp.where(queries >= bound(band.upper), s, -jnp.inf)
            if band.lower is not None:
                s = jnp.where(queries <= bound(band.lower), s, -jnp.inf)
            if segment_refs:
                q_ids = load_with_layout(segment_refs[0].at[batch, pl.ds(row, block_q)], layout=_COLS, optimized=False)
                kv_ids = load_with_layout(
                    segment_refs[1].at[batch, pl.ds(col, WGMMA_ROWS)], layout=_ROWS, optimized=False
                )
                same = lax.broadcast_in_dim(kv_ids, s.shape, [0]) == along_queries(q_ids)
                s = jnp.where(same, s, -jnp.inf)
            return s

        def needs_mask(col, row):
            cut = jnp.bool_(False)
            if band.upper is not None:
                cut = cut | (col + (WGMMA_ROWS - 1) - row > band.upper)
            if band.lower is not None:
                cut = cut | (col - row - (block_q - 1) < band.lower)
            return cut

        def along_queries(x):
            return lax.broadcast_in_dim(x, scores_shape, [1])

        def tile(i, step):
            batch, kv_head, col, start, count = decode(i)
            own_col = col + wg * WGMMA_ROWS
            steps = group * count
            plgpu.barrier_wait(k_full.at[wg])
            plgpu.barrier_wait(v_full.at[wg])
            # Every warpgroup reads all keys for dQ: it waits for the others' too.
            for c in range(consumers):
                pl.when(wg != c)(lambda c=c: plgpu.barrier_wait(k_full.at[c]))
                pl.when(wg != c)(lambda c=c: plgpu.barrier_wait(v_full.at[c]))

            def advance(n, carry):
                dk, dv = carry
                slot = slot_of(step + n)
                buffer = lax.rem(step + n, jnp.int32(2))
                head, row = place(n, kv_head, start, count)
                q_tile, do_tile = q_smem.at[slot], do_smem.at[slot]
                plgpu.barrier_wait(q_full.at[slot])

                # Accumulators are opened as late as possible: each holds its registers from there on.
                def weights(s_acc, dp_acc):
                    """Returns the weights and the gradient of the scores."""
                    mma.multiply(s_acc, k_tile, q_tile, b_t=True)
                    plgpu.barrier_wait(do_full.at[slot])
                    mma.multiply(dp_acc, v_tile, do_tile, b_t=True)
                    s = mma.result(s_acc, in_flight=1)
                    t = s if soft_cap is None else jnp.tanh(s * (scale / soft_cap))
                    capped = t if soft_cap is None else soft_cap * t
                    if segment_refs:
                        capped = unseen(capped, batch, own_col, row)
                    elif band.upper is not None or band.lower is not None:
                        capped = lax.cond(
                            needs_mask(own_col, row), lambda x: unseen(x, batch, own_col, row), lambda x: x, capped
                        )
                    lse = load_with_layout(lse_smem.at[slot], layout=_COLS)
                    p = jnp.exp2(capped * exponent_scale - along_queries(lse))
                    p = lax.optimization_barrier(p)
                    dp = mma.result(dp_acc)
                    ds = p * (dp - along_queries(load_with_layout(delta_smem.at[slot], layout=_COLS)))
                    if soft_cap is not None:
                        ds = ds * (1.0 - t * t)
                    return p.astype(q_ref.dtype), ds.astype(q_ref.dtype)

                p, ds = mma.scoped(weights, scores_shape, scores_shape)

                def gradients(dv_acc, dq_acc):
                    mma.start_from(dv_acc, dv)
                    mma.multiply(dv_acc, p, do_tile)
                    ds_smem.at[buffer, wg][...] = ds
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(ds_full.at[buffer])
                    plgpu.barrier_wait(ds_full.at[buffer])
                    for c in range(consumers):
                        if dq_by_rows:
                            rows = pl.ds(wg * WGMMA_ROWS, WGMMA_ROWS)
                            mma.multiply(dq_acc, ds_smem.at[buffer, c, :, rows], k_smem.at[c], a_t=True)
                        else:
                            cols = pl.ds(wg * dq_cols, dq_cols)
                            mma.multiply(dq_acc, ds_smem.at[buffer, c], k_smem.at[c, :, cols], a_t=True)

                    def rest(dk_acc):
                        mma.start_from(dk_acc, dk)
                        mma.multiply(dk_acc, ds, q_tile)
                        dq = mma.result(dq_acc, in_flight=1)
                        plgpu.barrier_arrive(do_free.at[slot])
                        staging = None if dq_smem is None else dq_smem.at[wg]
                        total.add(total.piece(dq_ref, batch, head, row, wg), dq, staging)
                        dk_new = mma.result(dk_acc, in_flight=0)
                        plgpu.barrier_arrive(q_free.at[slot])
                        return dk_new

                    dk_new = mma.scoped(rest, wide)
                    return dk_new, mma.result(dv_acc)

                return mma.scoped(gradients, wide, (WGMMA_ROWS, dq_cols))

            zeros = layout_cast(jnp.zeros(wide, jnp.float32), plgpu.Layout.WGMMA)
            dk, dv = lax.fori_loop(0, steps, advance, (zeros, zeros))
            # The gradients leave through the memory of K and V; the others may still be reading K.
            plgpu.barrier_arrive(tile_done)
            v_tile[...] = dv.astype(dv_ref.dtype)
            plgpu.barrier_wait(tile_done)
            k_tile[...] = (dk * scale).astype(dk_ref.dtype)
            plgpu.commit_smem()
            rows = pl.ds(own_col, WGMMA_ROWS)
            plgpu.copy_smem_to_gmem(v_tile, dv_ref.at[batch, rows, kv_head])
            plgpu.copy_smem_to_gmem(k_tile, dk_ref.at[batch, rows, kv_head])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(kv_free)
            return step + steps

        lax.fori_loop(0, tiles, tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)
