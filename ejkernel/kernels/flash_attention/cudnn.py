"""cuDNN's flash attention, through `jax.nn.dot_product_attention`; with gradients, by the two operations beneath it.

JAX's public call (0.10 to 0.12) rounds the log-sum-exp to 16 bits, too coarse for a backward, and has no separate
backward. With the two operations, cuDNN's forward works with any backward, and its backward with any forward.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel import _compat
from ejkernel.kernels.flash_attention import masks
from ejkernel.kernels.flash_attention.arguments import Attention, Rules
from ejkernel.kernels.flash_attention.checks import AttentionArgumentError
from ejkernel.kernels.flash_attention.jax_nn import jax_attention
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.utils.fingerprint import compute_capability, is_here

Array = jax.Array


BACKWARD_LIMIT = 1 << 31
"""Elements of an array from which on cuDNN's backward gives wrong gradients of query and key, without any error.

Seen on an H200 with JAX 0.11.2, also through `jax.nn.dot_product_attention`: the last batches are off by 40 to 80 %.
"""


def unsupported(inv: Invocation[Any, Any], *, backward: bool) -> str | None:
    """Why cuDNN does not support a call; None if it does."""
    if not is_here():
        return "JAX (0.10 to 0.12) asks the GPU itself whether cuDNN can be used, and it is only described here"
    query, key, value, extras, rules = Attention.of(inv.args, inv.kwargs)
    given = [name for name, x in extras._asdict().items() if x is not None]
    if given:
        return f"cuDNN is not given {', '.join(given)}: rows that see nothing, or gradients, would be wrong"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN takes bfloat16 and float16, got {query.dtype}"
    if rules.soft_cap is not None or not rules.normalize or rules.logits_dtype != "float32":
        return "cuDNN has no soft cap, no unnormalised output and float32 logits only"
    reason = _misfit(query, key, value) or _unbanded(query, key, rules)
    return reason or (_too_large(query.shape[0], query, key) if backward else None)


def _misfit(query: Any, key: Any, value: Any) -> str | None:
    head_dim, most = query.shape[3], 256 if compute_capability() >= (9, 0) else 128
    if value.shape[3] != head_dim:
        return f"cuDNN needs equal head dims, got {head_dim} and {value.shape[3]}"
    if head_dim % 8 or head_dim > most:
        return f"cuDNN needs a head dim that is a multiple of 8 and at most {most} here, got {head_dim}"
    if 0 in (query.size, key.size):
        return "cuDNN takes no empty arrays"
    return None


def _too_large(batch: Any, query: Any, key: Any) -> str | None:
    """Why cuDNN's backward would be wrong for arrays like these with such a batch."""
    # cuDNN may hold a gradient of the keys for every query head before it adds them up.
    elements = batch * max(query.shape[1], key.shape[1]) * query.shape[2] * query.shape[3]
    if not isinstance(elements, int) or elements < BACKWARD_LIMIT:  # Symbolic: only the running program knows.
        return None
    return f"cuDNN's backward is wrong from {BACKWARD_LIMIT:,} elements per array on, this call has {elements:,}"


def _unbanded(query: Any, key: Any, rules: Rules) -> str | None:
    """Why cuDNN's own masks cannot express the bounds of a call."""
    if rules.upper not in (None, 0) or (rules.upper is None and rules.lower is not None):
        return "cuDNN masks are causal from the first query on"
    if rules.lower is not None and (rules.lower > 0 or query.shape[1] != key.shape[1]):
        return "cuDNN windows need equal lengths of query and key"
    return None


def run(call: Attention) -> Array:
    """Returns only the output, for calls without gradients."""
    rules = call.rules
    return jax_attention(
        call.query,
        call.key,
        call.value,
        scale=rules.scale,
        is_causal=rules.upper == 0,
        local_window_size=None if rules.lower is None else (-rules.lower, 0),
        implementation="cudnn",
    )


def forward(call: Attention, params: None) -> tuple[Array, masks.LogSum]:
    """Returns the output and the log-sum-exp [batch, heads, q]; cuDNN does not return its rounding error."""
    out, lse = _compat.cudnn_forward(call.query, call.key, call.value, **_rules(call.rules))
    return out, masks.LogSum(lse, jnp.zeros_like(lse))


def backward(
    call: Attention, lse: Array, delta: Array, dout: Array, params: None, *, out: Array
) -> tuple[Array, Array, Array, None]:
    """Returns the gradients of query, key and value; `delta` is computed inside, from `out`."""
    dq, dk, dv = _gradients(_rules(call.rules), call.query, call.key, call.value, out, lse, dout)
    return dq, dk, dv, None


def _gradients(rules: dict[str, Any], *arrays: Array) -> tuple[Array, ...]:
    """The gradients of calls of any size, in parts of the batch that are small enough for cuDNN.

    A call that is too large is refused. But under `jax.vmap` each call may be small, and cuDNN gets all of them as one
    batch.
    """
    query, key = arrays[:2]
    batch = query.shape[0]
    if (reason := _too_large(batch, query, key)) is None:
        return _batchable(rules)(*arrays)
    part = next((n for n in range(batch, 0, -1) if batch % n == 0 and _too_large(n, query, key) is None), None)
    if part is None:
        raise AttentionArgumentError(f"{reason}. Take another platform for the backward.")
    parts = [x.reshape(batch // part, part, *x.shape[1:]) for x in arrays]
    found = jax.lax.map(lambda xs: _batchable(rules)(*xs), tuple(parts))
    return tuple(x.reshape(batch, *x.shape[2:]) for x in found)


def _batchable(rules: dict[str, Any]) -> Any:
    """The backward of cuDNN, with a rule for `jax.vmap` that gets the size of the whole batch."""
    run = jax.custom_batching.custom_vmap(partial(_compat.cudnn_backward, **rules))

    @run.def_vmap
    def batched(size: int, mapped: list[bool], *arrays: Array) -> tuple[Any, Any]:
        whole = [x if m else jnp.broadcast_to(x, (size, *x.shape)) for x, m in zip(arrays, mapped, strict=True)]
        found = _gradients(rules, *(x.reshape(size * x.shape[1], *x.shape[2:]) for x in whole))
        return tuple(x.reshape(size, x.shape[0] // size, *x.shape[1:]) for x in found), (True,) * 3

    return run


def _rules(rules: Rules) -> dict[str, Any]:
    # cuDNN's window counts the query's own position.
    window = None if rules.lower is None else 1 - rules.lower
    return {"scale": rules.scale, "causal": rules.upper == 0, "window": window}
