"""`jax.nn.dot_product_attention`, argument for argument, on the kernels of `flash_attention`."""

from __future__ import annotations

import operator
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ejkernel.kernels.flash_attention.checks import AttentionArgumentError, array, broadcast_hint
from ejkernel.kernels.flash_attention.jax_nn import jax_attention
from ejkernel.modules.flash_attention import flash_attention, with_log_sum
from ejkernel.modules.hidden_rows import HIDDEN, Sight, with_means
from ejkernel.ops.utils.promotion import usual_promotion

Array = jax.Array
Implementation = Literal["xla", "cudnn"]
Window = int | tuple[int, int]


@overload
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: Window | None = None,
    implementation: Implementation | None = None,
    return_residual: Literal[False] = ...,
) -> Array: ...


@overload
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: Window | None = None,
    implementation: Implementation | None = None,
    return_residual: Literal[True],
) -> tuple[Array, Array]: ...


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: Window | None = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
) -> Array | tuple[Array, Array]:
    """`jax.nn.dot_product_attention` by the fastest backend that supports the call, with memory linear in the sequence.

    Put in its place, it switches every library that calls it: Flax NNX, Keras. Results, gradients and errors are those
    of JAX, also in rows that see no key (the mean of all values).

    Args:
      query: [batch, q, heads, head_dim], or without batch.
      key: [batch, kv, kv_heads, head_dim], or without batch.
      value: Like `key`.
      bias: Added to the logits; at most four axes, broadcastable to [batch, heads, q, kv]. As in JAX, three axes are
        [heads, q, kv].
      mask: Boolean, True attends; shapes like those of `bias`.
      scale: Factor of the logits; by default head_dim ** -0.5. One that is traced is multiplied into the query.
      is_causal: Whether query i sees only keys j <= i.
      query_seq_lengths: int32 [batch]; the output of queries after these is zero.
      key_value_seq_lengths: int32 [batch]; keys after these are hidden.
      local_window_size: (left, right): query i sees keys i - left to i + right; an integer w is (w, w).
      implementation: What JAX's own function would run: None, "xla" or "cudnn". Libraries that always name one (Keras)
        could not be switched if it decided here, so it does not. To choose a backend, call
        `flash_attention(..., platform=...)`.
      return_residual: Whether to return the log-sum-exp of each row too, [batch, q, heads], which has no gradient.

    Returns:
      An array like `query`; with `return_residual` a pair.
    """
    if implementation not in (None, "xla", "cudnn"):
        raise _error(f"implementation must be None, 'xla' or 'cudnn', got {implementation!r}.")
    q, k, v = (_four_axes(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    given = {"mask": np.shape(mask), "bias": np.shape(bias)}
    bias, mask = (None if x is None else _four_axes(name, x) for name, x in (("bias", bias), ("mask", mask)))
    _check(q, k, v, bias, mask, given)
    q_lengths = _lengths("query_seq_lengths", query_seq_lengths, k.shape[0])
    kv_lengths = _lengths("key_value_seq_lengths", key_value_seq_lengths, k.shape[0])
    if callable(getattr(scale, "__jax_array__", None)):  # A parameter of NNX, which may hold what is traced.
        scale = scale.__jax_array__()
    if not _is_ours(q, k, scale):
        return jax_attention(
            query, key, value, bias, mask, scale=scale, is_causal=is_causal, query_seq_lengths=q_lengths,
            key_value_seq_lengths=kv_lengths, local_window_size=local_window_size, return_residual=return_residual,
        )  # fmt: skip
    window, mask = _window(local_window_size, q.shape[1], k.shape[1], mask)
    sight = Sight(
        mask=mask,
        left=window[0],
        right=0 if is_causal else window[1],
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
    )
    out = attend(q, k, v, bias, sight, scale=scale, return_residual=return_residual)
    shape = jnp.shape(query)
    if len(shape) == 4:
        return out
    return jax.tree.map(lambda x: x.reshape(*shape[:-1], *x.shape[3:]), out)


def attend(
    query: Array,
    key: Array,
    value: Array,
    bias: Any,
    sight: Sight,
    *,
    scale: Any = None,
    return_residual: bool = False,
    **options: Any,
) -> Any:
    """Attention as JAX and the libraries on it define it, of arrays with four axes.

    `options` are further keywords of `flash_attention`.
    """
    if bias is not None and not jnp.issubdtype(bias.dtype, jnp.floating):
        bias = bias.astype(jnp.float32)
    if isinstance(scale, Tracer):
        # Kernels have it as a constant.
        wide = np.promote_types(query.dtype, np.float32)
        query, scale = (query.astype(wide) * scale.astype(wide)).astype(query.dtype), 1.0
    scale = None if scale is None else _number(scale)
    given = {"attention_mask": sight.mask, "softmax_scale": scale, **_segments(sight, query, key), **options}
    given |= _band(sight)
    if return_residual:
        kwargs = {name: x for name, x in given.items() if x is not None}
        out, sums = with_log_sum((query, key, value, bias, None), kwargs)
        # For JAX, a row that sees nothing has a sum of hidden logits.
        sums = jnp.where(jnp.isposinf(sums), HIDDEN, sums).swapaxes(1, 2).astype(key.dtype)
    else:
        out, sums = flash_attention(query, key, value, bias=bias, **given), None
    hidden = sight.hidden_rows(query.shape[1], key.shape[1])
    if hidden is not None:
        out = with_means(out, value, hidden)
    return out if sums is None else (out, sums)


# --- Arguments ---


def _four_axes(name: str, x: Any) -> Array:
    x = jnp.asarray(array(name, x, _WHERE))
    return x.reshape((1,) * (4 - x.ndim) + x.shape) if x.ndim < 4 else x


def _check(
    query: Array, key: Array, value: Array, bias: Array | None, mask: Array | None, given: dict[str, tuple[int, ...]]
) -> None:
    """Raises what JAX raises; `given` are shapes as the call has them."""
    if key.ndim != 4:
        raise _error(f"key must be [batch, kv, heads, head_dim], or without batch, got shape {key.shape}.")
    batch, _, kv_heads, head_dim = key.shape
    if value.shape != key.shape or value.dtype != key.dtype:
        own_dim = value.shape[:-1] == key.shape[:-1] and value.dtype == key.dtype
        raise _error(
            f"value must be like key, {key.dtype}{list(key.shape)}, got {value.dtype}{list(value.shape)}."
            f"{' flash_attention takes values with a head dim of their own.' if own_dim else ''}"
        )
    fits = query.ndim == 4 and query.shape[0] == batch and query.shape[3] == head_dim
    if not fits or query.dtype != key.dtype:
        raise _error(
            f"query must be {key.dtype} of shape [{batch}, q, heads, {head_dim}] for key of shape {list(key.shape)}, "
            f"got {query.dtype}{list(query.shape)}."
        )
    if kv_heads == 0 or query.shape[2] % kv_heads:
        raise _error(
            f"query has {query.shape[2]} heads and key has {kv_heads}; the first must be a multiple of the second. "
            "Axes are [batch, sequence, heads, head_dim]."
        )
    if mask is not None and mask.dtype != jnp.bool_:
        raise _error(f"mask must be boolean (True attends), got {mask.dtype}. Additive masks are bias.")
    full = (batch, query.shape[2], query.shape[1], key.shape[1])
    for name, x in (("mask", mask), ("bias", bias)):
        if x is None:
            continue
        if x.ndim != 4:
            raise _error(f"{name} must have at most four axes, [batch, heads, q, kv], got shape {list(x.shape)}.")
        if any(n not in (1, whole) for n, whole in zip(x.shape, full, strict=True)):
            raise _error(
                f"{name} must be broadcastable to [batch, heads, q, kv] = {list(full)}, got shape "
                f"{list(given[name])}. {broadcast_hint(name, len(given[name]))}"
            )


def _lengths(name: str, x: Any, batch: int) -> Array | None:
    if x is None:
        return None
    x = jnp.asarray(array(name, x, _WHERE))
    if x.shape != (batch,) or x.dtype != jnp.int32:
        raise _error(f"{name} must be int32 of shape [{batch}], got {x.dtype}{list(x.shape)}.")
    return x


def _number(scale: Any) -> float:
    try:
        return float(scale)
    except (TypeError, ValueError) as error:
        raise _error(f"scale must be a real number, or None for head_dim ** -0.5, got {scale!r}.") from error


def _is_ours(query: Array, key: Array, scale: Any) -> bool:
    """Whether there are kernels for a call: not for integers and 8 bits, lengths that are not known, several scales."""
    if np.ndim(scale) > 0:
        return False
    floats = jnp.issubdtype(query.dtype, jnp.floating) and query.dtype.itemsize > 1
    return floats and all(isinstance(n, int) and n > 0 for n in (*query.shape[1:], *key.shape[1:]))


@usual_promotion()
def _window(window: Any, q_len: int, kv_len: int, mask: Array | None) -> tuple[tuple[Any, Any], Array | None]:
    """The window, and the mask, which has windows that begin after a query's place, end before it, or are traced."""
    if window is None:
        return (None, None), mask
    pair = (window, window) if isinstance(window, (int, np.integer)) else window
    sides = tuple(pair) if np.iterable(pair) else ()
    if len(sides) != 2 or not all(isinstance(x, (int, float, np.generic, np.ndarray, Array)) for x in sides):
        raise _error(f"local_window_size must be an integer or a pair (left, right) of integers, got {window!r}.")
    left, right = sides
    try:
        # As far as queries and keys reach: sums of places and bounds are int32.
        left, right = _within(left, -kv_len, q_len), _within(right, -q_len, kv_len)
    except TypeError:  # Traced, or no integers: JAX only compares with them.
        pass
    else:
        if left >= 0 and right >= 0:
            return (left, right), mask
    rows, cols = jnp.arange(q_len)[:, None], jnp.arange(kv_len)[None, :]
    inside = ((rows <= cols + left) & (rows >= cols - right))[None, None]
    return (None, None), inside if mask is None else mask & inside


def _within(x: Any, least: int, most: int) -> int:
    return min(max(operator.index(x), least), most)


def _band(sight: Sight) -> dict[str, Any]:
    """`causal` and `sliding_window` as the usual call has them."""
    causal = sight.right == 0
    if sight.left is None and (causal or sight.right is None):
        return {"causal": causal}
    return {"causal": causal, "sliding_window": (sight.left, sight.right)}


@usual_promotion()
def _segments(sight: Sight, query: Array, key: Array) -> dict[str, Array]:
    """Lengths as segments, whose tiles are skipped: one for all, and others that do not meet for what is after them."""
    if sight.q_lengths is None and sight.kv_lengths is None:
        return {}

    def ids(x: Array, lengths: Array | None, after: int) -> Array:
        shape = x.shape[:2]
        if lengths is None:
            return jnp.zeros(shape, jnp.int32)
        return jnp.where(jnp.arange(shape[1])[None] < lengths[:, None], 0, after)

    # Ids that grow along the sequence.
    return {"q_segment_ids": ids(query, sight.q_lengths, 1), "kv_segment_ids": ids(key, sight.kv_lengths, 2)}


_WHERE = "dot_product_attention"


def _error(message: str) -> AttentionArgumentError:
    return AttentionArgumentError(message, _WHERE)
