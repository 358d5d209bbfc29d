"""The arguments of one call of flash attention, checked and brought into one form."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ejkernel.errors import EjkernelError

Array = jax.Array
Causal = bool | Literal["lower_right"]


class AttentionArgumentError(EjkernelError, ValueError):
    """An argument of attention has a wrong shape, dtype or value, or contradicts another one."""

    def __init__(self, message: str, where: str = "flash_attention") -> None:
        super().__init__(f"{where}: {message}")


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
    lower, upper = _reachable(*_band(causal, sliding_window, 0 if packed else kv_len - q_len), q_len, kv_len, packed)
    segments = _segments(q_segment_ids, kv_segment_ids, packed, batch, q_len, kv_len)
    positions = (None, None)
    if packed:
        segments, positions = _packed(cum_seqlens_q, cum_seqlens_k, causal, batch, q_len, kv_len)
    prob, seed = _dropout(dropout_prob, dropout_seed)
    extras = Extras(
        bias=_broadcastable("bias", bias, full, floating=True),
        mask=_broadcastable("attention_mask", attention_mask, full, floating=False),
        q_segment_ids=segments[0],
        kv_segment_ids=segments[1],
        q_positions=positions[0],
        kv_positions=positions[1],
        softmax_aux=_sinks(softmax_aux, heads),
        dropout_seed=seed,
    )
    rules = Rules(
        scale=head_dim**-0.5 if softmax_scale is None else _number("softmax_scale", softmax_scale),
        lower=lower,
        upper=upper,
        soft_cap=_soft_cap(logits_soft_cap),
        dropout_prob=prob,
        normalize=_flag("normalize_output", normalize_output),
        precision=_precision(precision),
        logits_dtype=_logits_dtype(logits_dtype),
    )
    return (query, key, value), extras, rules


def keywords_of(rules: Rules, q_len: int, kv_len: int, head_dim: int, *, packed: bool = False) -> dict[str, Any]:
    """Keywords of `canonical` that give `rules`, without those that have their default."""
    causal, window = _written_band(rules.lower, rules.upper, 0 if packed else kv_len - q_len)
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


def _written_band(lower: int | None, upper: int | None, offset: int) -> tuple[Causal | None, Any]:
    """The inverse of `_band`: `causal` and `sliding_window`, None where the call needs neither."""
    # A bound beyond the diagonal can only be one of a diagonal that is aligned at the end.
    at_end = upper != 0 and (upper == offset or (lower or 0) > 0 or (upper or 0) < 0)
    if at_end and offset:
        return "lower_right", None if lower is None else offset - lower
    if upper == 0:
        return True, None if lower is None else -lower
    return None, None if lower is None and upper is None else (None if lower is None else -lower, upper)


# --- Query, key, value ---


def _checked_qkv(query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    named = {"query": _array("query", query), "key": _array("key", key), "value": _array("value", value)}
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


def _array(name: str, x: Any) -> Any:
    if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
        return x
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise AttentionArgumentError(f"{name} must be an array, got {type(x).__name__}: {error}") from error


# --- Which queries see which keys ---


def _band(causal: Causal, window: Any, offset: int) -> tuple[int | None, int | None]:
    """Bounds of `key - query`; `offset` is where the diagonal starts if it is aligned at the end."""
    if not (isinstance(causal, (bool, np.bool_)) or causal == "lower_right"):
        raise AttentionArgumentError(f"causal must be False, True or 'lower_right', got {causal!r}.")
    diagonal = offset if isinstance(causal, str) else 0
    left, right = _window(window)
    if causal is not False:
        right = 0 if right is None else min(right, 0)
    return None if left is None else diagonal - left, None if right is None else diagonal + right


def _reachable(
    lower: int | None, upper: int | None, q_len: int, kv_len: int, packed: bool
) -> tuple[int | None, int | None]:
    """The bounds, as far as queries and keys of these lengths reach: sums of places and bounds are int32."""
    if packed:  # Positions count from where sequences start, or end.
        far = q_len + kv_len
        return None if lower is None else max(lower, -far), None if upper is None else min(upper, far)
    lower = None if lower is None or lower <= 1 - q_len else min(lower, kv_len)
    upper = None if upper is None or upper >= kv_len - 1 else max(upper, -q_len)
    return lower, upper


def _window(window: Any) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    pair = (window, window) if isinstance(window, numbers.Integral) else window
    sides = tuple(pair) if isinstance(pair, (tuple, list)) else ()
    if len(sides) != 2 or not all(x is None or (_is_int(x) and int(x) >= 0) for x in sides):
        raise AttentionArgumentError(
            f"sliding_window must be an integer or a pair (left, right) of integers >= 0 or None, got {window!r}."
        )
    return tuple(None if x is None else int(x) for x in sides)  # pyright: ignore[reportReturnType]


def _is_int(x: Any) -> bool:
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def _segments(q_ids: Any, kv_ids: Any, packed: bool, batch: int, q_len: int, kv_len: int) -> tuple[Any, Any]:
    """Segment ids of queries and keys as the call gives them."""
    if q_ids is None and kv_ids is None:
        return None, None
    if packed:
        raise AttentionArgumentError("give q_segment_ids and kv_segment_ids, or cum_seqlens_q and cum_seqlens_k.")
    if (q_ids is None or kv_ids is None) and q_len != kv_len:
        raise AttentionArgumentError(
            f"q_segment_ids and kv_segment_ids are both needed when the lengths differ (query {q_len}, key {kv_len})."
        )
    q_ids, kv_ids = kv_ids if q_ids is None else q_ids, q_ids if kv_ids is None else kv_ids
    return _ids("q_segment_ids", q_ids, (batch, q_len)), _ids("kv_segment_ids", kv_ids, (batch, kv_len))


def _ids(name: str, x: Any, shape: tuple[int, int]) -> Any:
    x = _array(name, x)
    if x.shape != shape or not jnp.issubdtype(x.dtype, jnp.integer):
        raise AttentionArgumentError(f"{name} must be integers of shape {shape}, got {x.dtype}{list(x.shape)}.")
    return x


def _packed(
    cum_q: Any, cum_k: Any, causal: Causal, batch: int, q_len: int, kv_len: int
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Segment ids and positions inside segments, from cumulative lengths.

    Positions are left out if queries and keys are packed alike: then the index in the whole array is enough.
    """
    alike = cum_q is None or cum_k is None
    if alike and q_len != kv_len:
        raise AttentionArgumentError(
            f"cum_seqlens_q and cum_seqlens_k are both needed when the lengths differ (query {q_len}, key {kv_len})."
        )
    cum_q = cum_k if cum_q is None else cum_q
    cum_q = _cumulative("cum_seqlens_q", cum_q, batch)
    if alike:
        ids = _segment_of(cum_q, q_len)
        # Queries after the last sequence see nothing.
        return (jnp.where(ids < cum_q.shape[1] - 1, ids, -1), jnp.where(ids < cum_q.shape[1] - 1, ids, -2)), (
            None,
            None,
        )
    cum_k = _cumulative("cum_seqlens_k", cum_k, batch)
    if cum_k.shape != cum_q.shape:
        raise AttentionArgumentError(
            f"cum_seqlens_q and cum_seqlens_k count the same sequences, got shapes {cum_q.shape} and {cum_k.shape}."
        )
    count = cum_q.shape[1] - 1
    q_ids, kv_ids = _segment_of(cum_q, q_len), _segment_of(cum_k, kv_len)
    start_q, start_k = _of_segment(cum_q[:, :-1], q_ids), _of_segment(cum_k[:, :-1], kv_ids)
    q_positions, kv_positions = jnp.arange(q_len) - start_q, jnp.arange(kv_len) - start_k
    if isinstance(causal, str):
        longer = (cum_k[:, 1:] - cum_k[:, :-1]) - (cum_q[:, 1:] - cum_q[:, :-1])
        q_positions = q_positions + _of_segment(longer, q_ids)
    segments = jnp.where(q_ids < count, q_ids, -1), jnp.where(kv_ids < count, kv_ids, -2)
    return segments, (q_positions.astype(jnp.int32), kv_positions.astype(jnp.int32))


def _cumulative(name: str, x: Any, batch: int) -> Any:
    x = _array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer) or x.ndim not in (1, 2) or x.shape[-1] < 2:
        raise AttentionArgumentError(
            f"{name} must be integers [sequences + 1] or [batch, sequences + 1] that start with 0, got "
            f"{x.dtype}{list(x.shape)}."
        )
    if x.ndim == 2 and x.shape[0] != batch:
        raise AttentionArgumentError(f"{name} has batch {x.shape[0]}, query has {batch}.")
    return jnp.broadcast_to(x.astype(jnp.int32), (batch, x.shape[-1]))


def _segment_of(cumulative: Array, length: int) -> Array:
    """[batch, length]: the sequence that each index belongs to; the number of sequences if none."""
    place = jnp.arange(length)
    return jax.vmap(lambda ends: jnp.searchsorted(ends, place, side="right"))(cumulative[:, 1:]).astype(jnp.int32)


def _of_segment(values: Array, ids: Array) -> Array:
    return jnp.take_along_axis(values, jnp.minimum(ids, values.shape[1] - 1), axis=1)


def _broadcastable(name: str, x: Any, full: tuple[int, ...], *, floating: bool) -> Any:
    """`x` with four axes, each 1 or full."""
    if x is None:
        return None
    x = _array(name, x)
    if floating and not jnp.issubdtype(x.dtype, jnp.floating):
        raise AttentionArgumentError(f"{name} must be floating point, got {x.dtype}.")
    if not floating and x.dtype != jnp.bool_:
        raise AttentionArgumentError(f"{name} must be boolean (True attends), got {x.dtype}. Additive masks are bias.")
    if x.ndim == 3 and not floating:
        raise AttentionArgumentError(
            f"{name} has three axes, shape {list(x.shape)}: [batch, q, kv] or [heads, q, kv], which cannot be told "
            f"apart. Pass {name}[:, None] if it is the first, {name}[None] if it is the second."
        )
    shape = (1,) * (4 - x.ndim) + tuple(x.shape)
    if len(shape) != 4 or any(d not in (1, n) for d, n in zip(shape, full, strict=True)):
        raise AttentionArgumentError(
            f"{name} must be broadcastable to [batch, heads, q, kv] = {list(full)}, got shape {list(x.shape)}. "
            f"{broadcast_hint(name, x.ndim)}"
        )
    return x if x.ndim == 4 else x.reshape(shape)


def broadcast_hint(name: str, ndim: int) -> str:
    """How a mask or a bias that does not fit gets four axes."""
    if ndim == 3:
        return f"Three axes are [heads, q, kv]; one of [batch, q, kv] is {name}[:, None]."
    return f"One value per key and batch is {name}[:, None, None, :]."


# --- The softmax ---


def _sinks(aux: Any, heads: int) -> Any:
    """`softmax_aux` as [heads, sinks]."""
    if aux is None:
        return None
    aux = _array("softmax_aux", aux)
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


def _soft_cap(cap: Any) -> float | None:
    if cap is None:
        return None
    cap = _number("logits_soft_cap", cap)
    if not (cap > 0 and math.isfinite(cap)):
        raise AttentionArgumentError(f"logits_soft_cap must be positive and finite, or None for no cap, got {cap}.")
    return cap


def _dropout(prob: Any, seed: Any) -> tuple[float, Any]:
    prob = _number("dropout_prob", prob)
    if not 0.0 <= prob < 1.0:
        raise AttentionArgumentError(f"dropout_prob must be in [0, 1), got {prob}.")
    if prob == 0.0:
        return 0.0, None
    if seed is None:
        raise AttentionArgumentError(f"dropout_prob is {prob}, so dropout_seed is needed.")
    if _is_int(seed):
        seed = np.uint32(int(seed) & 0xFFFFFFFF)
    seed = _of_key(_array("dropout_seed", seed))
    if seed.shape != () or not jnp.issubdtype(seed.dtype, jnp.integer):
        raise AttentionArgumentError(
            f"dropout_seed must be one integer, or one key of jax.random, got {seed.dtype}{list(seed.shape)}."
        )
    return prob, seed.astype(jnp.uint32) if seed.dtype != jnp.uint32 else seed


def _of_key(seed: Any) -> Any:
    """The seed that a key of `jax.random` gives, typed or as its words; anything else as it is."""
    typed = jnp.issubdtype(seed.dtype, jax.dtypes.prng_key) and seed.ndim == 0
    words = seed.dtype == jnp.uint32 and seed.ndim == 1 and seed.shape == jax.random.PRNGKey(0).shape
    return jax.random.bits(seed, dtype=jnp.uint32) if typed or words else seed


def _number(name: str, x: Any) -> float:
    if isinstance(x, numbers.Real) and not isinstance(x, bool):
        return float(x)
    if isinstance(x, (jax.Array, np.ndarray)) and not isinstance(x, Tracer) and x.shape == ():
        return float(x)
    raise AttentionArgumentError(
        f"{name} must be a Python number, known while tracing, got {type(x).__name__}. NumPy's numbers count as arrays "
        f"here: give float(x).{' Multiply the query by a scale that is traced.' if name == 'softmax_scale' else ''}"
    )


def _flag(name: str, x: Any) -> bool:
    if not isinstance(x, (bool, np.bool_)):
        raise AttentionArgumentError(f"{name} must be True or False, got {x!r}.")
    return bool(x)


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
        found = jnp.dtype(dtype)
    except TypeError as error:
        raise AttentionArgumentError(f"logits_dtype must be a floating-point dtype, got {dtype!r}.") from error
    if not jnp.issubdtype(found, jnp.floating):
        raise AttentionArgumentError(f"logits_dtype must be a floating-point dtype, got {found}.")
    return found.name
