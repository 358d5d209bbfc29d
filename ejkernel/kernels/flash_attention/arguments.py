"""The arguments of one call of flash attention, checked and brought into one form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.flash_attention import bands, packing
from ejkernel.kernels.flash_attention.bands import Causal
from ejkernel.kernels.flash_attention.checks import AttentionArgumentError, array, broadcastable, flag, is_int, number

Array = jax.Array


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Everything static about a call.

    Query `r` may see key `c` when `lower <= c - r <= upper`; None is no bound. With positions (packed sequences of
    which queries and keys have different lengths) these take the place of `r` and `c`.
    """

    scale: float
    lower: int | None = None
    upper: int | None = None
    soft_cap: float | None = None
    dropout_prob: float = 0.0
    normalize: bool = True
    precision: Any = None
    logits_dtype: str = "float32"


class Extras(NamedTuple):
    """Arrays beside query, key and value, in canonical shapes; None where the call has none."""

    bias: Any = None
    """[batch or 1, heads or 1, q or 1, kv or 1]."""
    mask: Any = None
    """Like `bias`, boolean; True attends."""
    q_segment_ids: Any = None
    """[batch, q]; queries see keys of the same segment."""
    kv_segment_ids: Any = None
    q_positions: Any = None
    """[batch, q]."""
    kv_positions: Any = None
    softmax_aux: Any = None
    """[heads, sinks]."""
    dropout_seed: Any = None
    """A uint32 scalar."""


class Attention(NamedTuple):
    """A call after `canonical`, as every backend takes it."""

    query: Any
    key: Any
    value: Any
    extras: Extras
    rules: Rules

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Attention:
        """From the arguments of the kernel: five positional ones, `rules`, and the other arrays by name."""
        arrays = {name: kwargs[name] for name in Extras._fields if name in kwargs}
        query, key, value, bias, softmax_aux = args
        return cls(query, key, value, Extras(bias=bias, softmax_aux=softmax_aux, **arrays), kwargs["rules"])


def canonical(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    softmax_aux: Any = None,
    *,
    causal: Causal = False,
    softmax_scale: float | None = None,
    attention_mask: Any = None,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    cum_seqlens_q: Any = None,
    cum_seqlens_k: Any = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: Any = None,
    normalize_output: bool = True,
    precision: Any = None,
    logits_dtype: Any = "float32",
) -> tuple[tuple[Any, Any, Any], Extras, Rules]:
    """Checks a call and returns `(query, key, value)`, the other arrays and the static rules.

    Raises:
      AttentionArgumentError: It names the argument, what it is and what it should be.
    """
    query, key, value = _checked_qkv(query, key, value)
    batch, q_len, heads, head_dim = query.shape
    kv_len = key.shape[1]
    full = (batch, heads, q_len, kv_len)
    packed = cum_seqlens_q is not None or cum_seqlens_k is not None
    # In packed sequences the positions say where each sequence's diagonal starts.
    lower, upper = bands.reachable(
        *bands.band(causal, sliding_window, 0 if packed else kv_len - q_len), q_len, kv_len, packed
    )
    segments = packing.segments(q_segment_ids, kv_segment_ids, packed, batch, q_len, kv_len)
    positions = (None, None)
    if packed:
        segments, positions = packing.packed(cum_seqlens_q, cum_seqlens_k, causal, batch, q_len, kv_len)
    prob, seed = _dropout(dropout_prob, dropout_seed)
    extras = Extras(
        bias=broadcastable("bias", bias, full, floating=True),
        mask=broadcastable("attention_mask", attention_mask, full, floating=False),
        q_segment_ids=segments[0],
        kv_segment_ids=segments[1],
        q_positions=positions[0],
        kv_positions=positions[1],
        softmax_aux=_sinks(softmax_aux, heads),
        dropout_seed=seed,
    )
    rules = Rules(
        scale=head_dim**-0.5 if softmax_scale is None else _scale(softmax_scale),
        lower=lower,
        upper=upper,
        soft_cap=_soft_cap(logits_soft_cap),
        dropout_prob=prob,
        normalize=flag("normalize_output", normalize_output),
        precision=_precision(precision),
        logits_dtype=_logits_dtype(logits_dtype),
    )
    return (query, key, value), extras, rules


def keywords_of(rules: Rules, q_len: int, kv_len: int, head_dim: int, *, packed: bool = False) -> dict[str, Any]:
    """Keywords of `canonical` that give `rules`, without those that have their default."""
    causal, window = bands.written(rules.lower, rules.upper, 0 if packed else kv_len - q_len)
    written = {
        "causal": causal,
        "sliding_window": window,
        "softmax_scale": None if rules.scale == head_dim**-0.5 else rules.scale,
        "logits_soft_cap": rules.soft_cap,
        "dropout_prob": rules.dropout_prob or None,
        "normalize_output": None if rules.normalize else False,
        "precision": rules.precision,
        "logits_dtype": None if rules.logits_dtype == "float32" else rules.logits_dtype,
    }
    return {name: value for name, value in written.items() if value is not None}


# --- Query, key, value ---


def _checked_qkv(query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    named = {"query": array("query", query), "key": array("key", key), "value": array("value", value)}
    for name, x in named.items():
        if x.ndim != 4:
            raise AttentionArgumentError(f"{name} must be [batch, sequence, heads, head_dim], got shape {x.shape}.")
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
            raise AttentionArgumentError(f"{name} must be floating point of at least 16 bits, got {x.dtype}.")
        if x.dtype != named["query"].dtype:
            raise AttentionArgumentError(f"{name} is {x.dtype} and query is {named['query'].dtype}; cast one of them.")
        if not all(isinstance(n, int) for n in x.shape[1:]):
            raise AttentionArgumentError(f"of a shape only the batch may be symbolic, got {name} of shape {x.shape}.")
        if x.shape[0] != named["query"].shape[0]:
            raise AttentionArgumentError(f"{name} has batch {x.shape[0]}, query has {named['query'].shape[0]}.")
    q, k, v = named.values()
    if k.shape[3] != q.shape[3]:
        raise AttentionArgumentError(f"key has head_dim {k.shape[3]}, query has {q.shape[3]}; they must be equal.")
    if k.shape[1:3] != v.shape[1:3]:
        raise AttentionArgumentError(
            f"key and value must agree in length and heads, got {k.shape[1:3]} and {v.shape[1:3]}."
        )
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise AttentionArgumentError(
            f"query has {q.shape[2]} heads and key has {k.shape[2]}; the first must be a multiple of the second. "
            "Axes are [batch, sequence, heads, head_dim]."
        )
    if q.shape[2] == 0:
        raise AttentionArgumentError(f"query must have at least one head, got shape {q.shape}.")
    if q.shape[3] == 0 or v.shape[3] == 0:
        raise AttentionArgumentError(f"head_dim must not be 0, got {q.shape[3]} (query) and {v.shape[3]} (value).")
    return q, k, v


# --- The softmax ---


def _sinks(aux: Any, heads: int) -> Any:
    """`softmax_aux` as [heads, sinks]."""
    if aux is None:
        return None
    aux = array("softmax_aux", aux)
    good = jnp.issubdtype(aux.dtype, jnp.floating) and aux.ndim in (1, 2) and aux.shape[0] in (1, heads)
    if not good:
        raise AttentionArgumentError(
            f"softmax_aux must be floating point [heads] or [heads, sinks] with heads = {heads}, or 1 for all heads "
            f"alike, got {aux.dtype}{list(aux.shape)}."
        )
    aux = aux[:, None] if aux.ndim == 1 else aux
    if aux.shape[1] == 0:
        return None
    return aux if aux.shape[0] == heads else jnp.broadcast_to(aux, (heads, aux.shape[1]))


def _scale(scale: Any) -> float:
    scale = number("softmax_scale", scale)
    if not math.isfinite(scale):
        raise AttentionArgumentError(f"softmax_scale must be finite, or None for head_dim ** -0.5, got {scale}.")
    return scale


def _soft_cap(cap: Any) -> float | None:
    if cap is None:
        return None
    cap = number("logits_soft_cap", cap)
    if not (cap > 0 and math.isfinite(cap)):
        raise AttentionArgumentError(f"logits_soft_cap must be positive and finite, or None for no cap, got {cap}.")
    return cap


def _dropout(prob: Any, seed: Any) -> tuple[float, Any]:
    prob = number("dropout_prob", prob)
    if not 0.0 <= prob < 1.0:
        raise AttentionArgumentError(f"dropout_prob must be in [0, 1), got {prob}.")
    seed = None if seed is None else _seed(seed)
    if prob == 0.0:
        return 0.0, None
    if seed is None:
        raise AttentionArgumentError(f"dropout_prob is {prob}, so dropout_seed is needed.")
    seed = jax.random.bits(seed, dtype=jnp.uint32) if _is_key(seed) else seed
    return prob, seed.astype(jnp.uint32) if seed.dtype != jnp.uint32 else seed


def _seed(seed: Any) -> Any:
    if is_int(seed):
        return np.uint32(int(seed) & 0xFFFFFFFF)
    seed = array("dropout_seed", seed)
    if not _is_key(seed) and (seed.shape != () or not jnp.issubdtype(seed.dtype, jnp.integer)):
        raise AttentionArgumentError(
            f"dropout_seed must be one integer, or one key of jax.random, got {seed.dtype}{list(seed.shape)}."
        )
    return seed


def _is_key(seed: Any) -> bool:
    """Whether it is a key of `jax.random`, typed or as its words."""
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        return seed.ndim == 0
    return seed.dtype == jnp.uint32 and seed.ndim == 1 and seed.shape == jax.random.PRNGKey(0).shape


def _precision(precision: Any) -> Any:
    if precision is None:
        return None
    row = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    try:
        jax.eval_shape(lambda a, b: jnp.dot(a, b, precision=precision), row, row)
    except (TypeError, ValueError) as error:
        raise AttentionArgumentError(f"precision is {precision!r}, which jax.lax.dot does not take: {error}") from error
    return precision


def _logits_dtype(dtype: Any) -> str:
    try:
        found = None if dtype is None else jnp.dtype(dtype)  # NumPy takes None for float64.
    except TypeError as error:
        raise AttentionArgumentError(f"logits_dtype must be a floating-point dtype, got {dtype!r}.") from error
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise AttentionArgumentError(f"logits_dtype must be a floating-point dtype, got {found}.")
    # float64 is float32 while 64 bits are off: logits in it are no reason to refuse a call.
    return jax.dtypes.canonicalize_dtype(found).name
