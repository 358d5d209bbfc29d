"""`attention_fn` of Flax' attention layers, Linen's and NNX's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.flash_attention.checks import AttentionArgumentError, array
from ejkernel.modules.dot_product_attention import attend
from ejkernel.modules.hidden_rows import Sight

Array = jax.Array


def flax_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., Any] | None = None,
    qk_attn_weights_einsum: Callable[..., Any] | None = None,
    attn_weights_value_einsum: Callable[..., Any] | None = None,
    promote_dtype: Callable[..., Any] | None = None,
    is_causal: bool = False,
) -> Array:
    """`flax.linen.dot_product_attention` and `flax.nnx.dot_product_attention` on ejkernel's kernels.

    `MultiHeadAttention(..., attention_fn=flax_attention)` of either. Linen passes what a signature names and drops the
    rest without a word, so every name is spelled out here.

    Args:
      query: [batch..., q, heads, head_dim].
      key: [batch..., kv, kv_heads, head_dim].
      value: [batch..., kv, kv_heads, value_dim].
      bias: Added to the logits; broadcastable to [batch..., heads, q, kv].
      mask: What is zero or False is hidden, as `flax.linen.make_causal_mask` gives it; shapes like those of `bias`.
      broadcast_dropout: Has no effect: every head of every batch drops weights of its own.
      dropout_rng: A key of `jax.random`. It drops other weights than Flax would with it, as many.
      dropout_rate: Share of weights that are dropped.
      deterministic: Whether to drop none.
      dtype: What query, key and value are cast to; by default the type that they promote to.
      precision: Of the matrix products.
      module: A layer that wants to keep the weights (`sow_weights=True`). Only Flax' own attention has them all at
        once, so that one runs, with memory quadratic in the sequence.
      force_fp32_for_softmax: The softmax is always in float32; with True the result is float32 too, as Linen's.
      einsum_dot_general: With one of Linen's own products (quantised ones), Linen's own attention runs.
      qk_attn_weights_einsum: The same.
      attn_weights_value_einsum: The same.
      promote_dtype: How NNX casts query, key and value: `promote_dtype((query, key, value), dtype=dtype)`.
      is_causal: Whether query i sees only keys j <= i.

    Returns:
      [batch..., q, heads, value_dim].
    """
    if any(x is not None for x in (module, einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum)):
        shared = {
            "bias": bias, "mask": mask, "broadcast_dropout": broadcast_dropout, "dropout_rng": dropout_rng,
            "dropout_rate": dropout_rate, "deterministic": deterministic, "dtype": dtype, "precision": precision,
        }  # fmt: skip
        return _flax_own(
            (query, key, value), module, shared, force_fp32_for_softmax=force_fp32_for_softmax,
            einsum_dot_general=einsum_dot_general, qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum, promote_dtype=promote_dtype, is_causal=is_causal,
        )  # fmt: skip
    given = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask}
    found = {name: None if x is None else array(name, x, _WHERE) for name, x in given.items()}
    bias, mask = found["bias"], found["mask"]
    query, key, value = (promote_dtype or _promoted)((found["query"], found["key"], found["value"]), dtype=dtype)
    _check(query, key, value)
    *axes, q_len, heads, _ = query.shape
    full = (*axes, heads, q_len, key.shape[-3])
    mask = None if mask is None else _one_batch(mask != 0, full, "mask")
    sight = Sight(mask=mask, right=0 if is_causal else None)
    bias = None if bias is None else _one_batch(bias, full, "bias")
    options = {} if deterministic or not dropout_rate else {"dropout_prob": dropout_rate, "dropout_seed": dropout_rng}
    flat_query, flat_key, flat_value = (x.reshape(math.prod(axes), *x.shape[-3:]) for x in (query, key, value))
    out = attend(flat_query, flat_key, flat_value, bias, sight, precision=precision, **options)
    out = out.astype(jnp.promote_types(out.dtype, jnp.float32)) if force_fp32_for_softmax else out
    return out.reshape(*query.shape[:-1], value.shape[-1])


def _promoted(arrays: tuple[Any, ...], dtype: Any) -> list[Array]:
    """Arrays of one floating-point type, as Flax makes them."""
    try:
        found = jnp.result_type(*arrays) if dtype is None else jnp.dtype(dtype)
    except TypeError as error:
        raise _error(f"dtype must be a floating-point dtype or None, got {dtype!r}: {error}.") from error
    if not jnp.issubdtype(found, jnp.inexact):
        if dtype is not None:
            raise _error(f"dtype must be a floating-point dtype or None, got {found}.")
        found = jnp.promote_types(found, jnp.float32)
    return [jnp.asarray(x, found) for x in arrays]


def _check(query: Array, key: Array, value: Array) -> None:
    alike = query.ndim == key.ndim == value.ndim >= 3 and query.shape[:-3] == key.shape[:-3] == value.shape[:-3]
    if not alike:
        shapes = ", ".join(str(list(x.shape)) for x in (query, key, value))
        raise _error(
            f"query, key and value must be [batch..., length, heads, dim] with the same batch axes, got {shapes}."
        )


def _one_batch(x: Array, full: tuple[int, ...], name: str) -> Array:
    """`x`, broadcastable to [batch..., heads, q, kv], as [batch, heads, q, kv] with 1 where it can stay."""
    shape = (1,) * (len(full) - x.ndim) + x.shape
    if len(shape) != len(full) or any(n not in (1, whole) for n, whole in zip(shape, full, strict=True)):
        raise _error(f"{name} must be broadcastable to [batch..., heads, q, kv] = {list(full)}, got {list(x.shape)}.")
    if all(n == 1 for n in shape[:-3]):
        return x.reshape(1, *shape[-3:])
    return jnp.broadcast_to(x.reshape(shape), (*full[:-3], *shape[-3:])).reshape(math.prod(full[:-3]), *shape[-3:])


def _flax_own(arrays: tuple[Any, ...], module: Any, shared: dict[str, Any], **own: Any) -> Array:
    """What only the whole matrix of weights can give, by the library that the module is of."""
    from flax import linen, nnx

    if isinstance(module, nnx.Module):
        given = {name: own[name] for name in ("is_causal", "promote_dtype") if own[name]}
        return nnx.dot_product_attention(*arrays, **shared, module=module, **given)
    del own["promote_dtype"]
    if own.pop("is_causal"):  # NNX' argument.
        causal = jnp.tril(jnp.ones((arrays[0].shape[-3], arrays[1].shape[-3]), bool))
        shared["mask"] = causal if shared["mask"] is None else (jnp.asarray(shared["mask"]) != 0) & causal
    return linen.dot_product_attention(*arrays, **shared, module=module, **own)


_WHERE = "flax_attention"


def _error(message: str) -> AttentionArgumentError:
    return AttentionArgumentError(message, _WHERE)
