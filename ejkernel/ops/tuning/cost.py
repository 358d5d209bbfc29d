"""Cost: what a call computes and moves at least, counted by the compiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from ejkernel.ops.utils import arguments


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Operations of a call, and the bytes of its arguments and results, which every backend must move."""

    flops: float
    bytes: float


def cost_of(compiled: Any, least_flops: float = 0.0) -> Cost | None:
    """The cost of a compiled program that computes at least `least_flops`; None if the compiler does not say.

    XLA counts the body of a loop once, and nothing inside custom kernels, so a count is a lower bound.
    """
    try:
        analysis, memory = compiled.cost_analysis(), compiled.memory_analysis()
    except Exception:  # noqa: BLE001 - a figure for reports never stops a tuning.
        return None
    flops = analysis.get("flops") if isinstance(analysis, Mapping) else None
    if flops is None or flops < 0 or memory is None:
        return None
    moved = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return Cost(flops=max(float(flops), least_flops), bytes=float(moved))


def flops_of(fn: Callable[..., Any], *tree: Any) -> float:
    """Operations of `fn(*tree)`, counted without compiling it; 0 if it is not known."""
    try:
        run, arrays = arguments.on_arrays(fn, tree)
        analysis = jax.jit(run).lower(*arrays).cost_analysis()
    except Exception:  # noqa: BLE001 - a reference need not be traceable, and a figure for reports never stops a tuning.
        return 0.0
    return max(float(analysis.get("flops", 0)), 0.0) if isinstance(analysis, Mapping) else 0.0


def larger(one: Cost | None, two: Cost | None) -> Cost | None:
    """The larger of two counts of the same call: both are lower bounds."""
    if one is None or two is None:
        return one or two
    return max(one, two, key=lambda cost: cost.flops)
