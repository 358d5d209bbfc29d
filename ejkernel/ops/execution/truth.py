"""The truth of a problem: what a reference says, which is asked once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax

from ejkernel.ops.utils import arguments

logger = logging.getLogger("ejkernel.tuning")

_IN_A_HURRY = {"xla_gpu_autotune_level": 0}
"""On a GPU XLA else tries many ways to run each product of the program: longer than it takes to race all candidates."""


def once(fn: Callable[..., Any], *tree: Any) -> Any:
    """`fn(*tree)` as one program, compiled for a single run; operation by operation if that cannot be done."""
    arrays, statics = arguments.split(tree)
    options = _IN_A_HURRY if jax.default_backend() == "gpu" else None
    try:
        return jax.jit(lambda arrays: fn(*arguments.merge(arrays, statics)), compiler_options=options)(arrays)
    except Exception as error:  # noqa: BLE001 - a reference need not be traceable; if it is wrong, it says so itself.
        logger.debug("The reference cannot be one program: %s: %s", type(error).__name__, error)
        return fn(*tree)
