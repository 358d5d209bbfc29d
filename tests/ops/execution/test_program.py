"""The fast way of an eager call: each test calls one kernel object again and again, so that it is really taken."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import Executor, Kernel, overlay_cache, policy_override, set_default_executor
from ejkernel.ops.config.selection import ConfigNotFoundError
from ejkernel.ops.core.kernel import KernelDefinitionError
from ejkernel.ops.execution import program
from ejkernel.ops.utils.arguments import StaticArgumentError
from tests.support import Plain, Scale, new_executor

X = jnp.arange(1.0, 4.0)


class Shows(Kernel):
    """Its static value as an array: the type of the one is the dtype of the other."""

    def __init__(self):
        super().__init__("shows")
        self.traces = []

    def run(self, x, *args, cfg, held=None, other=None, **arrays):
        self.traces.append(held)
        value = held(2.0) if callable(held) else len(held) if isinstance(held, str) else held
        return jnp.asarray(value) * jnp.ones_like(value) if value is not None else x * cfg.factor

    def heuristic_cfg(self, inv):
        return Scale()


def same(found, want):
    found, want = np.asarray(found), np.asarray(want)
    return found.dtype == want.dtype and found.tobytes() == want.tobytes()


STATIC = [True, 1, 1.0, 0, False, 0.0, -0.0, 2.5, float("nan"), -1, 1 + 0j, complex(0.0, -0.0), complex(0.0, 0.0)]


@pytest.mark.parametrize("extra", [{}, {"other": 1}, {"bias": X}], ids=["alone", "two", "beside an array"])
def test_static_keywords_are_told_apart_by_type_and_value_each_time(extra):
    executor, kernel = new_executor(), Shows()
    for held in (*STATIC, *STATIC, *reversed(STATIC)):
        for _ in range(3):
            assert same(executor(kernel, X, held=held, **extra), jnp.asarray(held)), held
    # Beside arrays, a zero has the other values traced once more.
    assert len(kernel.traces) == len(STATIC) + 5 * ("bias" in extra)


@pytest.mark.parametrize("call", [lambda e, k: e(k, X, held=1 / 3 + 1), lambda e, k: k(X, held=1 / 3 + 1)])
def test_a_static_keyword_that_is_made_anew_at_each_call_is_traced_once(call):
    executor, kernel = new_executor(), Shows()
    for _ in range(4):
        call(executor, kernel)
    assert len(kernel.traces) == 1


def test_arrays_numbers_of_numpy_and_static_values_take_turns_under_one_name():
    executor, kernel = new_executor(), Shows()
    numbers = [np.float32(2), np.int8(2), np.bool_(True), jnp.float16(2), np.full(3, 2, np.int16), X]
    for held in (2, *numbers, 2.0, *numbers, 2, True):
        for _ in range(2):
            assert same(executor(kernel, X, held=held), jnp.asarray(held)), held
    assert {type(t) for t in kernel.traces if not isinstance(t, jax.core.Tracer)} == {int, float, bool}


def test_keywords_may_come_in_any_order_and_number():
    executor, kernel = new_executor(), Shows()
    for _ in range(2):
        assert same(executor(kernel, X, held=1, other=2), jnp.asarray(1))
        assert same(executor(kernel, X, other=1, held=2), jnp.asarray(2))
        assert same(executor(kernel, X, held=2), jnp.asarray(2))
        assert same(executor(kernel, X, other=2), X)
        assert same(executor(kernel, X), X)


def test_statics_by_position_and_by_keyword_take_turns():
    executor, kernel = new_executor(), Shows()
    for args in ((X,), (X, 2.0), (X,), (X, "text"), (X, X), (X, (1, X))):
        for held in (1, True, 1.0):
            for _ in range(2):
                assert same(executor(kernel, *args, held=held), jnp.asarray(held))


def test_functions_types_and_texts_are_static_keywords():
    executor, kernel = new_executor(), Shows()
    double, triple = (lambda x: 2 * x), (lambda x: 3 * x)
    for _ in range(3):
        for held, want in ((double, 4.0), (triple, 6.0), (int, 2), (float, 2.0), ("ab", 2), ("abc", 3), (abs, 2.0)):
            assert same(executor(kernel, X, held=held), jnp.asarray(want))
    assert len(kernel.traces) == 7


def test_an_unhashable_static_is_named_after_others_were_served():
    executor, kernel = new_executor(), Shows()
    executor(kernel, X, held=1), executor(kernel, X, held=1)
    with pytest.raises(StaticArgumentError, match="argument 'held' is a set"):
        executor(kernel, X, held={1})
    assert same(executor(kernel, X, held=1), jnp.asarray(1))


@pytest.mark.parametrize("error", [TypeError, ValueError, OverflowError, KeyError, AttributeError])
@pytest.mark.parametrize("kwargs", [{}, {"mode": "bad"}, {"mode": "bad", "bias": X}], ids=["none", "static", "mixed"])
def test_errors_of_a_kernel_with_static_keywords_arrive_unchanged_and_leave_nothing_behind(error, kwargs):
    class Fails(Plain):
        traces = 0

        def run(self, x, y, *, cfg, mode="good", bias=None):
            type(self).traces += 1
            if x.shape == (2,):
                raise error("from the kernel")
            return x

    executor, kernel = new_executor(), Fails()
    for _ in range(2):
        executor(kernel, X, X, **kwargs)
        with pytest.raises(error, match="from the kernel"):
            executor(kernel, X[:2], X, **kwargs)
    assert Fails.traces == 3


def test_tracers_are_keywords_of_a_kernel_that_was_called_eagerly_with_statics():
    executor, kernel = new_executor(), Shows()
    for _ in range(2):
        executor(kernel, X, held=2.0)
    found = jax.jit(lambda s: executor(kernel, X, held=s))(jnp.float16(3))
    assert same(found, jnp.float16(3))
    assert same(jax.vmap(lambda s: executor(kernel, X, held=s))(X), X)
    assert same(jax.jit(lambda: executor(kernel, X, held=2.0))(), jnp.asarray(2.0))


# --- What else tells calls apart ---


def test_equal_configs_of_other_types_are_told_apart_each_time():
    executor, kernel, numbers = new_executor(), Shows(), jnp.arange(3)
    one, real, flag = Scale(1), Scale(1.0), Scale(True)
    for _ in range(2):
        for cfg in (one, real, flag, one, Scale(1.0), Scale(1)):
            for _ in range(2):
                assert same(executor(kernel, numbers, cfg=cfg), numbers * cfg.factor)


def test_a_config_that_changes_is_another_config():
    @dataclass
    class Changing:
        factor: int

    class Kept(Shows):
        def heuristic_cfg(self, inv):
            return Changing(1)

    executor, kernel, cfg = new_executor(), Kept(), Changing(1)
    for factor in (1, 2, 2, 1):
        cfg.factor = factor
        assert same(executor(kernel, X, cfg=cfg), X * factor)


def test_overlays_entries_and_options_reach_a_call_that_is_repeated():
    executor, kernel = new_executor(), Shows()
    key = executor.explain(kernel, X, other=1).key
    for factor in (5, 6, 5):
        for _ in range(2):
            assert same(executor(kernel, X, other=1), X)
        with overlay_cache({key: Scale(factor)}):
            for _ in range(2):
                assert same(executor(kernel, X, other=1), X * factor)
    executor.chooser.cache.put(*key, Scale(7))
    assert same(executor(kernel, X, other=1), X * 7)
    with jax.enable_x64(True):
        for _ in range(2):
            assert executor(kernel, X, held=1).dtype == jnp.int64
    assert executor(kernel, X, held=1).dtype == jnp.int32


def test_policies_reach_a_call_that_is_repeated():
    executor, kernel = new_executor(), Shows()
    for _ in range(2):
        executor(kernel, X, other=1), executor(kernel, X, other=1)
        with policy_override(autotune="frozen"), pytest.raises(ConfigNotFoundError):
            executor(kernel, X, other=1)


@pytest.mark.parametrize("kwargs", [{}, {"other": 1}], ids=["position", "keyword"])
def test_executors_take_turns_with_one_kernel(kwargs):
    kernel, executors = Shows(), [new_executor(), new_executor()]
    key = executors[0].explain(kernel, X, **kwargs).key
    executors[1].chooser.cache.put(*key, Scale(3))
    for _ in range(3):
        for executor, factor in zip(executors, (1, 3), strict=True):
            assert same(executor(kernel, X, **kwargs), X * factor)
        for executor, factor in zip(executors, (1, 3), strict=True):
            set_default_executor(executor)
            assert same(kernel(X, **kwargs), X * factor)
    set_default_executor(None)
    assert same(kernel(X, **kwargs), X)


def test_a_kernel_that_is_changed_is_another_kernel_each_time():
    class Holds(Plain):
        def run(self, x, *, cfg, held=1):
            return x * self.gain * held

    executor, kernel = new_executor(), Holds()
    for gain in (1, 2, 2.0, [3], [4], 1):
        kernel.gain = gain if not isinstance(gain, list) else np.float32(gain[0])
        for _ in range(3):
            assert same(executor(kernel, X.astype(int), held=2), X.astype(int) * kernel.gain * 2)


def test_threads_with_other_static_values_do_not_meet():
    executor, kernel = new_executor(), Shows()
    start, values = threading.Barrier(8), [1, True, 1.0, 2, 2.5, 0.0, -0.0, 3]

    def work(held):
        start.wait()
        return all(same(executor(kernel, X, held=held), jnp.asarray(held)) for _ in range(200))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, values))


# --- Programs that are compiled as they are ---


class Ignores(Kernel[Scale, jax.Array]):
    def run(self, x, y, *, cfg, bias=None):
        return 2 * x

    def heuristic_cfg(self, inv):
        return Scale()


class IgnoresVjp(Ignores):
    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return 5 * cotangents[0], None


@pytest.mark.parametrize("cls", [Ignores, IgnoresVjp])
@pytest.mark.parametrize("kwargs", [{}, {"bias": X}], ids=["position", "keyword"])
def test_arguments_that_a_kernel_ignores_are_not_passed_on(cls, kwargs):
    executor, kernel = new_executor(), cls()
    assert same(executor(kernel, X, X[:2], **kwargs), 2 * X)
    jitted = kernel._ejkernel_programs.latest().way(kwargs)
    main = next(line for line in jitted.lower(X, X[:2], **kwargs).as_text().splitlines() if "@main" in line)
    assert main.count("%arg") == 1, main


def test_a_kernel_that_was_called_eagerly_is_differentiated_and_mapped_as_ever():
    executor, kernel = new_executor(), IgnoresVjp()
    call = lambda x: executor(kernel, x, X).sum()
    for _ in range(2):
        assert same(executor(kernel, X, X), 2 * X)
        assert same(jax.grad(call)(X), jnp.full(3, 5.0))
        assert same(jax.vmap(jax.grad(call))(jnp.stack([X, X])), jnp.full((2, 3), 5.0))
        assert same(jax.vmap(lambda x: executor(kernel, x, X))(jnp.stack([X, X])), jnp.stack([2 * X, 2 * X]))
        assert same(jax.jit(jax.grad(call))(X), jnp.full(3, 5.0))


def test_half_a_gradient_is_refused_by_an_eager_call_too():
    class Half(Plain):
        def vjp(self, residuals, out, dout, x, y, *, cfg):
            return dout, dout

    with pytest.raises(KernelDefinitionError, match="no fwd_with_residuals"):
        new_executor()(Half(), X, X)


def test_sharded_arguments_keep_their_sharding():
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("d",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.device_put(jnp.arange(4.0), jax.NamedSharding(mesh, jax.P("d")))
    executor, kernel = new_executor(), Ignores()
    for x in (X, sharded, X, sharded, jax.device_put(X, devices[1])):
        for _ in range(2):
            out = executor(kernel, x, x)
            assert out.sharding.device_set == x.sharding.device_set
            assert same(out, 2 * np.asarray(x))


def test_a_deleted_argument_is_refused():
    executor, kernel = new_executor(), Plain()
    x = X + 1
    executor(kernel, x, x)
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        executor(kernel, x, x)


# --- Calls by position, which leave out a frame ---


def direct(executor):
    """Calls of the kernel itself, with `executor` as the default."""
    set_default_executor(executor)
    return lambda kernel, *args, **kwargs: kernel(*args, **kwargs)


@pytest.fixture(params=[lambda executor: executor, direct], ids=["executor", "kernel"])
def by_position(request):
    yield request.param
    set_default_executor(None)


def test_static_values_arrays_and_configs_by_position_take_turns(by_position):
    class Takes(Shows):
        def run(self, x, held=None, *, cfg):
            return super().run(x, cfg=cfg, held=held)

    call, kernel = by_position(new_executor()), Takes()
    one, real = Scale(1), Scale(1.0)
    values = [(x,) for x in (True, 1, X, 1.0, 0.0, -0.0, np.float16(2), "text", jnp.int8(3))]
    for given in ((X,), *values, (), *reversed(values), ()):
        for _ in range(2):
            want = len("text") if given == ("text",) else given[0] if given else X
            assert same(call(kernel, X, *given), jnp.asarray(want)), given
    for cfg in (one, real, one, Scale(1.0), None):
        for _ in range(2):
            assert same(call(kernel, jnp.arange(3), cfg=cfg), jnp.arange(3) * (1 if cfg is None else cfg.factor))


@pytest.mark.parametrize("error", [TypeError, ValueError, AttributeError, KeyError])
def test_errors_of_a_call_by_position_arrive_unchanged_and_once(by_position, error):
    class Fails(Plain):
        traces = 0

        def run(self, x, y, *, cfg):
            type(self).traces += 1
            if x.shape == (2,):
                raise error("from the kernel")
            return x

    call, kernel = by_position(new_executor()), Fails()
    for _ in range(2):
        assert same(call(kernel, X, X), X)
        with pytest.raises(error, match="from the kernel") as caught:
            call(kernel, X[:2], X)
        assert caught.value.__context__ is None
    assert Fails.traces == 3


def test_a_call_by_position_is_traced_tuned_and_changed_like_any_other(by_position):
    executor, kernel = new_executor(), IgnoresVjp()
    call = by_position(executor)
    total = lambda x: call(kernel, x, X).sum()
    key = executor.explain(kernel, X, X).key
    assert same(call(kernel, X, X), 2 * X)
    assert same(jax.grad(total)(X), jnp.full(3, 5.0))
    assert same(jax.vmap(jax.grad(total))(jnp.stack([X, X])), jnp.full((2, 3), 5.0))
    with policy_override(autotune="frozen"), pytest.raises(ConfigNotFoundError):
        call(kernel, X, X)
    executor.chooser.cache.put(*key, Scale(4))
    with policy_override(autotune="frozen"):
        assert same(call(kernel, X, X), 2 * X)
    kernel.jit = False
    seen = []
    kernel.run = lambda x, y, *, cfg: seen.append(x) or x
    assert same(call(kernel, X, X), X)
    assert not isinstance(seen[0], jax.core.Tracer)


def test_a_call_by_position_that_measures_gets_its_data(by_position):
    class Measures:
        data = None

        def needs_inputs(self, inv, kernel):
            return inv.args[0].shape == (2,)

        def choose(self, inv, kernel):
            self.data = inv.args[0]
            return Scale()

    chooser, kernel = Measures(), Plain()
    call = by_position(Executor(chooser))
    for x in (X, X[:2]):
        call(kernel, x, x)
    assert same(chooser.data, X[:2])


# --- Memory ---


def test_static_values_that_never_come_again_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(program, "MAX_VARIANTS", 8)
    executor, kernel = new_executor(), Shows()
    for n in range(20):
        assert same(executor(kernel, X, held=n), jnp.asarray(n))
        jax.eval_shape(lambda: executor(kernel, X, **{f"k{n}": X}))  # noqa: B023
    found = [p for table in (*executor._shared.values(), *executor._own.values()) for p in table.values()]
    for held in found:
        assert max(len(getattr(held, name)) for name in ("ways", "_named", "_scalars", "_bound", "_static_names")) <= 8


@pytest.mark.parametrize("how", ["eager", "jit", "static"])
def test_shapes_that_never_come_again_do_not_fill_the_memory(monkeypatch, how):
    monkeypatch.setattr(program, "MAX_TRACES", 8)
    executor, kernel = new_executor(), Plain()
    made = []
    monkeypatch.setattr(program, "_named", lambda fn, name, named=program._named: made.append(fn) or named(fn, name))

    def call(n):
        x = np.ones(n, np.float32)
        if how == "jit":
            return jax.eval_shape(lambda x: executor(kernel, x, x), x)
        return executor(kernel, x, x) if how == "eager" else executor(kernel, x, x, held=n % 2)

    class Held(Plain):
        def run(self, x, y, *, cfg, held):
            return x

    kernel = Held() if how == "static" else kernel
    for n in range(1, 40):
        call(n)
    alive = [weakref.ref(fn) for fn in made]
    made.clear()
    jax.block_until_ready(call(40))
    gc.collect()
    assert len(alive) > 4
    assert sum(ref() is not None for ref in alive) <= 3
    assert call(3).shape == (3,)


def test_configs_that_equal_only_themselves_do_not_fill_the_memory(monkeypatch):
    @dataclass(frozen=True, eq=False)
    class Own:
        factor: int

    class Takes(Shows):
        def heuristic_cfg(self, inv):
            return Own(1)

    monkeypatch.setattr(program, "MAX_VARIANTS", 8)
    executor, kernel = new_executor(), Takes()
    for _ in range(50):
        assert same(executor(kernel, X, cfg=Own(2)), 2 * X)
    assert len(executor._table(kernel)) <= 8
