"""Numbers and flags that are part of the compiled program: their values must be known while it is traced."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from ejkernel.errors import EjkernelError


def number(name: str, x: Any, error: Callable[[str], EjkernelError]) -> float:
    """As Python's, also of NumPy's and JAX's: these count as arrays, whose values tracing hides."""
    is_array = isinstance(x, (np.generic, np.ndarray, jax.Array)) and not isinstance(x, Tracer)
    if not _is_truth(x) and (isinstance(x, (int, float)) or (is_array and x.ndim == 0)):
        return float(x)
    raise error(f"{name} must be a number, known while tracing, got {described(x)}.")


def integer(name: str, x: Any, error: Callable[[str], EjkernelError]) -> int:
    """As `number`, for integers."""
    try:
        if not _is_truth(x):
            return operator.index(x)
    except TypeError:
        pass
    raise error(f"{name} must be an integer, known while tracing, got {described(x)}.")


def flag(name: str, x: Any, error: Callable[[str], EjkernelError]) -> bool:
    """As `number`, for True and False: text and numbers are neither."""
    if isinstance(x, (bool, np.bool_)):
        return bool(x)
    raise error(f"{name} must be True or False, known while tracing, got {described(x)}.")


def _is_truth(x: Any) -> bool:
    """Whether it is one of True and False, which Python takes for 1 and 0."""
    return isinstance(x, bool) or getattr(x, "dtype", None) == np.bool_


def described(x: Any) -> str:
    """A value in an error."""
    return f"a traced {x.dtype}{list(x.shape)}" if isinstance(x, Tracer) else repr(x)
