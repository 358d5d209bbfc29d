"""Flash attention for TPUs, in Pallas: a block of queries (forward, dQ) or of keys (dK and dV) walks over the others.

Sums are kept in scratch memory from one step of the walk to the next.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.flash_attention import masks, pallas_tile, tile
from ejkernel.kernels.flash_attention.arguments import Attention
from ejkernel.kernels.flash_attention.pallas_bias import bias_gradient
from ejkernel.kernels.flash_attention.pallas_blocks import Cut
from ejkernel.kernels.flash_attention.pallas_cut import Part, Place, bundles, fitted
from ejkernel.kernels.flash_attention.pallas_memory import Kernel, vmem_bytes, vmem_limit
from ejkernel.kernels.flash_attention.pallas_views import View, Walking
from ejkernel.kernels.flash_attention.visits import needed_steps as needed_steps
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.utils import devices, fingerprint
from ejkernel.ops.utils.params import BwdParams, FwdParams

Array = jax.Array

_SIZES = (256, 512, 1024)
_BACKWARD: tuple[Kernel, ...] = ("dq", "dkv")


def unsupported(inv: Invocation[Any, Any], *, backward: bool) -> str | None:
    """Why this backend does not support a call; None if it does."""
    query, key, value, extras, rules = Attention.of(inv.args, inv.kwargs)
    if 0 in (query.size, key.size, value.size):
        return "this kernel takes no empty arrays"
    if query.dtype == jnp.float16:
        return "TPUs have no float16"
    if query.dtype == jnp.float32 and not _is_one_precision(rules.precision):
        return f"Mosaic takes one precision for both operands and no algorithm, got {rules.precision!r}"
    return tile.unsupported(query, extras, rules)


def _is_one_precision(precision: Any) -> bool:
    left, right = precision if isinstance(precision, tuple) else (precision, precision)
    try:
        return lax.Precision(left) == lax.Precision(right)
    except ValueError:
        return False


def forward_space(inv: Invocation[Any, Any]) -> list[FwdParams]:
    """The guess, and other tiles that fit."""
    blocks = _blocks(Attention.of(inv.args, inv.kwargs), ("forward",))
    return [FwdParams(q_blocksize=rows, kv_blocksize=cols) for rows, cols in blocks]


def backward_space(inv: Invocation[Any, Any]) -> list[BwdParams]:
    """The guess, and other tiles that fit."""
    blocks = _blocks(Attention.of(inv.args, inv.kwargs), _BACKWARD)
    return [BwdParams(q_blocksize=rows, kv_blocksize=cols) for rows, cols in blocks]


def _blocks(call: Attention, kernels: tuple[Kernel, ...]) -> list[tuple[int, int]]:
    """Blocks of queries and keys that fit the device's fast memory, the fewest bundles first."""
    q_len, kv_len = call.query.shape[1], call.key.shape[1]
    sizes = dict.fromkeys((fitted(rows, q_len), fitted(cols, kv_len)) for rows in _SIZES for cols in _SIZES)
    room = devices.find(fingerprint.current_device().device_kind).vmem_bytes
    most = lambda block: max(vmem_bytes(kernel, block[0], block[1], call) for kernel in kernels)
    fitting = [block for block in sizes if not room or most(block) <= room] or [min(sizes, key=most)]
    guess = min(fitting, key=lambda block: bundles(block[0], block[1], call))
    return [guess, *(block for block in fitting if block != guess)]


def forward(call: Attention, params: FwdParams | None = None, *, interpret: bool = False) -> tuple[Array, masks.LogSum]:
    """Returns the output and the log-sum-exp [batch, heads, q]."""
    query, _, value, extras, _ = call
    cut = _cut(call, params, ("forward",))
    batch, q_len, heads, _ = query.shape
    dim = value.shape[3]
    out, sums = tile.call(
        partial(_forward_kernel, cut=cut),
        cut.inputs(cut.by_query),
        [
            (((batch, heads, cut.q_length, dim), query.dtype), cut.by_query.queries(dim)),
            (((batch, heads, 2, cut.q_length), jnp.float32), cut.by_query.per_query(2)),
        ],
        grid=(batch, heads, cut.q_blocks, cut.by_query.width),
        scratch_shapes=[_floats(cut.rows, dim), *_columns(cut.rows, 2), *cut.columns(cut.rows)],
        **_options("forward", cut, call, interpret, cut.by_query),
    )
    sums = masks.LogSum(sums[:, :, 0, :q_len], sums[:, :, 1, :q_len])
    return masks.with_sinks(out[:, :, :q_len].swapaxes(1, 2), sums, extras.softmax_aux)


def _forward_kernel(refs: Any, o_ref: Any, sums_ref: Any, o_acc: Any, m_acc: Any, l_acc: Any, *kept: Any, cut: Cut):
    b, h, i, t = map(pl.program_id, range(4))
    course = cut.by_query.read(refs, b, h, i)
    place = Place(b * cut.heads + h, i, course.at(t))

    @pl.when(t == 0)
    def _start() -> None:
        o_acc[...] = jnp.zeros(o_acc.shape, jnp.float32)
        m_acc[...] = jnp.full(m_acc.shape, pallas_tile.UNSEEN, jnp.float32)
        l_acc[...] = jnp.zeros(l_acc.shape, jnp.float32)
        cut.keep(kept, refs, "q")

    def step(masked: bool, part: Part) -> None:
        at, there = part.own_rows, part.other_rows
        seen = cut.seen(refs, _of(kept, part), place, part, 0) if masked else None
        bias = cut.plane(refs, "bias", part)
        s, _ = pallas_tile.unscaled(refs["q"][at, :], refs["k"][there, :], seen, cut.rules, bias)
        carry, drop = (o_acc[at, :], m_acc[at, :], l_acc[at, :]), cut.dropper(refs, place, part, 0)
        carry = pallas_tile.accumulate(carry, s, refs["v"][there, :], drop, cut.rules, cut.unit)
        o_acc[at, :], m_acc[at, :], l_acc[at, :] = carry

    course.compute(t, step)

    @pl.when(t == cut.by_query.last(3))
    def _finish() -> None:
        out, sums = pallas_tile.finished((o_acc[...], m_acc[...], l_acc[...]), cut.unit)
        o_ref[...] = out.astype(o_ref.dtype)
        sums_ref[...] = jnp.concatenate(sums, axis=0)


def backward(
    call: Attention,
    lse: Array,
    delta: Array,
    dout: Array,
    params: BwdParams | None = None,
    *,
    interpret: bool = False,
) -> tuple[Array, Array, Array, Array | None]:
    """Returns the gradients of query, key, value and bias."""
    query, key, value, extras, _ = call
    cut = _cut(call, params, _BACKWARD)
    (batch, q_len, heads, dim), (kv_len, kv_heads, value_dim) = query.shape, value.shape[1:]
    units = pallas_tile.in_units(lse, cut.unit)
    dout, delta = masks.unlost(dout, delta, units.rest)
    missing = cut.q_length - q_len
    per_query = lambda x, fill: jnp.pad(x, ((0, 0), (0, 0), (0, missing)), constant_values=fill)[:, :, None]
    dout, lse, delta = tile.heads_first(dout, cut.rows), per_query(units.lse, jnp.inf), per_query(delta, 0.0)

    def inputs(view: View) -> dict[str, Any]:
        saved = {"lse": (lse, view.per_query(1)), "delta": (delta, view.per_query(1))}
        return {**cut.inputs(view), "dout": (dout, view.queries(value_dim)), **saved}

    (dq,) = tile.call(
        partial(_query_kernel, cut=cut),
        inputs(cut.by_query),
        [(((batch, heads, cut.q_length, dim), query.dtype), cut.by_query.queries(dim))],
        grid=(batch, heads, cut.q_blocks, cut.by_query.width),
        scratch_shapes=[_floats(cut.rows, dim), *_columns(cut.rows, 2), *cut.columns(cut.rows)],
        **_options("dq", cut, call, interpret, cut.by_query),
    )
    dk, dv = tile.call(
        partial(_key_kernel, cut=cut),
        inputs(cut.by_key),
        [
            (((batch, kv_heads, cut.kv_length, dim), key.dtype), cut.by_key.keys(dim)),
            (((batch, kv_heads, cut.kv_length, value_dim), value.dtype), cut.by_key.keys(value_dim)),
        ],
        grid=(batch, kv_heads, cut.kv_blocks, cut.group, cut.by_key.width),
        scratch_shapes=[_floats(cut.cols, dim), _floats(cut.cols, value_dim), *cut.columns(cut.cols)],
        **_options("dkv", cut, call, interpret, cut.by_key),
    )
    dq, dk, dv = dq[:, :, :q_len], dk[:, :, :kv_len], dv[:, :, :kv_len]
    dbias = None if extras.bias is None else bias_gradient(cut, call, inputs, interpret)
    return dq.swapaxes(1, 2), dk.swapaxes(1, 2), dv.swapaxes(1, 2), dbias


def _query_kernel(refs: Any, dq_ref: Any, dq_acc: Any, lse: Any, delta: Any, *kept: Any, cut: Cut) -> None:
    b, h, i, t = map(pl.program_id, range(4))
    course = cut.by_query.read(refs, b, h, i)
    place = Place(b * cut.heads + h, i, course.at(t))

    @pl.when(t == 0)
    def _start() -> None:
        dq_acc[...] = jnp.zeros(dq_acc.shape, jnp.float32)
        lse[...], delta[...] = pallas_tile.column(refs["lse"][...]), pallas_tile.column(refs["delta"][...])
        cut.keep(kept, refs, "q")

    def step(masked: bool, part: Part) -> None:
        at, there = part.own_rows, part.other_rows
        k, v = refs["k"][there, :], refs["v"][there, :]
        seen = cut.seen(refs, _of(kept, part), place, part, 0) if masked else None
        s, slope = pallas_tile.unscaled(refs["q"][at, :], k, seen, cut.rules, cut.plane(refs, "bias", part))
        dp = tile.dot(refs["dout"][at, :], v, (1, 1), cut.rules)
        top, mean = (pallas_tile.spread(x[at, :], part.others) for x in (lse, delta))
        _, ds = pallas_tile.weights(s, slope, top, mean, dp, cut.dropper(refs, place, part, 0), cut.unit)
        dq_acc[at, :] += tile.dot(ds.astype(k.dtype), k, (1, 0), cut.rules)

    course.compute(t, step)

    @pl.when(t == cut.by_query.last(3))
    def _finish() -> None:
        dq_ref[...] = (dq_acc[...] * cut.rules.scale).astype(dq_ref.dtype)


def _key_kernel(refs: Any, dk_ref: Any, dv_ref: Any, dk_acc: Any, dv_acc: Any, *kept: Any, cut: Cut) -> None:
    """Keys are the rows of its tiles: what belongs to queries is a row then, as it is in memory."""
    b, h, j, g, t = map(pl.program_id, range(5))
    course = cut.by_key.read(refs, b, h * cut.group + g, j)
    place = Place(b * cut.heads + h * cut.group + g, course.at(t), j)

    @pl.when((g == 0) & (t == 0))
    def _start() -> None:
        dk_acc[...] = jnp.zeros(dk_acc.shape, jnp.float32)
        dv_acc[...] = jnp.zeros(dv_acc.shape, jnp.float32)
        cut.keep(kept, refs, "kv")

    def step(masked: bool, part: Part) -> None:
        at, there = part.own_rows, part.other_rows
        q, dout = refs["q"][there, :], refs["dout"][there, :]
        seen = cut.seen(refs, _of(kept, part), place, part, 1) if masked else None
        s, slope = pallas_tile.unscaled(refs["k"][at, :], q, seen, cut.rules, cut.plane(refs, "bias", part))
        dp = tile.dot(refs["v"][at, :], dout, (1, 1), cut.rules)
        rows = refs["lse"][:, there], refs["delta"][:, there]
        p, ds = pallas_tile.weights(s, slope, *rows, dp, cut.dropper(refs, place, part, 1), cut.unit)
        dv_acc[at, :] += tile.dot(p.astype(dout.dtype), dout, (1, 0), cut.rules)
        dk_acc[at, :] += tile.dot(ds.astype(q.dtype), q, (1, 0), cut.rules)

    course.compute(t, step)

    @pl.when((g == cut.group - 1) & (t == cut.by_key.last(4)))
    def _finish() -> None:
        dk_ref[...] = (dk_acc[...] * cut.rules.scale).astype(dk_ref.dtype)
        dv_ref[...] = dv_acc[...].astype(dv_ref.dtype)


def _of(kept: tuple[Any, ...], part: Part) -> list[Any]:
    """A part of the columns that are kept for a walk."""
    return [column[part.own_rows, :] for column in kept]


# --- Around the kernels ---


def _cut(call: Attention, params: Any, kernels: tuple[Kernel, ...]) -> Cut:
    block_q, block_kv = (params.q_blocksize, params.kv_blocksize) if params else (None, None)
    if not (block_q and block_kv):
        guess = _blocks(call, kernels)[0]
        block_q, block_kv = block_q or guess[0], block_kv or guess[1]
    return Cut(call, block_q, block_kv)


def _floats(*shape: int) -> Any:
    return pltpu.VMEM(shape, jnp.float32)


def _columns(rows: int, count: int) -> list[Any]:
    return [_floats(rows, pallas_tile.LANES)] * count


def _options(name: Kernel, cut: Cut, call: Attention, interpret: bool, view: Walking) -> dict[str, Any]:
    """The grid's first three axes are of results; those that follow add to one."""
    semantics: Any = ("parallel",) * 3 + ("arbitrary",) * (2 if view.turned else 1)
    limit = vmem_limit(name, cut.rows, cut.cols, call)
    return {
        "name": f"flash_attention_{name}",
        "interpret": interpret,
        "scalars": view.scalars,
        "compiler_params": pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=limit),
    }
