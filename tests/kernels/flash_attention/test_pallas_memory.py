"""What the TPU kernels are thought to need, against what the compiler said, and what becomes of it."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels.flash_attention import pallas, pallas_memory
from ejkernel.kernels.flash_attention.arguments import Attention, Extras, Rules
from ejkernel.ops.utils import devices, fingerprint

IDS, SEED = jax.ShapeDtypeStruct((1, 4096), jnp.int32), jax.ShapeDtypeStruct((), jnp.uint32)
FEATURES = {
    "causal": (Extras(), {"upper": 0}),
    "segments": (Extras(q_segment_ids=IDS, kv_segment_ids=IDS), {"upper": 0}),
    "dropout": (Extras(dropout_seed=SEED), {"dropout_prob": 0.1}),
    "softcap": (Extras(), {"upper": 0, "soft_cap": 3.0}),
    "highest": (Extras(), {"upper": 0, "precision": "highest"}),
    "all": (
        Extras(q_segment_ids=IDS, kv_segment_ids=IDS, dropout_seed=SEED),
        {"upper": 0, "dropout_prob": 0.1, "soft_cap": 3.0, "precision": "highest"},
    ),
}
KEPT = [
    ("causal", 1024, 128, "bfloat16", (4.59, 4.12, 7.64)),
    ("segments", 1024, 128, "bfloat16", (4.82, 4.33, 7.91)),
    ("dropout", 1024, 128, "bfloat16", (2.6, 2.96, 6.55)),
    ("softcap", 1024, 128, "bfloat16", (4.58, 6.4, 9.42)),
    ("causal", 1024, 256, "bfloat16", (5.28, 5.35, 8.1)),
    ("causal", 1024, 128, "float32", (4.43, 4.63, 8.96)),
    ("highest", 1024, 128, "float32", (6.18, 10.64, 17.2)),
    ("causal", 512, 128, "bfloat16", (2.18, 1.98, 3.64)),
    ("all", 512, 256, "float32", (9.38, 11.28, 16.96)),
]
"""MiB that the compiler kept outside of registers in forward, dQ, dK and dV (JAX 0.12.0.1, libtpu 0.0.50.1), the larger
of those for v4 and v5e (all: v5e): spill slots of 4 KiB each in the dumped bundles; 4096 queries and keys in square
blocks."""


def call_of(features, dim, dtype, length=4096):
    extras, rules = FEATURES[features]
    x = jax.ShapeDtypeStruct((1, length, 2, dim), jnp.dtype(dtype))
    return Attention(x, x, x, extras, Rules(scale=dim**-0.5, **rules))


@pytest.mark.parametrize(("features", "block", "dim", "dtype", "kept"), KEPT)
def test_estimate_is_enough_for_what_no_register_holds_and_not_far_more(features, block, dim, dtype, kept):
    call = call_of(features, dim, dtype)
    for kernel, found in zip(("forward", "dq", "dkv"), kept, strict=True):
        guess = pallas_memory._kept(kernel, block, block, call) / 2**20
        assert found <= guess <= 2.5 * found, (kernel, found, guess)


def test_blocks_count_as_they_lie_in_memory():
    call = call_of("causal", 96, "bfloat16")
    # Of 96 columns there are 128 in memory: q, k, v and o, twice, and sums of float32 with two columns of 128 lanes.
    blocks = 2 * 2 * 4 * 512 * 128 + 4 * 512 * (128 + 256)
    assert blocks <= pallas_memory._blocks("forward", 512, 512, call) <= blocks + (1 << 18)
    with_ids = pallas_memory._blocks("dkv", 512, 512, call_of("segments", 96, "bfloat16"))
    assert with_ids - pallas_memory._blocks("dkv", 512, 512, call) == 4 * 512 * 128


@pytest.fixture
def on(monkeypatch):
    def set_kind(kind):
        device = SimpleNamespace(device_kind=kind, platform="tpu")
        monkeypatch.setattr(fingerprint, "current_device", lambda: device)

    return set_kind


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"])
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("dim", [64, 256])
def test_space_has_what_fits_the_chip(on, kind, features, dim):
    on(kind)
    room = devices.find(kind).vmem_bytes
    assert room
    call = call_of(features, dim, "float32")
    for kernels in (("forward",), ("dq", "dkv")):
        blocks = pallas._blocks(call, kernels)
        assert len(set(blocks)) == len(blocks)
        assert all(pallas_memory.vmem_bytes(kernel, *block, call) <= room for block in blocks for kernel in kernels)
        assert (256, 256) in blocks
    assert kind == "TPU v4" or len(blocks) == 9
    assert kind != "TPU v4" or dim == 64 or len(blocks) < 9


def test_guess_has_the_fewest_bundles(on):
    on("TPU v6 lite")
    causal = lambda length: call_of("causal", 128, "bfloat16", length)
    assert pallas._blocks(causal(4096), ("forward",))[0] == (1024, 1024)
    assert pallas._blocks(causal(300), ("forward",)) == [(384, 384), (256, 256), (256, 384), (384, 256)]
    narrow = causal(8192)._replace(rules=Rules(scale=1.0, lower=-100, upper=0))
    # Most of a large tile would be outside of such a window.
    assert pallas._blocks(narrow, ("forward",))[0] == (512, 512)


def test_more_memory_is_asked_for_only_where_it_is_needed():
    small, large = call_of("causal", 64, "bfloat16"), call_of("highest", 256, "float32")
    assert pallas_memory.vmem_limit("dkv", 512, 512, small) is None
    needed = pallas_memory.vmem_bytes("dkv", 1024, 1024, large)
    assert needed > 32 << 20
    assert pallas_memory.vmem_limit("dkv", 1024, 1024, large) == needed
    # Newer TPUs give 32 MiB by themselves, which is not to become less.
    assert pallas_memory.vmem_limit("dq", 1024, 1024, call_of("causal", 256, "float32")) == 32 << 20
