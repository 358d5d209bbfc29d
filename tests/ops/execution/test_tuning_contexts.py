"""A first call that tunes, from inside any transformation, is as good as an eager one and leaves nothing behind."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.ops import Autotuner, ConfigSelectorChain, Executor, Kernel, autotune, overlay_cache, policy_override
from ejkernel.ops.config.selection import ConfigNotFoundError, SymbolicCallWarning
from ejkernel.ops.execution.tuning import TuningError
from ejkernel.ops.tuning.problem import TuningInputsError
from tests.support import fully, table, within
from tests.tuning_kernels import (
    FAST,
    MIDDLE,
    Doubling,
    Gathering,
    GatheringBackward,
    GatheringWithExamples,
    OwnBackward,
    WithCustomVjp,
    WithResiduals,
    Work,
    call,
)

X = jnp.linspace(0.1, 1, 8 * 64).reshape(8, 64)  # Large enough for the guess to be slow for sure.
QUIET = Autotuner(progress=False, max_candidates=2)


def tuning_executor(**kwargs):
    return Executor(ConfigSelectorChain(autotune=True, tuner=QUIET, **kwargs))


def mesh(kind):
    return jax.make_mesh((4,), ("i",), axis_types=(kind,))


def in_custom_vjp(call, x):
    @jax.custom_vjp
    def outer(x):
        return call(x)

    outer.defvjp(lambda x: (call(x), None), lambda res, g: (3 * g,))
    return jax.grad(lambda x: outer(x).sum())(x)


def in_shard_map(call, x):
    return jax.jit(jax.shard_map(call, in_specs=P("i"), out_specs=P("i")))(x)


@contextlib.contextmanager
def arguments(place):
    """What to call the function of a place with, under the mesh that it wants."""
    if not place.startswith("shard_map"):
        yield X
        return
    m = mesh(AxisType.Explicit if place.endswith("explicit") else AxisType.Auto)
    with jax.set_mesh(m):
        yield jax.device_put(X, NamedSharding(m, P("i")))


PLACES = {
    "eager": lambda call, x: call(x),
    "jit": lambda call, x: jax.jit(call)(x),
    "vmap": lambda call, x: jax.vmap(call)(x),
    "grad": lambda call, x: jax.grad(lambda x: call(x).sum())(x),
    "jit of grad": lambda call, x: jax.jit(jax.grad(lambda x: call(x).sum()))(x),
    "scan": lambda call, x: jax.lax.scan(lambda c, row: (c, call(row)), 0, x)[1],
    "remat": lambda call, x: jax.grad(lambda x: jax.checkpoint(call)(x).sum())(x),
    "cond": lambda call, x: jax.lax.cond(x.sum() > 0, call, lambda x: x, x),
    "custom_vjp": in_custom_vjp,
    "shard_map auto": in_shard_map,
    "shard_map explicit": in_shard_map,
    "pmap": lambda call, x: jax.pmap(call)(x[:4]),
}


@pytest.mark.parametrize(
    ("place", "kernel"),
    table(PLACES, [Doubling, WithCustomVjp, WithResiduals, OwnBackward], ["eager", "grad", "vmap", "shard_map auto"]),
)
def test_first_call_tunes_and_answers_like_an_eager_one(place, kernel):
    tuned, plain = tuning_executor(), Executor(ConfigSelectorChain())
    run = PLACES[place]
    with arguments(place) as x:
        found = run(functools.partial(tuned, kernel()), x)
        np.testing.assert_allclose(found, run(functools.partial(plain, kernel()), x), rtol=1e-6)
    assert {cfg for _, cfg in tuned.chooser.cache.items()} == {Work(FAST)}


@pytest.mark.thin(2)
@pytest.mark.parametrize("place", [place for place in PLACES if place not in ("eager", "pmap")])
def test_nothing_is_left_in_the_callers_program(place):
    kernel, tuned = WithResiduals(), tuning_executor()
    program = functools.partial(PLACES[place], functools.partial(tuned, kernel))
    with arguments(place) as x:
        first = str(jax.make_jaxpr(program)(x))
        assert len(tuned.chooser.cache) > 0
        with policy_override(autotune="frozen"):
            assert str(jax.make_jaxpr(program)(x)) == first


@pytest.mark.parametrize("place", ["eager", "jit", "scan"])
def test_options_of_the_thread_hold_while_tuning(place):
    seen = []

    class Spy(Doubling):
        def run(self, x, *, cfg):
            seen.append((x.dtype, jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision))
            seen.append(str(jax.config.jax_default_device))
            return super().run(x, cfg=cfg)

    device = jax.devices()[2]
    with jax.enable_x64(True), jax.default_matmul_precision("highest"), jax.default_device(device):
        x = jnp.ones((4, 4), jnp.float64)
        out = PLACES[place](functools.partial(tuning_executor(), Spy()), x)
    assert out.dtype == jnp.float64
    assert set(seen) == {(jnp.dtype("float64"), True, "highest"), str(device)}


def test_matmul_precision_reaches_the_candidates_programs(monkeypatch):
    from ejkernel.ops.tuning.bench import Bench

    texts = []
    build = Bench._build

    def spying(bench, number, cfg):
        result = build(bench, number, cfg)
        texts.append(bench._compiled[number].as_text())
        return result

    monkeypatch.setattr(Bench, "_build", spying)

    class Product(Doubling):
        def run(self, x, *, cfg):
            return super().run(x @ x.T, cfg=cfg)

    with jax.default_matmul_precision("highest"):
        jax.jit(functools.partial(tuning_executor(), Product()))(X)
    assert texts
    assert all("highest" in text for text in texts)


def test_default_device_is_where_made_up_data_lies(monkeypatch):
    from ejkernel.ops.tuning.bench import Bench

    devices = set()
    measure = Bench.measure

    def spying(bench, order):
        devices.update(*(x.devices() for x in bench._arrays))
        return measure(bench, order)

    monkeypatch.setattr(Bench, "measure", spying)
    with jax.default_device(jax.devices()[3]):
        jax.jit(functools.partial(tuning_executor(), Doubling()))(X)
    assert devices == {jax.devices()[3]}


def test_overlays_reach_the_kernels_that_a_candidate_calls():
    inner, outer = Doubling("tests.inner"), Doubling("tests.outer")
    plain = Executor(ConfigSelectorChain())
    seen = set()

    class Spy(Doubling):
        def run(self, x, *, cfg):
            seen.add(cfg.tag)
            return super().run(x, cfg=cfg)

    class Outer(Kernel[Work, jax.Array]):
        def run(self, x, *, cfg):
            return outer.run(plain(Spy("tests.inner"), x), cfg=cfg)

        def heuristic_cfg(self, inv):
            return Work(MIDDLE)

        def config_space(self, inv):
            return [Work(MIDDLE), Work(FAST)]

    key = plain.explain(inner, X).key
    with overlay_cache({key: Work(FAST, tag=7)}):
        tuning_executor()(Outer(), X)
    assert seen == {7}


class OwnGradient(Doubling):
    """Its gradient is a call of itself: whoever compares gradients meets the very call that is being tuned."""

    executor: Executor

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return (self.executor(self, cotangents[0]),)


@pytest.mark.parametrize("differentiated", [False, True])
def test_kernel_whose_gradient_calls_the_kernel_again_is_tuned_once(differentiated):
    events = []
    executor = tuning_executor(on_event=lambda name, **data: events.append(name))
    kernel = OwnGradient("own_gradient")
    kernel.executor = executor
    call = jax.jit(functools.partial(executor, kernel))
    call = jax.grad(lambda x: jnp.vdot(executor(kernel, x), X)) if differentiated else call
    assert jnp.array_equal(within(60, lambda: call(X)), 2 * X)
    assert events.count("tuned") == 1


class Noting:
    """A chooser that wants the data of each call once, and notes the shapes that it is shown."""

    def __init__(self):
        self.shown = {}

    def needs_inputs(self, inv, kernel):
        return kernel.op_id not in self.shown

    def choose(self, inv, kernel):
        self.shown.setdefault(kernel.op_id, [x.shape for x in inv.args])
        return kernel.heuristic_cfg(inv)


def test_kernel_that_another_one_calls_is_not_shown_the_others_data():
    executor = Executor(chooser := Noting())

    class Outer(Doubling):
        def run(self, x, y, *, cfg):
            return executor(Doubling("inner"), x[0]) + y

    executor(Outer("outer"), jnp.ones((2, 3)), jnp.ones(3))
    assert chooser.shown == {"outer": [(2, 3), (3,)], "inner": [(3,)]}


def test_sharded_arguments_of_an_eager_call_are_tuned_as_they_lie():
    for kind in (AxisType.Auto, AxisType.Explicit):
        x = jax.device_put(X, NamedSharding(mesh(kind), P("i")))
        np.testing.assert_allclose(tuning_executor()(Doubling(), x), 2 * X, rtol=1e-6)


def test_static_and_numpy_arguments_are_tuned():
    class Scaled(Doubling):
        def run(self, x, *, by, mode, cfg):
            assert mode == "times"
            return super().run(x, cfg=cfg) * by

    out = tuning_executor()(Scaled(), np.asarray(X), by=0.5, mode="times")
    np.testing.assert_allclose(out, X, rtol=1e-6)


# --- Data of abstract calls ---


def test_abstract_integers_without_examples_say_what_to_write():
    index = jnp.arange(4)
    executor = tuning_executor()
    with pytest.raises(TuningInputsError, match=r"argument \[1\] is int32\[4\].*\n.*def example_inputs"):
        jax.jit(functools.partial(executor, Gathering()))(X, index)
    # An eager call has its own.
    np.testing.assert_allclose(executor(Gathering(), X, index), 2 * X[index], rtol=1e-6)


class OnlyGuess(Kernel[Work, jax.Array]):
    """A kernel with one candidate, written as each of the ways allows."""

    def __init__(self, space=None, jit=True):
        super().__init__("only_guess")
        self.jit = jit
        if space is not None:
            self.config_space = lambda inv: space

    def run(self, x, *, cfg):
        return x * (2 if self.jit else round(float(x.max())) // round(float(x.max())) * 2)

    def heuristic_cfg(self, inv):
        return GUESS


GUESS = Work(FAST)
ONE = {
    "none": None,
    "list": [GUESS],
    "twice": [GUESS, Work(FAST)],
    "axes": {"loops": [FAST], "fault": [""], "tag": [0]},
    "empty": [],
}


@pytest.mark.parametrize("policy", ["on", "frozen"])
@pytest.mark.parametrize("space", ONE)
def test_call_that_cannot_be_measured_and_leaves_no_choice_gets_its_guess(space, policy):
    events = []
    on_event = lambda name, **data: events.append((name, data.get("tier")))
    executor = Executor(ConfigSelectorChain(autotune=policy, tuner=QUIET, on_event=on_event))
    n = jnp.arange(4)
    np.testing.assert_array_equal(jax.jit(lambda n: executor(OnlyGuess(ONE[space]), n))(n), 2 * n)
    np.testing.assert_array_equal(jax.jit(jax.vmap(lambda n: executor(OnlyGuess(ONE[space]), n)))(n), 2 * n)
    x = jnp.arange(3.0)
    for _ in range(2):
        np.testing.assert_array_equal(executor(OnlyGuess(ONE[space], jit=False), x), 2 * x)
    assert set(events) == {("select", "heuristic")}, "nothing was tuned, and nothing stored as if it had been"


class WithoutConfigs(Kernel):
    """It has nothing that could be tuned."""

    def run(self, x, *, cfg):
        assert cfg is None
        return 2 * x

    def heuristic_cfg(self, inv):
        return None


@pytest.mark.parametrize("policy", ["on", "frozen"])
def test_kernel_without_configs_runs_under_every_policy(policy):
    executor, x = Executor(ConfigSelectorChain(autotune=policy, tuner=QUIET)), jnp.arange(3.0)
    np.testing.assert_array_equal(executor(WithoutConfigs(), x), 2 * x)
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: executor(WithoutConfigs(), x).sum()))(x), 2.0)


def test_tuning_a_kernel_without_configs_is_an_error_that_says_so():
    with pytest.raises(TuningError, match="There are none, and the guess is None"):
        autotune(WithoutConfigs(), jnp.arange(3.0))


def test_call_that_can_be_measured_or_leaves_a_choice_is_no_exception():
    executor = Executor(ConfigSelectorChain(autotune="frozen"))
    with pytest.raises(ConfigNotFoundError):
        executor(OnlyGuess(), jnp.ones(3))
    with pytest.raises(TuningInputsError):
        jax.jit(lambda n: tuning_executor()(OnlyGuess([GUESS, Work(MIDDLE)]), n))(jnp.arange(3))


def test_abstract_integers_in_a_nested_keyword_are_named():
    class Nested(Doubling):
        def run(self, x, *, table, cfg):
            return super().run(x, cfg=cfg)

    with pytest.raises(TuningInputsError, match=r"\['table'\]\['pages'\] is int32\[3\]"):
        jax.jit(lambda x, t: tuning_executor()(Nested(), x, table={"pages": t}))(X, jnp.arange(3))


def test_example_inputs_serve_abstract_calls_only():
    index, executor = jnp.arange(4), tuning_executor()
    before = GatheringWithExamples.examples
    executor(GatheringWithExamples(), X, index)
    assert GatheringWithExamples.examples == before
    out = jax.jit(functools.partial(executor, GatheringWithExamples()))(X[:, :2], index)
    np.testing.assert_allclose(out, 2 * X[:4, :2], rtol=1e-6)
    assert GatheringWithExamples.examples == before + 1


@pytest.mark.parametrize("style", ["grad", "vmap of grad", *fully("jvp", "constant of a jit")])
def test_integers_that_are_known_are_used_beside_what_is_traced(style):
    index, executor = jnp.arange(4), tuning_executor()
    run = lambda x: executor(Gathering(), x, index).sum()
    got = {
        "grad": lambda: jax.grad(run)(X),
        "jvp": lambda: jax.jvp(run, (X,), (X,))[1],
        "vmap of grad": lambda: jax.vmap(jax.grad(run))(jnp.stack([X, X]))[1],
        "constant of a jit": lambda: jax.jit(jax.grad(run))(X),
    }[style]()
    plain = lambda x: (2 * x[index]).sum()
    want = jax.jvp(plain, (X,), (X,))[1] if style == "jvp" else jax.grad(plain)(X)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_compiling_has_data_for_the_backward_too():
    index, kernel = jnp.arange(4), GatheringBackward()
    with pytest.raises(TuningInputsError, match="compile it with the executor's `compile`"):
        jax.grad(lambda x: tuning_executor()(kernel, x, index).sum())(X)
    executor = tuning_executor()
    compiled = executor.compile(kernel, X, index)
    np.testing.assert_allclose(compiled(X, index), 2 * X[index], rtol=1e-6)
    slope = jax.grad(lambda x: executor(kernel, x, index).sum())(X)
    np.testing.assert_allclose(slope, jax.grad(lambda x: (2 * x[index]).sum())(X), rtol=1e-6)


def test_undeclared_communication_is_named():
    class Summing(Doubling):
        def run(self, x, *, cfg):
            return jax.lax.psum(x, "d")

    with pytest.raises(TuningError, match="collective = True"):
        jax.pmap(functools.partial(tuning_executor(), Summing()), axis_name="d")(X[:4])


def test_data_for_tuning_leaves_nothing_of_prepare_in_the_program(capfd):
    class Printing(Gathering):
        def prepare(self, x, index):
            jax.debug.print("prepared")
            return (x, index), {}

    index, executor = jnp.arange(4), tuning_executor()
    jitted = jax.jit(lambda x: executor(Printing(), x, index))
    np.testing.assert_allclose(jitted(X), 2 * X[index], rtol=1e-6)
    jax.effects_barrier()
    capfd.readouterr()
    jax.block_until_ready(jitted(X))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("prepared") == 1


# --- Shapes that are not known ---

DERIVED = {
    "call": lambda f: f,
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "vmap": jax.vmap,
    "vmap of grad": lambda f: jax.vmap(jax.grad(lambda x: f(x).sum())),
}


def symbolic(*rest):
    return jax.ShapeDtypeStruct((*jax.export.symbolic_shape("b"), *rest), jnp.float32)


@pytest.mark.parametrize("place", DERIVED)
def test_exported_call_of_unknown_size_takes_the_guess_and_says_so_once(place):
    executor, kernel = tuning_executor(), OwnBackward()
    f = jax.jit(DERIVED[place](lambda x: executor(kernel, x)))
    with pytest.warns(SymbolicCallWarning) as told:
        exported = [jax.export.export(f)(symbolic(size)) for size in (4, 4, 5)]
    ops = [str(warning.message).partition(":")[0] for warning in told]
    assert len(set(ops)) == len(ops)
    assert "(b, 4)" in str(told[0].message)
    x = X[:3, :4]
    np.testing.assert_allclose(exported[0].call(x), DERIVED[place](lambda x: 2 * x)(x), rtol=1e-6)


def test_call_of_unknown_size_is_served_what_was_put_for_it_and_never_tuned():
    executor, kernel = tuning_executor(), Doubling()
    inv = call(kernel, symbolic(4))
    assert executor.explain(kernel, symbolic(4)).tier == "heuristic"
    with pytest.raises(TuningInputsError, match="symbolic dimensions cannot be tuned"):
        QUIET.tune(inv, kernel)
    with policy_override(autotune="frozen"), pytest.raises(ConfigNotFoundError, match="symbolic dimensions cannot"):
        executor.choose_config(kernel, symbolic(4))
    executor.chooser.cache.put(*inv.key, Work(FAST, tag=7))
    assert executor.choose_config(kernel, symbolic(4)) == Work(FAST, tag=7)
