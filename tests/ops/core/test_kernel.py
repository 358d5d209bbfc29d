import copy
import pickle
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import Invocation, Kernel
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


def test_a_kernel_that_changed_after_its_first_call_is_refused_when_it_is_traced_again():
    executor, kernel = new_executor(), Counted(2)
    executor(kernel, X)
    kernel.power = 3
    with pytest.raises(KernelDefinitionError, match="attributes changed after the first call"):
        executor(kernel, jnp.ones((5,)))


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
