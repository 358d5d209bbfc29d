"""Arguments of every kind, threads, opting out of jit, compile."""

import enum
import functools
import itertools
import threading
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import Executor, Kernel, find_labels_in_lowered
from ejkernel.ops.core.kernel import KernelDefinitionError
from ejkernel.ops.utils.arguments import StaticArgumentError
from tests.support import Plain, Scale, new_executor

X = jnp.arange(6.0).reshape(2, 3)


class Mode(enum.Enum):
    FAST = 1
    EXACT = 2


Pair = namedtuple("Pair", "a b")

CASES = {
    "arrays": ((X, X), {}),
    "numpy": ((np.ones(3), np.float32(2), np.arange(3)), {}),
    "none": ((X, None), {"y": None}),
    "scalars": ((X, 1, 2.5, True, 1j), {"flag": False, "n": 3}),
    "strings": ((X, "mode"), {"name": "x"}),
    "bytes": ((X, b"raw"), {}),
    "callables": ((X, jnp.sin), {"f": functools.partial(jnp.sum, axis=0), "g": len}),
    "enums and dtypes": ((X, Mode.FAST, jnp.bfloat16, np.dtype("int8"), np.float16), {"p": jax.lax.Precision.HIGH}),
    "keyword arrays": ((X,), {"bias": X, "scale": 2.0}),
    "pytrees": (({"a": X, "b": [X, (X, None)]},), {"tree": Pair(X, X)}),
    "pytrees with statics": (({"a": X, "mode": "fast", "n": 2}, [X, 1]), {"tree": OrderedDict(z=X, a=0.5)}),
    "empty": (((), {}, []), {}),
    "no arrays": ((1, "a"), {}),
    "key": ((jax.random.key(0).reshape(1),), {}),
    "refs": ((X, jax.new_ref(X)), {"options": {"mode": "x"}}),
    "scalar arrays": ((jnp.float32(1), jnp.asarray(True), jnp.asarray(2.0)), {}),
}


def strip(tree):
    arrays = (jax.Array, np.ndarray, np.generic, jax.Ref)
    return jax.tree.map(lambda x: "array" if isinstance(x, arrays) else x, tree)


class Echo(Kernel[Scale, jax.Array]):
    """Remembers how its arguments looked from inside."""

    def __init__(self):
        super().__init__("echo")

    def run(self, *args, cfg, **kwargs):
        Echo.last = strip((args, kwargs))
        return jnp.zeros(())

    def heuristic_cfg(self, inv):
        return Scale()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("how", ["eager", "jit", "cfg", "compile", "choose", "no jit"])
def test_arguments_arrive_as_they_were_given(name, how):
    args, kwargs = CASES[name]
    executor, kernel = new_executor(), Echo()
    if how == "eager":
        executor(kernel, *args, **kwargs)
        executor(kernel, *args, **kwargs)
    elif how == "jit":
        jax.jit(lambda: executor(kernel, *args, **kwargs))()
    elif how == "cfg":
        executor(kernel, *args, cfg=Scale(2), **kwargs)
    elif how == "compile":
        executor.compile(kernel, *args, **kwargs)(*args, **kwargs)
    elif how == "no jit":
        kernel.jit = False
        executor(kernel, *args, **kwargs)
    else:
        assert executor.choose_config(kernel, *args, **kwargs) == Scale()
        return
    assert Echo.last == strip((args, kwargs))
    for got, want in zip(jax.tree.leaves(Echo.last), jax.tree.leaves(strip((args, kwargs))), strict=True):
        assert type(got) is type(want)


class Scaled(Kernel[Scale, jax.Array]):
    traces = 0

    def run(self, x, scale=1.0, *, cfg, offset=0.0):
        type(self).traces += 1
        return x * scale + offset

    def heuristic_cfg(self, inv):
        return Scale()


def test_static_values_are_told_apart():
    executor, kernel = new_executor(), Scaled()
    for scale in (1, 1.0, True, 2, 2.0, 0.0, -0.0, 2):
        got = executor(kernel, X, scale)
        np.testing.assert_array_equal(got, X * scale)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(X * scale))


@dataclass(frozen=True)
class Held:
    value: object


@dataclass(frozen=True)
class Noted:
    value: object
    note: object = field(default=None, compare=False)


class ByHand:
    """Compares and hashes like a number."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, ByHand) and self.value == other.value

    def __hash__(self):
        return hash(self.value)


class Slotted(ByHand):
    __slots__ = ()


class Shows(Plain):
    """The static value it was traced with, as an array."""

    traces = 0

    def run(self, x, held, *, cfg, scale=None):
        type(self).traces += 1
        while not isinstance(held, (bool, int, float, complex)):
            held = next(iter(held)) if isinstance(held, (tuple, frozenset)) else held.value
        return x.astype(type(held)) * held if isinstance(held, bool) else jnp.asarray(held)


EQUAL = [(1, 1.0), (1.0, True), (0.0, -0.0), (complex(-1, 0.0), complex(-1, -0.0)), (2, 2 + 0j)]
WRAPS = {
    "itself": lambda x: x,
    "dataclass": Held,
    "dataclass of a tuple": lambda x: Held((x, "text")),
    "dataclass of a dataclass": lambda x: Held(Held(x)),
    "frozenset": lambda x: frozenset([x]),
    "set in a dataclass": lambda x: Held(frozenset([x])),
    "class": ByHand,
    "class in a class": lambda x: ByHand(ByHand(x)),
    "slots": Slotted,
    "tree": lambda x: (Held(x),),
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("where", ["eager", "jit"])
def test_static_values_that_compare_equal_do_not_share_a_program(wrap, where):
    executor, kernel = new_executor(), Shows()
    call = lambda held: executor(kernel, X, held)
    for pair in EQUAL:
        held = [wrap(value) for value in (*pair, *pair)]
        assert held[0] == held[1]
        got = [call(h) for h in held] if where == "eager" else jax.jit(lambda: [call(h) for h in held])()  # noqa: B023
        for found, value in zip(got, (*pair, *pair), strict=True):
            want = kernel.run(X, value, cfg=Scale())
            assert found.dtype == want.dtype
            assert np.asarray(found).tobytes() == np.asarray(want).tobytes()


def test_keywords_that_compare_equal_do_not_share_a_program():
    executor, kernel = new_executor(), Shows()
    for value in itertools.chain(*((*pair, *pair) for pair in EQUAL)):
        found, want = executor(kernel, X, held=value), kernel.run(X, value, cfg=Scale())
        assert found.dtype == want.dtype
        assert np.asarray(found).tobytes() == np.asarray(want).tobytes()


class ShowsConfig(Plain):
    """The factor of its config, as an array."""

    def run(self, x, *, cfg):
        return jnp.asarray(cfg.factor)


def test_configs_that_compare_equal_do_not_share_a_program():
    executor, kernel = new_executor(), ShowsConfig()
    cfgs = [Scale(2), Scale(2.0), Scale(2)]
    # The very same objects again: of these the executor remembers the program.
    for cfg in (*cfgs, *cfgs, *reversed(cfgs)):
        assert executor(kernel, X, cfg=cfg).dtype == jnp.asarray(cfg.factor).dtype


@dataclass(eq=False)
class Loose:
    """A config that hashes by identity and may change."""

    factor: int = 1


class TakesLoose(Kernel[Loose, jax.Array]):
    def run(self, x, *, cfg):
        return x * cfg.factor

    def heuristic_cfg(self, inv):
        return Loose()


def test_config_that_was_changed_since_counts_as_it_is():
    executor, kernel, cfg = new_executor(), TakesLoose(name="loose"), Loose(2)
    for factor in (2, 3, 2):
        cfg.factor = factor
        np.testing.assert_array_equal(executor(kernel, X, cfg=cfg), factor * X)


class Gained(Plain):
    def __init__(self, gain):
        super().__init__("gained")
        self.gain = gain

    def run(self, x, *, cfg):
        return jnp.asarray(self.gain)


def test_kernels_whose_attributes_compare_equal_do_not_share_a_program():
    executor = new_executor()
    for gain in (2, 2.0, True, 1, 1.0, 2):
        assert executor(Gained(gain), X).dtype == jnp.asarray(gain).dtype


def test_static_values_that_are_the_same_share_a_program():
    executor, kernel = new_executor(), Shows()
    Shows.traces = 0
    for _ in range(3):
        executor(kernel, X, Held((1.5, Held(-0.0))))
        executor(kernel, X, ByHand(2.5))
        executor(kernel, X, Noted(3, note=[1]))
    executor(kernel, X, Noted(3, note=object()))
    assert Shows.traces == 3


def test_objects_that_hold_each_other_are_static_values():
    one, two = ByHand(1), ByHand(1)
    one.other, two.other = two, one
    executor = new_executor()
    np.testing.assert_array_equal(executor(Shows(), X, one), executor(Shows(), X, two))


def test_same_static_values_are_traced_once():
    Scaled.traces = 0
    executor, kernel = new_executor(), Scaled()
    for _ in range(3):
        executor(kernel, X, float("nan"), offset=0.5)
        executor(kernel, X, 2.0, offset=-0.0)
    assert Scaled.traces == 2


def test_arrays_and_static_scalars_take_turns():
    executor, kernel = new_executor(), Scaled()
    for scale in (X, 2.0, jnp.float32(3), X, 2.0):
        np.testing.assert_array_equal(executor(kernel, X, scale), X * scale)


@pytest.mark.parametrize("place", [lambda n: n, lambda n: (n,), lambda n: {"n": [n]}], ids=["itself", "tuple", "tree"])
@pytest.mark.parametrize("n", [2**31, -(2**63), 2**70], ids=str)
def test_static_integers_may_be_larger_than_any_array_holds(n, place):
    class Counts(Plain):
        def run(self, x, held, *, cfg):
            (n,) = jax.tree.leaves(held)
            return x + n % 7

    executor, kernel = new_executor(), Counts()
    np.testing.assert_array_equal(executor(kernel, X, place(n)), X + n % 7)
    np.testing.assert_array_equal(executor.compile(kernel, X, place(n))(X, place(n)), X + n % 7)


def test_weakly_typed_tracers_are_arrays():
    executor, kernel = new_executor(), Scaled()
    got = jax.lax.fori_loop(0, 3, lambda i, x: executor(kernel, x, i + 1.0), X)
    np.testing.assert_array_equal(got, X * 6)
    np.testing.assert_array_equal(jax.jit(lambda s: executor(kernel, X, s))(2.0), X * 2)


@pytest.mark.parametrize(
    ("args", "kwargs", "name"),
    [
        ((X, {1, 2}), {}, "argument 1 is a set"),
        ((X,), {"opts": bytearray(b"x")}, "argument 'opts' is a bytearray"),
        ((X, {"a": [{3}]}), {}, r"argument 1\['a'\]\[0\] is a set"),
    ],
)
def test_unhashable_statics_are_named(args, kwargs, name):
    with pytest.raises(StaticArgumentError, match=f"echo: {name}, which is neither an array nor hashable"):
        new_executor()(Echo(), *args, **kwargs)


class TypeErrorInside(Kernel):
    def run(self, x, *, cfg):
        raise TypeError("from the kernel")

    def heuristic_cfg(self, inv):
        return None


def test_errors_of_the_kernel_arrive_unchanged():
    with pytest.raises(TypeError, match="from the kernel"):
        new_executor()(TypeErrorInside(), X)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'y'"):
        new_executor()(Plain(), X)


def test_missing_and_unknown_arguments_are_errors_of_the_kernels_signature():
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        new_executor()(Scaled(), X, colour="red")


def test_config_may_be_asked_for_with_shapes_only():
    executor, shape = new_executor(), jax.ShapeDtypeStruct((2, 3), jnp.float32)
    assert executor.choose_config(Plain(), shape, shape) == Scale(1)
    assert executor.explain(Plain(), shape, shape).key == executor.explain(Plain(), X, X).key
    compiled = executor.compile(Plain(), shape, shape)
    np.testing.assert_allclose(compiled(X, X), jnp.sin(X) * X, rtol=1e-6)


def test_asking_executes_nothing():
    class Explosive(Plain):
        def run(self, x, y, *, cfg):
            raise AssertionError("was run")

    executor = new_executor()
    assert executor.choose_config(Explosive(), X, X) == Scale(1)
    assert executor.explain(Explosive(), X, X).cfg == Scale(1)


@pytest.mark.parametrize("name", ["arrays", "scalars", "pytrees with statics"])
def test_compiled_call_compiles_nothing_when_it_is_called(caplog, name):
    args, kwargs = CASES[name]
    compiled = new_executor().compile(Echo(), *args, **kwargs)
    with jax.log_compiles():
        compiled(*args, **kwargs)
        assert not [r for r in caplog.records if "Compiling" in r.getMessage()]
        compiled(jnp.ones((7,)))
        assert [r for r in caplog.records if "Compiling" in r.getMessage()]


@pytest.mark.parametrize("args", [(X, X), (X, 2.0), (X, Held(3))], ids=["arrays", "scalar", "object"])
def test_compiled_call_is_a_jitted_function(args):
    class Times(Plain):
        def run(self, x, held, *, cfg):
            return x * getattr(held, "value", held)

    executor, kernel = new_executor(), Times()
    compiled = executor.compile(kernel, *args)
    assert isinstance(compiled, jax.stages.Wrapped)
    (found,) = find_labels_in_lowered(compiled.lower(*args))
    assert executor.explain(kernel, *args).key[2] in found
    assert compiled.trace(*args).lower().compile().as_text()
    want = executor(kernel, *args)
    np.testing.assert_array_equal(compiled(*args), want)
    np.testing.assert_array_equal(jax.jit(lambda x: compiled(x, *args[1:]))(args[0]), want)


def test_compiled_call_of_a_kernel_without_jit_can_be_lowered():
    executor = new_executor()
    compiled = executor.compile(type("NoJit", (Plain,), {"jit": False})("nojit"), X, X)
    assert len(find_labels_in_lowered(compiled.lower(X, X))) == 1
    np.testing.assert_allclose(compiled(X, X), jnp.sin(X) * X, rtol=1e-6)


def test_executor_tells_its_prefix():
    assert new_executor().stamp_prefix == "ejkernel_ops"
    assert Executor(stamp_prefix="mine").stamp_prefix == "mine"


def test_compiled_call_keeps_its_config():
    executor, kernel = new_executor(), Plain()
    compiled = executor.compile(kernel, X, X)
    executor.chooser.cache.put(*executor.explain(kernel, X, X).key, Scale(2))
    np.testing.assert_allclose(compiled(X, X), jnp.sin(X) * X, rtol=1e-6)
    np.testing.assert_allclose(executor(kernel, X, X), 2 * jnp.sin(X) * X, rtol=1e-6)


def test_kernel_without_jit_sees_values():
    class Eager(Kernel):
        jit = False

        def run(self, x, *, cfg):
            return x * float(x.sum())

        def heuristic_cfg(self, inv):
            return None

    np.testing.assert_array_equal(new_executor()(Eager(), X), X * 15)


def test_kernel_may_call_other_kernels():
    executor = new_executor()

    class Outer(Plain):
        def run(self, x, y, *, cfg):
            return executor(Scaled(), executor(Plain("inner"), x, y), 2.0)

    np.testing.assert_allclose(executor(Outer("outer"), X, X), 2 * jnp.sin(X) * X, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(lambda x: executor(Outer("outer"), x, x))(X), 2 * jnp.sin(X) * X, rtol=1e-6)


def test_one_executor_serves_many_threads_at_once():
    executor, kernels = new_executor(), [Plain("a"), Plain("b")]
    failures, start = [], threading.Barrier(8)

    def work(seed):
        start.wait()
        for i in range(25):
            kernel = kernels[(seed + i) % 2]
            x = jnp.full((1 + i % 5,), float(seed))
            y = x + 1
            got = executor(kernel, x, y) if i % 3 else jax.jit(lambda x, y, k=kernel: executor(k, x, y))(x, y)
            if not np.allclose(got, jnp.sin(x) * y):
                failures.append((seed, i))
            if i == 10:
                executor.chooser.cache.put(*executor.explain(kernel, x, y).key, Scale(1))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_program_has_the_kernels_name():
    executor = new_executor()
    text = jax.jit(lambda x: executor(Plain("my kernel"), x, x)).lower(X).as_text()
    assert "@my_kernel" in text


@pytest.mark.parametrize("ask", ["explain", "choose_config", "compile", "__call__"])
def test_a_class_in_place_of_a_kernel_is_told_apart(ask):
    with pytest.raises(KernelDefinitionError, match=r"expected a Kernel instance, got .*Plain.*Write Plain\(\)"):
        getattr(new_executor(), ask)(Plain, 1.0, 2.0)
