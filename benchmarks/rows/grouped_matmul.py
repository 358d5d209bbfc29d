"""Grouped products on a Hopper GPU: all workloads in three passes, beside torch's and a dense product."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.figures import Contender, Goal, Row
from benchmarks.ways import ways
from ejkernel.kernels.grouped_matmul.workloads import WORKLOADS, product
from ejkernel.modules import GroupedMatmul

PASSES = ("forward", "dlhs", "drhs")
BY_NAME = {w.name: w for w in WORKLOADS if w.device == "gpu"}
GOALS = {  # x torch, x dense
    "mixtral": (1.05, 0.92),
    "mixtral-down": (1.05, 0.92),
    "qwen3-30b": (1.25, None),
    "qwen3-30b-down": (1.25, None),
    "even-32": (1.02, 0.94),
    "deepseek-v3": (1.6, None),
}
READING = 0.85 * 4.3
"""TB/s: what decoding is to reach, reading the weights that it touches."""


def rows(name: str, dry: bool) -> list[Row]:
    """The passes of one workload."""
    workload = BY_NAME[name]
    if dry:
        workload = product(name, "gpu", (64, 4, 16, 32))
    return [_row(name, workload, which, dry) for which in PASSES]


def _row(name: str, workload: Any, which: str, dry: bool) -> Row:
    (m, k), (_, _, n) = (shape for shape, _ in workload.shapes[:2])
    found = ways(GroupedMatmul(), workload, ("mosaic", "triton"), dry=dry)
    contenders = {label: Contender(partial(_pass, which, fn)) for label, fn in found.items()}
    contenders["dense"] = Contender(_DENSE[which], alone=True, same=False)
    contenders["torch"] = Contender(partial(_by_torch, which), torch=True)
    by = [label for label in ("untuned", "tuned") if label in contenders]
    if name.startswith("decode"):
        goals = tuple(Goal(READING, what="rate", of=label) for label in by if which != "drhs")
        work, unit = 2 * (_touched(workload) * k * n + m * (k + n)), "TB/s"
    else:
        torch, dense = GOALS[name]
        goals = tuple(Goal(torch, ("torch",), label) for label in by)
        goals += tuple(Goal(dense, ("dense",), label) for label in by if dense)
        work, unit = workload.flops, "TFLOP/s"
    return Row(
        table=f"Grouped products, {which}{', decoding' if unit == 'TB/s' else ''}",
        name=name,
        inputs=partial(_inputs, workload, which),
        contenders=contenders,
        goals=goals,
        work=work,
        unit=unit,
    )


def _touched(workload: Any) -> int:
    """How many groups have rows: the weights of others are not read."""
    few = replace(workload, shapes=tuple(((1,) * len(shape), dtype) for shape, dtype in workload.shapes))
    return int(jnp.count_nonzero(few.inputs()[0][2]))


def _inputs(workload: Any, which: str) -> tuple[Any, ...]:
    """What a pass is given: lhs or dout, rhs or dout, sizes."""
    lhs, rhs, sizes = workload.inputs()[0]
    dout = jax.random.normal(jax.random.key(1), (lhs.shape[0], rhs.shape[2]), lhs.dtype)
    return {"forward": (lhs, rhs, sizes), "dlhs": (dout, rhs, sizes), "drhs": (lhs, dout, sizes)}[which]


def _pass(which: str, fn: Any, a: Any, b: Any, sizes: Any) -> Any:
    """One product or gradient by the operation: what else a gradient would compute is left out by the compiler."""
    if which == "forward":
        return fn(a, b, sizes)
    if which == "dlhs":
        lhs = jnp.zeros((a.shape[0], b.shape[1]), a.dtype)
        return jax.vjp(lambda lhs: fn(lhs, b, sizes), lhs)[1](a)[0]
    rhs = jnp.zeros((sizes.shape[0], a.shape[1], b.shape[1]), a.dtype)
    return jax.vjp(lambda rhs: fn(a, rhs, sizes), rhs)[1](b)[0]


_DENSE = {
    "forward": lambda lhs, rhs, sizes: lhs @ rhs[0],
    "dlhs": lambda dout, rhs, sizes: dout @ rhs[0].T,
    "drhs": lambda lhs, dout, sizes: lhs.T @ dout,
}


def _by_torch(which: str, a: Any, b: Any, sizes: Any) -> Any:
    import torch

    ends = torch.cumsum(sizes, 0).to(torch.int32)
    return {
        "forward": lambda: torch._grouped_mm(a, b, offs=ends),
        "dlhs": lambda: torch._grouped_mm(a, b.transpose(-2, -1), offs=ends),
        "drhs": lambda: torch._grouped_mm(a.t(), b, offs=ends),
    }[which]
