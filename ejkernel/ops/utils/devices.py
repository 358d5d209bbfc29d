"""Devices: facts about hardware that JAX does not report, from the makers' data sheets."""

from __future__ import annotations

import re
from typing import NamedTuple


class Device(NamedTuple):
    """One kind of device; 0 or nothing means that the value was not needed yet."""

    generation: str = ""
    """Of a TPU: its short name, such as "v6e"."""
    capability: str = ""
    """Of an NVIDIA GPU: its compute capability."""
    memory_bytes: int = 0
    """The main memory of what JAX calls one device."""
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


HOPPER = Device(capability="9.0", sms=132, block_bytes=232_448, cache_bytes=50 << 20, flops=989e12, bytes_per_s=3.35e12)
"""The H100 (SXM); other Hopper GPUs start from its values."""
_A100 = Device(capability="8.0", sms=108, block_bytes=166_912, cache_bytes=40 << 20)
_ADA = Device(capability="8.9", block_bytes=101_376)
_BLACKWELL = Device(capability="10.0", sms=148, block_bytes=232_448, cache_bytes=126 << 20)
_V5E = Device("v5e", memory_bytes=16 << 30, flops=197e12, bytes_per_s=0.82e12, vmem_bytes=128 << 20)
_V5P = Device("v5p", memory_bytes=95 << 30, flops=459e12, bytes_per_s=2.77e12, vmem_bytes=64 << 20)
_V6E = Device("v6e", memory_bytes=32 << 30, flops=918e12, bytes_per_s=1.64e12, vmem_bytes=128 << 20)
_V7X = Device("v7x", memory_bytes=96 << 30, flops=1153e12, bytes_per_s=3.69e12, vmem_bytes=64 << 20)

DEVICES = {
    "H200": HOPPER._replace(memory_bytes=140 << 30, cache_bytes=60 << 20, bytes_per_s=4.8e12),
    "GH200": HOPPER._replace(flops=0, bytes_per_s=0),
    "H100 80GB HBM3": HOPPER._replace(memory_bytes=79 << 30),
    "H100": HOPPER._replace(sms=0, flops=0, bytes_per_s=0),
    "A100 SXM4 80GB": _A100._replace(memory_bytes=79 << 30, flops=312e12, bytes_per_s=2.04e12),
    "A100": _A100,
    "B200": _BLACKWELL._replace(memory_bytes=179 << 30, flops=2250e12, bytes_per_s=8e12),
    "GB200": _BLACKWELL,
    "L40": _ADA._replace(sms=142, cache_bytes=96 << 20),
    "L4": _ADA._replace(memory_bytes=22 << 30, sms=58, cache_bytes=48 << 20, bytes_per_s=0.3e12),
    "TPU v4 lite": Device("v4i"),
    "TPU v4": Device("v4", memory_bytes=32 << 30, flops=275e12, bytes_per_s=1.2e12, vmem_bytes=16 << 20),
    "TPU v5 lite": _V5E,
    "TPU v5e": _V5E,
    "TPU v5p": _V5P,
    "TPU v5": _V5P,
    "TPU v6 lite": _V6E,
    "TPU v6e": _V6E,
    "TPU7x": _V7X,
    "TPU v7x": _V7X,
}
"""By words of the device's name; if two fit, the first is used. TPUs have several names for one kind."""

LEAST_BLOCK_BYTES = min(device.block_bytes for device in DEVICES.values() if device.block_bytes)
"""Shared memory that a block has on the smallest of these GPUs."""


def find(name: str) -> Device:
    """The facts about a device, by its `device_kind` or its fingerprint."""
    words = _words(name)
    return next((device for known, device in DEVICES.items() if _words(known) <= words), Device())


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))
