"""Devices: facts about hardware that JAX does not report, from the makers' data sheets."""

from __future__ import annotations

import re
from typing import NamedTuple


class Device(NamedTuple):
    """One kind of device; 0 means that the value was not needed yet."""

    sms: int = 0
    """Streaming multiprocessors."""
    block_bytes: int = 0
    """The most shared memory of one block."""
    cache_bytes: int = 0
    """The last-level cache."""
    flops: float = 0.0
    """Dense 16-bit operations per second."""
    bytes_per_s: float = 0.0
    """Of the main memory."""
    vmem_bytes: int = 0
    """The fast memory of a TPU's core, of which a kernel may use all."""


HOPPER = Device(sms=132, block_bytes=232_448, cache_bytes=50 << 20, flops=989e12, bytes_per_s=3.35e12)
"""The H100 (SXM); other Hopper GPUs start from its values."""

DEVICES = {
    "H200": HOPPER._replace(cache_bytes=60 << 20, bytes_per_s=4.8e12),
    "GH200": HOPPER._replace(flops=0, bytes_per_s=0),
    "H100 80GB HBM3": HOPPER,
    "H100": HOPPER._replace(sms=0, flops=0, bytes_per_s=0),
    "A100 SXM4 80GB": Device(sms=108, block_bytes=166_912, cache_bytes=40 << 20, flops=312e12, bytes_per_s=2.04e12),
    "A100": Device(sms=108, block_bytes=166_912, cache_bytes=40 << 20),
    "L40": Device(sms=142, block_bytes=101_376, cache_bytes=96 << 20),
    "L4": Device(sms=58, block_bytes=101_376, cache_bytes=48 << 20),
    "TPU v4": Device(vmem_bytes=16 << 20),
    "TPU v5 lite": Device(flops=197e12, bytes_per_s=0.82e12, vmem_bytes=128 << 20),
    "TPU v5": Device(vmem_bytes=64 << 20),
    "TPU v6 lite": Device(flops=918e12, bytes_per_s=1.64e12, vmem_bytes=128 << 20),
    "TPU7x": Device(vmem_bytes=64 << 20),
}
"""By words of the device's name; if two fit, the first is used."""

LEAST_BLOCK_BYTES = min(device.block_bytes for device in DEVICES.values() if device.block_bytes)
"""Shared memory that a block has on the smallest of these GPUs."""


def find(name: str) -> Device:
    """The facts about a device, by its `device_kind` or its fingerprint."""
    words = _words(name)
    return next((device for known, device in DEVICES.items() if _words(known) <= words), Device())


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))
