"""Flash attention in plain XLA: tiles with an online softmax, memory linear in the sequence, on every device.

All heads of the batch go through a tile together. Tiles that the causal or window bounds exclude are never computed,
and those that no bound cuts are not masked. The same holds for tiles between different segments, or of which a mask
leaves nothing: which they are is found out at run time, before the tiles are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.flash_attention import masks, xla_blocks
from ejkernel.kernels.flash_attention.arguments import Attention, Extras, Rules
from ejkernel.kernels.flash_attention.xla_tiles import Tiles
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.utils.params import BwdParams, FwdParams

Array = jax.Array


def forward_space(inv: Invocation[Any, Any]) -> list[FwdParams]:
    """The guess, and other tiles."""
    return [FwdParams(q_blocksize=rows, kv_blocksize=cols) for rows, cols in _blocks(inv, backward=False)]


def backward_space(inv: Invocation[Any, Any]) -> list[BwdParams]:
    """The guess, and other tiles."""
    return [BwdParams(q_blocksize=rows, kv_blocksize=cols) for rows, cols in _blocks(inv, backward=True)]


def _blocks(inv: Invocation[Any, Any], *, backward: bool) -> list[tuple[int, int]]:
    return xla_blocks.space(Attention.of(inv.args, inv.kwargs), backward=backward)


def forward(call: Attention, params: FwdParams | None = None) -> tuple[Array, masks.LogSum]:
    """Returns the output and the log-sum-exp [batch, heads, q].

    Without normalisation the latter is the maximum of the row.
    """
    *arrays, rules = call
    return _derivable(partial(_forward, rules, params), call)(*arrays)


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
    tiles = Tiles.of(Attention(query, key, value, extras, rules), params, all_tiles=all_tiles)
    _, rows = _over_blocks(lambda carry, i: (carry, _forward_rows(tiles, i)), None, tiles.q_blocks)
    batch, q_len, heads, _ = query.shape
    joined = jax.tree.map(lambda x: _joined(x, 3), rows)
    out, sums = jax.tree.map(lambda x: x.reshape(batch, heads, *x.shape[3:])[:, :, :q_len], joined)
    return out.swapaxes(1, 2).astype(query.dtype), sums


def _forward_rows(tiles: Tiles, i: Array) -> tuple[Array, masks.LogSum]:
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
        o = o * alpha[..., None] + tiles.products.weighted(p, tiles.kv_block(tiles.v, j))
        return o, m_new, l

    o, m, l = _softmax(tiles, q, i) if tiles.is_one_step else tiles.over_keys(i, step, tiles.start(q))
    if not tiles.rules.normalize:
        return o, masks.log_sum(m, jnp.where(l == 0, 0.0, 1.0))
    total = l if tiles.sees_all else jnp.where(l == 0, 1.0, l)
    return o / total[..., None], masks.log_sum(m, l)


def _softmax(tiles: Tiles, q: Array, i: Array) -> tuple[Array, Array, Array]:
    """Output, maximum and sum of rows with one tile of keys; XLA has kernels for just this on CPUs."""
    first = jnp.zeros_like(i)
    s = tiles.scores(q, i, first, masked=tiles.is_cut)[0]
    m = s.max(axis=-1)
    shift = m if tiles.sees_all else jnp.where(jnp.isneginf(m), 0.0, m)
    p = jnp.exp(s - shift[..., None])
    weighted = tiles.products.weighted(tiles.dropped(p, i, first), tiles.kv_block(tiles.v, first))
    return weighted, m, p.sum(axis=-1)


def backward(
    call: Attention, lse: Array, delta: Array, dout: Array, params: BwdParams | None = None
) -> tuple[Array, Array, Array, Array | None]:
    """Returns the gradients of query, key, value and bias; `lse` and `delta` are [batch, heads, q]."""
    *arrays, rules = call
    return _derivable(partial(_backward, rules, params), call)(*arrays, lse, delta, dout)


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
    tiles = Tiles.of(Attention(query, key, value, extras, rules), params, all_tiles=all_tiles, backward=True)
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


def _backward_columns(tiles: Tiles, saved: tuple[Array, Array, Array], carry: Any, j: Array) -> Any:
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
        dv = dv + tiles.products.onto_keys(tiles.dropped(p, i, j), dout)
        dp = tiles.dropped(tiles.products.scores(dout, v), i, j)
        ds = p * (dp - delta[..., None])
        if dbias is not None:
            dbias = tiles.add_to_bias(dbias, ds, i, j)
        ds = ds * slope
        dk = dk + tiles.products.onto_keys(ds, q) * tiles.scale
        dq = tiles.products.weighted(ds, k) * rules.scale
        return tiles.add_to_rows(dq_all, dq, i), dbias, dk, dv

    state = *carry, tiles.zeros(k.shape), tiles.zeros(v.shape)
    *carry, dk, dv = tiles.over_queries(j, step, state)
    return tuple(carry), (dk, dv)


def _derivable(run: Callable[..., Any], call: Attention) -> Callable[..., Any]:
    """`run` of which JAX can take any derivative.

    It cannot go back through loops whose bounds only the running program knows: derivatives are those of all tiles.
    """
    extras, rules = call.extras, call.rules
    bounds = (rules.lower, rules.upper, extras.q_segment_ids, extras.q_positions, extras.mask)
    if all(x is None for x in bounds):
        return partial(run, all_tiles=False)
    derivable = jax.custom_jvp(partial(run, all_tiles=False))
    derivable.defjvp(lambda primals, tangents: jax.jvp(partial(run, all_tiles=True), primals, tangents))
    return derivable


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
