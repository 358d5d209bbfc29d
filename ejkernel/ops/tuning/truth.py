"""The right answer of a problem: the output of its reference, which runs once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax

from ejkernel.ops.utils import arguments

logger = logging.getLogger("ejkernel.tuning")

MAX_EQUATIONS = 1000
"""A Python loop in a reference is unrolled in a program, and compiling it takes longer than running its steps."""

_IN_A_HURRY = {
    # Otherwise XLA tunes each product of the program, which takes longer than timing all candidates (JAX 0.11.2, H200).
    "xla_gpu_autotune_level": 0,
    # Round where the reference does, as it would operation by operation.
    "xla_allow_excess_precision": False,
}


def once(fn: Callable[..., Any], *tree: Any) -> Any:
    """`fn(*tree)`: operation by operation, on a GPU as one program that is compiled for a single run, if it can be."""
    if jax.default_backend() == "gpu":
        try:
            return _as_one_program(fn, tree)
        except Exception as error:  # noqa: BLE001 - a reference need not be traceable; a broken one raises below.
            logger.debug("The reference runs operation by operation: %s: %s", type(error).__name__, error)
    return fn(*tree)


def _as_one_program(fn: Callable[..., Any], tree: tuple[Any, ...]) -> Any:
    run, arrays = arguments.on_arrays(fn, tree)
    traced = jax.jit(run, compiler_options=_IN_A_HURRY).trace(*arrays)
    equations = traced.jaxpr.eqns
    if len(equations) > MAX_EQUATIONS:
        raise ValueError(f"it has {len(equations)} operations")
    if any(device is not None for e in equations for device in e.params.get("devices", ())):
        raise ValueError("it names the device to run on")
    return jax.block_until_ready(traced.lower().compile()(*arrays))
