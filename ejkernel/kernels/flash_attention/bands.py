"""Which keys a query sees by its place: `causal` and `sliding_window` as bounds, and back."""

from __future__ import annotations

import numbers
from typing import Any, Literal

import numpy as np

from ejkernel.kernels.flash_attention.checks import AttentionArgumentError, is_int
from ejkernel.ops.utils.arguments import shown

Causal = bool | Literal["lower_right"]


def band(causal: Causal, window: Any, offset: int) -> tuple[int | None, int | None]:
    """Bounds of `key - query`; `offset` is where the diagonal starts if it is aligned at the end."""
    if not (isinstance(causal, (bool, np.bool_)) or causal == "lower_right"):
        raise AttentionArgumentError(f"causal must be False, True or 'lower_right', got {shown(causal)}.")
    diagonal = offset if isinstance(causal, str) else 0
    left, right = _window(window)
    if causal is not False:
        right = 0 if right is None else min(right, 0)
    return None if left is None else diagonal - left, None if right is None else diagonal + right


def reachable(
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
    if len(sides) != 2 or not all(x is None or (is_int(x) and int(x) >= 0) for x in sides):
        raise AttentionArgumentError(
            f"sliding_window must be an integer or a pair (left, right) of integers >= 0 or None, got {shown(window)}."
        )
    return tuple(None if x is None else int(x) for x in sides)  # pyright: ignore[reportReturnType]


def written(lower: int | None, upper: int | None, offset: int) -> tuple[Causal | None, Any]:
    """The inverse of `band`: `causal` and `sliding_window`, None where the call needs neither."""
    # A bound beyond the diagonal can only be one of a diagonal that is aligned at the end.
    at_end = upper != 0 and (upper == offset or (lower or 0) > 0 or (upper or 0) < 0)
    if at_end and offset:
        return "lower_right", None if lower is None else offset - lower
    if upper == 0:
        return True, None if lower is None else -lower
    return None, None if lower is None and upper is None else (None if lower is None else -lower, upper)
