"""The compilers as clocks, with the real ones: a small call of each kind."""

import pytest

from ejkernel.cli import calls
from ejkernel.ops.tuning.clock import Compilers
from ejkernel.ops.utils import targets

pytestmark = pytest.mark.targets


def ranking(target, most):
    found = targets.find(target)
    with targets.compiling_for(found):
        (inv,) = calls.named("grouped_matmul", "bf16[4096,2048],bf16[4,2048,2048],s32[4]", [], False)
    with Compilers(found, jobs=1) as compilers:
        return compilers.rank(inv, inv.kernel, most=most)


@pytest.mark.parametrize("target", ["v6e"])
def test_a_tpu_ranks_by_its_schedule(target):
    found = ranking(target, 3)
    bundles = [each.bundles for each in found.candidates]
    assert found.clock == "schedule"
    assert bundles == sorted(bundles)
    assert bundles[0] > 0
    assert found.statistics()["candidates"][0]["status"] == "winner"


@pytest.mark.parametrize("target", ["sm_90a"])
def test_a_gpu_keeps_the_order_of_the_space_and_reads_registers(target):
    found = ranking(target, 2)
    assert found.clock == "order"
    assert found.candidates[0].is_guess
    assert 0 < found.candidates[0].report.registers <= 255
    assert found.candidates[0].bundles is None
