"""What is compiled for which device: every backend of every operation, at sizes that users have."""

import functools
from dataclasses import dataclass
from typing import Any

import jax

from ejkernel.cli import operations, suites
from ejkernel.kernels.flash_attention.workloads import attention
from ejkernel.kernels.grouped_matmul.workloads import product
from ejkernel.ops.config.asking import forward_of
from ejkernel.ops.core.backend import KINDS
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.workload import Workload
from ejkernel.ops.tuning import ahead
from ejkernel.ops.utils import targets
from ejkernel.ops.utils.targets import TARGETS, Target

OPERATIONS = {op_id: operations.make(op_id) for op_id in operations.own()}
NOT_FOR = {
    # JAX asks the GPU itself whether cuDNN can be used.
    "cudnn": set(TARGETS),
    # Written for Hopper.
    "mosaic": set(TARGETS) - {"sm_90a"},
}
THOROUGH = ("v5e", "v6e", "sm_90a")
"""Those for which all workloads are compiled; for the others one in three, which keeps it within minutes."""
KERNELS = {
    ("flash_attention", "mosaic"): 1,
    ("flash_attention.vjp", "mosaic"): 2,
    ("flash_attention", "triton"): 1,
    ("flash_attention.vjp", "triton"): 2,
    ("flash_attention", "pallas"): 1,
    ("flash_attention.vjp", "pallas"): 2,
    **{
        (f"{norm}{part}", by): 1
        for norm in ("rms_norm", "layer_norm")
        for part in ("", ".vjp")
        for by in ("triton", "mosaic", "pallas")
    },
    ("linear_cross_entropy", "triton"): 1,
    ("linear_cross_entropy", "mosaic"): 1,
    ("linear_cross_entropy_gradients", "triton"): 1,
    ("linear_cross_entropy_gradients", "mosaic"): 2,
    ("grouped_matmul", "mosaic"): 1,
    ("grouped_matmul", "triton"): 1,
    ("grouped_matmul", "pallas"): 1,
    ("grouped_matmul_drhs", "mosaic"): 1,
    ("grouped_matmul_drhs", "triton"): 1,
    ("grouped_matmul_drhs", "pallas"): 1,
}
"""How many kernels of our own a call has; XLA's backend has none. Fewer means that something else ran."""
SOMETIMES_MORE = {("flash_attention.vjp", "mosaic"): 2, ("linear_cross_entropy_gradients", "triton"): 1}
"""How many more some calls have: the Hopper kernels round dK and dV by themselves where several blocks add to them, and
of several chunks of a loss the first stands before the loop over the others."""


def kind_of(target: Target) -> str:
    return "tpu" if target.platform == "tpu" else "gpu"


def _attention_extras(kind: Any) -> list[Workload]:
    ids = jax.ShapeDtypeStruct((2, 4096), "int32")
    packed = {"q_segment_ids": ids, "kv_segment_ids": ids, "causal": True}
    bias = (((4, 4096, 8, 128), "bfloat16"),) * 3
    own = lambda name, shapes, **kwargs: Workload(name=name, device=kind, shapes=shapes, kwargs=kwargs)
    return [
        attention(kind, 2, 4096, 8, 8, 128, True, "float32"),
        attention(kind, 3, 1000, 6, 2, 80, True),
        own("packed", (((2, 4096, 8, 128), "bfloat16"),) * 3, **packed),
        own("window", bias, causal=True, sliding_window=(1023, 0), logits_soft_cap=30.0),
        own("sinks", (*bias, None, ((8, 1), "float32")), causal=True),
        own("decoding", (((8, 1, 32, 128), "bfloat16"), *(((8, 8192, 8, 128), "bfloat16"),) * 2)),
    ]


def _product_extras(kind: Any) -> list[Workload]:
    return [
        product("float32", kind, (8192, 16, 1024, 2048), dtype="float32"),
        product("odd sizes", kind, (5000, 7, 1000, 520)),
        product("one group", kind, (8192, 1, 4096, 4096)),
    ]


def _norm_extras(kind: Any) -> list[Workload]:
    x, scale = ((8, 2048, 4096), "bfloat16"), ((4096,), "float32")
    return [
        Workload(name="residual", device=kind, shapes=(x, scale, x)),
        Workload(name="30 000 columns", device=kind, shapes=(((64, 30_000), "float32"), None)),
        Workload(name="few rows", device=kind, shapes=(((3, 4096), "float32"), ((4096,), "float32"))),
    ]


def _layer_extras(kind: Any) -> list[Workload]:
    x, scale = ((8, 2048, 4096), "bfloat16"), ((4096,), "float32")
    return [Workload(name="residual", device=kind, shapes=(x, scale, scale, x))]


EXTRAS = {
    "flash_attention": _attention_extras,
    "grouped_matmul": _product_extras,
    "rms_norm": _norm_extras,
    "layer_norm": _layer_extras,
}
"""What the named workloads do not have; mosaic kernels refuse some of it."""


@functools.cache
def workloads(op_id: str, kind: str) -> dict[str, Workload]:
    """Those of an operation for a kind of device, by name; those of GPUs where there are none."""
    kernel = OPERATIONS[op_id]
    named = kernel.workloads(kind) or kernel.workloads("gpu")
    return {w.name: w for w in [*named, *EXTRAS.get(op_id, lambda kind: [])(kind)]}


@dataclass(frozen=True)
class Case:
    """A workload of an operation, by one backend, for one target."""

    target: str
    op_id: str
    platform: str
    workload: str

    def __str__(self):
        return f"{self.target}, {self.op_id}[{self.platform}], {self.workload}"


def cases() -> list[Case]:
    found = []
    for target in TARGETS.values():
        for op_id, kernel in OPERATIONS.items():
            for backend in kernel.backends:
                names = list(workloads(op_id, kind_of(target)))
                if kind_of(target) in KINDS[backend.platform] and target.name not in NOT_FOR.get(backend.platform, ()):
                    chosen = names if target.name in THOROUGH else names[::3]
                    # XLA's own: one call is enough, nothing in it is ours.
                    chosen = names[:1] if backend.platform == "xla" else chosen
                    found += [Case(target.name, op_id, backend.platform, name) for name in chosen]
    return found


@functools.cache
def device(target: str) -> Any:
    return targets.describe(TARGETS[target])[0]


@dataclass(frozen=True)
class Outcome:
    """What became of one part of a case: a compiled program, or why the backend refuses it."""

    op_id: str
    program: ahead.Compiled | None
    refused: str | None = None


def compiled(case: Case) -> list[Outcome]:
    """All parts of a case with the guess of its backend; the compiler's errors are raised."""
    target, found = TARGETS[case.target], []
    with targets.compiling_for(target):
        kernel = OPERATIONS[case.op_id]
        calls = suites.calls_of(kernel, workloads(case.op_id, kind_of(target))[case.workload])
        for inv in calls:
            owner, backward = forward_of(inv.kernel), isinstance(inv.kernel, BackwardKernel)
            refused = owner._refusal(owner.backend(case.platform), inv, backward)
            if refused is None:
                cfg = owner.cfg_on(case.platform, inv, backward=backward)
                program = ahead.compiled(inv, inv.kernel, cfg, target, device(case.target))
            found.append(Outcome(inv.op_id, None if refused else program, refused))
    return found
