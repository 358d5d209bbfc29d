"""Shared memory of the Triton kernels: what the compiler asked for, and that the tiles of an untuned call fit."""

import itertools

import jax
import pytest

from ejkernel.kernels.flash_attention import triton_memory
from ejkernel.kernels.flash_attention.arguments import Attention, canonical
from ejkernel.ops.utils.devices import DEVICES, LEAST_BLOCK_BYTES
from ejkernel.ops.utils.params import BwdParams, FwdParams

ROOMS = sorted({device.block_bytes for device in DEVICES.values() if device.block_bytes})
PLANE = (1, 2, 512, 512)
EXTRAS = {
    "": {},
    "bias": {"bias": jax.ShapeDtypeStruct(PLANE, "bfloat16")},
    "mask": {"attention_mask": jax.ShapeDtypeStruct(PLANE, "bool")},
}


def call_of(dim, value_dim, dtype, extra=""):
    shape = lambda dim: jax.ShapeDtypeStruct((1, 512, 2, dim), dtype)
    qkv, extras, rules = canonical(shape(dim), shape(dim), shape(value_dim), causal=True, **EXTRAS[extra])
    return Attention(*qkv, extras, rules)


# By XLA of JAX 0.12 for an L4: dims of keys and values, tile, warps, stages, what else, bytes.
FORWARD = [
    (128, 128, "float32", (128, 64, 8, 2), "", 131_072),
    (128, 128, "float32", (64, 64, 4, 2), "", 114_688),
    (64, 64, "float32", (128, 64, 4, 3), "", 98_304),
    (128, 64, "float32", (128, 64, 8, 2), "", 114_688),
    (256, 256, "float32", (32, 32, 4, 2), "", 102_400),
    (256, 256, "bfloat16", (64, 32, 4, 2), "", 69_632),
    (64, 256, "bfloat16", (128, 64, 4, 3), "", 114_688),
    (128, 128, "bfloat16", (128, 64, 8, 2), "bias", 81_920),
    (128, 128, "bfloat16", (128, 64, 8, 2), "mask", 73_728),
]
BACKWARD = [
    (128, 128, "float32", (64, 64), "", 131_584),
    (128, 128, "bfloat16", (64, 64), "", 74_240),
    (64, 256, "float32", (64, 64), "", 213_504),
    (64, 256, "float32", (32, 32), "", 106_752),
    (256, 256, "bfloat16", (32, 32), "", 67_840),
    (128, 128, "bfloat16", (64, 64), "bias", 82_432),
]


@pytest.mark.parametrize(("dim", "value_dim", "dtype", "tile", "extra", "asked"), FORWARD)
def test_a_forward_needs_what_the_compiler_asks_for(dim, value_dim, dtype, tile, extra, asked):
    rows, cols, warps, stages = tile
    params = FwdParams(q_blocksize=rows, kv_blocksize=cols, num_warps=warps, num_stages=stages)
    assert triton_memory.forward_bytes(params, call_of(dim, value_dim, dtype, extra)) == asked


@pytest.mark.parametrize(("dim", "value_dim", "dtype", "tile", "extra", "asked"), BACKWARD)
def test_a_backward_needs_at_most_what_is_thought(dim, value_dim, dtype, tile, extra, asked):
    params = BwdParams(q_blocksize=tile[0], kv_blocksize=tile[1], num_warps=4, num_stages=2)
    assert asked <= triton_memory.backward_bytes(params, call_of(dim, value_dim, dtype, extra)) <= 1.3 * asked


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("extra", EXTRAS)
def test_the_guess_fits_every_gpu(dtype, extra):
    for room, dim, value_dim in itertools.product(ROOMS, (8, 64, 72, 128, 256), (16, 64, 128, 256)):
        call = call_of(dim, value_dim, dtype, extra)
        assert triton_memory.forward_bytes(triton_memory.default_forward(call, room), call) <= room
        assert triton_memory.backward_bytes(triton_memory.default_backward(call, room), call) <= room


def test_16_bits_have_the_same_guess_on_every_gpu_unless_values_are_wider():
    for dim in (64, 128, 256):
        call = call_of(dim, dim, "bfloat16")
        for default in (triton_memory.default_forward, triton_memory.default_backward):
            assert default(call, LEAST_BLOCK_BYTES) == default(call, ROOMS[-1])
