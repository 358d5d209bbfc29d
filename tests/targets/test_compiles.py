"""Every backend of every operation compiles for every device that it is for, and it is our kernels that run."""

import jax
import pytest

from ejkernel.kernels.grouped_matmul import pallas
from ejkernel.ops.tuning import ahead
from ejkernel.ops.utils import targets
from ejkernel.ops.utils.targets import TARGETS
from tests.targets import plan

pytestmark = [
    pytest.mark.targets,
    # JAX 0.12 warns that this dialect of Pallas will go; `docs/flash_attention.md` tells what that means for us.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
MAY_REFUSE = {
    "mosaic": {
        *("2, 4096, 8, 128, causal, float32", "3, 1000, 6 (2), 80, causal, bfloat16", "decoding"),
        *("window", "sinks", "float32"),
        # The loss: where there are as many rows as columns.
        *("linear_cross_entropy: 32768 x 2560 to 128256", "linear_cross_entropy: 16384 x 2048 to 32000"),
        *("30 000 columns", "layer_norm: 8192 x 8192, bfloat16"),
    },
    "triton": set(),
    "pallas": {"30 000 columns"},  # No multiple of 128.
    "xla": set(),
}


@pytest.mark.parametrize("case", plan.cases(), ids=str)
def test_compiles_with_the_kernels_that_it_should_have(case):
    for part in plan.compiled(case):
        if part.refused is not None:
            assert {case.workload, f"{case.op_id}: {case.workload}"} & MAY_REFUSE[case.platform], part.refused
            continue
        key = part.op_id, case.platform
        assert part.program.kernels - plan.KERNELS.get(key, 0) in (0, plan.SOMETIMES_MORE.get(key, 0))


def test_all_operations_and_backends_are_listed():
    listed = {(op_id.removesuffix(".vjp"), platform) for op_id, platform in plan.KERNELS}
    has = {(op_id, b.platform) for op_id, kernel in plan.OPERATIONS.items() for b in kernel.backends}
    assert listed == {(op_id, platform) for op_id, platform in has if platform not in ("xla", "cudnn")} | {
        ("grouped_matmul_drhs", platform) for platform in ("mosaic", "triton", "pallas")
    }


@pytest.mark.parametrize("target", ["v5e", "v6e"])
@pytest.mark.parametrize("rows", [1, 4])
def test_products_of_few_rows_of_16_bits_compile(target, rows):
    shapes = (((rows, 300), "bfloat16"), ((3, 300, 100), "bfloat16"), ((3,), "int32"))
    target = TARGETS[target]
    with targets.compiling_for(target, device := targets.describe(target)[0]):
        given = tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)
        assert ahead.compile_program(pallas.forward, given, device).kernels == 1
