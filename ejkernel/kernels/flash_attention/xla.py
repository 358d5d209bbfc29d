"""Flash attention in plain XLA: tiles with an online softmax, memory linear in the sequence, on every device.

All heads of the batch go through a tile together. Tiles that the causal or window bounds exclude are never computed,
and those that no bound cuts are not masked. The same holds for tiles between different segments, or of which a mask
leaves nothing: which they are is found out at run time, before the tiles are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.flash_attention import masks, needed
from ejkernel.kernels.flash_attention.arguments import Attention, Extras, Rules
from ejkernel.kernels.manual_axes import axes_of, vary
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.utils.params import BwdParams, FwdParams

Array = jax.Array

Step = Callable[[Array, Any, bool], Any]

TILE_SCORES = 1 << 20
"""Scores of one tile over all heads that a CPU's caches still hold, or nearly."""
SPARSE_TILE_SCORES = 1 << 15
"""The same for calls whose arrays leave out tiles: of large ones less is left out."""
FEW_QUERIES, FEW_KEYS = 16, 512
"""Up to so many there is one tile for all keys."""


def default_blocks(
    heads: int, q_len: int, kv_len: int, *, sparse: bool = False, banded: bool = False
) -> tuple[int, int]:
    """Rows and columns of a tile: as large as `TILE_SCORES` allows for all `heads` of the batch together.

    `sparse` calls have arrays that leave out tiles, `banded` ones a causal mask or a window: of large tiles less is
    left out. Others have all keys in a tile if keys or queries are few: then nothing is rescaled or padded.
    """
    heads, most = known(heads), SPARSE_TILE_SCORES if sparse else TILE_SCORES
    q_len, kv_len, rows, cols = max(q_len, 1), max(kv_len, 1), 512, 256
    if q_len <= FEW_QUERIES and heads * q_len * kv_len <= most:
        return q_len, kv_len
    if banded:
        rows, cols = (max(128, min(block, length // 64 * 16)) for block, length in ((rows, q_len), (cols, kv_len)))
    elif kv_len <= FEW_KEYS and not sparse:
        return fitted(max(64, most // (heads * kv_len) // 16 * 16), q_len), kv_len
    while heads * rows * cols > most and rows > 64:
        rows, cols = (rows // 2, cols) if rows > cols else (rows, cols // 2)
    return fitted(rows, q_len), fitted(cols, kv_len)


def _is_sparse(extras: Extras) -> bool:
    """Whether a call may need few tiles: packed sequences, or a mask with rows of its own."""
    return extras.q_segment_ids is not None or (extras.mask is not None and extras.mask.shape[2] > 1)


def known(size: Any) -> int:
    """A product of dimensions as a number; a symbolic one, of an exported program, counts as large."""
    return size if isinstance(size, int) else TILE_SCORES


def fitted(block: int, length: int) -> int:
    """`block`, or less: the whole of a shorter sequence; of a longer one what leaves little of the last block empty."""
    length = max(length, 1)
    return length if block >= length else -(-length // (-(-length // block) * 16)) * 16


def forward_space(inv: Invocation[Any, Any]) -> list[FwdParams]:
    """The guess, and other tiles."""
    return [FwdParams(q_blocksize=rows, kv_blocksize=cols) for rows, cols in _blocks(inv)]


def backward_space(inv: Invocation[Any, Any]) -> list[BwdParams]:
    """The guess, and other tiles."""
    return [BwdParams(q_blocksize=rows, kv_blocksize=cols) for rows, cols in _blocks(inv)]


def _blocks(inv: Invocation[Any, Any]) -> list[tuple[int, int]]:
    """Tiles for all heads at once: a handful of them must fit a cache, and there are few small ones."""
    (batch, q_len, heads, _), kv_len = inv.args[0].shape, inv.args[1].shape[1]
    many = known(batch * heads)
    sizes = (128, 256, 512, 1024) if many <= 32 else (64, 128, 256, 512)
    all_blocks = [(fitted(rows, q_len), fitted(cols, kv_len)) for rows in sizes for cols in sizes]
    small = [b for b in all_blocks if many * b[0] * b[1] <= 4 * TILE_SCORES]
    return [_default(Attention.of(inv.args, inv.kwargs)), *small]


def _default(call: Attention) -> tuple[int, int]:
    (batch, q_len, heads, _), kv_len = call.query.shape, call.key.shape[1]
    banded = call.rules.lower is not None or call.rules.upper is not None
    return default_blocks(batch * heads, q_len, kv_len, sparse=_is_sparse(call.extras), banded=banded)


def forward(
    query: Array, key: Array, value: Array, extras: Extras, rules: Rules, params: FwdParams | None = None
) -> tuple[Array, masks.LogSum]:
    """Returns the output and the log-sum-exp [batch, heads, q].

    Without normalisation the latter is the maximum of the row.
    """
    run = partial(_forward, rules, params)
    return _derivable(run, extras, rules)(query, key, value, extras)


def _forward(
    rules: Rules,
    params: FwdParams | None,
    query: Array,
    key: Array,
    value: Array,
    extras: Extras,
    *,
    all_tiles: bool,
) -> tuple[Array, masks.LogSum]:
    tiles = _Tiles.of(Attention(query, key, value, extras, rules), params, all_tiles=all_tiles)
    _, rows = _over_blocks(lambda carry, i: (carry, _forward_rows(tiles, i)), None, tiles.q_blocks)
    batch, q_len, heads, _ = query.shape
    joined = jax.tree.map(lambda x: _joined(x, 3), rows)
    out, sums = jax.tree.map(lambda x: x.reshape(batch, heads, *x.shape[3:])[:, :, :q_len], joined)
    return out.swapaxes(1, 2).astype(query.dtype), sums


def _forward_rows(tiles: _Tiles, i: Array) -> tuple[Array, masks.LogSum]:
    """Output and log-sum-exp of one block of queries."""
    q = tiles.q_block(tiles.q, i)

    def step(j: Array, carry: Any, masked: bool) -> Any:
        o, m, l = carry
        s = tiles.scores(q, i, j, masked)[0]
        m_new = jnp.maximum(m, s.max(axis=-1))
        # A row of which nothing was seen yet has a maximum of -inf, and -inf - -inf is not a number.
        shift = jnp.where(jnp.isneginf(m_new), 0.0, m_new)
        p = jnp.exp(s - shift[..., None])
        alpha = jnp.exp(m - shift)
        l = l * alpha + p.sum(axis=-1)
        p = tiles.dropped(p, i, j)
        o = o * alpha[..., None] + tiles.product("bkgqs,bksd->bkgqd", p, tiles.kv_block(tiles.v, j))
        return o, m_new, l

    o, m, l = _softmax(tiles, q, i) if tiles.is_plain else tiles.over_keys(i, step, tiles.start(q))
    if not tiles.rules.normalize:
        return o, masks.log_sum(m, jnp.where(l == 0, 0.0, 1.0))
    total = l if tiles.is_plain else jnp.where(l == 0, 1.0, l)
    return o / total[..., None], masks.log_sum(m, l)


def _softmax(tiles: _Tiles, q: Array, i: Array) -> tuple[Array, Array, Array]:
    """Output, maximum and sum of rows with one tile of keys that all see; XLA has kernels for just this on CPUs."""
    first = jnp.zeros_like(i)
    s = tiles.scores(q, i, first, masked=False)[0]
    m = s.max(axis=-1)
    p = jnp.exp(s - m[..., None])
    weighted = tiles.product("bkgqs,bksd->bkgqd", tiles.dropped(p, i, first), tiles.kv_block(tiles.v, first))
    return weighted, m, p.sum(axis=-1)


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
) -> tuple[Array, Array, Array, Array | None]:
    """Returns the gradients of query, key, value and bias; `lse` and `delta` are [batch, heads, q]."""
    run = partial(_backward, rules, params)
    return _derivable(run, extras, rules)(query, key, value, extras, lse, delta, dout)


def _backward(
    rules: Rules,
    params: BwdParams | None,
    query: Array,
    key: Array,
    value: Array,
    extras: Extras,
    lse: Array,
    delta: Array,
    dout: Array,
    *,
    all_tiles: bool,
) -> tuple[Array, Array, Array, Array | None]:
    tiles = _Tiles.of(Attention(query, key, value, extras, rules), params, all_tiles=all_tiles)
    dout = tiles.by_group(dout, query.shape[1])
    # Rows of padding have no weights.
    lse = tiles.by_group(lse.swapaxes(1, 2), query.shape[1], fill=jnp.inf)
    saved = dout, lse, tiles.by_group(delta.swapaxes(1, 2), query.shape[1])
    carry = tiles.zeros(tiles.q.shape), None if tiles.bias is None else tiles.zeros(tiles.bias.shape)
    step = partial(_backward_columns, tiles, saved)
    (dq, dbias), columns = _over_blocks(step, carry, tiles.kv_blocks)
    batch, q_len, heads, _ = query.shape
    dq = dq.reshape(batch, heads, *dq.shape[3:])[:, :, :q_len].swapaxes(1, 2).astype(query.dtype)
    dk, dv = (_joined(x, 2)[:, :, : key.shape[1]].swapaxes(1, 2) for x in columns)
    if dbias is not None:
        bias = extras.bias
        dbias = dbias.reshape(*bias.shape[:2], *dbias.shape[3:])[:, :, : bias.shape[2], : bias.shape[3]]
        dbias = dbias.astype(bias.dtype)
    return dq, dk.astype(key.dtype), dv.astype(value.dtype), dbias


def _backward_columns(tiles: _Tiles, saved: tuple[Array, Array, Array], carry: Any, j: Array) -> Any:
    """Gradients of one block of keys, while those of queries and bias are added up in `carry`."""
    k, v = tiles.kv_block(tiles.k, j), tiles.kv_block(tiles.v, j)
    rules = tiles.rules

    def step(i: Array, carry: Any, masked: bool) -> Any:
        dq_all, dbias, dk, dv = carry
        q = tiles.q_block(tiles.q, i)
        dout, lse, delta = (tiles.q_block(x, i) for x in saved)
        s, slope = tiles.scores(q, i, j, masked)
        s = s if masked else tiles.without_padding(s, j)
        p = jnp.exp(s - lse[..., None])
        dv = dv + tiles.product("bkgqs,bkgqd->bksd", tiles.dropped(p, i, j), dout)
        dp = tiles.dropped(tiles.product("bkgqd,bksd->bkgqs", dout, v), i, j)
        ds = p * (dp - delta[..., None])
        if dbias is not None:
            dbias = tiles.add_to_bias(dbias, ds, i, j)
        ds = ds * slope
        dk = dk + tiles.product("bkgqs,bkgqd->bksd", ds, q) * rules.scale
        dq = tiles.product("bkgqs,bksd->bkgqd", ds, k) * rules.scale
        return tiles.add_to_rows(dq_all, dq, i), dbias, dk, dv

    state = *carry, tiles.zeros(k.shape), tiles.zeros(v.shape)
    *carry, dk, dv = tiles.over_queries(j, step, state)
    return tuple(carry), (dk, dv)


def _derivable(run: Callable[..., Any], extras: Extras, rules: Rules) -> Callable[..., Any]:
    """`run` of which JAX can take any derivative.

    It cannot go back through loops whose bounds only the running program knows: derivatives are those of all tiles.
    """
    arrays = (rules.lower, rules.upper, extras.q_segment_ids, extras.q_positions, extras.mask)
    if all(x is None for x in arrays):
        return partial(run, all_tiles=False)
    call = jax.custom_jvp(partial(run, all_tiles=False))
    call.defjvp(lambda primals, tangents: jax.jvp(partial(run, all_tiles=True), primals, tangents))
    return call


def _over_blocks(fn: Callable[[Any, Array], Any], carry: Any, count: int) -> tuple[Any, Any]:
    """`lax.scan` of `fn` over the numbers of blocks; one block needs no loop."""
    if count == 1:
        carry, out = fn(carry, jnp.int32(0))
        return carry, jax.tree.map(lambda x: x[None], out)
    return lax.scan(fn, carry, jnp.arange(count, dtype=jnp.int32))


def _joined(blocks: Array, axis: int) -> Array:
    """Blocks along the first axis as one axis at `axis`."""
    x = jnp.moveaxis(blocks, 0, axis)
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


@dataclass(frozen=True, kw_only=True)
class _Tiles:
    """A call cut into tiles: q is [batch, kv heads, group, queries, dim], k and v are [batch, kv heads, keys, dim]."""

    q: Array
    k: Array
    v: Array
    bias: Array | None
    extras: Extras
    rules: Rules
    by_query: needed.Visits | None
    """Which tiles each block of queries needs, if arrays say so; None: its place does."""
    by_key: needed.Visits | None
    all: bool
    """Whether all tiles are computed and masked."""
    rows: int
    cols: int
    q_len: int
    kv_len: int

    @classmethod
    def of(cls, call: Attention, params: FwdParams | BwdParams | None, *, all_tiles: bool) -> _Tiles:
        query, key, value, extras, rules = call
        batch, q_len, heads, _ = query.shape
        kv_len, kv_heads = key.shape[1:3]
        guess = _default(call)
        rows = min(params.q_blocksize, max(q_len, 1)) if params and params.q_blocksize else guess[0]
        cols = min(params.kv_blocksize, max(kv_len, 1)) if params and params.kv_blocksize else guess[1]

        def per_group(x: Array | None) -> Array | None:
            """[batch, heads, q, kv], each perhaps 1, cut and padded like the scores."""
            if x is None:
                return None
            split = (kv_heads, heads // kv_heads) if x.shape[1] > 1 else (1, 1)
            x = x.reshape(x.shape[0], *split, *x.shape[2:])
            # An axis of 1 broadcasts; one of 0 is from a call without queries or keys.
            x = x if x.shape[3] == 1 else _padded(x, 3, rows)
            return x if x.shape[4] == 1 else _padded(x, 4, cols)

        pad_q, pad_kv = partial(_padded, axis=1, block=rows), partial(_padded, axis=1, block=cols)
        on = lambda fn, x: None if x is None else fn(x)
        blocks = needed.Blocks(rows, cols, max(-(-q_len // rows), 1), max(-(-kv_len // cols), 1), kv_len)
        found = needed.find(extras, rules, blocks)
        found = None if found is None else found.together()
        extras = extras._replace(
            mask=per_group(extras.mask),
            q_segment_ids=on(pad_q, extras.q_segment_ids),
            kv_segment_ids=on(pad_kv, extras.kv_segment_ids),
            q_positions=on(pad_q, extras.q_positions),
            kv_positions=on(pad_kv, extras.kv_positions),
        )
        q = pad_q(query).swapaxes(1, 2)
        return cls(
            q=q.reshape(batch, kv_heads, heads // kv_heads, *q.shape[2:]),
            k=pad_kv(key).swapaxes(1, 2),
            v=pad_kv(value).swapaxes(1, 2),
            bias=per_group(extras.bias),
            extras=extras,
            rules=rules,
            by_query=None if found is None else needed.listed(found),
            by_key=None if found is None else needed.listed(found.turned()),
            all=all_tiles,
            rows=rows,
            cols=cols,
            q_len=q_len,
            kv_len=kv_len,
        )

    @property
    def q_blocks(self) -> int:
        return self.q.shape[3] // self.rows

    @property
    def kv_blocks(self) -> int:
        return self.k.shape[2] // self.cols

    @property
    def dtype(self) -> Any:
        return masks.accumulator(self.q.dtype)

    # --- Cutting ---

    def q_block(self, x: Array, i: Array) -> Array:
        return lax.dynamic_slice_in_dim(x, i * self.rows, self.rows, axis=3)

    def kv_block(self, x: Array, j: Array) -> Array:
        return lax.dynamic_slice_in_dim(x, j * self.cols, self.cols, axis=2)

    def by_group(self, x: Array, q_len: int, fill: float = 0.0) -> Array:
        """[batch, q, heads, ...] like `q`."""
        x = _padded(x, 1, self.rows, fill).swapaxes(1, 2)
        return x.reshape(*self.q.shape[:3], *x.shape[2:])

    def zeros(self, shape: tuple[int, ...], fill: float = 0.0) -> Array:
        """The start value of a loop; inside shard_map it varies over the same axes as what is added to it."""
        zeros = jnp.full(shape, fill, self.dtype)
        arrays = [x for x in (self.q, self.k, self.v, self.bias, *self.extras) if x is not None]
        return vary(zeros, axes_of(arrays))

    def start(self, q: Array) -> tuple[Array, Array, Array]:
        """Output, maximum and sum of no keys; sinks are logits that come first."""
        shape = q.shape[:-1]
        o, m, l = self.zeros((*shape, self.v.shape[-1])), self.zeros(shape, -jnp.inf), self.zeros(shape)
        if self.extras.softmax_aux is None:
            return o, m, l
        aux = self.extras.softmax_aux.astype(self.dtype).reshape(*shape[1:3], 1, -1)
        top = aux.max(axis=-1)
        finite = jnp.where(jnp.isneginf(top), 0.0, top)  # A sink of -inf does not count.
        return o, jnp.maximum(m, top), l + jnp.exp(aux - finite[..., None]).sum(axis=-1)

    # --- Scores of one tile ---

    def product(self, equation: str, a: Array, b: Array) -> Array:
        """Products in the arguments' own dtype, summed in float32; CPUs multiply float32 fastest."""
        narrow = self.dtype if jax.default_backend() == "cpu" else self.q.dtype
        return jnp.einsum(
            equation,
            a.astype(narrow),
            b.astype(narrow),
            precision=self.rules.precision,
            preferred_element_type=self.dtype,
        )

    def scores(self, q: Array, i: Array, j: Array, masked: bool) -> tuple[Array, Any]:
        """Logits of a tile, and the slope of the soft cap at each."""
        rules = self.rules
        s = self.product("bkgqd,bksd->bkgqs", q, self.kv_block(self.k, j)) * rules.scale
        if rules.logits_dtype != s.dtype.name:
            s = s.astype(rules.logits_dtype).astype(self.dtype)
        slope: Any = 1.0
        if rules.soft_cap is not None:
            t = jnp.tanh(s / rules.soft_cap)
            s, slope = rules.soft_cap * t, 1.0 - t * t
        if self.bias is not None:
            s = s + self._cut(self.bias, i, j).astype(self.dtype)
        return (jnp.where(self._seen(i, j), s, -jnp.inf) if masked else s), slope

    def without_padding(self, s: Array, j: Array) -> Array:
        """Logits of a tile that is not masked: keys of padding are zeros, but their weights may be infinite."""
        if not self.kv_len % self.cols:
            return s
        return jnp.where(self._places(jnp.zeros_like(j), j)[1] < self.kv_len, s, -jnp.inf)

    def dropped(self, x: Array, i: Array, j: Array) -> Array:
        prob = self.rules.dropout_prob
        if not prob:
            return x
        heads = lax.iota(jnp.int32, x.shape[0] * x.shape[1] * x.shape[2]).reshape(*x.shape[:3], 1, 1)
        keep = masks.kept(self.extras.dropout_seed, heads, *self._places(i, j), prob)
        return jnp.where(keep, x / (1.0 - prob), 0.0)

    def _places(self, i: Array, j: Array) -> tuple[Array, Array]:
        return (
            i * self.rows + lax.broadcasted_iota(jnp.int32, (self.rows, 1), 0),
            j * self.cols + lax.broadcasted_iota(jnp.int32, (1, self.cols), 1),
        )

    def _seen(self, i: Array, j: Array) -> Array:
        rows, cols = self._places(i, j)
        seen = cols < self.kv_len
        extras = self.extras
        along_q = lambda x: lax.dynamic_slice_in_dim(x, i * self.rows, self.rows, axis=1)[:, None, None, :, None]
        along_kv = lambda x: lax.dynamic_slice_in_dim(x, j * self.cols, self.cols, axis=1)[:, None, None, None, :]
        if extras.q_positions is not None:
            rows, cols = along_q(extras.q_positions), along_kv(extras.kv_positions)
        inside = masks.may_see(rows, cols, self.rules)
        seen = seen if inside is None else seen & inside
        if extras.q_segment_ids is not None:
            seen = seen & (along_q(extras.q_segment_ids) == along_kv(extras.kv_segment_ids))
        return seen if extras.mask is None else seen & self._cut(extras.mask, i, j)

    def _cut(self, x: Array, i: Array, j: Array) -> Array:
        """A tile of something that broadcasts against the scores."""
        x = self.q_block(x, i) if x.shape[3] > 1 else x
        return lax.dynamic_slice_in_dim(x, j * self.cols, self.cols, axis=4) if x.shape[4] > 1 else x

    def add_to_rows(self, all_rows: Array, rows: Array, i: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(all_rows, self.q_block(all_rows, i) + rows, i * self.rows, axis=3)

    def add_to_bias(self, dbias: Array, ds: Array, i: Array, j: Array) -> Array:
        ds = ds.sum(axis=[axis for axis, n in enumerate(dbias.shape) if n == 1], keepdims=True)
        at = (0, 0, 0, i * self.rows if dbias.shape[3] > 1 else 0, j * self.cols if dbias.shape[4] > 1 else 0)
        # Of one type: with 64 bits enabled, the two loops may count in different ones.
        starts = [jnp.asarray(n, jnp.int32) for n in at]
        return lax.dynamic_update_slice(dbias, self._cut(dbias, i, j) + ds, starts)

    # --- Which tiles ---

    @property
    def _is_cut(self) -> bool:
        """Whether a tile may have to be masked."""
        extras, bounds = self.extras, (self.rules.lower, self.rules.upper)
        arrays = (extras.mask, extras.q_segment_ids, extras.q_positions)
        return self.all or self.kv_len % self.cols != 0 or any(x is not None for x in (*bounds, *arrays))

    @property
    def is_plain(self) -> bool:
        """Whether every query sees every key, in one tile, and nothing but keys: no sum is zero."""
        others = (self.bias, self.extras.softmax_aux)
        return self.kv_blocks == 1 and not self._is_cut and all(x is None for x in others)

    def _is_one(self, blocks: int) -> bool:
        """Whether a loop over so many blocks is one step that is always needed."""
        return blocks == 1 and (self.q_blocks == self.kv_blocks or not self._is_cut)

    def over_keys(self, i: Array, step: Step, carry: Any) -> Any:
        """Runs `step(j, carry, masked)` over the blocks of keys that a block of queries sees."""
        if self._is_one(self.kv_blocks):
            return step(jnp.zeros_like(i), carry, self._is_cut)
        if self.all:
            return _over(masks.Spans(0, 0, 0, self.kv_blocks, self.kv_blocks), _same, step, carry)
        if self.by_query is not None:
            return _over(*self.by_query.of(i), step, carry)
        lower, upper = self.rules.lower, self.rules.upper
        return _over(masks.spans(i * self.rows, self.rows, self.cols, self.kv_len, lower, upper), _same, step, carry)

    def over_queries(self, j: Array, step: Step, carry: Any) -> Any:
        """Runs `step(i, carry, masked)` over the blocks of queries that see a block of keys."""
        if self._is_one(self.q_blocks):
            return step(jnp.zeros_like(j), carry, self._is_cut)
        if self.all:
            return _over(masks.Spans(0, 0, 0, self.q_blocks, self.q_blocks), _same, step, carry)
        if self.by_key is not None:
            return _over(*self.by_key.of(j), step, carry)
        lower, upper = self.rules.lower, self.rules.upper
        # The same bounds for a block of keys.
        other = None if upper is None else -upper, None if lower is None else -lower
        spans = masks.spans(j * self.cols, self.cols, self.rows, self.q_blocks * self.rows, *other)
        return _over(spans, _same, step, carry)


def _over(spans: masks.Spans, at: Callable[[Array], Array], step: Step, carry: Any) -> Any:
    for lo, hi, masked in spans.loops():
        carry = lax.fori_loop(lo, hi, partial(_flip, step, at, masked), carry)
    return carry


def _flip(step: Step, at: Callable[[Array], Array], masked: bool, index: Array, carry: Any) -> Any:
    return step(at(index), carry, masked)


def _same(index: Array) -> Array:
    return index


def _padded(x: Array, axis: int, block: int, fill: float = 0.0) -> Array:
    """`x` with at least one block along `axis`, and no broken one."""
    missing = max(-(-x.shape[axis] // block), 1) * block - x.shape[axis]
    if not missing:
        return x
    widths = [(0, missing if a == axis else 0) for a in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=jnp.asarray(fill, x.dtype))
