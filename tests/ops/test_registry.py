import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import Invocation, Kernel, device_fingerprint, get_invocations, record_invocation, registry
from tests.support import OwnBackward, Plain, Scale, new_executor

X = jnp.ones((3, 2))
SHAPE = jax.ShapeDtypeStruct((3, 2), jnp.float32)


def test_explicit_record_is_found_by_op_and_key():
    kernel = Plain()
    inv = Invocation(kernel=kernel, args=(X, X), kwargs={"scale": 1.0})
    record_invocation(kernel, inv)
    want = {kernel.op_id: {inv.call_key: (kernel, (SHAPE, SHAPE), {"scale": 1.0})}}
    assert get_invocations() == get_invocations(device_fingerprint()) == get_invocations(jax.devices()[0]) == want
    assert get_invocations("another device") == {}


def test_calls_are_recorded_only_on_request(monkeypatch):
    executor, kernel = new_executor(), Plain()
    executor(kernel, X, X)
    assert get_invocations() == {}
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    jax.jit(lambda x: executor(kernel, x, x))(jnp.ones((5,)))
    recorded = get_invocations()[kernel.op_id]
    assert len(recorded) == 2
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "0")
    # What ran while recording was on stays recorded.
    assert [args[0].shape for _, args, _ in get_invocations()[kernel.op_id].values()] == [(5,)]


def test_unknown_value_of_the_switch_lists_the_known_ones(monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "yes")
    with pytest.raises(ValueError, match="EJKERNEL_OPS_RECORD: 'yes' is not one of '0', '1'"):
        new_executor()(Plain(), X, X)


@pytest.mark.parametrize("how", ["eager", "jit", "grad", "vmap"])
def test_what_is_recorded_is_abstract(monkeypatch, how):
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    executor, kernel = new_executor(), OwnBackward()
    f = lambda x: executor(kernel, x, x).sum()
    {"eager": f, "jit": jax.jit(f), "grad": jax.grad(f), "vmap": jax.vmap(f)}[how](X)
    calls = get_invocations()
    assert set(calls) == {kernel.op_id} | ({f"{kernel.op_id}.vjp"} if how == "grad" else set())
    for _, args, kwargs in calls[kernel.op_id].values():
        assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves((args, kwargs)))


def test_no_array_and_no_tracer_outlives_the_call(monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    executor, kernel, tracers = new_executor(), Plain(), []
    x = jnp.ones((4, 4)) * 2
    alive = weakref.ref(x)

    def f(x):
        tracers.append(weakref.ref(x))
        return executor(kernel, x, x)

    executor(kernel, x, x)
    jax.jit(f)(x)
    record_invocation(kernel, Invocation(kernel=kernel, args=(x, x)))
    del x
    gc.collect()
    assert alive() is None
    assert [t() for t in tracers] == [None]


class GroupSizes(Kernel[Scale, jax.Array]):
    record_integers = True

    def run(self, x, sizes, *, cfg):
        return x * sizes.sum()

    def heuristic_cfg(self, inv):
        return Scale()


def test_small_integers_are_kept_if_the_kernel_asks(monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    executor, sizes = new_executor(), jnp.array([1, 2])
    for _ in range(2):
        executor(GroupSizes(), X, sizes)
    jax.jit(lambda s: executor(GroupSizes(), X, s))(sizes)
    ((_, (x, kept), _),) = get_invocations()[GroupSizes().op_id].values()
    assert isinstance(x, jax.ShapeDtypeStruct)
    assert isinstance(kept, np.ndarray)
    np.testing.assert_array_equal(kept, sizes)


def test_large_integers_are_not_kept(monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    new_executor()(GroupSizes(), X, jnp.zeros(registry.SMALL_INTEGERS + 1, jnp.int32))
    ((_, (_, kept), _),) = get_invocations()[GroupSizes().op_id].values()
    assert isinstance(kept, jax.ShapeDtypeStruct)
