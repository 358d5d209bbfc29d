"""Flash attention for TPUs, in Pallas.

The grid's last axis runs over the blocks of the other side, one after the other, with sums in scratch memory. Blocks
that the mask leaves out are neither computed nor fetched: their index is that of a block that is already loaded.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.flash_attention import masks, tile
from ejkernel.kernels.flash_attention.arguments import Attention, Extras, Rules
from ejkernel.kernels.flash_attention.visits import needed_steps as needed_steps
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.utils.params import BwdParams, FwdParams

Array = jax.Array

LANES = 128
_SIZES = (256, 512, 1024)


def unsupported(inv: Invocation[Any, Any], *, backward: bool) -> str | None:
    """Why this backend does not support a call; None if it does."""
    query, key, value, extras, rules = Attention.of(inv.args, inv.kwargs)
    if 0 in (query.size, key.size, value.size):
        return "this kernel takes no empty arrays"
    if query.dtype == jnp.float16:
        return "TPUs have no float16"
    return tile.unsupported(query, extras, rules)


def forward_space(inv: Invocation[Any, Any]) -> list[FwdParams]:
    """The guess, and other tiles."""
    return [FwdParams(q_blocksize=rows, kv_blocksize=cols) for rows, cols in _blocks(inv)]


def backward_space(inv: Invocation[Any, Any]) -> list[BwdParams]:
    """The guess, and other tiles."""
    return [BwdParams(q_blocksize=rows, kv_blocksize=cols) for rows, cols in _blocks(inv)]


def _blocks(inv: Invocation[Any, Any]) -> list[tuple[int, int]]:
    q_len, kv_len = inv.args[0].shape[1], inv.args[1].shape[1]
    pairs = [(512, 512), *((rows, cols) for rows in _SIZES for cols in _SIZES)]
    return list(dict.fromkeys((_fitted(rows, q_len), _fitted(cols, kv_len)) for rows, cols in pairs))


def _fitted(block: int, length: int) -> int:
    """`block` in whole lanes, or less if the sequence is shorter."""
    whole = lambda n: -(-n // LANES) * LANES
    return min(whole(block), whole(max(length, 1)))


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
    cut = _Cut(query, key, value, extras, rules, params)
    batch, q_len, heads, _ = query.shape
    out, sums = tile.call(
        partial(_forward_kernel, cut=cut),
        cut.inputs(cut.by_query),
        [
            (((batch, heads, cut.q_length, value.shape[3]), query.dtype), cut.by_query.queries(value.shape[3])),
            # Side by side: the last axis is padded to whole lanes anyway.
            (((batch, heads, cut.q_length, 2), jnp.float32), cut.by_query.queries(2)),
        ],
        grid=(batch, heads, cut.q_blocks, cut.kv_blocks),
        scratch_shapes=[
            pltpu.VMEM((cut.rows, value.shape[3]), jnp.float32),
            pltpu.VMEM((cut.rows, 1), jnp.float32),
            pltpu.VMEM((cut.rows, 1), jnp.float32),
        ],
        **cut.options(interpret, sequential=1),
    )
    sums = masks.LogSum(sums[:, :, :q_len, 0], sums[:, :, :q_len, 1])
    return masks.with_sinks(out[:, :, :q_len].swapaxes(1, 2), sums, extras.softmax_aux)


def _forward_kernel(refs: Any, o_ref: Any, sums_ref: Any, o_acc: Any, m_acc: Any, l_acc: Any, *, cut: _Cut) -> None:
    head, i, j = pl.program_id(0) * cut.heads + pl.program_id(1), pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _start() -> None:
        o_acc[...] = jnp.zeros(o_acc.shape, jnp.float32)
        m_acc[...] = jnp.full(m_acc.shape, -jnp.inf, jnp.float32)
        l_acc[...] = jnp.zeros(l_acc.shape, jnp.float32)

    @pl.when(cut.needed(i, j))
    def _step() -> None:
        s, _, drop = cut.scores(refs, head, i, j)
        carry = o_acc[...], m_acc[...], l_acc[...]
        o_acc[...], m_acc[...], l_acc[...] = tile.accumulate(carry, s, refs["v"][...], drop, cut.rules)

    @pl.when(j == cut.kv_blocks - 1)
    def _finish() -> None:
        out, sums = tile.finished((o_acc[...], m_acc[...], l_acc[...]))
        o_ref[...] = out.astype(o_ref.dtype)
        sums_ref[...] = jnp.where(tile.places(0, 2, 1) == 0, sums.lse, sums.rest)


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
    cut = _Cut(query, key, value, extras, rules, params)
    (batch, q_len, heads, head_dim), (kv_len, kv_heads, value_dim) = query.shape, value.shape[1:]
    saved = {
        "dout": tile.heads_first(dout, cut.rows),
        "lse": tile.heads_first(lse.swapaxes(1, 2)[..., None], cut.rows, fill=jnp.inf),
        "delta": tile.heads_first(delta.swapaxes(1, 2)[..., None], cut.rows),
    }
    with_saved = lambda view: {**cut.inputs(view), **{n: (x, view.queries(x.shape[3])) for n, x in saved.items()}}
    (dq,) = tile.call(
        partial(_query_kernel, cut=cut),
        with_saved(cut.by_query),
        [(((batch, heads, cut.q_length, head_dim), query.dtype), cut.by_query.queries(head_dim))],
        grid=(batch, heads, cut.q_blocks, cut.kv_blocks),
        scratch_shapes=[pltpu.VMEM((cut.rows, head_dim), jnp.float32)],
        **cut.options(interpret, sequential=1),
    )
    dk, dv = tile.call(
        partial(_key_kernel, cut=cut),
        with_saved(cut.by_key),
        [
            (((batch, kv_heads, cut.kv_length, head_dim), key.dtype), cut.by_key.keys(head_dim)),
            (((batch, kv_heads, cut.kv_length, value_dim), value.dtype), cut.by_key.keys(value_dim)),
        ],
        grid=(batch, kv_heads, cut.kv_blocks, cut.group, cut.q_blocks),
        scratch_shapes=[
            pltpu.VMEM((cut.cols, head_dim), jnp.float32),
            pltpu.VMEM((cut.cols, value_dim), jnp.float32),
        ],
        **cut.options(interpret, sequential=2),
    )
    dq, dk, dv = dq[:, :, :q_len], dk[:, :, :kv_len], dv[:, :, :kv_len]
    return dq.swapaxes(1, 2), dk.swapaxes(1, 2), dv.swapaxes(1, 2), None


def _query_kernel(refs: Any, dq_ref: Any, dq_acc: Any, *, cut: _Cut) -> None:
    head, i, j = pl.program_id(0) * cut.heads + pl.program_id(1), pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _start() -> None:
        dq_acc[...] = jnp.zeros(dq_acc.shape, jnp.float32)

    @pl.when(cut.needed(i, j))
    def _step() -> None:
        s, slope, drop = cut.scores(refs, head, i, j)
        rows = refs["lse"][...], refs["delta"][...], refs["dout"][...]
        _, ds = tile.weights(s, slope, *rows, refs["v"][...], drop, cut.rules)
        k = refs["k"][...]
        dq_acc[...] += tile.dot(ds.astype(k.dtype), k, (1, 0), cut.rules)

    @pl.when(j == cut.kv_blocks - 1)
    def _finish() -> None:
        dq_ref[...] = (dq_acc[...] * cut.rules.scale).astype(dq_ref.dtype)


def _key_kernel(refs: Any, dk_ref: Any, dv_ref: Any, dk_acc: Any, dv_acc: Any, *, cut: _Cut) -> None:
    j, g, i = pl.program_id(2), pl.program_id(3), pl.program_id(4)
    head = pl.program_id(0) * cut.heads + pl.program_id(1) * cut.group + g

    @pl.when((g == 0) & (i == 0))
    def _start() -> None:
        dk_acc[...] = jnp.zeros(dk_acc.shape, jnp.float32)
        dv_acc[...] = jnp.zeros(dv_acc.shape, jnp.float32)

    @pl.when(cut.needed(i, j))
    def _step() -> None:
        s, slope, drop = cut.scores(refs, head, i, j)
        q, dout = refs["q"][...], refs["dout"][...]
        p, ds = tile.weights(s, slope, refs["lse"][...], refs["delta"][...], dout, refs["v"][...], drop, cut.rules)
        dk_acc[...] += tile.dot(ds.astype(q.dtype), q, (0, 0), cut.rules)
        dv_acc[...] += tile.dot(p.astype(dout.dtype), dout, (0, 0), cut.rules)

    @pl.when((g == cut.group - 1) & (i == cut.q_blocks - 1))
    def _finish() -> None:
        dk_ref[...] = (dk_acc[...] * cut.rules.scale).astype(dk_ref.dtype)
        dv_ref[...] = dv_acc[...].astype(dv_ref.dtype)


class _View:
    """Block specs for one kind of grid: `place` maps its indices to (batch, head, query block, key block)."""

    def __init__(self, cut: _Cut, place: Any) -> None:
        self._cut = cut
        self._place = place

    def _spec(self, shape: tuple[Any, ...], at: Any) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda *grid: at(*self._place(*grid)))

    def queries(self, dim: int) -> pl.BlockSpec:
        return self._spec((None, None, self._cut.rows, dim), lambda b, h, i, j: (b, h, i, 0))

    def keys(self, dim: int) -> pl.BlockSpec:
        group = self._cut.group
        return self._spec((None, None, self._cut.cols, dim), lambda b, h, i, j: (b, h // group, j, 0))

    def query_ids(self) -> pl.BlockSpec:
        return self._spec((None, self._cut.rows, 1), lambda b, h, i, j: (b, i, 0))

    def key_ids(self) -> pl.BlockSpec:
        return self._spec((None, 1, self._cut.cols), lambda b, h, i, j: (b, 0, j))


class _Cut:
    """A call cut into tiles: arrays with heads first, lengths in whole blocks."""

    def __init__(
        self, query: Array, key: Array, value: Array, extras: Extras, rules: Rules, params: FwdParams | BwdParams | None
    ) -> None:
        self.rules = rules
        self.rows = _fitted((params and params.q_blocksize) or 512, query.shape[1])
        self.cols = _fitted((params and params.kv_blocksize) or 512, key.shape[1])
        self.kv_len = key.shape[1]
        self.heads, self.group = query.shape[2], query.shape[2] // key.shape[2]
        self._arrays = tuple(
            tile.heads_first(x, block) for x, block in ((query, self.rows), (key, self.cols), (value, self.cols))
        )
        self._extras = extras
        self.q_length, self.kv_length = self._arrays[0].shape[2], self._arrays[1].shape[2]
        self.q_blocks, self.kv_blocks = self.q_length // self.rows, self.kv_length // self.cols
        self.by_query = _View(self, lambda b, h, i, j: (b, h, i, self._held(j, self._key_spans(i))))
        self.by_key = _View(self, lambda b, h, j, g, i: (b, h * self.group + g, self._held(i, self._query_spans(j)), j))

    def options(self, interpret: bool, sequential: int) -> dict[str, Any]:
        semantics: Any = ("parallel",) * 3 + ("arbitrary",) * sequential
        return {"interpret": interpret, "compiler_params": pltpu.CompilerParams(dimension_semantics=semantics)}

    def inputs(self, view: _View) -> dict[str, tuple[Array, pl.BlockSpec]]:
        q, k, v = self._arrays
        found = {
            "q": (q, view.queries(q.shape[3])),
            "k": (k, view.keys(k.shape[3])),
            "v": (v, view.keys(v.shape[3])),
        }
        extras = self._extras
        if extras.q_segment_ids is not None:
            found["q_ids"] = _ids(extras.q_segment_ids, self.q_length)[:, :, None], view.query_ids()
            found["kv_ids"] = _ids(extras.kv_segment_ids, self.kv_length)[:, None, :], view.key_ids()
        if extras.dropout_seed is not None:
            found["seed"] = extras.dropout_seed.reshape(1), pl.BlockSpec(memory_space=pltpu.SMEM)
        return found

    def scores(self, refs: Any, head: Any, i: Any, j: Any) -> tuple[Any, Any, Any]:
        """Logits of a tile, the slope of the soft cap, and the function that drops weights."""
        rows, cols = tile.places(i * self.rows, self.rows, 0), tile.places(j * self.cols, self.cols, 1)
        ids = (refs["q_ids"][...], refs["kv_ids"][...]) if "q_ids" in refs else None
        seen = tile.seen(rows, cols, self.kv_len, ids, self.rules)
        s, slope = tile.scores(refs["q"][...], refs["k"][...], seen, self.rules)
        seed = refs["seed"][0] if "seed" in refs else None
        return s, slope, tile.dropper(seed, head, rows, cols, self.rules)

    # --- Which tiles ---

    def needed(self, i: Any, j: Any) -> Any:
        spans = self._key_spans(i)
        return (j >= spans.start) & (j < spans.end)

    def _held(self, block: Any, spans: masks.Spans) -> Any:
        """The block to fetch: always one that is needed."""
        return jnp.maximum(jnp.minimum(jnp.maximum(block, spans.start), spans.end - 1), 0)

    def _key_spans(self, i: Any) -> masks.Spans:
        rules = self.rules
        return masks.spans(i * self.rows, self.rows, self.cols, self.kv_len, rules.lower, rules.upper)

    def _query_spans(self, j: Any) -> masks.Spans:
        lower, upper = self.rules.lower, self.rules.upper
        other = None if upper is None else -upper, None if lower is None else -lower
        return masks.spans(j * self.cols, self.cols, self.rows, self.q_length, *other)


def _ids(ids: Array, length: int) -> Array:
    return jnp.pad(ids.astype(jnp.int32), ((0, 0), (0, length - ids.shape[1])))
