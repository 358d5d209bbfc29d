"""Flash attention for Hopper: the forward pass.

One producer warpgroup feeds K and V tiles through shared memory; two or three consumer warpgroups own 64 query rows
each. A consumer issues the scores of the next key tile before it waits for the output product of this one, and
consumers take turns at the matrix units. `docs/hopper.md` has the measured effect of each choice.
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

from ejkernel.kernels.flash_attention.config import MosaicFwdConfig, guessed_forward
from ejkernel.kernels.flash_attention.mosaic_bias import Bias, in_tiles
from ejkernel.kernels.flash_attention.mosaic_bits import packed_bits
from ejkernel.kernels.flash_attention.mosaic_columns import Columns, columns
from ejkernel.kernels.flash_attention.mosaic_hide import Mask
from ejkernel.kernels.flash_attention.mosaic_mask import Band
from ejkernel.kernels.flash_attention.mosaic_schedule import tile_table
from ejkernel.kernels.flash_attention.mosaic_tiles import Tiles, packed_table
from ejkernel.kernels.hopper.chip import SMS, WGMMA_ROWS
from ejkernel.kernels.hopper.cluster import shared_barrier
from ejkernel.kernels.hopper.launch import as_consumer, as_producer, launch
from ejkernel.kernels.hopper.wgmma import MatrixUnit, layout_cast

_LOG2E = math.log2(math.e)
_L2_BUDGET_BYTES = 16 << 20  # A third of the L2 cache: larger and smaller groups of heads were slower.
_MIN_HEAD_GROUP = 4  # Fewer heads cannot keep all SMs busy.
_ROWS = plgpu.Layout.WGMMA.reduce(1)


def flash_attention_forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float | None = None,
    lower: int | None = None,
    upper: int | None = None,
    soft_cap: float | None = None,
    q_segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    cfg: MosaicFwdConfig | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns attention output `[B, T, H, D]`, the log-sum-exp `[B, H, T]` in units of log2 and its rounding error.

    `lower` and `upper` bound `key - query`; `upper=0` is causal. With segment ids (`[B, T]`, `[B, S]`) a query sees the
    keys of its own segment only. A `mask` `[B or 1, 1, T or 1, S or 1]` is True where a query sees a key; one that is
    the same for all queries, or all keys, cannot be combined with segment ids. A `bias` `[B or 1, H or 1, T or 1, S]`
    is added to the scores; with one, the log-sum-exp is in natural units. A row that sees no key gives zeros and a
    log-sum-exp of +inf, so that its weights vanish in the backward pass. `mosaic_support.unsupported` says which calls
    are supported; nothing is checked here.
    """
    batch, q_len, heads, head_dim = q.shape
    _, kv_len, kv_heads, _ = k.shape
    value_dim, packed = v.shape[3], q_segment_ids is not None or mask is not None
    facts = {"packed": packed, "biased": bias is not None}
    cfg = cfg or guessed_forward(q.shape, k.shape, value_dim, lower, upper, **facts)
    factor: float = head_dim**-0.5 if scale is None else scale
    band = Band(q_len=q_len, kv_len=kv_len, lower=lower, upper=upper)
    ids, words = (), None
    if q_segment_ids is not None and kv_segment_ids is not None:
        ids = q_segment_ids.astype(jnp.int32), kv_segment_ids.astype(jnp.int32)
    if mask is not None and 1 in mask.shape[2:]:
        ids = ids_of_mask(mask, batch, q_len, kv_len)
    elif mask is not None:
        words = packed_bits(mask[:, 0], rows=cfg.block_q * cfg.cluster, cols=cfg.block_kv)
    table = _table(cfg, band, ids, words, batch, heads, _head_group(k, heads // kv_heads, band))
    lengths = (q_len, kv_len)
    layout = columns(head_dim, value_dim, lengths=lengths, share_qo=cfg.share_qo, interpret=bool(interpret))
    body = functools.partial(
        _kernel,
        cfg=cfg,
        layout=layout,
        band=band,
        scale=factor,
        soft_cap=soft_cap,
        group=heads // kv_heads,
        mma=MatrixUnit(bool(interpret)),
        has_ids=bool(ids),
    )
    extras = ()
    if ids:
        extras = padded(ids[0], cfg.block_q * cfg.cluster, -1), padded(ids[1], cfg.block_kv, -2)
    if words is not None:
        extras = (*extras, words)
    bias = in_tiles(bias, queries=cfg.block_q * cfg.cluster, keys=cfg.block_kv)
    # Rows of log-sum-exp are copied without a check of bounds: there must be whole blocks of them.
    lse_shape = (batch, heads, q_len + -q_len % (cfg.block_q * cfg.cluster))
    q_tiles = cfg.q_stages * cfg.consumers
    o_tile, kv_tile = (cfg.consumers, WGMMA_ROWS), (cfg.stages, cfg.block_kv)
    scratch: dict[str, Any] = {
        "q_smem": layout.memory(layout.qk, (q_tiles, WGMMA_ROWS), q.dtype),
        "o_smem": None if cfg.share_qo else layout.memory(layout.o, o_tile, q.dtype),
        "k_smem": layout.memory(layout.qk, kv_tile, k.dtype),
        "v_smem": layout.memory(layout.v, kv_tile, v.dtype),
        "lse_smem": plgpu.SMEM((cfg.consumers, WGMMA_ROWS), jnp.float32),
        "rest_smem": plgpu.SMEM((cfg.consumers, WGMMA_ROWS), jnp.float32),
        "q_full": plgpu.Barrier(num_barriers=q_tiles, num_arrivals=len(layout.qk)),
        "q_free": plgpu.Barrier(num_barriers=q_tiles),
        "k_full": plgpu.Barrier(num_barriers=cfg.stages, num_arrivals=len(layout.qk)),
        "v_full": plgpu.Barrier(num_barriers=cfg.stages, num_arrivals=len(layout.v)),
        "k_free": shared_barrier(cfg.cluster, cfg.stages, cfg.consumers),
        "v_free": shared_barrier(cfg.cluster, cfg.stages, cfg.consumers),
        "turn": plgpu.Barrier(num_barriers=cfg.consumers),
    }
    row = jax.ShapeDtypeStruct(lse_shape, jnp.float32)
    out, lse, rest = launch(
        body,
        *(q, k, v, table, bias, *extras),
        out_type=(jax.ShapeDtypeStruct((batch, q_len, heads, value_dim), q.dtype), row, row),
        blocks=table.shape[0],
        cluster=cfg.cluster,
        consumers=cfg.consumers,
        scratch=scratch,
        interpret=interpret,
    )
    return out, lse[:, :, :q_len], rest[:, :, :q_len]


def padded(rows: jax.Array, block: int, value: float) -> jax.Array:
    """Lengthens the last axis to whole blocks: vectors along it are read without a check of bounds."""
    missing = -rows.shape[-1] % block
    return jnp.pad(rows, ((0, 0),) * (rows.ndim - 1) + ((0, missing),), constant_values=value) if missing else rows


def _table(
    cfg: MosaicFwdConfig,
    band: Band,
    ids: tuple[jax.Array, ...],
    words: jax.Array | None,
    batch: int,
    heads: int,
    head_group: int,
) -> jax.Array:
    """Which block runs which tiles: known now, or only by the device if ids of segments or a mask decide it."""
    blocks, head_group = SMS // cfg.cluster, cfg.head_group or head_group
    if ids or words is not None:
        rules = {"cfg": cfg, "band": band, "batch": batch, "heads": heads}
        return packed_table(ids, words, blocks=blocks, head_group=head_group, **rules)
    table = tile_table(
        heads=batch * heads,
        steps=band.steps(cfg.block_q * cfg.cluster, cfg.block_kv),
        blocks=blocks,
        head_group=head_group,
        persistent=cfg.schedule == "persistent",
    )
    return jnp.asarray(table)


def ids_of_mask(mask: jax.Array, batch: int, q_len: int, kv_len: int) -> tuple[jax.Array, jax.Array]:
    """Ids of segments for a mask that is the same for all queries, or for all keys: one segment of what is seen."""
    line = lambda x, length: jnp.broadcast_to(x, (batch, length))
    if mask.shape[2] == 1:
        return jnp.zeros((batch, q_len), jnp.int32), line(jnp.where(mask[:, 0, 0], 0, 1), kv_len).astype(jnp.int32)
    return line(jnp.where(mask[:, 0, :, 0], 0, 1), q_len).astype(jnp.int32), jnp.zeros((batch, kv_len), jnp.int32)


def _head_group(k: jax.Array, group: int, band: Band) -> int:
    """Returns how many query heads read about `_L2_BUDGET_BYTES` of K and V; fewer where all tiles are equally long."""
    if band.lower is None and band.upper is None:
        return _MIN_HEAD_GROUP
    _, kv_len, _, head_dim = k.shape
    kv_heads = _L2_BUDGET_BYTES // (2 * kv_len * head_dim * k.dtype.itemsize)
    return max(kv_heads * group, _MIN_HEAD_GROUP)


def _kernel(
    q_ref,
    k_ref,
    v_ref,
    table_ref,
    bias_ref,
    *refs: Any,
    cfg: MosaicFwdConfig,
    layout: Columns,
    band: Band,
    scale: float,
    soft_cap: float | None,
    group: int,
    mma: MatrixUnit,
    has_ids: bool,
    q_smem,
    o_smem,
    k_smem,
    v_smem,
    lse_smem,
    rest_smem,
    q_full,
    q_free,
    k_full,
    v_full,
    k_free,
    v_free,
    turn,
):
    *facts, o_ref, lse_ref, rest_ref = refs
    ids, words = (tuple(facts[:2]), facts[2:]) if has_ids else ((), facts)
    hidden = Mask(band=band, block_kv=cfg.block_kv, ids=ids, words=words[0] if words else None)
    bias = None if bias_ref is None else Bias(bias_ref, key_axis=1)
    wg = lax.axis_index("warpgroup")
    block_kv, stages = cfg.block_kv, cfg.stages
    dim = max(q_ref.shape[3], v_ref.shape[3])
    # Pieces of columns have addresses of their own, and two blocks, one of which is masked, are no loop any more.
    wide = dim > 128 or (dim > 96 and layout.plain and block_kv < band.kv_len < 2 * block_kv)
    tiles = Tiles(table=table_ref, band=band, cfg=cfg, heads=q_ref.shape[2], spans=bool(facts), wide=wide)
    count = tiles.count

    def slot_of(step):
        return lax.rem(step, jnp.int32(stages))

    def q_slot_of(i, consumer):
        return consumer + lax.rem(i, jnp.int32(cfg.q_stages)) * cfg.consumers if cfg.q_stages > 1 else consumer

    @pl.when(wg == cfg.consumers)
    def _produce():
        as_producer(cfg.consumers)

        def load(ref, smem, full, free, batch, kv_head, kv_block, step):
            slot = slot_of(step)
            plgpu.barrier_wait(free.at[slot])
            rows = ref.at[batch, pl.ds(kv_block * block_kv, block_kv), kv_head]
            for piece, memory in zip(layout.qk if ref is k_ref else layout.v, smem, strict=True):
                layout.load(rows, memory, slot, piece, full.at[slot], cfg.cluster)

        def tile(i, step):
            batch, head, row, start, end, *_ = tiles.tile(i)
            kv_head = lax.div(head, jnp.int32(group))
            load(k_ref, k_smem, k_full, k_free, batch, kv_head, end - 1, step)
            for c in range(cfg.consumers):
                q_slot = q_slot_of(i, c)
                plgpu.barrier_wait(q_free.at[q_slot])
                rows = q_ref.at[batch, pl.ds(row + c * WGMMA_ROWS, WGMMA_ROWS), head]
                for piece, memory in zip(layout.qk, q_smem, strict=True):
                    layout.load(rows, memory, q_slot, piece, q_full.at[q_slot])
            load(v_ref, v_smem, v_full, v_free, batch, kv_head, end - 1, step)

            def rest(s, _):
                load(k_ref, k_smem, k_full, k_free, batch, kv_head, end - 1 - s, step + s)
                load(v_ref, v_smem, v_full, v_free, batch, kv_head, end - 1 - s, step + s)

            lax.fori_loop(1, end - start, rest, None)
            return step + (end - start)

        lax.fori_loop(0, count, tile, jnp.int32(0))
        # All barrier arrivals must be waited for before the block ends; JAX's interpreter checks it.
        for free in (k_free, v_free):
            for s in range(stages):
                plgpu.barrier_wait(free.at[s])
        for c in range(q_free.shape[0]):
            plgpu.barrier_wait(q_free.at[c])

    @pl.when(wg < cfg.consumers)
    def _consume():
        as_consumer(cfg.consumers)
        lse_tile, rest_tile = lse_smem.at[wg], rest_smem.at[wg]
        o_memory = q_smem[: len(layout.o)] if cfg.share_qo else o_smem
        o_shapes = tuple((WGMMA_ROWS, piece.width) for piece in layout.v)
        # Every buffer starts free, and the first turn belongs to the first warpgroup.
        for s in range(cfg.q_stages):
            plgpu.barrier_arrive(q_free.at[wg + s * cfg.consumers])
        for s in range(stages):
            plgpu.barrier_arrive(k_free.at[s])
            plgpu.barrier_arrive(v_free.at[s])
        if cfg.ping_pong:
            pl.when(wg == cfg.consumers - 1)(lambda: plgpu.barrier_arrive(turn.at[0]))
        next_wg = lax.rem(wg + 1, jnp.int32(cfg.consumers))

        def take_turn():
            if cfg.ping_pong:
                plgpu.barrier_wait(turn.at[wg])

        def pass_turn():
            if cfg.ping_pong:
                plgpu.barrier_arrive(turn.at[next_wg])

        def multiply_scores(acc, q_slot, slot):
            for q_part, k_part in zip(q_smem, k_smem, strict=True):
                mma.multiply(acc, layout.operand(q_part, q_slot), layout.operand(k_part, slot), b_t=True)

        def start_from(accs, values):
            for acc, value in zip(accs, values, strict=True):
                mma.start_from(acc, value)

        def multiply_values(accs, p, slot):
            for acc, v_part in zip(accs, v_smem, strict=True):
                mma.multiply(acc, p, layout.operand(v_part, slot))

        exponent_scale = _LOG2E if soft_cap is not None else scale * _LOG2E

        def capped(s):
            return s if soft_cap is None else soft_cap * jnp.tanh(s * (scale / soft_cap))

        def softmax(s, m, l, hide, piece, col):
            """Returns weights, the new maximum, the new partial sums, and the scale for the old output.

            The maximum is kept as a rounded exponent: the log-sum-exp must use exactly the number that was subtracted.
            """
            s = capped(s)
            if bias is not None:
                found = bias.of_tile(piece.batch, piece.head, piece.row, col, s.shape)
                s = bias.added(s if soft_cap is not None else s * scale, found)
            if hide is not None:
                s = hide(s)
            m_new = jnp.maximum(m, s.max(axis=1) * (exponent_scale if bias is None else 1.0))
            # A row of which nothing was seen yet has a maximum of -inf, and -inf - -inf is not a number.
            guarded = hide is not None or bias is not None
            shift = jnp.where(m_new == -jnp.inf, 0.0, m_new) if guarded else m_new
            if bias is None:
                p = jnp.exp2(s * exponent_scale - lax.broadcast_in_dim(shift, s.shape, [0]))
                alpha = jnp.exp2(m - shift)
            else:
                p = jnp.exp2((s - lax.broadcast_in_dim(shift, s.shape, [0])) * _LOG2E)
                alpha = jnp.exp2((m - shift) * _LOG2E)
            # Sums are kept per column of a quad until the end, so that the loop needs no additions across lanes.
            l = l * lax.broadcast_in_dim(alpha, l.shape, [0])
            for c in range(0, block_kv, 8):
                l = l + p[:, c : c + 8]
            return p, m_new, l, alpha

        def first_facts(piece):
            """Loads what hides keys from a strip, and from it in its first block."""
            of_block = hidden.of_block(piece.batch, piece.row, (piece.own_end - 1) * block_kv)
            return hidden.of_strip(piece.batch, piece.row), of_block

        def read_tile(i):
            piece = tiles.strip(i, wg)
            return piece, first_facts(piece)

        def store(held):
            """Stores an output tile that is held, if there is one."""
            o, batch, head, row, o_slot = held

            @pl.when(batch >= 0)
            def _():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for memory, value in zip(o_memory, layout.stored(o), strict=True):
                    layout.operand(memory, o_slot)[...] = value
                plgpu.commit_smem()
                for piece, memory in zip(layout.o, o_memory, strict=True):
                    layout.store(memory, o_slot, piece, o_ref.at[batch, pl.ds(row, WGMMA_ROWS), head])

        def tile(i, carry):
            step, held, *read = carry
            piece, (of_strip, of_first) = read or read_tile(i)
            batch, head, row, start, end, own_start, own_end, _ = piece
            skip, q_slot = end - own_end, q_slot_of(i, wg)

            def drain(s, _):
                """Waits for and releases a key block that this warpgroup does not need."""
                slot = slot_of(step + s)
                take_turn()
                pass_turn()
                for full, free in ((k_full, k_free), (v_full, v_free)):
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.barrier_arrive(free.at[slot])

            if tiles.uneven:
                lax.fori_loop(0, skip, drain, None)

            stop = end - own_start
            plgpu.barrier_wait(q_full.at[q_slot])
            first_slot = slot_of(step + skip)
            plgpu.barrier_wait(k_full.at[first_slot])

            def first(s_acc):
                take_turn()
                multiply_scores(s_acc, q_slot, first_slot)
                pass_turn()
                if cfg.hold:
                    store(held)
                return mma.result(s_acc)

            s = mma.scoped(first, (WGMMA_ROWS, block_kv))
            plgpu.barrier_arrive(k_free.at[first_slot])
            m = layout_cast(jnp.full((WGMMA_ROWS,), -jnp.inf, jnp.float32), _ROWS)
            l = layout_cast(jnp.zeros((WGMMA_ROWS, 8), jnp.float32), plgpu.Layout.WGMMA)
            o = tuple(layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA) for shape in o_shapes)
            col = (own_end - 1) * block_kv
            hide = lambda s: hidden.hide(s, row, col, of_strip, of_first)
            p, m, l, _ = softmax(s, m, l, hide if hidden.needed else None, piece, col)
            p = p.astype(v_ref.dtype)
            take_turn()

            def advance(s, carry, mask: bool):
                o, m, l, p = carry
                slot, last_slot = slot_of(step + s), slot_of(step + s - 1)
                col, hide = (end - 1 - s) * block_kv, None
                if mask:
                    # Early, so that it arrives while the scores are computed.
                    of_block = hidden.of_block(batch, row, col)
                    hide = lambda s: hidden.hide(s, row, col, of_strip, of_block)
                plgpu.barrier_wait(k_full.at[slot])

                def products(s_acc, *o_accs: Any):
                    start_from(o_accs, o)
                    multiply_scores(s_acc, q_slot, slot)
                    plgpu.barrier_wait(v_full.at[last_slot])
                    multiply_values(o_accs, p, last_slot)
                    pass_turn()
                    scores = mma.result(s_acc, in_flight=len(o_accs))
                    plgpu.barrier_arrive(k_free.at[slot])
                    p_new, m_new, l_new, alpha = softmax(scores, m, l, hide, piece, col)
                    p_new, m_new, l_new, alpha = lax.optimization_barrier((p_new, m_new, l_new, alpha))
                    # Waiting for the turn here, and not just before the next products, also keeps ptxas (CUDA 13.0)
                    # from moving the wait for the output product up into the softmax: it does not move it over a
                    # branch.
                    take_turn()
                    o_new = tuple(map(mma.result, o_accs))
                    plgpu.barrier_arrive(v_free.at[last_slot])
                    o_new = tuple(x * lax.broadcast_in_dim(alpha, x.shape, [0]) for x in o_new)
                    return o_new, m_new, l_new, p_new.astype(v_ref.dtype)

                return mma.scoped(products, (WGMMA_ROWS, block_kv), *o_shapes)

            # Steps count from the last key block of the whole tile. The block on the diagonal was the first; with an
            # edge that cuts blocks at another place, more of them need the mask.
            done, carry = skip + 1, (o, m, l, p)
            masked_step = functools.partial(advance, mask=True)
            clear, clear_end = tiles.clear_of(piece)
            if tiles.cut_above:
                first_clear = jnp.clip(end - clear_end, done, stop)
                carry = lax.fori_loop(done, first_clear, masked_step, carry)
                done = first_clear
            last_clear = jnp.clip(end - clear, done, stop) if tiles.cut_below else stop
            carry = lax.fori_loop(done, last_clear, functools.partial(advance, mask=False), carry)
            if tiles.cut_below:
                carry = lax.fori_loop(last_clear, stop, masked_step, carry)
            o, m, l, p = carry
            if not cfg.share_qo:
                plgpu.barrier_arrive(q_free.at[q_slot])

            following = None
            if ahead:
                following = tiles.strip(jnp.minimum(i + 1, count - 1), wg)
            last_slot = slot_of(step + stop - 1)
            plgpu.barrier_wait(v_full.at[last_slot])

            def last(*o_accs: Any):
                start_from(o_accs, o)
                multiply_values(o_accs, p, last_slot)
                pass_turn()
                return tuple(map(mma.result, o_accs))

            o = mma.scoped(last, *o_shapes)
            plgpu.barrier_arrive(v_free.at[last_slot])
            if tiles.cut_below and tiles.uneven:
                lax.fori_loop(stop, end - start, drain, None)

            following = () if following is None else (following, first_facts(following))
            l = l.sum(axis=1)
            empty = l == 0.0
            inverse = jnp.where(empty, 0.0, 1.0 / l)
            log = jnp.log2(l) if bias is None else jnp.log(l)
            lse = jnp.where(empty, jnp.inf, m + log)
            rest = jnp.where(empty, 0.0, (m - lse) + log)
            o_slot = q_slot if cfg.share_qo else wg
            o = tuple((x * lax.broadcast_in_dim(inverse, x.shape, [0])).astype(o_ref.dtype) for x in o)
            # Sums first: the wait is for those of the tile before.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if not cfg.hold:
                for memory, value in zip(o_memory, layout.stored(o), strict=True):
                    layout.operand(memory, o_slot)[...] = value
            lse_tile[...] = lse
            rest_tile[...] = rest
            plgpu.commit_smem()
            rows = pl.ds(row, WGMMA_ROWS)
            if not cfg.hold:
                for piece, memory in zip(layout.o, o_memory, strict=True):
                    layout.store(memory, o_slot, piece, o_ref.at[batch, rows, head])
            plgpu.copy_smem_to_gmem(lse_tile, lse_ref.at[batch, head, rows])
            plgpu.copy_smem_to_gmem(rest_tile, rest_ref.at[batch, head, rows])
            if cfg.share_qo:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(q_free.at[q_slot])
            return step + (end - start), (o, batch, head, row, o_slot) if cfg.hold else (), *following

        # Where much is read before a tile can start, it is read while the one before is finished. The registers that
        # this takes cost more than it gains where a tile's number is all.
        ahead = bool(facts)
        first_read = read_tile(jnp.int32(0)) if ahead else ()
        none = tuple(layout_cast(jnp.zeros(shape, o_ref.dtype), plgpu.Layout.WGMMA) for shape in o_shapes)
        nowhere = (none, *(jnp.int32(x) for x in (-1, 0, 0, 0))) if cfg.hold else ()
        _, held, *_ = lax.fori_loop(0, count, tile, (jnp.int32(0), nowhere, *first_read))
        if cfg.hold:
            store(held)
        pl.when(wg == 0)(take_turn)
        plgpu.wait_smem_to_gmem(0)
