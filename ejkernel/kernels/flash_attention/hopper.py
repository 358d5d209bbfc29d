"""The Hopper kernels as a backend: what they support, and their base-2 logarithms as natural ones."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.flash_attention import config, masks, tile, triton
from ejkernel.kernels.flash_attention.arguments import Attention, Extras, Rules
from ejkernel.kernels.flash_attention.config import MosaicBwdConfig, MosaicFwdConfig
from ejkernel.kernels.flash_attention.mosaic_support import unsupported as unsupported_arrays
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.utils.fingerprint import compute_capability

Array = jax.Array


def unsupported(inv: Invocation[Any, Any], *, backward: bool) -> str | None:
    """Why the Hopper kernels do not support a call; None if they do."""
    query, key, value, extras, rules = Attention.of(inv.args, inv.kwargs)
    for name in ("q_positions", "dropout_seed"):
        if getattr(extras, name) is not None:
            return f"this kernel takes no {name}"
    if (reason := _unsupported_bias(inv, backward=backward) or _unsupported_mask(extras)) is not None:
        return reason
    if not rules.normalize or rules.logits_dtype != "float32" or rules.precision is not None:
        return "this kernel normalises its output, keeps logits in float32 and has one precision"
    if 0 in (query.size, key.size):
        return "this kernel takes no empty arrays"
    capability = ".".join(map(str, compute_capability()))
    facts = {"backward": backward, "scale": rules.scale, "compute_capability": capability}
    if (reason := unsupported_arrays(query, key, value, **facts)) is None:
        import ejkernel.kernels.flash_attention.mosaic  # noqa: F401 - it needs packages that JAX does not install.
    return reason


def _unsupported_bias(inv: Invocation[Any, Any], *, backward: bool) -> str | None:
    """Its gradient is that of the Triton kernels, which refuse some biases."""
    query, _, _, extras, rules = Attention.of(inv.args, inv.kwargs)
    if extras.bias is None:
        return None
    return triton.unsupported(inv, backward=True) if backward else tile.unsupported(query, extras, rules)


def _unsupported_mask(extras: Extras) -> str | None:
    mask = extras.mask
    if mask is None:
        return None
    if mask.shape[1] > 1:
        return f"this kernel takes no mask per head, got shape {list(mask.shape)}"
    if 1 in mask.shape[2:] and extras.q_segment_ids is not None:
        return (
            "this kernel takes either segments or a mask that is the same for all queries or keys; use segments alone"
        )
    return None


def forward_space(inv: Invocation[Any, Any]) -> list[MosaicFwdConfig]:
    """The guess, then the others."""
    query, key, value, extras, rules = Attention.of(inv.args, inv.kwargs)
    facts = {"packed": _is_packed(extras), "biased": extras.bias is not None}
    guess = config.guessed_forward(query.shape, key.shape, value.shape[3], rules.lower, rules.upper, **facts)
    return [guess, *config.forward_space(query.shape[3], value.shape[3])]


def backward_space(inv: Invocation[Any, Any]) -> list[MosaicBwdConfig]:
    """The guess, then with other parts of tiles, or two tiles of keys in flight, then the others."""
    query, key, value, extras, rules = Attention.of(inv.args, inv.kwargs)
    dims, packed = (query.shape[3], value.shape[3]), _is_packed(extras)
    clusters = config.clusters_pay(query.shape, key.shape, rules.lower, rules.upper, packed=packed)
    guess = config.default_backward(*dims, clusters=clusters)
    near = [dataclasses.replace(guess, splits=splits) for splits in (1, 2, 4)]
    near += [dataclasses.replace(guess, head_group=heads) for heads in (2, 4)]
    near += [] if packed else [dataclasses.replace(guess, kv_stages=2)]
    others = [*near, dataclasses.replace(guess, cluster=3 - guess.cluster), *config.backward_space(*dims)]
    return [guess, *(cfg for cfg in others if cfg.unfit(*dims, ids=packed) is None)]


def _is_packed(extras: Extras) -> bool:
    return extras.q_segment_ids is not None or extras.mask is not None


def forward(call: Attention, params: MosaicFwdConfig | None = None) -> tuple[Array, masks.LogSum]:
    """Returns the output and the log-sum-exp [batch, heads, q]."""
    from ejkernel.kernels.flash_attention.mosaic import flash_attention_forward

    out, *found = flash_attention_forward(call.query, call.key, call.value, cfg=params, **_rules(call))
    sums = masks.LogSum(*found)
    sums = sums if call.extras.bias is not None else _scaled(sums, 1.0 / _to_base_2(call.rules))
    return masks.with_sinks(out, sums, call.extras.softmax_aux)


def backward(
    call: Attention,
    lse: Array,
    delta: Array,
    dout: Array,
    params: MosaicBwdConfig | None = None,
    *,
    out: Array,
    rest: Array,
) -> tuple[Array, Array, Array, Array | None]:
    """Returns the gradients of query, key, value and bias; for the first three `delta` is computed inside."""
    from ejkernel.kernels.flash_attention.mosaic_bwd import flash_attention_backward

    dbias = None
    if call.extras.bias is not None:
        # Where nobody needs it, it is dead code.
        dbias = triton.gradient_of_bias(call, lse, *masks.unlost(dout, delta, rest)[::-1])
    else:
        lse, rest = _scaled(masks.LogSum(lse, rest), _to_base_2(call.rules))
    saved = out, lse, rest, dout
    return *flash_attention_backward(call.query, call.key, call.value, *saved, cfg=params, **_rules(call)), dbias


def _to_base_2(rules: Rules) -> float:
    """The factor from logits to the kernels' exponents: log2(e), rounded with the scale as the kernels do."""
    scale = 1.0 if rules.soft_cap is not None else rules.scale
    return float(np.float32(scale * math.log2(math.e))) / float(np.float32(scale))


def _scaled(sums: masks.LogSum, factor: float) -> masks.LogSum:
    """The sums times a number, with an error of some 2**-34 of them.

    A product of two float32 numbers has twice the digits. Each number is split into halves, whose products are exact.
    """
    lse = jnp.where(sums.lse == jnp.inf, 0.0, sums.lse)
    upper = jax.lax.reduce_precision(lse, exponent_bits=8, mantissa_bits=11)
    lower = lse - upper
    first = np.float32(np.float16(factor))
    second = np.float32(np.float16(factor - float(first)))
    third = np.float32(factor - float(first) - float(second))
    small = (upper * second + lower * first) + (lower * second + lse * third + sums.rest * np.float32(factor))
    product = masks.rounded(upper * first, small)
    return masks.LogSum(jnp.where(sums.lse == jnp.inf, jnp.inf, product.lse), product.rest)


def _rules(call: Attention) -> dict[str, Any]:
    extras, rules = call.extras, call.rules
    return {
        "scale": rules.scale,
        "lower": rules.lower,
        "upper": rules.upper,
        "soft_cap": rules.soft_cap,
        "q_segment_ids": extras.q_segment_ids,
        "kv_segment_ids": extras.kv_segment_ids,
        "mask": extras.mask,
        "bias": extras.bias,
    }
