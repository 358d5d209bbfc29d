"""Equinox' attention layer on ejkernel's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ejkernel.kernels.flash_attention.checks import AttentionArgumentError
from ejkernel.modules.dot_product_attention import attend
from ejkernel.modules.hidden_rows import Sight
from ejkernel.modules.static import described

Array = jax.Array


def equinox_attention(
    layer: Any,
    query: Any,
    key_: Any,
    value: Any,
    mask: Any = None,
    *,
    key: Any = None,
    inference: bool | None = None,
    deterministic: bool | None = None,
    process_heads: Callable[..., Any] | None = None,
) -> Array:
    """What `layer(query, key_, value, mask, ...)` computes, for an `equinox.nn.MultiheadAttention`.

    `equinox.nn.MultiheadAttention.__call__ = equinox_attention` switches all of them.

    Args:
      layer: The layer; its projections and its dropout are used.
      query: [q, query_size].
      key_: [kv, key_size].
      value: [kv, value_size].
      mask: Boolean [q, kv] or [heads, q, kv], True attends.
      key: A key of `jax.random`, for dropout. It drops other weights than Equinox would with it, as many.
      inference: Whether to drop none; by default what the layer says.
      deterministic: The older name of `inference`.
      process_heads: Gets and returns the heads of query, key and value, each [length, heads, dim].

    Returns:
      [q, output_size].
    """
    heads = [
        jax.vmap(project)(x).reshape(x.shape[0], layer.num_heads, -1)
        for project, x in ((layer.query_proj, query), (layer.key_proj, key_), (layer.value_proj, value))
    ]
    if process_heads is not None:
        shapes = [x.shape for x in heads]
        heads = process_heads(*heads)
        if [x.shape for x in heads] != shapes:
            raise _error(f"process_heads must keep the shapes {shapes}, got {[x.shape for x in heads]}.")
    if mask is not None:
        mask = _four_axes(mask, (layer.num_heads, query.shape[0], key_.shape[0]))
    options = _dropout(layer.dropout, key, inference if deterministic is None else deterministic)
    dtype = jnp.result_type(*heads)  # The layer's products promote too.
    query_heads, key_heads, value_heads = (x[None].astype(dtype) for x in heads)
    out = attend(query_heads, key_heads, value_heads, None, Sight(mask=mask), **options)
    return jax.vmap(layer.output_proj)(out.reshape(query.shape[0], -1))


def _four_axes(mask: Any, full: tuple[int, int, int]) -> Array:
    if mask.shape not in (full, full[1:]) or mask.dtype != bool:
        raise _error(
            f"mask must be boolean [heads, q, kv] = {list(full)}, or [q, kv], got {mask.dtype}{list(mask.shape)}."
        )
    return mask.reshape(1, *(1,) * (3 - mask.ndim), *mask.shape)


def _dropout(dropout: Any, key: Any, inference: bool | None) -> dict[str, Any]:
    inference = dropout.inference if inference is None else inference
    if inference:
        return {}
    if isinstance(dropout.p, Tracer):
        raise _error(
            f"dropout.p of the layer must be a number, known while tracing, got {described(dropout.p)}. Under jax.jit, "
            "give only the layer's arrays as arguments (equinox.filter_jit, equinox.partition by equinox.is_array)."
        )
    if not dropout.p:
        return {}
    if key is None:
        raise _error(f"the layer drops {dropout.p} of its weights, so key= is needed, or inference=True.")
    return {"dropout_prob": float(dropout.p), "dropout_seed": key}


def _error(message: str) -> AttentionArgumentError:
    return AttentionArgumentError(message, "equinox_attention")
