import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import config as jax_config
from jax.sharding import AxisType, PartitionSpec

from ejkernel.ops.tuning.workers import run_outside

X = jnp.arange(8.0)


def tune():
    """Stands for a tuning: compiles, runs and looks at numbers, all of which a trace forbids."""
    x = jnp.arange(16.0)
    doubled = jax.jit(lambda x: x * 2).lower(x).compile()(x)
    assert not isinstance(doubled, jax.core.Tracer)
    return float(doubled.sum())


def op(x):
    """An operation that has to be tuned before it can be traced."""
    return x * run_outside(tune)


def custom_vjp(x):
    f = jax.custom_vjp(op)
    f.defvjp(lambda x: (op(x), None), lambda _, g: (op(g),))
    return jax.grad(lambda x: f(x).sum())(x)


def mesh(kind):
    return jax.make_mesh((4,), ("i",), axis_types=(kind,))


def sharded(kind, *, jit):
    def run(x):
        with jax.set_mesh(mesh(kind)):
            f = jax.shard_map(op, in_specs=PartitionSpec("i"), out_specs=PartitionSpec("i"))
            return (jax.jit(f) if jit else f)(jax.device_put(x, jax.NamedSharding(mesh(kind), PartitionSpec("i"))))

    return run


CALLERS = {
    "eager": op,
    "jit": jax.jit(op),
    "vmap": jax.vmap(op),
    "grad": jax.grad(lambda x: op(x).sum()),
    "jvp": lambda x: jax.jvp(op, (x,), (jnp.ones_like(x),))[1],
    "scan": lambda x: jax.lax.scan(lambda c, a: (c, op(a)), 0.0, x)[1],
    "cond": lambda x: jax.lax.cond(x[1] > 0, op, lambda x: x, x),
    "remat": jax.grad(lambda x: jax.checkpoint(op)(x).sum()),
    "custom_vjp": custom_vjp,
    "shard_map, auto mesh": sharded(AxisType.Auto, jit=False),
    "shard_map, auto mesh, jit": sharded(AxisType.Auto, jit=True),
    "shard_map, explicit mesh": sharded(AxisType.Explicit, jit=False),
    "shard_map, explicit mesh, jit": sharded(AxisType.Explicit, jit=True),
    "pmap": lambda x: jax.pmap(op)(x.reshape(4, 2)).reshape(8),
    "nested": lambda x: jax.jit(jax.vmap(jax.grad(op)))(x),
    "another thread": lambda x: run_outside(lambda: jax.jit(op)(x)),
}
GRADIENTS = {"grad", "jvp", "remat", "custom_vjp", "nested"}


@pytest.mark.parametrize("name", CALLERS)
def test_any_caller_gets_the_same_answer_as_an_eager_one(name):
    expected = np.full(8, 240.0) if name in GRADIENTS else np.asarray(X) * 240
    np.testing.assert_array_equal(CALLERS[name](X), expected)


def test_nothing_is_left_in_the_callers_program():
    assert str(jax.make_jaxpr(op)(X)) == str(jax.make_jaxpr(lambda x: x * 240.0)(X))


OPTIONS = {
    "x64": lambda: jax.enable_x64(True),
    "matmul precision": lambda: jax.default_matmul_precision("highest"),
    "device": lambda: jax.default_device(jax.devices()[1]),
    "dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "nans": lambda: jax.debug_nans(True),
    "infs": lambda: jax.debug_infs(True),
    "prng": lambda: jax.default_prng_impl("rbg"),
    "custom prng": lambda: jax.enable_custom_prng(True),
    "threefry": lambda: jax.threefry_partitionable(not jax.config.jax_threefry_partitionable),
    "key reuse": lambda: jax.debug_key_reuse(True),
    "softmax": lambda: jax.softmax_custom_jvp(not jax.config.jax_softmax_custom_jvp),
    "direct linearize": lambda: jax_config.use_direct_linearize(not jax_config.use_direct_linearize.value),
    "seed offset": lambda: jax_config.random_seed_offset(7),
}


def in_force():
    """Everything that decides what JAX traces and compiles, but for axes and meshes."""
    values = {name: state.value for name, state in jax_config.config_states.items()}
    return values, jax.dtypes.canonicalize_dtype(float), jax.random.key(0).dtype


def trace_key():
    """What JAX itself says a trace depends on; the axes are an object per thread."""
    names = jax_config.config_ext.trace_context_names()
    values = zip(names, jax_config.trace_context(), strict=True)
    return [(name, value) for name, value in values if name != "axis_env_state"]


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_of_the_caller_holds_outside(name):
    default = in_force()
    with OPTIONS[name]():
        assert in_force() != default
        assert run_outside(in_force) == in_force()
    assert run_outside(in_force) == default


def test_all_options_hold_together():
    with ExitStack() as stack:
        for enter in OPTIONS.values():
            stack.enter_context(enter())
        assert in_force() == run_outside(in_force)
        assert trace_key() == run_outside(trace_key)


def test_options_reach_the_compiled_program():
    with jax.enable_x64(True):
        assert jax.jit(lambda x: x + run_outside(lambda: jnp.zeros(2).dtype).itemsize)(1) == 9
    with jax.default_matmul_precision("highest"):
        text = run_outside(lambda: jax.jit(lambda x: x @ x).lower(jnp.ones((2, 2))).as_text())
    assert "HIGHEST" in text


def test_what_belongs_to_the_callers_trace_stays_behind():
    seen = []

    def f(x):
        seen.append((jax_config._check_vma.value, run_outside(lambda: jax_config._check_vma.value)))
        seen.append(run_outside(lambda: jax.sharding.get_abstract_mesh().empty))
        return x

    sharded_x = jax.device_put(X, jax.NamedSharding(mesh(AxisType.Explicit), PartitionSpec("i")))
    with jax.set_mesh(mesh(AxisType.Explicit)):
        jax.jit(jax.shard_map(f, in_specs=PartitionSpec("i"), out_specs=PartitionSpec("i")))(sharded_x)
    assert seen[:2] == [(True, False), True]


def test_guards_of_the_caller_do_not_stop_the_work():
    with jax.transfer_guard("disallow"), jax.disable_jit():
        assert run_outside(tune) == 240.0


def test_further_contexts_are_entered():
    scope = jax.make_user_context(default_value="outer")
    assert run_outside(lambda: scope.value) == "outer"
    assert run_outside(lambda: scope.value, contexts=[scope("inner")]) == "inner"
    with scope("mine"):
        assert scope.value == "mine"
        assert run_outside(lambda: scope.value, contexts=[scope(scope.value)]) == "mine"


def test_an_exception_comes_back_as_it_is():
    def broken():
        raise ZeroDivisionError("here")

    with pytest.raises(ZeroDivisionError, match="here"):
        run_outside(broken)


def test_the_thread_is_gone_afterwards():
    run_outside(tune)
    assert not [thread for thread in threading.enumerate() if thread.name == "ejkernel-outside"]


INTERRUPTED = """
import os, signal, threading
from ejkernel.ops.tuning.workers import run_outside
stop = threading.Event()
def work():
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert stop.wait(30)
    return "best so far"
def hopeless():
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    threading.Timer(0.6, os.kill, (os.getpid(), signal.SIGINT)).start()
    threading.Event().wait(60)
print(run_outside(work, on_interrupt=stop.set))
try:
    run_outside(hopeless, on_interrupt=lambda: None)
except KeyboardInterrupt:
    print("gave up")
"""


def test_the_first_interrupt_asks_and_the_second_insists():
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        cwd=Path(__file__).parents[4],
        stdout=subprocess.PIPE,
        text=True,
        timeout=40,
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.stdout.split("\n")[:2] == ["best so far", "gave up"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
