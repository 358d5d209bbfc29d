import pytest

from ejkernel.kernels.hopper import chip
from ejkernel.ops.utils.devices import HOPPER


@pytest.mark.parametrize("consumers", [1, 2, 3])
def test_block_fits_up_to_the_limits_of_the_chip(consumers):
    most = chip.CONSUMER_REGISTERS[consumers]
    assert chip.unfit_block(HOPPER.block_bytes, most, consumers) is None
    assert "bytes of shared memory for dQ" in chip.unfit_block(HOPPER.block_bytes + 1, most, consumers, " for dQ")
    assert f"a consumer has {most}" in chip.unfit_block(HOPPER.block_bytes, most + 1, consumers)


def test_registers_of_all_threads_fit_into_an_sm():
    for consumers in (1, 2, 3):
        used = consumers * chip.CONSUMER_REGISTERS[consumers] + chip.PRODUCER_REGISTERS[consumers]
        assert used * chip.WARPGROUP <= 65_536
