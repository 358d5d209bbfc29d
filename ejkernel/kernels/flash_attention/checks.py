"""Checks of single arguments of attention, and the error that names the one that does not fit."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ejkernel.errors import EjkernelError
from ejkernel.ops.utils.arguments import shown


class AttentionArgumentError(EjkernelError, ValueError):
    """An argument of attention has a wrong shape, dtype or value, or contradicts another one."""

    def __init__(self, message: str, where: str = "flash_attention") -> None:
        super().__init__(f"{where}: {message}")


def array(name: str, x: Any, where: str = "flash_attention") -> Any:
    """`x` as an array."""
    if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
        return x
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError) as error:
        raise AttentionArgumentError(f"{name} must be an array, got {type(x).__name__}: {error}", where) from error


def is_int(x: Any) -> bool:
    """Whether `x` is an integer of Python's or NumPy's, and no truth value."""
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def number(name: str, x: Any) -> float:
    """`x` as a number that is known while tracing."""
    if isinstance(x, numbers.Real) and not isinstance(x, bool):
        return float(x)
    if isinstance(x, (jax.Array, np.ndarray)) and not isinstance(x, Tracer) and x.shape == ():
        return float(x)
    raise AttentionArgumentError(
        f"{name} must be a Python number, known while tracing, got "
        f"{shown(x) if isinstance(x, Tracer) else type(x).__name__}. NumPy's numbers count as arrays here: give "
        f"float(x).{' Multiply the query by a scale that is traced.' if name == 'softmax_scale' else ''}"
    )


def flag(name: str, x: Any) -> bool:
    """`x` as True or False."""
    if not isinstance(x, (bool, np.bool_)):
        raise AttentionArgumentError(f"{name} must be True or False, got {shown(x)}.")
    return bool(x)


def broadcastable(name: str, x: Any, full: tuple[int, ...], *, floating: bool) -> Any:
    """`x` with four axes, each 1 or full."""
    if x is None:
        return None
    x = array(name, x)
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
