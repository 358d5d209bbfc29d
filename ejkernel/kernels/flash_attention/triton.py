"""Flash attention for NVIDIA GPUs, Ampere or newer, in Pallas' Triton dialect.

One program owns a block of queries (forward, dQ) or of keys (dK and dV) and runs over the blocks of the other side that
the mask does not exclude. It uses Pallas' dialect rather than jax-triton: no release of jax-triton installs beside both
Triton 3.6 and JAX 0.12, and Pallas runs in an interpreter on a CPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels.flash_attention import masks, tile
from ejkernel.kernels.flash_attention.arguments import Attention
from ejkernel.kernels.flash_attention.triton_bias import bias_gradient
from ejkernel.kernels.flash_attention.triton_cut import Cut
from ejkernel.kernels.flash_attention.triton_memory import default_backward, default_forward, forward_bytes
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.utils.devices import LEAST_BLOCK_BYTES
from ejkernel.ops.utils.fingerprint import block_bytes
from ejkernel.ops.utils.params import BwdParams, FwdParams

Array = jax.Array


def unsupported(inv: Invocation[Any, Any], *, backward: bool) -> str | None:
    """Why this backend does not support a call; None if it does."""
    query, key, value, extras, rules = Attention.of(inv.args, inv.kwargs)
    if max(query.shape[3], value.shape[3]) > 256:
        return f"head dims must be at most 256, got {query.shape[3]} and {value.shape[3]}"
    if 0 in (query.size, key.size, value.size):
        return "this kernel takes no empty arrays"
    return tile.unsupported(query, extras, rules)


def forward_space(inv: Invocation[Any, Any]) -> list[FwdParams]:
    """The guess, and other tiles whose accumulators fit the registers."""
    call, room = Attention.of(inv.args, inv.kwargs), block_bytes()
    sizes = (64, 128) if call.query.shape[3] <= 128 else (32, 64)
    space = [
        FwdParams(q_blocksize=rows, kv_blocksize=cols, num_warps=warps, num_stages=stages)
        for rows in sizes
        for cols in (32, 64, 128)
        if cols <= sizes[-1]
        for warps in (4, 8)
        for stages in (2, 3)
    ]
    return [default_forward(call, room), *(params for params in space if unfit(params, call, room) is None)]


def unfit(params: FwdParams, call: Attention, room: int = LEAST_BLOCK_BYTES) -> str | None:
    """Why a forward cannot run on a GPU whose blocks have so much shared memory; None if it can."""
    if (smem := forward_bytes(params, call)) > room:
        return f"needs {smem} bytes of shared memory, a block has {room}"
    dim, item = pl.next_power_of_2(call.query.shape[3]), call.query.dtype.itemsize
    rows, cols, warps = params.q_blocksize or 128, params.kv_blocksize or 64, params.num_warps or 4
    live = rows * (dim + cols) // (32 * warps) + rows * (dim + cols) * item // (128 * warps) + 24
    return f"needs about {live} registers per thread, there are 255" if live > 255 else None


def backward_space(inv: Invocation[Any, Any]) -> list[BwdParams]:
    """The guess, and other tiles."""
    call = Attention.of(inv.args, inv.kwargs)
    sizes = (32, 64, 128) if call.query.shape[3] <= 64 else (32, 64)
    space = [
        BwdParams(q_blocksize=rows, kv_blocksize=cols, num_warps=warps, num_stages=2)
        for rows in sizes
        for cols in sizes
        for warps in (4, 8)
    ]
    return [default_backward(call, block_bytes()), *space]


def forward(call: Attention, params: FwdParams | None = None, *, interpret: bool = False) -> tuple[Array, masks.LogSum]:
    """Returns the output and the log-sum-exp [batch, heads, q]."""
    query, _, value, extras, _ = call
    cut = _cut(call, params or default_forward(call, block_bytes()))
    batch, heads = query.shape[0], query.shape[2]
    row = ((batch, heads, cut.q_length), jnp.float32), cut.per_query()
    out, *sums = tile.call(
        partial(_forward_kernel, cut=cut),
        cut.inputs(block_q=True),
        [(((batch, heads, cut.q_length, cut.v_dim), query.dtype), cut.per_query(cut.v_dim)), row, row],
        grid=(cut.q_length // cut.rows, heads, batch),
        **cut.options(interpret),
    )
    out = out[:, :, : query.shape[1], : value.shape[3]].swapaxes(1, 2)
    sums = masks.LogSum(*(x[:, :, : query.shape[1]] for x in sums))
    return masks.with_sinks(out, sums, extras.softmax_aux)


def _forward_kernel(refs: Any, o_ref: Any, lse_ref: Any, rest_ref: Any, *, cut: Cut) -> None:
    i, head = pl.program_id(0), pl.program_id(2) * cut.heads + pl.program_id(1)
    q, rows = refs["q"][...], cut.queries(refs, i)
    seed = refs["seed"][0] if "seed" in refs else None

    def step(j: Any, carry: Any, masked: bool) -> Any:
        at = pl.ds(j * cut.cols, cut.cols)
        cols = cut.keys(refs, j, at)
        seen = tile.seen(rows, cols, cut.kv_len, cut.rules, cut.plane(refs, "mask", at)) if masked else None
        s, _ = tile.scores(q, refs["k"][at, :], seen, cut.rules, cut.plane(refs, "bias", at))
        drop = tile.dropper(seed, head, rows.places, cols.places, cut.rules)
        return tile.accumulate(carry, s, refs["v"][at, :], drop, cut.rules)

    carry = (
        jnp.zeros((cut.rows, cut.v_dim), jnp.float32),
        jnp.full((cut.rows, 1), -jnp.inf, jnp.float32),
        jnp.zeros((cut.rows, 1), jnp.float32),
    )
    out, sums = tile.finished(cut.over_keys(refs, i, step, carry))
    o_ref[...] = out.astype(o_ref.dtype)
    lse_ref[...], rest_ref[...] = sums.lse.reshape(cut.rows), sums.rest.reshape(cut.rows)


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
    cut = _cut(call, params or default_backward(call, block_bytes()))
    batch, q_len, heads, _ = query.shape
    kv_len, kv_heads = key.shape[1:3]
    saved = _saved(cut, lse, delta, dout)
    (dq,) = tile.call(
        partial(_query_kernel, cut=cut),
        {
            **cut.inputs(block_q=True),
            "dout": (saved["dout"], cut.per_query(cut.v_dim)),
            "lse": (saved["lse"], cut.per_query()),
            "delta": (saved["delta"], cut.per_query()),
        },
        [(((batch, heads, cut.q_length, cut.dim), query.dtype), cut.per_query(cut.dim))],
        grid=(cut.q_length // cut.rows, heads, batch),
        **cut.options(interpret),
    )
    dk, dv = tile.call(
        partial(_key_kernel, cut=cut),
        {
            **cut.inputs(block_q=False),
            "dout": (saved["dout"], cut.whole_queries(cut.v_dim)),
            "lse": (saved["lse"], cut.whole_queries()),
            "delta": (saved["delta"], cut.whole_queries()),
        },
        [
            (((batch, kv_heads, cut.kv_length, cut.dim), key.dtype), cut.per_key(cut.dim)),
            (((batch, kv_heads, cut.kv_length, cut.v_dim), value.dtype), cut.per_key(cut.v_dim)),
        ],
        grid=(cut.kv_length // cut.cols, kv_heads, batch),
        **cut.options(interpret),
    )
    dq = dq[:, :, :q_len, : query.shape[3]].swapaxes(1, 2)
    dk = dk[:, :, :kv_len, : key.shape[3]].swapaxes(1, 2)
    dv = dv[:, :, :kv_len, : value.shape[3]].swapaxes(1, 2)
    return dq, dk, dv, None if extras.bias is None else bias_gradient(cut, extras.bias, saved, interpret)


def gradient_of_bias(call: Attention, lse: Array, delta: Array, dout: Array, *, interpret: bool = False) -> Array:
    """Returns the gradient of a call's bias alone."""
    cut = _cut(call, default_backward(call, block_bytes()))
    return bias_gradient(cut, call.extras.bias, _saved(cut, lse, delta, dout), interpret)


def _saved(cut: Cut, lse: Array, delta: Array, dout: Array) -> dict[str, Array]:
    """What a backward reads of each query, with heads first."""
    return {
        "dout": tile.heads_first(dout, cut.rows, cut.v_dim),
        "lse": tile.heads_first(lse.swapaxes(1, 2), cut.rows, fill=jnp.inf),
        "delta": tile.heads_first(delta.swapaxes(1, 2), cut.rows),
    }


def _query_kernel(refs: Any, dq_ref: Any, *, cut: Cut) -> None:
    i, head = pl.program_id(0), pl.program_id(2) * cut.heads + pl.program_id(1)
    q, dout, rows = refs["q"][...], refs["dout"][...], cut.queries(refs, i)
    lse, delta = refs["lse"][...][:, None], refs["delta"][...][:, None]
    seed = refs["seed"][0] if "seed" in refs else None

    def step(j: Any, dq: Any, masked: bool) -> Any:
        at = pl.ds(j * cut.cols, cut.cols)
        cols = cut.keys(refs, j, at)
        seen = tile.seen(rows, cols, cut.kv_len, cut.rules, cut.plane(refs, "mask", at)) if masked else None
        k = refs["k"][at, :]
        s, slope = tile.scores(q, k, seen, cut.rules, cut.plane(refs, "bias", at))
        drop = tile.dropper(seed, head, rows.places, cols.places, cut.rules)
        _, ds = tile.weights(s, slope, lse, delta, dout, refs["v"][at, :], drop, cut.rules)
        return dq + tile.dot(ds.astype(k.dtype), k, (1, 0), cut.rules)

    dq = cut.over_keys(refs, i, step, jnp.zeros((cut.rows, cut.dim), jnp.float32))
    dq_ref[...] = (dq * cut.rules.scale).astype(dq_ref.dtype)


def _key_kernel(refs: Any, dk_ref: Any, dv_ref: Any, *, cut: Cut) -> None:
    j, first_head = pl.program_id(0), pl.program_id(2) * cut.heads + pl.program_id(1) * cut.group
    k, v, cols = refs["k"][...], refs["v"][...], cut.keys(refs, j)
    seed = refs["seed"][0] if "seed" in refs else None

    def of_head(g: Any, carry: Any) -> Any:
        def step(i: Any, carry: Any, masked: bool) -> Any:
            dk, dv = carry
            at = pl.ds(i * cut.rows, cut.rows)
            rows = cut.queries(refs, i, at)
            seen = tile.seen(rows, cols, cut.kv_len, cut.rules, cut.plane(refs, "mask", at, g)) if masked else None
            q, dout = refs["q"][g, at, :], refs["dout"][g, at, :]
            s, slope = tile.scores(q, k, seen, cut.rules, cut.plane(refs, "bias", at, g))
            drop = tile.dropper(seed, first_head + g, rows.places, cols.places, cut.rules)
            lse, delta = refs["lse"][g, at][:, None], refs["delta"][g, at][:, None]
            p, ds = tile.weights(s, slope, lse, delta, dout, v, drop, cut.rules)
            dk = dk + tile.dot(ds.astype(q.dtype), q, (0, 0), cut.rules)
            return dk, dv + tile.dot(p.astype(dout.dtype), dout, (0, 0), cut.rules)

        return cut.over_queries(refs, j, g, step, carry)

    zeros = jnp.zeros((cut.cols, cut.dim), jnp.float32), jnp.zeros((cut.cols, cut.v_dim), jnp.float32)
    dk, dv = lax.fori_loop(0, cut.group, of_head, zeros)
    dk_ref[...] = (dk * cut.rules.scale).astype(dk_ref.dtype)
    dv_ref[...] = dv.astype(dv_ref.dtype)


def _cut(call: Attention, params: FwdParams | BwdParams) -> Cut:
    guess = default_backward(call, block_bytes())
    rows, cols = params.q_blocksize or guess.q_blocksize or 64, params.kv_blocksize or guess.kv_blocksize or 64
    return Cut(call, rows, cols, params)
