import copy
import functools
import gc
import pickle
import weakref
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import Invocation, Kernel, default_key_builder_with_sharding, registry
from ejkernel.ops.config.asking import candidates
from ejkernel.ops.core.kernel import KernelDefinitionError
from tests.support import Plain, Scale, new_executor

X = jnp.ones((2, 3))


class Bare(Kernel[Scale, jax.Array]):
    def run(self, x, *, cfg):
        return x * cfg.factor

    def heuristic_cfg(self, inv):
        return Scale(1)


class Forgetful(Bare):
    def __init__(self):
        """Does not call super().__init__()."""


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        (Bare(name="a"), "a"),
        (Bare("a"), "a"),
        (Bare(op_id="a"), "a"),
        (Bare(), f"{__name__}.Bare"),
        (Forgetful(), f"{__name__}.Forgetful"),
    ],
)
def test_name_and_op_id_are_one_string(kernel, name):
    assert kernel.name == kernel.op_id == name
    np.testing.assert_array_equal(new_executor()(kernel, X), X)


def test_two_names_are_refused():
    with pytest.raises(KernelDefinitionError, match="name='a' and op_id='b'"):
        Bare("a", op_id="b")


def test_config_space_and_candidate_cfgs_answer_for_each_other():
    class Space(Bare):
        def config_space(self, inv):
            return [Scale(1), Scale(2)]

    class Candidates(Bare):
        def candidate_cfgs(self, inv):
            return [Scale(3)]

    inv = Invocation(kernel=Space(), args=(X,))
    assert Space().candidate_cfgs(inv) == [Scale(1), Scale(2)]
    assert Candidates().config_space(inv) == [Scale(3)]
    assert Bare().config_space(inv) == Bare().candidate_cfgs(inv) == [Scale(1)]


def test_config_type_comes_from_the_type_argument():
    assert Plain().cfg_type is Scale
    assert Kernel("k").cfg_type is None


def test_missing_heuristic_names_the_class():
    class Nothing(Kernel):
        def run(self, x, *, cfg):
            return x

    with pytest.raises(KernelDefinitionError, match="Nothing must define heuristic_cfg"):
        new_executor()(Nothing(), X)


@pytest.mark.parametrize("guess", [None, Scale], ids=["no return", "the class itself"])
def test_guess_that_is_no_config_names_what_to_return(guess):
    class Careless(Kernel[Scale, jax.Array]):
        def run(self, x, *, cfg):
            return cfg.factor * x

        def heuristic_cfg(self, inv):
            return guess

    with pytest.raises(KernelDefinitionError, match=r"heuristic_cfg of .*Careless must return a .*Scale, got"):
        new_executor()(Careless(), X)


@pytest.mark.parametrize("name", [3, "", b"k", ("k",)], ids=repr)
def test_name_that_is_no_text_is_refused(name):
    with pytest.raises(KernelDefinitionError, match="Bare: name must be a text that is not empty, or None"):
        Bare(name)
    with pytest.raises(KernelDefinitionError, match="Bare: name must be a text that is not empty, or None"):
        Bare(op_id=name)


def test_missing_run_names_what_could_be_written():
    class Nothing(Kernel):
        def heuristic_cfg(self, inv):
            return None

    with pytest.raises(KernelDefinitionError, match="implements none of run_xla, run"):
        new_executor()(Nothing(), X)


def test_something_that_is_no_kernel_is_refused():
    with pytest.raises(KernelDefinitionError, match="expected a Kernel instance, got 3"):
        new_executor()(3, X)
    with pytest.raises(KernelDefinitionError, match="Bare"):
        new_executor()(Bare, X)


class Counted(Bare):
    traces = 0

    def __init__(self, power):
        super().__init__()
        self.power = power

    def run(self, x, *, cfg):
        type(self).traces += 1
        return x**self.power


def test_equal_kernels_share_programs_and_different_ones_do_not():
    executor = new_executor()
    Counted.traces = 0
    for _ in range(3):
        np.testing.assert_array_equal(executor(Counted(2), X * 3), X * 9)
    assert Counted.traces == 1
    np.testing.assert_array_equal(executor(Counted(3), X * 3), X * 27)
    np.testing.assert_array_equal(executor(Counted(2.0), X * 3), X * 9)
    assert Counted.traces == 3


def test_kernels_with_attributes_that_are_not_simple_are_themselves_alone():
    executor = new_executor()
    one, two = Counted([2]), Counted([3])
    one.run = lambda x, *, cfg: x ** one.power[0]
    two.run = lambda x, *, cfg: x ** two.power[0]
    np.testing.assert_array_equal(executor(one, X * 3), X * 9)
    np.testing.assert_array_equal(executor(two, X * 3), X * 27)


def test_assigning_an_attribute_makes_another_kernel():
    executor, kernel = new_executor(), Counted(2)
    np.testing.assert_array_equal(executor(kernel, X * 3), X * 9)
    kernel.power = 3
    np.testing.assert_array_equal(executor(kernel, X * 3), X * 27)
    # One that still is what the first was shares its programs, and is not confused by what became of the first.
    other = Counted(2)
    np.testing.assert_array_equal(executor(other, X * 3), X * 9)
    np.testing.assert_array_equal(executor(other, jnp.full(5, 3.0)), jnp.full(5, 9.0))
    kernel.power = [1]
    kernel.run = lambda x, *, cfg: x + kernel.power[0]
    np.testing.assert_array_equal(executor(kernel, X), X + 1)


@pytest.mark.parametrize("extra", [[1], jnp.sin, lambda x: x], ids=["list", "function", "lambda"])
def test_assigning_an_attribute_counts_beside_attributes_that_are_not_simple(extra):
    executor, kernel = new_executor(), Counted(2)
    kernel.extra = extra
    np.testing.assert_array_equal(executor(kernel, X * 3), X * 9)
    kernel.power = 3
    np.testing.assert_array_equal(executor(kernel, X * 3), X * 27)


def test_deleting_an_attribute_makes_another_kernel():
    class Default(Counted):
        power = 3

    executor, kernel = new_executor(), Default(2)
    np.testing.assert_array_equal(executor(kernel, X * 3), X * 9)
    del kernel.power
    np.testing.assert_array_equal(executor(kernel, X * 3), X * 27)


def test_kernel_may_be_a_dataclass_without_a_hash():
    @dataclass
    class Unhashable(Bare):
        power: list

        def run(self, x, *, cfg):
            return x ** self.power[0]

    executor = new_executor()
    np.testing.assert_array_equal(executor(Unhashable([2]), X * 3), X * 9)
    np.testing.assert_array_equal(executor(Unhashable([3]), X * 3), X * 27)


def test_config_that_changed_counts_as_it_is_now():
    class Mutable:
        factor = 2

    class Typed(Bare):
        def heuristic_cfg(self, inv):
            return Mutable()

    executor, cfg = new_executor(), Mutable()
    np.testing.assert_array_equal(executor(Typed(), X, cfg=cfg), 2 * X)
    cfg.factor = 9
    np.testing.assert_array_equal(executor(Typed(), X, cfg=cfg), 9 * X)


def test_kernel_may_take_notes_on_itself_while_it_is_traced():
    class Noting(Bare):
        def __init__(self):
            super().__init__()
            self.traces = 0

        def run(self, x, *, cfg):
            self.traces += 1
            return x

    executor, kernel = new_executor(), Noting()
    for shape in ((2,), (2,), (3,), (3,), (2,)):
        executor(kernel, jnp.ones(shape))
    assert kernel.traces == 2


def test_cached_properties_are_no_change():
    class Cached(Counted):
        @functools.cached_property
        def exponent(self):
            return self.power

        def run(self, x, *, cfg):
            type(self).traces += 1
            return x**self.exponent

    executor = new_executor()
    Cached.traces = 0
    for shape in ((2,), (3,)):
        for _ in range(2):
            np.testing.assert_array_equal(executor(Cached(2), jnp.full(shape, 3.0)), jnp.full(shape, 9.0))
    assert Cached.traces == 2


@dataclass(frozen=True, slots=True)
class Slotted(Bare):
    power: float

    def run(self, x, *, cfg):
        return x**self.power


@dataclass(frozen=True)
class Frozen(Bare):
    power: float

    def run(self, x, *, cfg):
        return x**self.power


@pytest.mark.parametrize("cls", [Slotted, Frozen])
def test_kernels_may_be_dataclasses(cls):
    executor = new_executor()
    np.testing.assert_array_equal(executor(cls(2), X * 3), X * 9)
    np.testing.assert_array_equal(executor(cls(3), X * 3), X * 27)
    again = copy.copy(cls(3))
    np.testing.assert_array_equal(executor(again, X * 3), X * 27)


def test_kernels_and_executors_do_not_keep_each_other_alive():
    kernel = Counted(2)
    executors = [new_executor() for _ in range(3)]
    for executor in executors:
        executor(kernel, X)
    alive = [weakref.ref(executor) for executor in executors]
    del executors, executor
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3
    np.testing.assert_array_equal(new_executor()(kernel, X * 3), X * 9)
    executor, other = new_executor(), Counted([2])
    other.run = lambda x, *, cfg: x
    executor(other, X)
    ref = weakref.ref(other)
    registry.clear()
    del other
    gc.collect()
    assert ref() is None


def test_explicit_configs_are_told_apart_by_the_types_of_their_fields():
    class Typed(Bare):
        def run(self, x, *, cfg):
            return x * cfg.factor

    executor, ints = new_executor(), jnp.arange(3)
    for factor in (1, 1.0, True, 1):
        got = executor(Typed(), ints, cfg=Scale(factor))
        assert got.dtype == (ints * factor).dtype


def test_explicit_config_counts_as_it_was_given():
    class AnyConfig(Kernel):
        def run(self, x, *, cfg):
            return x * cfg["factor"]

        def heuristic_cfg(self, inv):
            return {"factor": 1}

    executor, cfg = new_executor(), {"factor": 2}
    np.testing.assert_array_equal(executor(AnyConfig(), X, cfg=cfg), 2 * X)
    cfg["factor"] = 3
    np.testing.assert_array_equal(executor(AnyConfig(), X, cfg=cfg), 3 * X)
    np.testing.assert_array_equal(executor(AnyConfig(), jnp.ones(5), cfg={"factor": 2}), 2 * jnp.ones(5))


NAMES = ["method", "attempt", "fixed", "first", "self", "args", "kwargs", "kernel", "inv", "key", "call"]


@pytest.mark.parametrize("value", ["static", 2, jnp.ones(2)], ids=["text", "scalar", "array"])
@pytest.mark.parametrize("name", NAMES)
def test_keyword_argument_of_any_name_and_kind_arrives(name, value):
    class Keyword(Bare):
        def run(*arguments, cfg, **kwargs):
            assert list(kwargs) == [name]
            return arguments[1]

        def prepare(*arguments, **kwargs):
            return arguments[1:], kwargs

    executor, x = new_executor(), jnp.ones(3)
    for _ in range(2):
        np.testing.assert_array_equal(executor(Keyword("keyword"), x, **{name: value}), x)


@pytest.mark.parametrize("name", ["method", "attempt", "fixed", "first", "args", "kernel", "inv", "key"])
def test_keyword_arguments_may_have_any_name(name):
    class Keyword(Bare):
        def run(self, x, *, cfg, **kwargs):
            assert kwargs == {name: "static"}
            return x

        def fwd_with_residuals(self, x, *, cfg, **kwargs):
            return self.run(x, cfg=cfg, **kwargs), None

        def vjp(self, residuals, out, dout, x, *, cfg, **kwargs):
            assert kwargs == {name: "static"}
            return (3 * dout,)

    executor, x = new_executor(), jnp.ones(3)
    call = lambda x: executor(Keyword(), x, **{name: "static"})
    np.testing.assert_array_equal(call(x), x)
    np.testing.assert_array_equal(jax.grad(lambda x: call(x).sum())(x), 3 * x)
    np.testing.assert_array_equal(executor.compile(Keyword(), x, **{name: "static"})(x, **{name: "static"}), x)
    assert executor.explain(Keyword(), x, **{name: "static"}).cfg == Scale(1)


def test_key_builder_may_be_a_plain_function_in_the_class_body():
    class BySharding(Plain):
        key_builder = default_key_builder_with_sharding

    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    put = lambda *spec: jax.device_put(jnp.ones((4, 4)), jax.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))
    executor, kernel = new_executor(), BySharding("sharded")
    with jax.set_mesh(mesh):
        keys = [executor.explain(kernel, x, x).key for x in (put("d"), put(None, "d"), put(), put("d"))]
    assert keys[0] == keys[3]
    assert len(set(keys)) == 3


def test_kernels_copy_and_pickle_without_their_programs():
    executor, kernel = new_executor(), Counted(2)
    executor(kernel, X)
    changed = copy.copy(kernel)
    changed.power = 3
    np.testing.assert_array_equal(executor(changed, X * 2), X * 8)
    np.testing.assert_array_equal(executor(pickle.loads(pickle.dumps(kernel)), X * 2), X * 4)


def test_kernel_called_directly_uses_the_default_executor():
    from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, default_executor, set_default_executor

    kernel = Bare("direct")
    np.testing.assert_array_equal(kernel(X), X)
    assert default_executor() is default_executor()
    cache = ConfigCache()
    mine = Executor(ConfigSelectorChain(cache))
    cache.put(*mine.explain(kernel, X).key, Scale(5))
    set_default_executor(mine)
    np.testing.assert_array_equal(kernel(X), 5 * X)


def test_default_executor_must_be_an_executor():
    from ejkernel.ops import set_default_executor

    with pytest.raises(TypeError, match="expected an Executor, got int"):
        set_default_executor(3)


class Prepared(Kernel[Scale, jax.Array]):
    """Takes `x` of any rank and an optional scale; runs on vectors only."""

    def prepare(self, x, scale=None):
        return (x.reshape(-1),), {"scale": 2.0 if scale is None else scale}

    def run(self, x, *, cfg, scale):
        assert x.ndim == 1
        return x * scale * cfg.factor

    def heuristic_cfg(self, inv):
        assert inv.args[0].ndim == 1
        assert inv.kwargs["scale"]
        return Scale(1)

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        assert primals[0].ndim == 1
        return (cotangents[0] * kwargs["scale"] * cfg.factor,)


def test_prepare_runs_first_on_every_path():
    executor, kernel = new_executor(), Prepared()
    want = 2 * X.reshape(-1)
    np.testing.assert_array_equal(executor(kernel, X), want)
    np.testing.assert_array_equal(executor.compile(kernel, X)(X), want)
    np.testing.assert_array_equal(jax.vmap(lambda x: executor(kernel, x))(X).reshape(-1), want)
    np.testing.assert_array_equal(executor(kernel, X, cfg=Scale(3)), 3 * want)
    np.testing.assert_array_equal(jax.grad(lambda x: executor(kernel, x, scale=4.0).sum())(X), 4 * X)
    assert executor.choose_config(kernel, X) == Scale(1)
    assert executor.explain(kernel, X).selection.inv.abstract_args[0].shape == (6,)


def test_prepare_must_return_args_and_kwargs():
    class Wrong(Bare):
        def prepare(self, x):
            return x

    with pytest.raises(KernelDefinitionError, match=r"prepare must return \(args, kwargs\)"):
        new_executor()(Wrong(), X)


def test_invocation_accepts_what_the_contract_lists():
    kernel = Plain()
    inv = Invocation(kernel=kernel, args=(X, X), kwargs={"scale": 1.0}, metadata={"a": 1})
    assert inv.op_id == kernel.op_id
    assert len(inv.call_key) == 16
    assert int(inv.call_key, 16) >= 0
    assert inv.abstract_args[0] == jax.ShapeDtypeStruct((2, 3), jnp.float32)
    assert inv.abstract_kwargs == {"scale": 1.0}
    other = Invocation(op_id="x", args=(X,), batch_axes=(0,), override_cfg=Scale(2), stamp=False, context="shard_map")
    assert (other.op_id, other.override_cfg) == ("x", Scale(2))
    with pytest.raises(AttributeError):
        inv.args = ()
    with pytest.raises(KernelDefinitionError, match="needs kernel= or op_id="):
        Invocation()
    with pytest.raises(KernelDefinitionError, match=r"args must be a tuple, got ArrayImpl. Write args=\(x,\)"):
        Invocation(kernel=kernel, args=X)


def test_version_is_in_the_call_key():
    class Newer(Plain):
        version = "1"

    old, new = Plain("k"), Newer("k")
    assert Invocation(kernel=old, args=(X,)).call_key != Invocation(kernel=new, args=(X,)).call_key


def test_key_builder_decides_the_call_key():
    class Bucketed(Plain):
        def key_builder(self, inv):
            return f"rows<{1 << inv.args[0].shape[0].bit_length()}"

    keys = [Invocation(kernel=Bucketed(), args=(jnp.ones((n, 2)),)).call_key for n in (4, 5, 9)]
    assert keys[0] == keys[1] != keys[2]
    assert all(len(key) == 16 for key in keys)


@dataclass(frozen=True)
class Nested:
    sizes: tuple[int, ...] = (1, 2)


def test_unhashable_and_dict_configs_run():
    class AnyConfig(Kernel):
        def run(self, x, *, cfg):
            return x * cfg["factor"]

        def heuristic_cfg(self, inv):
            return {"factor": 2}

    executor = new_executor()
    np.testing.assert_array_equal(executor(AnyConfig(), X), 2 * X)
    for factor in (3, 4):
        np.testing.assert_array_equal(executor(AnyConfig(), X, cfg={"factor": factor}), factor * X)


class Listed(Bare):
    def heuristic_cfg(self, inv):
        return Scale(1)

    def config_space(self, inv):
        return [Scale(1), Scale(2)]


class Renamed(Listed):
    def candidate_cfgs(self, inv):
        return [Scale(3)]


class Again(Renamed):
    def config_space(self, inv):
        return [Scale(4)]


class Extended(Bare):
    def heuristic_cfg(self, inv):
        return Scale(1)

    def candidate_cfgs(self, inv):
        return [*super().candidate_cfgs(inv), Scale(5)]


class ExtendedSpace(Extended):
    def config_space(self, inv):
        return [Scale(6)]


@pytest.mark.parametrize(
    ("cls", "factors"), [(Listed, [1, 2]), (Renamed, [3]), (Again, [4]), (Extended, [1, 5]), (ExtendedSpace, [6])]
)
def test_candidates_are_those_of_the_most_derived_class(cls, factors):
    kernel = cls()
    assert [cfg.factor for cfg in candidates(Invocation(kernel=kernel, args=(X,)), kernel)] == factors


def key_of(kernel):
    return Invocation(kernel=kernel, args=(X,)).call_key


def test_attributes_are_not_in_the_key():
    assert key_of(Counted(2)) == key_of(Counted(3))


def test_key_builder_must_return_text():
    kernel = Bare()
    kernel.key_builder = lambda inv: 5
    with pytest.raises(KernelDefinitionError, match="key_builder must return a string, got 5"):
        key_of(kernel)
