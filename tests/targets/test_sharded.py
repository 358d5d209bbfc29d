"""Arrays on several devices: our kernels run where each device can run its part, XLA where the compiler must decide."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.modules import flash_attention, grouped_matmul, rms_norm
from ejkernel.ops.execution import parts
from ejkernel.ops.execution.parts import DivisionWarning
from ejkernel.ops.utils import targets

pytestmark = pytest.mark.targets
TARGET = "v6e"


def mesh_of(kind):
    devices = np.array(targets.describe(targets.find(TARGET))[:4]).reshape(2, 2)
    return Mesh(devices, ("data", "model"), axis_types=(kind,) * 2)


def array(mesh, shape, spec, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def attention(q, k, v):
    return jax.grad(lambda *x: flash_attention(*x, causal=True).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)


def product(x, w, sizes):
    return jax.grad(lambda *a: grouped_matmul(*a, sizes).astype(jnp.float32).sum(), (0, 1))(x, w)


def norm(x, scale):
    return jax.grad(lambda *a: rms_norm(*a).astype(jnp.float32).sum(), (0, 1))(x, scale)


CALLS = {
    # function, arrays with their specs, kernels in the program
    "attention by batch and heads": (attention, [((4, 2048, 16, 128), P("data", None, "model"))] * 3, 3),
    "product by columns": (
        product,
        [((4096, 1024), P()), ((8, 1024, 2048), P(None, None, "model")), ((8,), P())],
        2,  # The forward is dead code.
    ),
    "norm by rows": (norm, [((8, 2048, 1024), P("data", "model")), ((1024,), P())], 0),
}


def compiled(name, kind):
    call, shapes, kernels = CALLS[name]
    mesh = mesh_of(kind)
    args = [
        array(mesh, shape, spec, jnp.int32 if len(shape) == 1 and shape[0] == 8 else jnp.bfloat16)
        for shape, spec in shapes
    ]
    fresh = lambda *args: call(*args)
    with jax.set_mesh(mesh):
        program = jax.jit(fresh).lower(*args).compile()
    return program, len(re.findall(r'custom_call_target="tpu_custom_call"', program.as_text())), kernels


@pytest.mark.parametrize("name", CALLS)
def test_explicit_axes_run_the_kernels_on_each_device(name):
    program, found, kernels = compiled(name, AxisType.Explicit)
    assert found == kernels
    assert "all-gather" not in program.as_text()


@pytest.mark.parametrize("name", CALLS)
def test_automatic_axes_run_what_the_compiler_can_split_and_say_so_once(name):
    parts._warn_of_division.cache_clear()
    if CALLS[name][2] == 0:
        _, found, _ = compiled(name, AxisType.Auto)
    else:
        with pytest.warns(DivisionWarning, match=r"on 4 devices .* Pass mesh=") as caught:
            _, found, _ = compiled(name, AxisType.Auto)
        told = [str(w.message).partition(":")[0] for w in caught if w.category is DivisionWarning]
        assert len(told) == len(set(told))
    assert found == 0


def test_a_sharded_sequence_is_left_to_the_compiler():
    parts._warn_of_division.cache_clear()
    mesh = mesh_of(AxisType.Explicit)
    q = array(mesh, (4, 2048, 16, 128), P("data", "model"))
    with jax.set_mesh(mesh), pytest.warns(DivisionWarning):
        program = jax.jit(lambda q: flash_attention(q, q, q)).lower(q).compile()
    assert "tpu_custom_call" not in program.as_text()


def test_mesh_and_specs_run_the_kernels_on_each_device():
    mesh, spec = mesh_of(AxisType.Auto), P("data", None, "model")
    q = array(mesh, (4, 2048, 16, 128), spec)
    call = lambda q: flash_attention(q, q, q, mesh=mesh, in_specs=spec)
    with jax.default_device(mesh.devices.flat[0]):
        program = jax.jit(call).lower(q).compile()
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 1


def test_a_backend_that_was_asked_for_is_not_replaced():
    mesh = mesh_of(AxisType.Auto)
    q = array(mesh, (4, 2048, 16, 128), P("data", None, "model"))
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match="cannot be automatically partitioned"):
        jax.jit(lambda q: flash_attention(q, q, q, platform="pallas")).lower(q)
