"""Batches: one selection, made for the batch, on shapes alone; values and gradients equal those of plain JAX."""

import gc
import json
import weakref
from dataclasses import dataclass

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ejkernel.ops import (
    Autotuner,
    ConfigSelectorChain,
    Executor,
    Kernel,
    autotune_lowered,
    default_executor,
    pmap_with_config,
    policy_override,
    registry,
    specs_of,
    vmap_with_config,
)
from ejkernel.ops.config.selection import ConfigNotFoundError
from ejkernel.ops.core.kernel import KernelDefinitionError
from ejkernel.ops.execution.batch import BatchArgumentError
from ejkernel.ops.offline import specs
from tests.support import (
    STYLES,
    CustomVjp,
    OwnBackward,
    Plain,
    Residuals,
    Scale,
    fully,
    new_executor,
    reference_of,
    table,
    true,
)


class Recorder:
    """Chooses one config, and remembers who asked."""

    def __init__(self, factor=1):
        self.asked = []
        self.factor = factor

    def choose(self, inv, kernel):
        self.asked.append((inv.op_id, tuple(x.shape for x in jax.tree.leaves(inv.args)), inv.batch_axes))
        return Scale(self.factor)


class ByBatch:
    """Chooses `Scale(5)` for batches and `Scale(1)` for single calls, so that a result shows what was asked."""

    def choose(self, inv, kernel):
        return Scale(1 if inv.batch_axes is None else 5)


def same(got, want):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6), got, want)


def normal(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape), jnp.float32)


# --- vmap_with_config: values and gradients ---

IN_AXES = {
    "int": (0, (3, 4), (3, 4)),
    "inner axis": (1, (4, 3), (4, 3)),
    "negative": (-1, (4, 3), (4, 3)),
    "tuple": ((0, 1), (3, 4), (4, 3)),
    "list": ([0, 0], (3, 4), (3, 4)),
    "none": ((0, None), (3, 4), (4,)),
    "none first": ((None, 1), (4,), (4, 3)),
}


def weighted(f):
    return lambda x, y: (f(x, y) ** 2).sum()


@pytest.mark.thin(2)
@pytest.mark.parametrize(("form", "style"), table(IN_AXES, STYLES, [next(iter(IN_AXES))]))
def test_vmap_with_config_equals_vmap(form, style):
    in_axes, a, b = IN_AXES[form]
    x, y = normal(*a), normal(*b)
    mapped = vmap_with_config(new_executor(), style(), in_axes=in_axes)
    plain = jax.vmap(reference_of(style), in_axes=in_axes)
    same(mapped(x, y), plain(x, y))
    same(jax.grad(weighted(mapped), (0, 1))(x, y), jax.grad(weighted(plain), (0, 1))(x, y))
    same(jax.jit(jax.grad(weighted(mapped), (0, 1)))(x, y), jax.grad(weighted(plain), (0, 1))(x, y))


class Tree(Kernel[Scale, jax.Array]):
    """Pytrees in and out, a keyword array, a static keyword."""

    def run(self, pair, y, *, cfg, shift=0.0, mode="plus"):
        a, b = pair["a"], pair["b"]
        total = a + b if mode == "plus" else a - b
        return {"out": cfg.factor * total * y + shift, "sum": (a * y).sum()}

    def heuristic_cfg(self, inv):
        return Scale(1)


def tree(pair, y, shift=0.0, mode="plus"):
    return Tree("tree").run(pair, y, cfg=Scale(1), shift=shift, mode=mode)


TREE_AXES = {
    "whole argument": ((0, None), (3, 4), (3, 4)),
    "each leaf": (({"a": 0, "b": 1}, None), (3, 4), (4, 3)),
    "one leaf": (({"a": 0, "b": None}, 0), (3, 4), (4,)),
}


@pytest.mark.parametrize("transform", [vmap_with_config, pmap_with_config], ids=lambda t: t.__name__)
@pytest.mark.parametrize("form", TREE_AXES)
def test_axes_of_leaves_and_keywords_that_are_not_mapped(form, transform):
    in_axes, a, b = TREE_AXES[form]
    pair = {"a": normal(*a), "b": normal(*b)}
    y = normal(3, 4) if in_axes[1] == 0 else normal(4)
    shift = normal(4)
    got = transform(new_executor(), Tree("tree"), in_axes=in_axes)(pair, y, shift=shift, mode="minus")
    want = jax.vmap(lambda pair, y: tree(pair, y, shift, "minus"), in_axes=in_axes)(pair, y)
    same(got, want)


@pytest.mark.parametrize("transform", [vmap_with_config, pmap_with_config], ids=lambda t: t.__name__)
@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, {"a": None, "b": None})], ids=str)
def test_trees_with_as_many_leaves_as_there_are_axes_are_mapped_by_argument(in_axes, transform):
    class Second(Tree):
        def run(self, y, pair, *, cfg):
            return super().run(pair, y, cfg=cfg)

    y, pair = normal(4, 4), {"a": normal(4, 4), "b": normal(4)}
    want = jax.vmap(lambda y, pair: tree(pair, y), in_axes=in_axes)(y, pair)
    same(transform(new_executor(), Second("tree"), in_axes=in_axes)(y, pair), want)


def test_static_leaf_of_a_tree_that_is_not_mapped_is_static_under_pmap():
    class Tagged(Plain):
        def run(self, x, tree, *, cfg):
            return x * (tree["w"] if tree["mode"] == "times" else tree["n"])

    x, w = normal(4, 4), normal(4)
    mapped = pmap_with_config(new_executor(), Tagged(), in_axes=(0, {"w": None, "mode": None, "n": None}))
    same(mapped(x, {"w": w, "mode": "times", "n": 2}), x * w)
    same(mapped(x, {"w": w, "mode": "other", "n": 2}), x * 2)
    assert mapped(x.astype(int), {"w": w, "mode": "other", "n": 2}).dtype == jnp.int32
    assert mapped(x.astype(int), {"w": w, "mode": "other", "n": 2.0}).dtype == jnp.float32


def test_out_axes_and_axis_size():
    x, y = normal(3, 4), normal(3, 4)
    mapped = vmap_with_config(new_executor(), Plain(), out_axes=1)
    same(mapped(x, y), jax.vmap(true, out_axes=1)(x, y))
    whole = vmap_with_config(new_executor(), Plain(), in_axes=None, axis_size=3)
    same(whole(x, y), jax.vmap(true, in_axes=None, axis_size=3)(x, y))


@st.composite
def batches(draw):
    size, rank = draw(st.integers(1, 4)), draw(st.integers(0, 2))
    shape = tuple(draw(st.integers(1, 3)) for _ in range(rank))
    places = st.one_of(st.none(), st.integers(0, rank))
    axes = draw(st.tuples(places, places).filter(lambda axes: axes != (None, None)))
    shapes = [shape if axis is None else (*shape[:axis], size, *shape[axis:]) for axis in axes]
    return axes, shapes, draw(st.sampled_from(STYLES))


@given(batches())
@settings(max_examples=3, suppress_health_check=list(HealthCheck))
def test_any_shape_and_axes_equal_plain_vmap(batch):
    in_axes, (a, b), style = batch
    x, y = normal(*a), normal(*b)
    executor, kernel = new_executor(), style()
    plain = jax.vmap(reference_of(style), in_axes=in_axes)
    for mapped in (
        vmap_with_config(executor, kernel, in_axes=in_axes),
        jax.vmap(lambda x, y: executor(kernel, x, y), in_axes=in_axes),
    ):
        same(mapped(x, y), plain(x, y))
        same(jax.grad(weighted(mapped), (0, 1))(x, y), jax.grad(weighted(plain), (0, 1))(x, y))


# --- Call forms and errors ---


def test_kernel_alone_runs_by_the_default_executor():
    x = normal(3, 4)
    assert default_executor() is not None
    same(vmap_with_config(Plain(), in_axes=(0, 0))(x, x), jax.vmap(true)(x, x))
    same(pmap_with_config(Plain(), axis_name="devices")(x, x), jax.vmap(true)(x, x))


@pytest.mark.parametrize("transform", [vmap_with_config, pmap_with_config], ids=lambda t: t.__name__)
def test_wrong_arguments_are_named(transform):
    with pytest.raises(BatchArgumentError, match=r"an executor and a kernel, or a kernel alone.*got function"):
        transform(true)
    with pytest.raises(TypeError, match="in_axes"):
        transform(Plain(), in_axes="rows")
    with pytest.raises(ValueError, match="inconsistent sizes"):
        transform(new_executor(), Plain())(normal(3, 4), normal(2, 4))
    with pytest.raises((ValueError, TypeError), match="in_axes"):
        transform(new_executor(), Plain(), in_axes=(0, 0, 0))(normal(3, 4), normal(3, 4))


def test_missing_axis_is_refused_as_by_vmap():
    with pytest.raises(ValueError, match="rank should be at least 2"):
        vmap_with_config(new_executor(), Plain(), in_axes=1)(normal(3), normal(3))


# --- One selection ---


@pytest.mark.parametrize("transform", [vmap_with_config, pmap_with_config], ids=lambda t: t.__name__)
def test_one_selection_on_shapes_and_nothing_executed_for_it(transform):
    runs = []

    class Counting(Plain):
        def run(self, x, y, *, cfg):
            jax.debug.callback(lambda: runs.append(1))
            return super().run(x, y, cfg=cfg)

    chooser = Recorder()
    mapped = transform(Executor(chooser), Counting())
    x = normal(3, 4)
    jax.block_until_ready(mapped(x, x))
    jax.effects_barrier()
    assert len(chooser.asked) == 1
    assert len(runs) <= 3, "the three calls of the batch, no sample"
    transform(Executor(chooser), Counting())
    mapped(x + 1, x)
    assert len(chooser.asked) == 1


def test_selection_sees_the_batch_and_where_its_axis_is():
    chooser = Recorder()
    vmap_with_config(Executor(chooser), Plain("k"), in_axes=(1, None))(normal(4, 3), normal(4))
    assert chooser.asked == [("k", ((4, 3), (4,)), (1, None))]


def test_function_made_anew_at_each_call_is_compiled_once():
    executor, x = new_executor(), normal(3, 4)
    traces = []

    class Counting(Plain):
        def run(self, x, y, *, cfg):
            traces.append(1)
            return super().run(x, y, cfg=cfg)

    for _ in range(3):
        vmap_with_config(executor, Counting(), in_axes=0)(x, x)
        first = len(traces)
    assert len(traces) == first


def test_explicit_config_is_not_selected():
    chooser = Recorder()
    x = normal(3, 4)
    same(vmap_with_config(Executor(chooser), Plain(), cfg=Scale(3))(x, x), 3 * true(x, x))
    same(pmap_with_config(Executor(chooser), Plain(), cfg=Scale(3))(x, x), 3 * true(x, x))
    assert chooser.asked == []


class Centred(Plain):
    """Communicates with the other calls of its batch."""

    def run(self, x, y, *, cfg):
        return (x - jax.lax.pmean(x, "batch")) * y


@pytest.mark.parametrize("transform", [vmap_with_config, pmap_with_config], ids=lambda t: t.__name__)
def test_kernel_communicates_over_the_axis_name(transform):
    x = normal(4, 5)
    mapped = transform(new_executor(), Centred(), axis_name="batch")
    plain = lambda x, y: (x - x.mean(0)) * y
    same(mapped(x, x), plain(x, x))
    same(jax.grad(weighted(mapped))(x, x), jax.grad(weighted(plain))(x, x))


@pytest.mark.parametrize("style", STYLES, ids=lambda s: s.__name__)
def test_gradient_through_pmap(style):
    x, y = normal(4, 5), normal(5)
    mapped = pmap_with_config(new_executor(), style(), in_axes=(0, None))
    plain = jax.vmap(reference_of(style), in_axes=(0, None))
    same(jax.grad(weighted(mapped), (0, 1))(x, y), jax.grad(weighted(plain), (0, 1))(x, y))


# --- Plain jax.vmap ---

PLACES = {
    "vmap": lambda f: jax.vmap(f),
    "vmap of jit": lambda f: jax.vmap(jax.jit(f)),
    "jit of vmap": lambda f: jax.jit(jax.vmap(f)),
    "vmap of scan": lambda f: jax.vmap(lambda x, y: jax.lax.scan(lambda c, _: (c, f(x, y)), 0, None, length=1)[1][0]),
    "vmap of remat": lambda f: jax.vmap(jax.checkpoint(f)),
}


@pytest.mark.parametrize(("place", "style"), table(PLACES, STYLES, [next(iter(PLACES))]))
def test_config_is_chosen_for_the_batch(place, style):
    executor, kernel, x = Executor(ByBatch()), style(), normal(3, 4)
    same(PLACES[place](lambda x, y: executor(kernel, x, y))(x, x), 5 * true(x, x))
    same(executor(kernel, x, x), true(x, x))


DERIVATIVES = {
    "vmap of grad": lambda f: jax.vmap(jax.grad(lambda x, y: f(x, y).sum())),
    "grad of vmap": lambda f: jax.grad(lambda x, y: jax.vmap(f)(x, y).sum()),
    "jit of vmap of grad": lambda f: jax.jit(jax.vmap(jax.grad(lambda x, y: f(x, y).sum()))),
    "vmap of jit of grad": lambda f: jax.vmap(jax.jit(jax.grad(lambda x, y: f(x, y).sum()))),
    "grad of jit of vmap": lambda f: jax.grad(lambda x, y: jax.jit(jax.vmap(f))(x, y).sum()),
}


@pytest.mark.parametrize(
    ("place", "style"), table(DERIVATIVES, [Plain, CustomVjp, Residuals, OwnBackward], ["vmap of jit of grad"])
)
def test_config_of_a_gradient_is_chosen_for_the_batch(place, style):
    # What JAX has differentiated inside of jit cannot be chosen anew, nor can residuals.
    factor = 1 if place == "vmap of jit of grad" and style in (Plain, Residuals) else 5
    executor, kernel, x = Executor(ByBatch()), style(), normal(3, 4)
    got = DERIVATIVES[place](lambda x, y: executor(kernel, x, y))(x, x)
    reference = true if style is OwnBackward else reference_of(style)
    same(got, factor * DERIVATIVES[place](reference)(x, x))


def test_config_of_a_gradient_is_chosen_for_a_batch_that_only_some_arguments_have():
    executor, kernel = Executor(ByBatch()), OwnBackward()
    grad = lambda f: jax.vmap(jax.jit(jax.grad(lambda x, y: f(x, y).sum())), in_axes=(0, None))
    got, want = (grad(f)(normal(3, 4), normal(4)) for f in (lambda x, y: executor(kernel, x, y), true))
    same(got, 5 * want)


@pytest.mark.parametrize("style", [Plain, CustomVjp, Residuals, OwnBackward], ids=lambda s: s.__name__)
def test_config_of_a_gradient_between_two_batches_is_chosen_for_both(style):
    chooser, kernel = Recorder(), style("k")
    executor, x = Executor(chooser), normal(2, 3, 4)
    inner = lambda x: jax.vmap(lambda x: executor(kernel, x, x))(x).sum()
    for wrap in (lambda f: f, jax.jit):
        wrap(jax.vmap(jax.grad(inner), in_axes=1))(x)
    both = ((2, 3, 4), (2, 3, 4)), ((0, 0), (1, 1))
    assert {asked[1:] for asked in chooser.asked} == {both}


@pytest.mark.parametrize("nest", ["vmap of grad", "jit of vmap of grad"])
def test_config_that_is_put_for_a_batch_reaches_gradients_that_were_traced_before(nest):
    executor, kernel, x = new_executor(), Plain(), normal(3, 4)
    grad = DERIVATIVES[nest](lambda x, y: executor(kernel, x, y))
    before = grad(x, x)
    asked = []
    other = new_executor(on_event=lambda name, device, op_id, call_key, **_: asked.append((device, op_id, call_key)))
    jax.vmap(lambda x: other(kernel, x, x))(x)
    executor.chooser.cache.put(*asked[-1], Scale(5))
    same(grad(x, x), 5 * before)


def test_forward_mode_over_a_batch():
    executor, kernel, x = Executor(ByBatch()), Plain(), normal(3, 4)
    push = lambda f: jax.vmap(lambda x: jax.jvp(lambda x: f(x, x), (x,), (x,))[1])(x)
    same(push(lambda x, y: executor(kernel, x, y)), 5 * push(true))


def test_second_derivative_over_a_batch():
    executor, kernel, x = new_executor(), Plain(), normal(3)
    hessian = lambda f: jax.vmap(jax.hessian(lambda x: f(x, x)))(x)
    same(hessian(lambda x, y: executor(kernel, x, y)), hessian(true))


def test_linear_kernel_is_transposed():
    class Linear(Plain):
        def run(self, x, y, *, cfg):
            return 2 * x * y

    executor, x = new_executor(), normal(3, 4)
    (got,) = jax.linear_transpose(lambda x: jax.vmap(lambda x: executor(Linear(), x, jnp.ones(4)))(x), x)(x)
    same(got, 2 * x)


def test_nested_batches_are_told_innermost_first():
    chooser = Recorder()
    executor, kernel = Executor(chooser), Plain("k")
    jax.vmap(jax.vmap(lambda x, y: executor(kernel, x, y), in_axes=(0, None)), in_axes=(2, None))(
        normal(3, 4, 2), normal(4)
    )
    assert chooser.asked[-1] == ("k", ((3, 4, 2), (4,)), ((0, None), (2, None)))


def test_batch_is_tuned_stored_and_found_as_a_problem_of_its_own():
    tuned = []

    class Last:
        def autotune(self, make_fn, args, kwargs, candidates):
            cfg = list(candidates)[-1]
            tuned.append([x.shape for x in args])
            assert make_fn(cfg)(*args).shape == (3, 4)
            return cfg

    selector = ConfigSelectorChain(tuner=Last(), autotune=True)
    executor, kernel, x = Executor(selector), Plain(), normal(3, 4)
    same(jax.vmap(lambda x, y: executor(kernel, x, y))(x, x), 2 * true(x, x))
    assert tuned == [[(3, 4), (3, 4)]], "the batch, and no single call"
    with policy_override(autotune="frozen"):
        same(jax.vmap(lambda x, y: executor(kernel, x, y))(x, x), 2 * true(x, x))
        same(vmap_with_config(executor, kernel)(x, x), 2 * true(x, x))


def test_guess_and_candidates_of_a_mapped_kernel_are_about_one_call():
    seen = []

    class Asking(Plain):
        def heuristic_cfg(self, inv):
            seen.append((inv.args[0].shape, inv.batch_axes))
            return Scale(1)

    x = normal(3, 4)
    vmap_with_config(new_executor(), Asking())(x, x)
    assert seen == [((4,), None)]


# --- Kernels that run batches themselves ---


class Native(Plain):
    """Shows in its result that it was given the batch."""

    def run_batched(self, x, y, *, cfg, in_axes):
        assert in_axes == (0, None)
        return 7 * cfg.factor * jnp.sin(x) * y[None]


class NativeVjp(CustomVjp):
    run_batched = Native.run_batched


class Leading(Plain):
    leading_batch = True

    def run(self, x, y, *, cfg):
        factor = 7 if x.ndim == 2 else 1
        return factor * cfg.factor * jnp.sin(x) * y


@pytest.mark.parametrize("kernel", [Native(), NativeVjp(), Leading()], ids=lambda k: type(k).__name__)
@pytest.mark.parametrize("axis", [0, 1])
def test_kernel_that_runs_batches_is_given_the_batch(kernel, axis):
    executor, y = new_executor(), normal(4)
    x = jnp.moveaxis(normal(3, 4), 0, axis)
    want = 7 * jax.vmap(true, in_axes=(axis, None))(x, y)
    same(jax.vmap(lambda x, y: executor(kernel, x, y), in_axes=(axis, None))(x, y), want)
    same(vmap_with_config(executor, kernel, in_axes=(axis, None))(x, y), want)
    same(executor(kernel, y, y), true(y, y))


WRONG_BATCHES = {
    "without its axis": lambda x: x[0],
    "of other elements": lambda x: x[:2],
    "of another dtype": lambda x: x.astype(jnp.bfloat16),
    "a sum": jnp.sum,
    "nothing": lambda x: None,
}


@pytest.mark.parametrize("wrong", WRONG_BATCHES)
@pytest.mark.parametrize("base", [Plain, CustomVjp])
def test_native_batch_that_is_no_batch_of_the_calls_outputs_is_refused(base, wrong):
    class Wrong(base):
        def run_batched(self, x, y, *, cfg, in_axes):
            return WRONG_BATCHES[wrong](x)

    executor, x, y = new_executor(), normal(3, 4), normal(4)
    mapped = jax.vmap(lambda x: executor(Wrong("wrong"), x, y))
    for run in (mapped, jax.jit(mapped), jax.grad(lambda x: mapped(x).sum())):
        with pytest.raises(KernelDefinitionError, match=r"wrong: run_batched.* batch axis first: float32\[3, 4\]"):
            run(x)


def test_gradient_of_a_native_batch_is_the_kernels_own():
    executor, x, y = new_executor(), normal(3, 4), normal(4)
    mapped = lambda f: lambda x, y: jax.vmap(f, in_axes=(0, None))(x, y).sum()
    got = jax.grad(mapped(lambda x, y: executor(NativeVjp(), x, y)), (0, 1))(x, y)
    same(got, jax.grad(mapped(reference_of(CustomVjp)), (0, 1))(x, y))


@dataclass(frozen=True)
class Factor:
    value: float = 1.0


class NativeKeyword(Kernel[Factor, jax.Array]):
    """A gradient of its own, a batch of its own, and a keyword array that nobody differentiates."""

    def run(self, x, *, cfg, w):
        return x * w

    def run_batched(self, x, *, cfg, in_axes, w):
        return x * w

    def heuristic_cfg(self, inv):
        return Factor()

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return (3 * cotangents[0] * kwargs["w"],)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_native_batch_is_differentiated_only_by_what_moves(wrap):
    w, run = jnp.arange(1.0, 4.0), vmap_with_config(Executor(ConfigSelectorChain()), NativeKeyword())
    grad = wrap(jax.grad(lambda x: run(x, w=w).sum()))(jnp.ones((5, 3)))
    np.testing.assert_allclose(grad, jnp.broadcast_to(3 * w, (5, 3)))


class WithSum(Kernel[Factor, tuple[jax.Array, jax.Array]]):
    """One of its outputs does not depend on all arguments."""

    def run(self, x, y, *, cfg):
        return x * y, x + x

    def fwd_with_residuals(self, x, y, *, cfg):
        return self.run(x, y, cfg=cfg), None

    def vjp(self, residuals, out, dout, x, y, *, cfg):
        return dout[0] * y + 2 * dout[1], dout[0] * x

    def heuristic_cfg(self, inv):
        return Factor()


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("axes", [(1, 1), (None, 0), (0, None), (1, None)])
def test_outputs_have_one_batch_axis_differentiated_or_not(axes, wrap):
    executor, kernel, plain = new_executor(), WithSum(), lambda x, y: (x * y, x + x)
    args = [normal(3) if axis is None else normal(3, 3) for axis in axes]
    got, pull = jax.vjp(wrap(jax.vmap(lambda x, y: executor(kernel, x, y), axes)), *args)
    want, pull_plain = jax.vjp(jax.vmap(plain, axes), *args)
    for pair in zip((*got, *pull(want)), (*want, *pull_plain(want)), strict=True):
        same(*pair)


class NativeProduct(Kernel[Factor, jax.Array]):
    """Takes a batch of both arguments; the gradient is its own."""

    def run(self, x, y, *, cfg):
        return x * y

    def run_batched(self, x, y, *, cfg, in_axes):
        return x * y

    def heuristic_cfg(self, inv):
        return Factor()

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return cotangents[0] * primals[1], cotangents[0] * primals[0]


def test_native_batch_in_another_has_one_batch_axis_differentiated_or_not():
    executor, kernel, x, y = new_executor(), NativeProduct(), normal(3, 3, 3), normal(3, 3, 3) + 1
    twice = jax.vmap(jax.vmap(lambda x, y: executor(kernel, x, y)), in_axes=2)
    out, pull = jax.vjp(twice, x, y)
    same(out, jnp.moveaxis(x * y, 2, 0))
    same(pull(jnp.moveaxis(x, 2, 0))[1], x * x)


def test_derivatives_of_a_native_batch_do_not_disturb_each_other():
    executor, kernel, x, y = new_executor(), NativeProduct(), normal(3, 4), normal(3, 4) + 1
    mapped = jax.vmap(lambda x, y: executor(kernel, x, y))
    _, of_x = jax.vjp(lambda x: mapped(x, y), x)
    _, of_y = jax.vjp(lambda y: mapped(x, y), y)
    same(of_x(x)[0], x * y)
    same(of_y(x)[0], x * x)


def test_example_inputs_of_a_native_kernel_are_the_batch():
    ran = []

    class Picks(Kernel[Factor, jax.Array]):
        def run(self, x, i, *, cfg):
            return x[i]

        def run_batched(self, x, i, *, cfg, in_axes):
            ran.append((x.shape, i.shape))
            return jnp.take_along_axis(x, i, axis=1)

        def heuristic_cfg(self, inv):
            return Factor()

        def example_inputs(self, inv, key):
            x, i = inv.args
            return (jax.random.normal(key, x.shape, x.dtype), jnp.zeros(i.shape, i.dtype)), {}

    executor = Executor(ConfigSelectorChain(autotune=True))
    vmap_with_config(executor, Picks())(jnp.ones((5, 3)), jnp.zeros((5, 3), jnp.int32))
    assert set(ran) == {((5, 3), (5, 3))}


def test_batch_is_tuned_although_a_leaf_has_no_gradient():
    class Half(Kernel[Factor, jax.Array]):
        def run(self, p, *, cfg):
            return p["a"] * 2

        def heuristic_cfg(self, inv):
            return Factor()

        def reference(self, p):
            return p["a"] * 2

        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            return ({"a": cotangents[0] * 2, "b": None},)

    run = vmap_with_config(Executor(ConfigSelectorChain(autotune=True)), Half())
    x = jnp.ones((5, 3))
    np.testing.assert_allclose(run({"a": x, "b": x}), 2 * x)
    grads = jax.grad(lambda p: run(p).sum())({"a": x, "b": x})
    np.testing.assert_allclose(grads["a"], 2 * x)
    np.testing.assert_allclose(grads["b"], 0 * x)


class Prepares(Kernel[Factor, jax.Array]):
    def prepare(self, x, *, scale=2.0):
        return (x,), {"scale": scale}

    def run(self, x, *, cfg, scale):
        return x * scale

    def heuristic_cfg(self, inv):
        return Factor()


def test_first_call_under_pmap_is_tuned_for_a_kernel_that_prepares_its_arguments():
    x = jnp.ones((jax.device_count(), 3))
    np.testing.assert_allclose(pmap_with_config(Executor(ConfigSelectorChain(autotune=True)), Prepares())(x), 2 * x)


def test_first_call_on_a_mesh_is_tuned_for_a_kernel_that_prepares_its_arguments():
    x, spec, mesh = jnp.ones((8, 3)), jax.sharding.PartitionSpec("d"), jax.make_mesh((4,), ("d",))
    executor = Executor(ConfigSelectorChain(autotune=True))
    np.testing.assert_allclose(executor(Prepares(), x, mesh=mesh, in_specs=spec, out_specs=spec), 2 * x)


def test_kernel_that_is_gone_leaves_its_equations():
    class Unshared(Plain):
        def __init__(self):
            super().__init__("unshared")
            self.notes = []

    executor, x = new_executor(), normal(3, 4)
    jaxpr = jax.make_jaxpr(lambda x, y: executor(Unshared(), x, y))(x[0], x[0])
    same(jax.vmap(jax.extend.core.jaxpr_as_fun(jaxpr))(x, x), [true(x, x)])


@pytest.mark.parametrize(
    "place",
    ["vmap of grad", "grad of jit of vmap", *fully("grad of vmap", "jit of vmap of grad", "vmap of jit of grad")],
)
def test_kernel_that_holds_arrays_is_gone_with_its_last_user(place):
    def run(executor, kernel):
        f = DERIVATIVES[place](lambda x, y: executor(kernel, x))
        jax.block_until_ready(f(jnp.ones((2, 3)), jnp.ones((2, 3))))
        return weakref.ref(kernel)

    gone = run(new_executor(), Weighted(jnp.ones(3)))
    registry.clear()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("style", STYLES, ids=lambda s: s.__name__)
def test_gradient_outlives_the_kernel(style):
    class Unshared(style):
        def __init__(self):
            super().__init__("unshared")
            self.notes = []

    executor, x = new_executor(), normal(3, 4)
    _, pull = jax.vjp(lambda x: jax.vmap(lambda x: executor(Unshared(), x, x))(x), x)
    _, want = jax.vjp(lambda x: jax.vmap(lambda x: reference_of(style)(x, x))(x), x)
    same(pull(x), want(x))


# --- Outside of the program that was traced ---


def test_batch_in_a_lowered_program_is_found_and_tuned_by_its_label():
    executor, kernel, x = new_executor(), Plain("labelled"), normal(3, 4)
    fn = jax.jit(jax.vmap(lambda x, y: executor(kernel, x, y)))
    result = autotune_lowered(executor.chooser, fn.lower(x, x))
    assert [entry.op_id for entry in result.entries] == ["labelled"]
    assert result.unmatched == ()
    with policy_override(autotune="frozen"):
        fn(x, x)


def test_batch_can_be_tuned_in_another_process():
    executor, kernel, x = new_executor(), Residuals("travels"), normal(3, 4)
    lowered = jax.jit(jax.vmap(lambda x, y: executor(kernel, x, y), in_axes=(0, None))).lower(x, normal(4))
    (spec,) = specs_of(lowered)
    inv = specs.from_spec(json.loads(json.dumps(spec)))
    assert (inv.op_id, inv.batch_axes) == ("travels", (0, None))
    assert Autotuner(timer="wall").tune(inv, inv.kernel).complete


def test_key_of_the_kernels_own_making_tells_batches_apart():
    class Keyed(Plain):
        def key_builder(self, inv):
            return f"rank {inv.args[0].ndim}"

    keys = set()
    selector = ConfigSelectorChain(on_event=lambda name, **data: keys.add(data["call_key"]))
    executor, kernel = Executor(selector), Keyed()
    for size in (3, 3, 5):
        vmap_with_config(executor, kernel)(normal(size, 4), normal(size, 4))
        vmap_with_config(executor, kernel)(normal(size, 2), normal(size, 2))
    assert len(keys) == 2


# --- What a batch must not change ---


class Squared(Kernel[Factor, jax.Array]):
    """x², whose residuals hold the config: a backward with another one gives another gradient."""

    def run(self, x, *, cfg):
        return x**2

    def fwd_with_residuals(self, x, *, cfg):
        return x**2, x * cfg.value

    def vjp(self, residuals, out, dout, x, *, cfg):
        return (2 * residuals / cfg.value * dout,)

    def heuristic_cfg(self, inv):
        return Factor()


class PerBatch:
    """Another config for batches than for single calls."""

    def choose(self, inv, kernel):
        return Factor(1.0 if inv.batch_axes is None else 2.0)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_backward_of_batched_cotangents_has_the_forwards_config(wrap):
    executor, x = Executor(PerBatch()), jnp.arange(1.0, 4.0)
    call = wrap(lambda x: executor(Squared("squared"), x))
    np.testing.assert_allclose(jax.jacrev(call)(x), jnp.diag(2 * x))
    shared = jax.vmap(jax.grad(lambda w, x: (call(x) * w).sum(), argnums=1), (0, None))(jnp.ones((2, 3)), x)
    np.testing.assert_allclose(shared, jnp.stack([2 * x, 2 * x]))


class Weighted(Kernel[Factor, jax.Array]):
    """Closes over an array that may be traced."""

    def __init__(self, weight):
        super().__init__("weighted")
        self.weight = weight

    def run(self, x, *, cfg):
        return x * self.weight

    def heuristic_cfg(self, inv):
        return Factor()


class HoldsWeight(Kernel[Factor, jax.Array]):
    def __init__(self, w):
        super().__init__("tests.holds_weight")
        self.held = {"w": w}

    def run(self, x, *, cfg):
        return x * self.held["w"]

    def heuristic_cfg(self, inv):
        return Factor()

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return (3 * cotangents[0] * self.held["w"],)


class HoldsWeightForResiduals(HoldsWeight):
    def fwd_with_residuals(self, x, *, cfg):
        return self.run(x, cfg=cfg), None

    def vjp(self, residuals, out, dout, x, *, cfg):
        return (3 * dout * self.held["w"],)


@pytest.mark.parametrize("kernel", [HoldsWeight, HoldsWeightForResiduals])
def test_gradient_of_its_own_and_traced_values_that_it_closes_over(kernel):
    executor, x, w = Executor(), jnp.ones((2, 3)), 2 * jnp.ones((2, 3))
    loss = lambda x, w: executor(kernel(w), x).sum()
    for grad in (jax.jit(jax.grad(loss)), jax.vmap(jax.grad(loss)), jax.jit(jax.vmap(jax.grad(loss)))):
        np.testing.assert_allclose(grad(x, w), 3 * w)
    np.testing.assert_allclose(jax.jit(loss)(x, w), (x * w).sum())


def test_kernel_that_closes_over_traced_values_is_batched_by_its_equations():
    executor, x, w = Executor(), jnp.arange(12.0).reshape(4, 3), jnp.arange(1.0, 4.0)
    layer = jax.jit(lambda x, w: executor(Weighted(w), x))
    np.testing.assert_allclose(jax.vmap(layer, (0, None))(x, w), x * w)
    np.testing.assert_allclose(jax.jit(jax.vmap(layer, (0, None)))(x, w), x * w)
    grads = jax.vmap(jax.grad(lambda x, w: layer(x, w).sum()), (0, None))(x, w)
    np.testing.assert_allclose(grads, jnp.broadcast_to(w, x.shape))


class FallsBack(Kernel[Factor, jax.Array]):
    def run_xla(self, x, *, cfg):
        raise NotImplementedError("not for this one")

    def run(self, x, *, cfg):
        return x * 2

    def heuristic_cfg(self, inv):
        return Factor()


def test_implementation_that_gives_up_is_passed_over_in_a_batch_too():
    executor, kernel, x = Executor(), FallsBack("falls_back"), jnp.ones((4, 3))
    call = lambda x: executor(kernel, x)
    for mapped in (
        jax.vmap(call),
        jax.vmap(jax.jit(call)),
        jax.jit(jax.vmap(call)),
        vmap_with_config(executor, kernel),
    ):
        np.testing.assert_allclose(mapped(x), 2 * x)
    np.testing.assert_allclose(jax.vmap(jax.grad(lambda x: call(x).sum()))(x), 2 * jnp.ones_like(x))


class Flips(Kernel[Factor, jax.Array]):
    """x² y, whose residuals hold the config."""

    def run(self, x, y, *, cfg):
        return x**2 * y

    def fwd_with_residuals(self, x, y, *, cfg):
        return x**2 * y, x * cfg.value

    def vjp(self, residuals, out, dout, x, y, *, cfg):
        x = residuals / cfg.value
        return 2 * x * y * dout, x**2 * dout

    def heuristic_cfg(self, inv):
        return Factor()


class PerAxes:
    """Another config for each place of the batch axis."""

    def choose(self, inv, kernel):
        return Factor(1.0 + {None: 0, (0, None): 1, (1, None): 2, (None, 0): 3, (None, 1): 4}.get(inv.batch_axes, 5))


MOVED = {
    "scan": lambda f: lambda x, y: jax.lax.scan(lambda c, _: (c, f(x, y)), 0, None, length=2)[1],
    "cond": lambda f: (
        lambda x, y: jax.lax.scan(
            lambda c, i: (c, jax.lax.cond(i > 0, f, lambda x, y: f(y, x), x, y)), 0, jnp.arange(2)
        )[1]
    ),
}


@pytest.mark.parametrize("place", MOVED)
def test_backward_has_the_forwards_config_wherever_jax_moves_the_batch(place):
    x, y, executor = jnp.linspace(0.1, 1, 12).reshape(3, 4), jnp.linspace(1, 2, 3), Executor(PerAxes())
    grad = lambda f: jax.vmap(jax.grad(lambda x, y: MOVED[place](f)(x, y).sum(), (0, 1)), in_axes=(1, None))
    same(grad(lambda x, y: executor(Flips("flips"), x, y))(x, y), grad(lambda x, y: x**2 * y)(x, y))


@pytest.mark.parametrize("chooser", [None, PerBatch()], ids=["guess", "chosen for the batch"])
def test_eager_gradients_of_a_batch_are_compiled_once(chooser, caplog):
    executor, kernel, x = Executor(chooser), Squared("squared"), jnp.ones((4, 3))
    run = lambda: jax.vmap(jax.grad(lambda x: executor(kernel, x).sum()))(x)
    run()
    with jax.log_compiles(), caplog.at_level("WARNING"):
        run()
    assert "Compiling" not in caplog.text


def test_config_is_the_one_that_was_given_to_vmap_with_config():
    @dataclass
    class Mutable:
        value: float = 2.0

        def __hash__(self):
            return hash(self.value)

    class Times(Kernel[Mutable, jax.Array]):
        def run(self, x, *, cfg):
            return x * cfg.value

        def heuristic_cfg(self, inv):
            return Mutable(1.0)

    executor, kernel, cfg = Executor(), Times("times"), Mutable(2.0)
    mapped = vmap_with_config(executor, kernel, cfg=cfg)
    cfg.value = 5.0
    np.testing.assert_allclose(mapped(jnp.ones((2, 3))), 2 * jnp.ones((2, 3)))
    np.testing.assert_allclose(vmap_with_config(executor, kernel, cfg=Mutable(2.0))(jnp.ones((2, 3)))[0, 0], 2)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_config_that_is_stored_after_a_miss_serves_the_next_call(wrap):
    executor, x = Executor(ConfigSelectorChain(autotune="frozen")), jnp.ones(3)

    class Times(Kernel[Factor, jax.Array]):
        def run(self, x, *, cfg):
            return x * cfg.value

        def heuristic_cfg(self, inv):
            return Factor()

    kernel = Times("times")
    call = wrap(lambda x: executor(kernel, x))
    with pytest.raises(ConfigNotFoundError):
        call(x)
    executor.chooser.cache.put(*executor.explain(kernel, x).key, Factor(3.0))
    np.testing.assert_allclose(call(x), 3 * x)
