"""The Pallas kernels reach the compilers of the devices they are written for, which a CPU can check without them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from ejkernel.kernels.grouped_matmul import pallas, triton

DEVICES = {
    "cuda": AbstractDevice(platform="gpu", device_kind="NVIDIA H100 80GB HBM3", num_cores=1),
    "tpu": AbstractDevice(platform="tpu", device_kind="TPU v5e", num_cores=1),
}
CUSTOM_CALLS = {"cuda": "__gpu$xla.gpu.triton", "tpu": "tpu_custom_call"}


# JAX 0.12 warns that this dialect of Pallas will go; `docs/flash_attention.md` tells what that means for us.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("module", "platform"), [(triton, "cuda"), (pallas, "tpu")])
def test_all_passes_lower_for_their_device(module, platform, dtype):
    rows, groups, k, n = 512, 4, 256, 384
    lhs, dout = (jax.ShapeDtypeStruct((rows, d), dtype) for d in (k, n))
    rhs, sizes = jax.ShapeDtypeStruct((groups, k, n), dtype), jax.ShapeDtypeStruct((groups,), jnp.int32)

    def passes(lhs, rhs, dout, sizes):
        out = module.forward(lhs, rhs, sizes)
        return out, module.forward(dout, rhs, sizes, transpose_rhs=True), module.drhs(lhs, dout, sizes)

    mesh = AbstractMesh((1,), ("x",), abstract_device=DEVICES[platform])
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(passes).trace(lhs, rhs, dout, sizes).lower(lowering_platforms=(platform,)).as_text()
    assert text.count("stablehlo.custom_call @" + CUSTOM_CALLS[platform]) == 3


def test_products_of_16_bits_are_not_asked_for_a_precision_that_mosaic_does_not_have():
    lhs, rhs = jax.ShapeDtypeStruct((512, 256), "bfloat16"), jax.ShapeDtypeStruct((4, 256, 384), "bfloat16")
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    with jax.default_matmul_precision("highest"):
        assert "HIGHEST" not in str(jax.make_jaxpr(pallas.forward)(lhs, rhs, sizes))
        assert "HIGHEST" not in str(jax.make_jaxpr(pallas.drhs)(lhs, lhs, sizes))
