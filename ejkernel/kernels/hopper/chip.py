"""The chip, as configs of kernels see it: what one block may have, and how a launch splits it."""

from __future__ import annotations

from ejkernel.ops.utils.devices import HOPPER

SMS = HOPPER.sms  # On a smaller chip the last blocks just start later.
WARPGROUP = 128
WGMMA_ROWS = 64
BARRIER_BYTES = 1_024  # All mbarriers of a block, with the alignment padding around them.
CONSUMER_REGISTERS = {1: 240, 2: 240, 3: 160}  # Of a thread, by the number of warpgroups that compute.
PRODUCER_REGISTERS = {1: 24, 2: 24, 3: 32}


def unfit_block(smem_bytes: int, live_registers: int, consumers: int, what: str = "") -> str | None:
    """Says why a block with this much shared memory, and registers per thread, cannot run; `None` if it can."""
    if smem_bytes > HOPPER.block_bytes:
        return f"needs {smem_bytes} bytes of shared memory{what}, the chip has {HOPPER.block_bytes}"
    if live_registers > (have := CONSUMER_REGISTERS[consumers]):
        return f"needs about {live_registers} registers per thread{what}, a consumer has {have}"
    return None
