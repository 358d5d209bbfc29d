"""Norms on a GPU: forward, and the backward alone from what its forward kept, beside plain JAX and torch.compile."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from benchmarks.figures import Contender, Goal, Row
from benchmarks.peers.layer_norm import peers as plain_layer_norm
from benchmarks.peers.rms_norm import peers as plain_rms_norm
from benchmarks.ways import ways
from ejkernel.modules import LayerNorm, RmsNorm
from ejkernel.ops.core.workload import Workload

KERNELS = {"rms_norm": RmsNorm, "layer_norm": LayerNorm}
PLAIN = {"rms_norm": plain_rms_norm, "layer_norm": plain_layer_norm}
SHAPES = ((16384, 4096), (8192, 8192), (65536, 1024))


def rows(op_id: str, dry: bool) -> list[Row]:
    """All shapes, with and without a residual."""
    shapes = [(16, 128)] if dry else SHAPES
    cases = [
        (shape, residual, backward) for shape in shapes for residual in (False, True) for backward in (False, True)
    ]
    return [_row(op_id, *case, dry) for case in cases]


def _row(op_id: str, shape: tuple[int, int], residual: bool, backward: bool, dry: bool) -> Row:
    x, column = (shape, "bfloat16"), (shape[1:], "bfloat16")
    shapes = (x, column, *([column] if op_id == "layer_norm" else []), *([x] if residual else []))
    workload = Workload(name="", device="gpu", shapes=shapes)
    found = ways(KERNELS[op_id](), workload, ("triton", "mosaic"), dry=dry)
    plain = partial(_plain, PLAIN[op_id](workload)["plain JAX"], residual)
    if backward:
        # JAX would keep float32 arrays for a backward alone: together with its forward, which costs XLA nothing here.
        contenders = {"plain JAX": Contender(lambda args, douts: jax.vjp(plain, *args)[1](douts))}
        contenders |= {name: _backward_alone(fn) for name, fn in found.items()}
    else:
        contenders = {"plain JAX": Contender(lambda args, douts: plain(*args))}
        contenders |= {name: Contender(lambda args, douts, fn=fn: fn(*args)) for name, fn in found.items()}
    contenders["torch.compile"] = Contender(_by_torch(op_id, residual, backward), torch=True, warm=True)
    # With a residual the forward is to be as fast as XLA's fusion.
    least = 1.5 if backward else 1.0 if residual else 1.03
    by = [name for name in ("untuned", "mosaic", "tuned") if name in contenders]
    return Row(
        table=f"{op_id}, {'backward' if backward else 'forward'}",
        name=f"{shape[0]} x {shape[1]}{', residual' if residual else ''}",
        inputs=partial(_inputs, workload, residual),
        contenders=contenders,
        goals=tuple(Goal(least, ("plain JAX",), name) for name in by),
        work=2 * shape[0] * shape[1] * (3 + residual if backward else 2 + 2 * residual),
        unit="TB/s",
    )


def _inputs(workload: Workload, residual: bool) -> tuple[Any, ...]:
    """The arguments, and the gradients of the results."""
    args, _ = workload.inputs()
    dout = jax.random.normal(jax.random.key(9), args[0].shape, args[0].dtype)
    return args, (dout, dout) if residual else dout


def _plain(norm: Any, residual: bool, x: Any, *rest: Any) -> Any:
    if not residual:
        return norm(x, *rest)
    total = x + rest[-1]
    return norm(total, *rest[:-1]), total


def _backward_alone(fn: Any) -> Contender:
    def before(args, douts):
        return jax.vjp(fn, *args)[1], douts

    return Contender(lambda pull, douts: pull(douts), after=before)


def _by_torch(op_id: str, residual: bool, backward: bool) -> Any:
    fast: list[Any] = []

    def norm(x, scale, *rest):
        from torch.nn import functional

        total = x + rest[-1] if residual else x
        if op_id == "layer_norm":
            out = functional.layer_norm(total, total.shape[-1:], scale, rest[0], 1e-6)
        else:
            out = functional.rms_norm(total, total.shape[-1:], scale, 1e-6)
        return (out, total) if residual else (out,)

    def make(args, douts):
        import torch

        if not fast:
            fast.append(torch.compile(norm, dynamic=False))
        args = [x.detach().clone().requires_grad_(backward) for x in args]
        if not backward:
            return lambda: fast[0](*args) if residual else fast[0](*args)[0]
        outs, douts = fast[0](*args), douts if residual else (douts,)
        return lambda: torch.autograd.grad(outs, args, douts, retain_graph=True)

    return make
