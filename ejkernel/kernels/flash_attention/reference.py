"""The plain formulation of attention: all scores at once, softmax in float32. Other backends are compared with it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.errors import EjkernelError
from ejkernel.kernels.flash_attention import masks, xla
from ejkernel.kernels.flash_attention.arguments import Attention, Extras, Rules

Array = jax.Array

MAX_SCORES = 1 << 28
"""Scores that the reference may hold at once: 1 GiB of float32, and a few times that while differentiating."""


class ReferenceTooLargeError(EjkernelError, NotImplementedError):
    """A call's scores do not fit; the memory of every other backend is linear in the sequence."""


def too_large(query: Array, key: Array) -> str | None:
    """Why the reference is refused for arguments of these shapes; None if it is not."""
    batch, q_len, heads, _ = query.shape
    scores = batch * heads * q_len * key.shape[1]
    if not isinstance(scores, int) or scores <= MAX_SCORES:  # Symbolic: only the running program knows.
        return None
    return f"the reference would hold {scores:,} scores at once, and at most {MAX_SCORES:,} are allowed."


def attention(query: Array, key: Array, value: Array, extras: Extras, rules: Rules) -> Array:
    """Returns [batch, q, heads, value dim]; differentiated by JAX.

    Raises:
      ReferenceTooLargeError: There are more than `MAX_SCORES` scores.
    """
    if (reason := too_large(query, key)) is not None:
        raise ReferenceTooLargeError(f'flash_attention: {reason} Pass platform="xla", whose memory is linear.')
    return _attention(query, key, value, extras, rules)


@partial(jax.jit, static_argnames="rules")
def _attention(query: Array, key: Array, value: Array, extras: Extras, rules: Rules) -> Array:
    batch, q_len, heads, _ = query.shape
    kv_len, kv_heads = key.shape[1:3]
    dtype = masks.accumulator(query.dtype)
    key, value = (jnp.repeat(x, heads // kv_heads, axis=2) for x in (key, value))
    # Not in the arguments' own precision: backends that round are compared with it too.
    product = partial(jnp.einsum, precision=rules.precision or jax.lax.Precision.HIGHEST, preferred_element_type=dtype)
    s = product("bqhd,bkhd->bhqk", query.astype(dtype), key.astype(dtype)) * rules.scale
    s = s.astype(rules.logits_dtype).astype(dtype)
    if rules.soft_cap is not None:
        s = rules.soft_cap * jnp.tanh(s / rules.soft_cap)
    if extras.bias is not None:
        s = s + extras.bias.astype(dtype)
    rows, cols = jnp.arange(q_len)[:, None], jnp.arange(kv_len)[None, :]
    seen = _seen(rows, cols, extras, rules)
    if seen is not None:
        s = jnp.where(seen, s, -jnp.inf)
    aux = () if extras.softmax_aux is None else (extras.softmax_aux.astype(dtype),)
    top = jax.lax.stop_gradient(jnp.max(s, axis=-1, keepdims=True, initial=-jnp.inf))
    if aux:
        top = jnp.maximum(top, jax.lax.stop_gradient(aux[0].max(axis=1))[:, None, None])
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    p = jnp.exp(s - top)
    total = p.sum(axis=-1, keepdims=True)
    if aux:
        total = total + jnp.exp(aux[0][None, :, None, :] - top).sum(axis=-1, keepdims=True)
    if rules.dropout_prob:
        head = jnp.arange(batch * heads).reshape(batch, heads, 1, 1)
        keep = masks.kept(extras.dropout_seed, head, rows, cols, rules.dropout_prob)
        p = jnp.where(keep, p / (1.0 - rules.dropout_prob), 0.0)
    if rules.normalize:
        p = jnp.where(total > 0, p / jnp.where(total > 0, total, 1.0), 0.0)
    return product("bhqk,bkhd->bqhd", p, value.astype(dtype)).astype(query.dtype)


def _seen(rows: Array, cols: Array, extras: Extras, rules: Rules) -> Array | None:
    """[batch or 1, heads or 1, q, kv]: which queries see which keys."""
    if extras.q_positions is not None:
        rows, cols = extras.q_positions[:, None, :, None], extras.kv_positions[:, None, None, :]
    seen = masks.may_see(rows, cols, rules)
    if extras.q_segment_ids is not None:
        same = extras.q_segment_ids[:, None, :, None] == extras.kv_segment_ids[:, None, None, :]
        seen = same if seen is None else seen & same
    if extras.mask is not None:
        seen = extras.mask if seen is None else seen & extras.mask
    return seen


@partial(jax.jit, static_argnames="rules")
def with_log_sum(query: Array, key: Array, value: Array, extras: Extras, rules: Rules) -> tuple[Array, Array]:
    """XLA tiles of float32 arguments: the output and the log-sum-exp of each row."""
    rules = replace(rules, precision=rules.precision or jax.lax.Precision.HIGHEST)
    q, k, v = (x.astype(masks.accumulator(x.dtype)) for x in (query, key, value))
    out, sums = xla.forward(Attention(q, k, v, extras, rules))
    return out.astype(query.dtype), sums.lse


@partial(jax.jit, static_argnames="rules")
def tiled(args: tuple[Any, ...], extras: Extras, rules: Rules) -> Array:
    """Like the reference, with memory linear in the sequence: XLA tiles, everything in float32."""
    rules = replace(rules, precision=rules.precision or jax.lax.Precision.HIGHEST)
    wide = lambda x: None if x is None else x.astype(masks.accumulator(x.dtype))

    def forward(q: Array, k: Array, v: Array, bias: Any, aux: Any) -> tuple[Array, Any]:
        own = extras._replace(bias=bias, softmax_aux=aux)
        out, sums = xla.forward(Attention(q, k, v, own, rules))
        return out, (q, k, v, own, out, sums)

    def backward(saved: Any, dout: Array) -> tuple[Any, ...]:
        q, k, v, own, out, sums = saved
        delta = masks.row_products(out, dout, sums.lse.dtype) if rules.normalize else jnp.zeros_like(sums.lse)
        sinks = None if own.softmax_aux is None else masks.sinks_gradient(sums, delta, own.softmax_aux)
        dout, delta = masks.unlost(dout, delta, sums.rest)
        return *xla.backward(Attention(q, k, v, own, rules), sums.lse, delta, dout), sinks

    run = jax.custom_vjp(lambda *args: forward(*args)[0])
    run.defvjp(forward, backward)
    return run(*map(wide, args)).astype(args[0].dtype)
