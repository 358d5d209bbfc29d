"""Calls that the compiler splits over devices: XLA's backend in place of kernels that cannot be split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.modules import flash_attention, grouped_matmul, rms_norm
from ejkernel.ops.execution import parts
from ejkernel.ops.execution.parts import DivisionWarning
from ejkernel.ops.utils import targets


@pytest.fixture(autouse=True)
def nobody_was_told():
    parts._warn_of_division.cache_clear()


def lowered(fn, *shapes):
    """The text of a program for TPUs, with the first axis of its arrays on four devices."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, P("d"))
    with targets.compiling_for(targets.find("v6e")):
        traced = jax.jit(fn, in_shardings=(place,) * len(shapes)).trace(*shapes)
        return traced.lower(lowering_platforms=("tpu",)).as_text()


def attention(q):
    return jax.grad(lambda q: flash_attention(q, q, q, causal=True).astype(jnp.float32).sum())(q)


QUERY = jax.ShapeDtypeStruct((4, 256, 2, 128), jnp.bfloat16)


def test_what_cannot_be_split_is_replaced_with_one_warning():
    with pytest.warns(DivisionWarning, match=r"flash_attention.*4 devices.*pallas kernel: xla runs") as told:
        text = lowered(attention, QUERY)
    assert "tpu_custom_call" not in text
    assert len({str(w.message) for w in told}) == len(told) == 2  # The forward, and the backward.


def test_a_backend_that_was_asked_for_is_not_replaced():
    with pytest.raises(NotImplementedError, match="cannot be automatically partitioned"):
        lowered(lambda q: flash_attention(q, q, q, platform="pallas"), QUERY)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
def test_sharded_arrays_give_the_same_values_and_gradients(kind):
    rng = np.random.default_rng(0)
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind,) * 2)
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    x, scale = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((4, 6, 16), (16,)))
    norm = lambda x, scale: jax.value_and_grad(lambda *a: (rms_norm(*a) ** 2).sum(), (0, 1))(x, scale)
    lhs, rhs = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((12, 8), (3, 8, 4)))
    sizes = jnp.array([5, 0, 7])
    product = lambda l, r: jax.value_and_grad(lambda *a: (grouped_matmul(*a, sizes) ** 2).sum(), (0, 1))(l, r)
    want = norm(x, scale), product(lhs, rhs)
    with jax.set_mesh(mesh):
        got = (
            jax.jit(norm)(put(x, "a", "b"), put(scale)),
            jax.jit(product)(put(lhs), put(rhs, None, None, "b")),
        )
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-5, atol=1e-5), got, want)
