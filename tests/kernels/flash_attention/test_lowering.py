"""The Pallas kernels reach the compilers of the devices they are written for, which a CPU can check without them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from ejkernel.kernels.flash_attention import pallas, triton
from ejkernel.kernels.flash_attention.arguments import Attention, canonical

DEVICES = {
    "cuda": AbstractDevice(platform="gpu", device_kind="NVIDIA H100 80GB HBM3", num_cores=1),
    "tpu": AbstractDevice(platform="tpu", device_kind="TPU v5e", num_cores=1),
}
CALLS = {
    "causal": (128, {"causal": True}),
    "window and soft cap": (64, {"sliding_window": (100, 30), "logits_soft_cap": 3.0}),
    "segments": (80, {"q_segment_ids": jnp.zeros((2, 512), jnp.int32), "causal": True}),
    "dropout": (256, {"dropout_prob": 0.2, "dropout_seed": 3}),
    "mask": (64, {"attention_mask": jnp.ones((2, 1, 512, 512), bool)}),
    "bias": (64, {"bias": jnp.zeros((4, 512, 512), jnp.bfloat16), "causal": True}),
}


# JAX 0.12 warns that this dialect of Pallas will go; `docs/flash_attention.md` tells what that means for us.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("module", "platform"), [(triton, "cuda"), (pallas, "tpu")])
@pytest.mark.parametrize("call", CALLS)
def test_forward_and_backward_lower_for_their_device(module, platform, call):
    head_dim, kwargs = CALLS[call]
    q = jax.ShapeDtypeStruct((2, 512, 4, head_dim), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, 512, 2, head_dim), jnp.bfloat16)
    row = jax.ShapeDtypeStruct((2, 4, 512), jnp.float32)

    def both(q, k, v, lse, delta):
        qkv, extras, rules = canonical(q, k, v, **kwargs)
        made = Attention(*qkv, extras, rules)
        out, found = module.forward(made)
        return out, found, module.backward(made, lse, delta, out)

    mesh = AbstractMesh((1,), ("x",), abstract_device=DEVICES[platform])
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(both).trace(q, k, k, row, row).lower(lowering_platforms=(platform,)).as_text()
    calls = text.count("stablehlo.custom_call @" + {"cuda": "__gpu$xla.gpu.triton", "tpu": "tpu_custom_call"}[platform])
    assert calls == (4 if call == "bias" else 3)  # Its gradient is a kernel of its own.


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("module", "platform"), [(triton, "cuda"), (pallas, "tpu")])
def test_a_batch_of_calls_may_have_a_seed_each(module, platform):
    q = jax.ShapeDtypeStruct((3, 1, 256, 2, 64), jnp.bfloat16)

    def one(q, seed):
        qkv, extras, rules = canonical(q, q, q, dropout_prob=0.2, dropout_seed=seed)
        made = Attention(*qkv, extras, rules)
        out, sums = module.forward(made)
        return module.backward(made, sums.lse, sums.rest, out)

    mesh = AbstractMesh((1,), ("x",), abstract_device=DEVICES[platform])
    with jax.sharding.use_abstract_mesh(mesh):
        seeds = jax.ShapeDtypeStruct((3,), jnp.uint32)
        jax.jit(jax.vmap(one)).trace(q, seeds).lower(lowering_platforms=(platform,))


def test_products_of_16_bits_are_not_asked_for_a_precision_that_mosaic_does_not_have():
    q = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.bfloat16)

    def forward(q, **options):
        qkv, extras, rules = canonical(q, q, q, **options)
        return pallas.forward(Attention(*qkv, extras, rules))

    assert "HIGHEST" not in str(jax.make_jaxpr(lambda q: forward(q, precision="highest"))(q))
    with jax.default_matmul_precision("highest"):
        assert "HIGHEST" not in str(jax.make_jaxpr(forward)(q))
