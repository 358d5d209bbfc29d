"""cuDNN's flash attention, through `jax.nn.dot_product_attention`; with gradients, by the two operations beneath it.

JAX's public call rounds the log-sum-exp to 16 bits, too coarse for a backward, and offers no backward apart. With both
at hand cuDNN's forward goes with any backward, and its backward with any forward.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel import _compat
from ejkernel.kernels.flash_attention import masks
from ejkernel.kernels.flash_attention.arguments import Extras, Rules

Array = jax.Array


def unsupported(
    query: Any, key: Any, value: Any, extras: Extras, rules: Rules, capability: tuple[int, int]
) -> str | None:
    """Why cuDNN cannot serve a call on a GPU of this compute capability; None if it can."""
    if capability < (8, 0):
        return "cuDNN's flash attention needs an NVIDIA GPU from Ampere on"
    given = [name for name, x in extras._asdict().items() if x is not None]
    if given:
        return f"cuDNN is not given {', '.join(given)}: rows that see nothing, or gradients, would be wrong"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN takes bfloat16 and float16, got {query.dtype}"
    if rules.soft_cap is not None or not rules.normalize or rules.logits_dtype != "float32":
        return "cuDNN has no soft cap, no unnormalised output and float32 logits only"
    return _misfit(query, key, value, capability) or _unbanded(query, key, rules)


def _misfit(query: Any, key: Any, value: Any, capability: tuple[int, int]) -> str | None:
    head_dim, most = query.shape[3], 256 if capability >= (9, 0) else 128
    if value.shape[3] != head_dim:
        return f"cuDNN needs equal head dims, got {head_dim} and {value.shape[3]}"
    if head_dim % 8 or head_dim > most:
        return f"cuDNN needs a head dim that is a multiple of 8 and at most {most} here, got {head_dim}"
    if 0 in (query.size, key.size):
        return "cuDNN takes no empty arrays"
    return None


def _unbanded(query: Any, key: Any, rules: Rules) -> str | None:
    """Why cuDNN's own masks cannot express the bounds of a call."""
    if rules.upper not in (None, 0) or (rules.upper is None and rules.lower is not None):
        return "cuDNN masks are causal from the first query on"
    if rules.lower is not None and (rules.lower > 0 or query.shape[1] != key.shape[1]):
        return "cuDNN windows need equal lengths of query and key"
    return None


def run(query: Array, key: Array, value: Array, rules: Rules) -> Array:
    """Returns the output alone, for calls without gradients."""
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        scale=rules.scale,
        is_causal=rules.upper == 0,
        local_window_size=None if rules.lower is None else (-rules.lower, 0),
        implementation="cudnn",
    )


def forward(
    query: Array, key: Array, value: Array, extras: Extras, rules: Rules, params: None
) -> tuple[Array, masks.LogSum]:
    """Returns the output and the log-sum-exp [batch, heads, q]; what rounding took from it, cuDNN does not tell."""
    out, lse = _compat.cudnn_forward(query, key, value, **_rules(rules))
    return out, masks.LogSum(lse, jnp.zeros_like(lse))


def backward(
    query: Array,
    key: Array,
    value: Array,
    extras: Extras,
    rules: Rules,
    lse: Array,
    delta: Array,
    dout: Array,
    params: None,
    *,
    out: Array,
) -> tuple[Array, Array, Array, None]:
    """Returns the gradients of query, key and value; `delta` is computed inside, from `out`."""
    return *_compat.cudnn_backward(query, key, value, out, lse, dout, **_rules(rules)), None


def _rules(rules: Rules) -> dict[str, Any]:
    # cuDNN's window counts the query's own position.
    window = None if rules.lower is None else 1 - rules.lower
    return {"scale": rules.scale, "causal": rules.upper == 0, "window": window}
