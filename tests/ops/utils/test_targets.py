"""Devices that are only described: named like real ones, asked like real ones, never run on."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice

from ejkernel.modules import flash_attention, rms_norm
from ejkernel.modules.flash_attention import FlashAttention
from ejkernel.ops import Autotuner, Executor, Invocation
from ejkernel.ops.tuning import proof
from ejkernel.ops.utils import fingerprint, targets
from ejkernel.ops.utils.fingerprint import AbsentDeviceError
from ejkernel.ops.utils.targets import TARGETS, TargetError
from tests.support import Plain, Scale, new_executor


class Chip:
    """What a real TPU says of itself."""

    platform = "tpu"

    def __init__(self, kind, **facts):
        self.device_kind = kind
        self.__dict__.update(facts)

    def memory_stats(self):
        return {"bytes_limit": 33 << 30}


class CompileOnlyPyClient:
    """Named as the client of JAX's described devices."""


class Described:
    """A device of a topology: it raises where a real one has statistics."""

    client = CompileOnlyPyClient()

    def __init__(self, target):
        self.platform, self.device_kind = target.platform, target.kind

    def memory_stats(self):
        raise RuntimeError("not implemented")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v4", "tpu-v4"), ("TPU v5 lite", "tpu-v5e"), ("TPU v5e", "tpu-v5e"), ("TPU v5", "tpu-v5p"),
        ("TPU v5p", "tpu-v5p"), ("TPU v6 lite", "tpu-v6e"), ("TPU v6e", "tpu-v6e"), ("TPU7x", "tpu-v7x"),
        ("TPU v9 heavy", "tpu-tpu_v9_heavy"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("facts", [{}, {"core_count": 1}, {"num_cores": 2}])
def test_a_tpu_is_named_by_its_kind_whatever_else_it_reports(kind, name, facts):
    assert fingerprint.device_fingerprint(Chip(kind, **facts)) == name


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
def test_a_described_device_is_named_like_a_real_one(target):
    gpus = {
        "sm_80": "gpu-nvidia_a100-sxm4-80gb-sm80-108c-64g",
        "sm_90a": "gpu-nvidia_h200-sm90-132c-128g",
        "sm_100a": "gpu-nvidia_b200-sm100-148c-128g",
    }
    names = {fingerprint.device_fingerprint(device) for device in (Described(target), target.abstract)}
    assert names == {gpus.get(target.name, f"tpu-{target.name}")}
    assert not fingerprint.is_here(Described(target))
    assert not fingerprint.is_here(target.abstract)


def test_an_abstract_gpu_has_the_facts_of_its_data_sheet():
    h100 = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
    assert fingerprint.compute_capability(h100) == (9, 0)
    assert fingerprint.multiprocessors(h100) == 132
    assert fingerprint.compute_capability(TARGETS["v6e"].abstract) == (0, 0)


def test_the_device_of_a_mesh_is_the_current_one_unless_it_looks_like_that_of_this_process():
    here = jax.local_devices()[0]
    with targets.compiling_for(TARGETS["v6e"]):
        assert fingerprint.device_fingerprint() == "tpu-v6e"
        assert fingerprint.device_kind() == "tpu"
    own = AbstractDevice(device_kind=here.device_kind, num_cores=None, platform="cpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=own)):
        assert fingerprint.current_device() == here
        assert fingerprint.is_here()
    with jax.set_mesh(jax.make_mesh((4,), ("d",))):
        assert fingerprint.current_device() == here


def test_unknown_targets_are_refused_with_the_known_ones():
    with pytest.raises(TargetError, match=r"no target 'v3'; known are v4 \(TPU v4\), .*sm_90a \(NVIDIA H200\)"):
        targets.find("v3")
    assert targets.find("sm_90").name == "sm_90a"
    assert targets.find("TPU-v5e").name == "v5e"


def lowered(fn, target, *args):
    """The program of a fresh function for a target, without its compiler."""
    with targets.compiling_for(TARGETS[target]):
        return jax.jit(lambda *args: fn(*args)).trace(*args).lower(lowering_platforms=(TARGETS[target].platform,))


def attention(q):
    return flash_attention(q, q, q, causal=True)


# JAX 0.12 warns that this dialect of Pallas will go; `docs/flash_attention.md` tells what that means for us.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_programs_get_the_backends_of_their_target_whatever_they_were_traced_for_before():
    q = jax.ShapeDtypeStruct((1, 256, 2, 128), jnp.bfloat16)
    assert "custom_call @" not in jax.jit(attention).lower(q).as_text()
    for _ in range(2):
        assert "tpu_custom_call" in lowered(attention, "v6e", q).as_text()
        assert "triton" in lowered(attention, "sm_80", q).as_text()
        assert "custom_call @" not in jax.jit(attention).lower(q).as_text()


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_a_call_that_was_traced_here_is_traced_again_for_another_device():
    x = jnp.ones((8, 256), jnp.bfloat16)
    norm = lambda x: rms_norm(x)
    assert "triton" not in jax.jit(norm).lower(x).as_text()
    assert "triton" in lowered(norm, "sm_90a", x).as_text()


def test_measuring_for_a_device_that_is_not_here_is_an_error():
    kernel, x = FlashAttention(), jax.ShapeDtypeStruct((1, 256, 2, 128), jnp.bfloat16)
    args, kwargs = kernel.prepare(x, x, x, causal=True)
    with targets.compiling_for(TARGETS["v6e"]):
        inv = Invocation(kernel=kernel, args=args, kwargs=kwargs)
        with pytest.raises(AbsentDeviceError, match="TPU v6 lite is only described here"):
            Autotuner().tune(inv, kernel)
        executor = new_executor(autotune="on")
        with pytest.raises(AbsentDeviceError, match="--for"):
            jax.jit(lambda x: executor(kernel, x, x, x)).trace(x)


def test_a_config_of_another_shape_is_not_proved_on_a_device_that_is_not_here():
    kernel, x = Plain(), jax.ShapeDtypeStruct((8, 3), jnp.float32)
    with targets.compiling_for(TARGETS["v6e"]):
        inv = Invocation(kernel=kernel, args=(x, x))
        found = proof.prove(inv, kernel, Scale(7), None)
    assert found is not None
    assert found.reason == "it cannot be checked: the device is not here"


def test_a_described_device_takes_what_is_stored_for_its_kind():
    executor, kernel = Executor(), Plain()
    x = jax.ShapeDtypeStruct((8, 3), jnp.float32)
    with targets.compiling_for(TARGETS["v6e"]):
        inv = Invocation(kernel=kernel, args=(x, x))
        assert inv.key[0] == "tpu-v6e"
        executor.chooser.cache.put(*inv.key, Scale(5))
        assert executor.choose_config(kernel, x, x) == Scale(5)
    assert executor.choose_config(kernel, x, x) != Scale(5)
