"""A call of XLA's backend in tiles: where they lie, which are needed, and the scores of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.flash_attention import masks, needed, xla_blocks
from ejkernel.kernels.flash_attention.arguments import Attention, Extras, Rules
from ejkernel.kernels.flash_attention.xla_products import Products
from ejkernel.kernels.manual_axes import axes_of, vary
from ejkernel.ops.utils.params import BwdParams, FwdParams

Array = jax.Array

Step = Callable[[Array, Any, bool], Any]


@dataclass(frozen=True, kw_only=True)
class Tiles:
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
    few_queries: bool
    scale: float
    """What products with queries still have to be multiplied by."""

    @classmethod
    def of(
        cls, call: Attention, params: FwdParams | BwdParams | None, *, all_tiles: bool, backward: bool = False
    ) -> Tiles:
        query, key, value, extras, rules = call
        batch, q_len, heads, _ = query.shape
        kv_len, kv_heads = key.shape[1:3]
        guess = xla_blocks.guess(call, backward=backward)
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
        scale = rules.scale
        if _narrow(query.dtype) == (wide := masks.accumulator(query.dtype)):
            # Not the scores: where a compiler rounds `scores * scale - maximum` once and where twice is its choice, and
            # for large logits the weights of forward and backward would differ. With fewer bits it would be less exact.
            query, scale = query.astype(wide) * rules.scale, 1.0
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
            few_queries=xla_blocks.folds(call, backward=backward),
            scale=scale,
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

    @property
    def products(self) -> Products:
        """Those of the arguments, summed in float32."""
        return Products(
            narrow=_narrow(self.k.dtype),
            dtype=self.dtype,
            precision=self.rules.precision,
            folded=jax.default_backend() == "cpu" and self.few_queries and self.q_blocks == self.kv_blocks == 1,
        )

    def scores(self, q: Array, i: Array, j: Array, masked: bool) -> tuple[Array, Any]:
        """Logits of a tile, and the slope of the soft cap at each."""
        rules = self.rules
        s = self.products.scores(q, self.kv_block(self.k, j)) * self.scale
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
    def is_cut(self) -> bool:
        """Whether a tile may have to be masked."""
        extras, bounds = self.extras, (self.rules.lower, self.rules.upper)
        arrays = (extras.mask, extras.q_segment_ids, extras.q_positions)
        return self.all or self.kv_len % self.cols != 0 or any(x is not None for x in (*bounds, *arrays))

    @property
    def sees_all(self) -> bool:
        """Whether every query sees every key: no sum is zero."""
        return not self.is_cut and self.bias is None

    @property
    def is_one_step(self) -> bool:
        """Whether a block of queries has one tile, and nothing but keys."""
        return self._is_one(self.kv_blocks) and self.extras.softmax_aux is None

    def _is_one(self, blocks: int) -> bool:
        """Whether a loop over so many blocks is one step that is always needed."""
        return blocks == 1 and (self.q_blocks == self.kv_blocks or not self.is_cut)

    def over_keys(self, i: Array, step: Step, carry: Any) -> Any:
        """Runs `step(j, carry, masked)` over the blocks of keys that a block of queries sees."""
        if self._is_one(self.kv_blocks):
            return step(jnp.zeros_like(i), carry, self.is_cut)
        if self.all:
            return _over(masks.Spans(0, 0, 0, self.kv_blocks, self.kv_blocks), _same, step, carry)
        if self.by_query is not None:
            return _over(*self.by_query.of(i), step, carry)
        lower, upper = self.rules.lower, self.rules.upper
        return _over(masks.spans(i * self.rows, self.rows, self.cols, self.kv_len, lower, upper), _same, step, carry)

    def over_queries(self, j: Array, step: Step, carry: Any) -> Any:
        """Runs `step(i, carry, masked)` over the blocks of queries that see a block of keys."""
        if self._is_one(self.q_blocks):
            return step(jnp.zeros_like(j), carry, self.is_cut)
        if self.all:
            return _over(masks.Spans(0, 0, 0, self.q_blocks, self.q_blocks), _same, step, carry)
        if self.by_key is not None:
            return _over(*self.by_key.of(j), step, carry)
        lower, upper = self.rules.lower, self.rules.upper
        # The same bounds for a block of keys.
        other = None if upper is None else -upper, None if lower is None else -lower
        spans = masks.spans(j * self.cols, self.cols, self.rows, self.q_blocks * self.rows, *other)
        return _over(spans, _same, step, carry)


def _narrow(dtype: Any) -> Any:
    """The dtype in which arguments are multiplied: their own, but CPUs multiply float32 fastest."""
    return masks.accumulator(dtype) if jax.default_backend() == "cpu" else jnp.dtype(dtype)


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
