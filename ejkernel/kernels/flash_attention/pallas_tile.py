"""What the TPU kernels do with one tile of scores.

A number per row is kept as [rows, 128], the same in all lanes: as [rows, 1] each use would first have to spread it. In
memory such numbers are rows, [1, rows], because a last axis of one is padded to 128.

Softmax is computed in powers of two from logits that are not scaled yet, `unit` times too small: one product per
element, of the difference to the largest, does both.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.flash_attention import masks, tile
from ejkernel.kernels.flash_attention.arguments import Rules

LANES = 128
UNSEEN = -0.7 * float(np.finfo(np.float32).max)
"""The logit of a key that is not seen. It is finite, so that the difference of two is a number."""
LEAST = 0.8 * UNSEEN
"""What smaller logits are taken for. Next to any larger one its weight is zero, as theirs."""


# --- Logits ---


def unit(rules: Rules, *, biased: bool = False) -> float:
    """What an unscaled logit is to be multiplied with; positive, so that the largest stays the largest.

    A bias is added to logits as they are: divided by a unit, the least number would be none.
    """
    if biased:
        return 1.0
    if rules.soft_cap is not None:
        return rules.soft_cap
    return rules.scale if rules.scale > 0 else 1.0


def unscaled(a: Any, b: Any, seen: Any, rules: Rules, bias: Any = None) -> tuple[Any, Any]:
    """Logits of a tile without their unit, and the slope of the soft cap at each; `seen` is a mask or None."""
    s, slope = tile.dot(a, b, (1, 1), rules), None
    if rules.soft_cap is not None:
        s = jnp.tanh(s * (rules.scale / rules.soft_cap))
        slope = 1.0 - s * s
    elif rules.scale <= 0 and bias is None:
        s = s * rules.scale
    if bias is not None:
        s = _biased(s * (rules.soft_cap or rules.scale), bias.astype(jnp.float32))
    return (s if seen is None else jnp.where(seen, s, UNSEEN)), slope


def _biased(s: Any, bias: Any) -> Any:
    """A bias of -inf hides a key; one of the least number does not, and must not look as if it did."""
    return jnp.where(bias == -jnp.inf, UNSEEN, jnp.maximum(s + bias, LEAST))


def _power(difference: Any, size: float) -> Any:
    return jnp.exp2(difference * (size * math.log2(math.e)))


# --- Forward ---


def accumulate(carry: Any, s: Any, v: Any, drop: Any, rules: Rules, size: float) -> Any:
    """Output, maximum and sum with one more tile of keys; the sum is one per lane, added up at the end.

    A row of which nothing was seen yet has weights of one. They are gone with the first key that is seen: its logit is
    so much larger that the factor of what was there before is zero.
    """
    o, m, l = carry
    m_new = jnp.maximum(m, jnp.max(s, axis=1, keepdims=True))
    p = _power(s - spread(m_new, s.shape[1]), size)
    alpha = _power(m - m_new, size)
    o = o * spread(alpha, o.shape[1]) + tile.dot(drop(p).astype(v.dtype), v, (1, 0), rules)
    return o, m_new, l * alpha + folded(p)


def finished(carry: Any, size: float) -> tuple[Any, masks.LogSum]:
    """Output, and log-sum-exp as rows."""
    o, m, l = carry
    empty = m == UNSEEN
    total = jnp.where(empty, 0.0, jnp.broadcast_to(jnp.sum(l, axis=1, keepdims=True), l.shape))
    share = jnp.where(total == 0, 0.0, 1.0 / jnp.where(total == 0, 1.0, total))
    large, small = product(row(m), size)
    sums = masks.log_sum(large, row(total))
    rest = sums.rest + small
    return o * spread(share, o.shape[1]), masks.LogSum(sums.lse, jnp.where(sums.lse == jnp.inf, 0.0, rest))


# --- Backward ---


def weights(s: Any, slope: Any, lse: Any, delta: Any, dp: Any, drop: Any, size: float) -> tuple[Any, Any]:
    """Weights of a tile after dropout, and the gradient of its products; `lse` is in units, and +inf for no weights."""
    p = _power(s - lse, size)
    ds = p * (drop(dp) - delta)
    return drop(p), ds if slope is None else ds * slope


def in_units(lse: Any, size: float) -> masks.LogSum:
    """The log-sum-exp divided by the unit, and what is missing in the product of both."""
    found = lse / size
    large, small = product(found, size)
    return masks.LogSum(found, jnp.where(jnp.isinf(lse), 0.0, (lse - large) - small))


def product(x: Any, factor: float) -> tuple[Any, Any]:
    """`x` times `factor` in float32, and the error of that; for huge numbers it is not known, and 0."""
    factor = float(np.float32(factor))
    rounded = x * factor
    if math.frexp(factor)[0] == 0.5:  # A power of two: nothing is rounded.
        return rounded, jnp.zeros_like(rounded)
    (high, low), (f_high, f_low) = _halves(x), _halves(np.float32(factor))
    error = ((high * f_high - rounded) + high * f_low + low * f_high) + low * f_low
    return rounded, jnp.where(jnp.abs(x) < 1e30, error, 0.0)


def _halves(x: Any) -> tuple[Any, Any]:
    """A number as the sum of two whose products with others of 12 bits are exact (Dekker, 1971)."""
    scaled = x * np.float32(4097.0)
    high = scaled - (scaled - x)
    return high, x - high


# --- Shapes ---


def spread(x: Any, width: int) -> Any:
    """[rows, 128], the same in all lanes, as [rows, width]."""
    copies = -(-width // LANES)
    wide = x if copies == 1 else jnp.concatenate([x] * copies, axis=1)
    return wide if width == wide.shape[1] else wide[:, :width]


def folded(x: Any) -> Any:
    """Sums of every 128th column."""
    parts = [x[:, start : start + LANES] for start in range(0, x.shape[1], LANES)]
    while len(parts) > 1:
        parts = [sum(parts[i : i + 2][1:], parts[i]) for i in range(0, len(parts), 2)]
    return parts[0]


def row(x: Any) -> Any:
    """[rows, 128], the same in all lanes, as [1, rows]."""
    return x.T[:1]


def column(x: Any) -> Any:
    """[1, rows] as [rows, 128], the same in all lanes."""
    return jnp.broadcast_to(x, (LANES, x.shape[1])).T
