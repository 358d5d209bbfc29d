"""The linear cross entropy on a GPU: time and temporary memory, beside plain JAX and torch.compile."""

from __future__ import annotations

from typing import Any

import jax

from benchmarks.figures import Contender, Goal, Row
from benchmarks.peers.linear_cross_entropy import peers
from benchmarks.ways import ways
from ejkernel.kernels.linear_cross_entropy.workloads import WORKLOADS, loss
from ejkernel.modules import LinearCrossEntropy

BY_NAME = {w.name: w for w in WORKLOADS if w.device == "gpu"}
MOST_MB = {"4096 x 4096 to 128256": 400, "32768 x 2560 to 128256": 1500, "16384 x 2048 to 32000": 500}


def rows(name: str, dry: bool) -> list[Row]:
    """One workload, without and with gradients."""
    workload = loss(name, "gpu", 64, 32, 256) if dry else BY_NAME[name]
    return [_row(name, workload, backward, dry) for backward in (False, True)]


def _row(name: str, workload: Any, backward: bool, dry: bool) -> Row:
    found = peers(workload) | ways(LinearCrossEntropy(), workload, ("triton", "mosaic", "xla"), dry=dry)
    run = lambda fn: jax.value_and_grad(fn, (0, 1)) if backward else fn
    # All of them have products that XLA tries ways to compute.
    contenders = {label: Contender(run(fn), alone=True) for label, fn in found.items()}
    contenders["torch.compile"] = Contender(_by_torch(backward), torch=True, warm=True)
    by = [label for label in ("untuned", "tuned") if label in contenders]
    speed = [Goal(1.0, ("plain JAX",), label) for label in by]
    memory = [Goal(MOST_MB[name], of=label, what="MB") for label in by]
    return Row(
        table=f"linear_cross_entropy, {'with gradients' if backward else 'forward'}",
        name=name,
        inputs=lambda: workload.inputs()[0],
        contenders=contenders,
        goals=tuple([*speed, *memory] if backward else speed),
        work=workload.flops + backward * workload.backward_flops,
    )


def _by_torch(backward: bool) -> Any:
    fast: list[Any] = []

    def make(x, weights, labels):
        import torch

        if not fast:
            entropy = torch.nn.functional.cross_entropy
            fast.append(torch.compile(lambda x, w, t: entropy((x @ w).float(), t), dynamic=False))
        x, weights = (a.detach().requires_grad_(backward) for a in (x, weights))
        labels = labels.long()

        def call():
            out = fast[0](x, weights, labels)
            return (out, torch.autograd.grad(out, (x, weights))) if backward else out

        return call

    return make
