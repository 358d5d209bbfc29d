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
from jax.experimental.pallas import triton as plgpu

from ejkernel.kernels.flash_attention import masks, tile
from ejkernel.kernels.flash_attention.arguments import Attention, Extras, Rules
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


def default_forward(head_dim: int) -> FwdParams:
    """The tile of an untuned call."""
    if head_dim <= 64:
        return FwdParams(q_blocksize=128, kv_blocksize=64, num_warps=4, num_stages=3)
    if head_dim <= 128:
        return FwdParams(q_blocksize=128, kv_blocksize=64, num_warps=8, num_stages=2)
    return FwdParams(q_blocksize=64, kv_blocksize=32, num_warps=4, num_stages=2)


def default_backward(head_dim: int) -> BwdParams:
    """The tile of an untuned call."""
    block = 64 if head_dim <= 128 else 32
    return BwdParams(q_blocksize=block, kv_blocksize=block, num_warps=4, num_stages=2)


def forward_space(inv: Invocation[Any, Any]) -> list[FwdParams]:
    """The guess, and other tiles whose accumulators fit the registers."""
    head_dim = inv.args[0].shape[3]
    sizes = (64, 128) if head_dim <= 128 else (32, 64)
    space = [
        FwdParams(q_blocksize=rows, kv_blocksize=cols, num_warps=warps, num_stages=stages)
        for rows in sizes
        for cols in (32, 64, 128)
        if cols <= sizes[-1]
        for warps in (4, 8)
        for stages in (2, 3)
    ]
    call, room = Attention.of(inv.args, inv.kwargs), block_bytes()
    return [default_forward(head_dim), *(params for params in space if unfit(params, call.query, room) is None)]


def unfit(params: FwdParams, query: Any, room: int = LEAST_BLOCK_BYTES) -> str | None:
    """Why a forward cannot run on a GPU whose blocks have so much shared memory; None if it can.

    As Triton has it: tiles of keys and values in flight are in shared memory, all else is in registers.
    """
    dim, item = pl.next_power_of_2(query.shape[3]), query.dtype.itemsize
    usual = default_forward(query.shape[3])
    rows, cols = params.q_blocksize or usual.q_blocksize or 128, params.kv_blocksize or usual.kv_blocksize or 64
    stages, warps = params.num_stages or 2, params.num_warps or 4
    smem = (2 * stages - 1) * cols * dim * item
    if smem > room:
        return f"needs {smem} bytes of shared memory, a block has {room}"
    live = rows * (dim + cols) // (32 * warps) + rows * (dim + cols) * item // (128 * warps) + 24
    return f"needs about {live} registers per thread, there are 255" if live > 255 else None


def backward_space(inv: Invocation[Any, Any]) -> list[BwdParams]:
    """The guess, and other tiles."""
    head_dim = inv.args[0].shape[3]
    sizes = (32, 64, 128) if head_dim <= 64 else (32, 64)
    space = [
        BwdParams(q_blocksize=rows, kv_blocksize=cols, num_warps=warps, num_stages=2)
        for rows in sizes
        for cols in sizes
        for warps in (4, 8)
    ]
    return [default_backward(head_dim), *space]


def forward(
    query: Array,
    key: Array,
    value: Array,
    extras: Extras,
    rules: Rules,
    params: FwdParams | None = None,
    *,
    interpret: bool = False,
) -> tuple[Array, masks.LogSum]:
    """Returns the output and the log-sum-exp [batch, heads, q]."""
    cut = _Cut(query, key, value, extras, rules, params or default_forward(query.shape[3]))
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


def _forward_kernel(refs: Any, o_ref: Any, lse_ref: Any, rest_ref: Any, *, cut: _Cut) -> None:
    i, head = pl.program_id(0), pl.program_id(2) * cut.heads + pl.program_id(1)
    q = refs["q"][...]
    rows = tile.places(i * cut.rows, cut.rows, 0)
    q_ids = refs["q_ids"][...][:, None] if "q_ids" in refs else None
    seed = refs["seed"][0] if "seed" in refs else None

    def step(j: Any, carry: Any, masked: bool) -> Any:
        at = pl.ds(j * cut.cols, cut.cols)
        cols = tile.places(j * cut.cols, cut.cols, 1)
        ids = None if q_ids is None else (q_ids, refs["kv_ids"][at][None, :])
        seen = tile.seen(rows, cols, cut.kv_len, ids, cut.rules) if masked else None
        s, _ = tile.scores(q, refs["k"][at, :], seen, cut.rules)
        drop = tile.dropper(seed, head, rows, cols, cut.rules)
        return tile.accumulate(carry, s, refs["v"][at, :], drop, cut.rules)

    carry = (
        jnp.zeros((cut.rows, cut.v_dim), jnp.float32),
        jnp.full((cut.rows, 1), -jnp.inf, jnp.float32),
        jnp.zeros((cut.rows, 1), jnp.float32),
    )
    out, sums = tile.finished(cut.over(cut.key_spans(i), step, carry))
    o_ref[...] = out.astype(o_ref.dtype)
    lse_ref[...], rest_ref[...] = sums.lse.reshape(cut.rows), sums.rest.reshape(cut.rows)


def backward(
    query: Array,
    key: Array,
    value: Array,
    extras: Extras,
    rules: Rules,
    lse: Array,
    delta: Array,
    dout: Array,
    params: BwdParams | None = None,
    *,
    interpret: bool = False,
) -> tuple[Array, Array, Array, None]:
    """Returns the gradients of query, key and value."""
    cut = _Cut(query, key, value, extras, rules, params or default_backward(query.shape[3]))
    batch, q_len, heads, _ = query.shape
    kv_len, kv_heads = key.shape[1:3]
    saved = {
        "dout": tile.heads_first(dout, cut.rows, cut.v_dim),
        "lse": tile.heads_first(lse.swapaxes(1, 2), cut.rows, fill=jnp.inf),
        "delta": tile.heads_first(delta.swapaxes(1, 2), cut.rows),
    }
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
    return dq, dk, dv[:, :, :kv_len, : value.shape[3]].swapaxes(1, 2), None


def _query_kernel(refs: Any, dq_ref: Any, *, cut: _Cut) -> None:
    i, head = pl.program_id(0), pl.program_id(2) * cut.heads + pl.program_id(1)
    q, dout = refs["q"][...], refs["dout"][...]
    lse, delta = refs["lse"][...][:, None], refs["delta"][...][:, None]
    rows = tile.places(i * cut.rows, cut.rows, 0)
    q_ids = refs["q_ids"][...][:, None] if "q_ids" in refs else None
    seed = refs["seed"][0] if "seed" in refs else None

    def step(j: Any, dq: Any, masked: bool) -> Any:
        at = pl.ds(j * cut.cols, cut.cols)
        cols = tile.places(j * cut.cols, cut.cols, 1)
        ids = None if q_ids is None else (q_ids, refs["kv_ids"][at][None, :])
        seen = tile.seen(rows, cols, cut.kv_len, ids, cut.rules) if masked else None
        k = refs["k"][at, :]
        s, slope = tile.scores(q, k, seen, cut.rules)
        drop = tile.dropper(seed, head, rows, cols, cut.rules)
        _, ds = tile.weights(s, slope, lse, delta, dout, refs["v"][at, :], drop, cut.rules)
        return dq + tile.dot(ds.astype(k.dtype), k, (1, 0), cut.rules)

    dq = cut.over(cut.key_spans(i), step, jnp.zeros((cut.rows, cut.dim), jnp.float32))
    dq_ref[...] = (dq * cut.rules.scale).astype(dq_ref.dtype)


def _key_kernel(refs: Any, dk_ref: Any, dv_ref: Any, *, cut: _Cut) -> None:
    j, first_head = pl.program_id(0), pl.program_id(2) * cut.heads + pl.program_id(1) * cut.group
    k, v = refs["k"][...], refs["v"][...]
    cols = tile.places(j * cut.cols, cut.cols, 1)
    kv_ids = refs["kv_ids"][...][None, :] if "kv_ids" in refs else None
    seed = refs["seed"][0] if "seed" in refs else None

    def of_head(g: Any, carry: Any) -> Any:
        def step(i: Any, carry: Any, masked: bool) -> Any:
            dk, dv = carry
            at = pl.ds(i * cut.rows, cut.rows)
            rows = tile.places(i * cut.rows, cut.rows, 0)
            ids = None if kv_ids is None else (refs["q_ids"][at][:, None], kv_ids)
            seen = tile.seen(rows, cols, cut.kv_len, ids, cut.rules) if masked else None
            q, dout = refs["q"][g, at, :], refs["dout"][g, at, :]
            s, slope = tile.scores(q, k, seen, cut.rules)
            drop = tile.dropper(seed, first_head + g, rows, cols, cut.rules)
            lse, delta = refs["lse"][g, at][:, None], refs["delta"][g, at][:, None]
            p, ds = tile.weights(s, slope, lse, delta, dout, v, drop, cut.rules)
            dk = dk + tile.dot(ds.astype(q.dtype), q, (0, 0), cut.rules)
            return dk, dv + tile.dot(p.astype(dout.dtype), dout, (0, 0), cut.rules)

        return cut.over(cut.query_spans(j), step, carry)

    zeros = jnp.zeros((cut.cols, cut.dim), jnp.float32), jnp.zeros((cut.cols, cut.v_dim), jnp.float32)
    dk, dv = lax.fori_loop(0, cut.group, of_head, zeros)
    dk_ref[...] = (dk * cut.rules.scale).astype(dk_ref.dtype)
    dv_ref[...] = dv.astype(dv_ref.dtype)


class _Cut:
    """A call cut into tiles: arrays with heads first, lengths in whole blocks, head dims in powers of two."""

    def __init__(
        self, query: Array, key: Array, value: Array, extras: Extras, rules: Rules, params: FwdParams | BwdParams
    ) -> None:
        guess = default_backward(query.shape[3])
        self.rules = rules
        self.params = params
        self.rows = params.q_blocksize or guess.q_blocksize or 64
        self.cols = params.kv_blocksize or guess.kv_blocksize or 64
        self.dim, self.v_dim = (max(16, pl.next_power_of_2(x.shape[3])) for x in (query, value))
        self.kv_len = key.shape[1]
        self.heads, self.group = query.shape[2], query.shape[2] // key.shape[2]
        self._q = tile.heads_first(query, self.rows, self.dim)
        self._k = tile.heads_first(key, self.cols, self.dim)
        self._v = tile.heads_first(value, self.cols, self.v_dim)
        self._extras = extras
        self.q_length, self.kv_length = self._q.shape[2], self._k.shape[2]

    def options(self, interpret: bool) -> dict[str, Any]:
        params = plgpu.CompilerParams(num_warps=self.params.num_warps or 4, num_stages=self.params.num_stages or 2)
        return {"interpret": interpret, "compiler_params": params}

    # --- Specs: the grid is (block, head, batch); a group's heads are adjacent ---

    def per_query(self, dim: int | None = None) -> pl.BlockSpec:
        tail = () if dim is None else (dim,)
        return pl.BlockSpec((None, None, self.rows, *tail), lambda i, h, b: (b, h, i, *[0] * len(tail)))

    def per_key(self, dim: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, self.cols, dim), lambda j, h, b: (b, h, j, 0))

    def whole_queries(self, dim: int | None = None) -> pl.BlockSpec:
        """All queries of the heads that share a key head."""
        tail = () if dim is None else (dim,)
        shape = (None, self.group, self.q_length, *tail)
        return pl.BlockSpec(shape, lambda j, h, b: (b, h, 0, *[0] * len(tail)))

    def whole_keys(self, dim: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, self.kv_length, dim), lambda i, h, b: (b, h // self.group, 0, 0))

    def inputs(self, *, block_q: bool) -> dict[str, tuple[Array, pl.BlockSpec]]:
        """What every kernel reads, for programs that own a block of queries or of keys."""
        if block_q:
            specs = self.per_query(self.dim), self.whole_keys(self.dim), self.whole_keys(self.v_dim)
        else:
            specs = self.whole_queries(self.dim), self.per_key(self.dim), self.per_key(self.v_dim)
        found: dict[str, Any] = {"q": (self._q, specs[0]), "k": (self._k, specs[1]), "v": (self._v, specs[2])}
        extras = self._extras
        if extras.q_segment_ids is not None:
            q_ids = _ids(extras.q_segment_ids, self.q_length)
            kv_ids = _ids(extras.kv_segment_ids, self.kv_length)
            own_q, own_kv = (self.rows, self.kv_length) if block_q else (self.q_length, self.cols)
            at = lambda owned: (lambda i, h, b: (b, i)) if owned else (lambda i, h, b: (b, 0))
            found["q_ids"] = q_ids, pl.BlockSpec((None, own_q), at(block_q))
            found["kv_ids"] = kv_ids, pl.BlockSpec((None, own_kv), at(not block_q))
        if extras.dropout_seed is not None:
            found["seed"] = extras.dropout_seed.reshape(1), pl.BlockSpec((1,), lambda i, h, b: (0,))
        return found

    # --- Loops ---

    def key_spans(self, i: Any) -> masks.Spans:
        rules = self.rules
        return masks.spans(i * self.rows, self.rows, self.cols, self.kv_len, rules.lower, rules.upper)

    def query_spans(self, j: Any) -> masks.Spans:
        """The same bounds for a block of keys; padding needs no mask: its keys are zeros, its rows have no weights."""
        lower, upper = self.rules.lower, self.rules.upper
        other = None if upper is None else -upper, None if lower is None else -lower
        return masks.spans(j * self.cols, self.cols, self.rows, self.q_length, *other)

    def over(self, spans: masks.Spans, step: Any, carry: Any) -> Any:
        if self._extras.q_segment_ids is not None:
            spans = spans._replace(clear=spans.start, clear_end=spans.start)
        for lo, hi, masked in spans.loops():
            carry = lax.fori_loop(lo, hi, partial(_flip, step, masked), carry)
        return carry


def _flip(step: Any, masked: bool, index: Any, carry: Any) -> Any:
    return step(index, carry, masked)


def _ids(ids: Array, length: int) -> Array:
    return jnp.pad(ids.astype(jnp.int32), ((0, 0), (0, length - ids.shape[1])))
