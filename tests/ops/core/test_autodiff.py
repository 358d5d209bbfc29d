import gc
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from ejkernel.ops import Kernel, registry
from ejkernel.ops.core.autodiff import GradientError
from ejkernel.ops.core.kernel import KernelDefinitionError
from tests.support import OwnBackward, Plain, Residuals, Scale, new_executor

X = jnp.arange(1.0, 5.0)


class WithGrads(Kernel[Scale, jax.Array]):
    """`x * y.sum()` for anything summable as `y`, with whatever gradients it is told to return."""

    def __init__(self, grads):
        super().__init__("with_grads")
        self.grads = grads

    def run(self, *args, cfg, **kwargs):
        return args[0] * 2

    def heuristic_cfg(self, inv):
        return Scale()

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return self.grads(cotangents)


def gradient(kernel, *args, argnums=0, **kwargs):
    executor = new_executor()
    return jax.grad(lambda *a: executor(kernel, *a, **kwargs).sum(), argnums=argnums, allow_int=True)(*args)


def test_none_means_zero():
    got = gradient(WithGrads(lambda ct: (ct[0] * 2, None)), X, X, argnums=(0, 1))
    np.testing.assert_array_equal(got[0], jnp.full(4, 2.0))
    np.testing.assert_array_equal(got[1], jnp.zeros(4))


def test_none_for_leaves_of_a_pytree_means_zero():
    tree = {"a": X, "b": [X, X]}
    grads = lambda ct: (None, {"a": ct[0], "b": [None, ct[0] * 3]})
    got = gradient(WithGrads(grads), X, tree, argnums=1)
    np.testing.assert_array_equal(got["a"], jnp.ones(4))
    np.testing.assert_array_equal(got["b"][0], jnp.zeros(4))
    np.testing.assert_array_equal(got["b"][1], jnp.full(4, 3.0))


@pytest.mark.parametrize("returned", [None, 7], ids=["none", "something"])
def test_integer_arguments_get_float0(returned):
    ints = jnp.arange(4)
    grads = lambda ct: (ct[0], None if returned is None else jnp.full(4, returned))
    got = gradient(WithGrads(grads), X, ints, argnums=(0, 1))
    assert got[1].dtype == jax.dtypes.float0


def test_static_positional_arguments_have_a_place_in_the_gradients():
    got = gradient(WithGrads(lambda ct: (ct[0] * 5, None, None)), X, "mode", 3)
    np.testing.assert_array_equal(got, jnp.full(4, 5.0))


def test_gradient_takes_the_dtype_of_its_argument():
    got = gradient(WithGrads(lambda ct: (ct[0].astype(jnp.float32),)), X.astype(jnp.bfloat16))
    assert got.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("grads", "message"),
    [
        (lambda ct: (ct[0],), "a tuple of 2 gradients, one per positional argument, got 1 of them"),
        (lambda ct: ct[0], "a tuple of 2 gradients, one per positional argument, got a"),
        (lambda ct: (ct[0][:2], None), r"gradient of argument 0 has shape \(2,\), the argument has \(4,\)"),
        (lambda ct: (ct[0], {"a": ct[0]}), "gradient of argument 1 has structure"),
    ],
)
def test_gradients_that_do_not_fit_are_named(grads, message):
    with pytest.raises(GradientError, match=f"with_grads: .*{message}"):
        gradient(WithGrads(grads), X, (X, X))


def test_cotangents_have_one_entry_an_output():
    seen = []

    class TwoOutputs(Kernel):
        def run(self, x, *, cfg):
            return x, 2 * x

        def heuristic_cfg(self, inv):
            return None

        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            seen.append(len(cotangents))
            return (cotangents[0] + 2 * cotangents[1],)

    executor = new_executor()
    # Only the second output is used: the first one's cotangent is a zero array, not a symbol.
    np.testing.assert_array_equal(jax.grad(lambda x: executor(TwoOutputs(), x)[1].sum())(X), jnp.full(4, 2.0))
    assert seen == [2]


class KeywordArray(Kernel):
    def run(self, x, *, cfg, bias):
        return x + bias

    def heuristic_cfg(self, inv):
        return None

    def fwd_with_residuals(self, x, *, cfg, bias):
        return x + bias, bias

    def vjp(self, residuals, out, dout, x, *, cfg, bias):
        np.testing.assert_equal(residuals.shape, bias.shape)
        return (dout,)


def test_keyword_array_is_refused_a_gradient_and_never_gets_a_silent_zero():
    executor = new_executor()
    loss = lambda x, b: executor(KeywordArray(), x, bias=b).sum()
    np.testing.assert_array_equal(jax.grad(loss)(X, X), jnp.ones(4))
    np.testing.assert_array_equal(jax.grad(lambda x: loss(x, jax.lax.stop_gradient(x)))(X), jnp.ones(4))
    with pytest.raises(GradientError, match=r"keyword argument \['bias'\] is differentiated"):
        jax.grad(loss, argnums=1)(X, X)
    with pytest.raises(GradientError, match="Pass it by position"):
        jax.jit(jax.grad(loss, argnums=1))(X, X)


def test_integer_keyword_arrays_need_no_gradient():
    executor = new_executor()
    loss = lambda x: executor(KeywordArray(), x, bias=jnp.arange(4)).sum()
    np.testing.assert_array_equal(jax.grad(loss)(X), jnp.ones(4))


def test_jax_differentiates_keyword_arrays_where_the_kernel_has_no_backward_of_its_own():
    class NoBackward(Kernel):
        def run(self, x, *, cfg, bias):
            return x * bias

        def heuristic_cfg(self, inv):
            return None

    executor = new_executor()
    np.testing.assert_array_equal(jax.grad(lambda b: executor(NoBackward(), X, bias=b).sum())(X), X)


def test_backward_with_configs_of_its_own_is_its_own_problem():
    executor, kernel, y = new_executor(), OwnBackward(), jnp.ones(4)
    grad = jax.jit(jax.grad(lambda x: executor(kernel, x, y).sum()))
    np.testing.assert_allclose(grad(X), jnp.cos(X), rtol=1e-6)
    device, op_id, call_key = executor.explain(kernel, X, y).key
    (vjp_key,) = registry._traced.keys() - {(device, op_id, call_key)}
    assert vjp_key[:2] == (device, f"{op_id}.vjp")
    executor.chooser.cache.put(*vjp_key, Scale(3))
    np.testing.assert_allclose(grad(X), 3 * jnp.cos(X), rtol=1e-6)
    np.testing.assert_allclose(executor(kernel, X, y), jnp.sin(X), rtol=1e-6)


def test_explicit_config_is_the_forwards_and_the_backward_keeps_its_own():
    executor, y = new_executor(), jnp.ones(4)
    got = jax.grad(lambda x: executor(OwnBackward(), x, y, cfg=Scale(5)).sum())(X)
    np.testing.assert_allclose(got, jnp.cos(X), rtol=1e-6)


class Covering(OwnBackward):
    """A config with a factor above ten holds the backward's: its tens."""

    def cfg_vjp(self, cfg):
        return Scale(cfg.factor // 10) if cfg.factor > 10 else None


@pytest.mark.parametrize("policy", ["frozen", "on"])
def test_explicit_config_that_holds_the_backwards_leaves_nothing_to_choose(policy):
    asked = []
    executor = new_executor(autotune=policy, on_event=lambda name, op_id, **_: asked.append(op_id))
    loss = lambda x: executor(Covering(), x, jnp.ones(4), cfg=Scale(72)).sum()
    for grad in (jax.grad(loss), jax.jit(jax.grad(jax.checkpoint(loss)))):
        np.testing.assert_allclose(grad(X), 7 * jnp.cos(X), rtol=1e-6)
    for grad in (jax.vmap(jax.grad(loss)), jax.vmap(jax.jit(jax.grad(loss)))):
        np.testing.assert_allclose(grad(X[None]), 7 * jnp.cos(X)[None], rtol=1e-6)
    compiled = executor.compile(Covering(), X, jnp.ones(4), cfg=Scale(72))
    np.testing.assert_allclose(jax.grad(lambda x: compiled(x, jnp.ones(4)).sum())(X), 7 * jnp.cos(X), rtol=1e-6)
    assert f"{Covering().op_id}.vjp" not in asked


def test_backwards_config_that_cannot_serve_is_not_used():
    class Refusing(Covering):
        def supports(self, inv, platform):
            return not inv.op_id.endswith(".vjp")

    executor = new_executor()
    got = jax.grad(lambda x: executor(Refusing(), x, jnp.ones(4), cfg=Scale(72)).sum())(X)
    np.testing.assert_allclose(got, jnp.cos(X), rtol=1e-6)


@dataclass(frozen=True)
class Placed(Scale):
    platform: str | None = None


def test_backwards_config_is_asked_about_on_the_platform_that_it_names():
    class Elsewhere(Covering):
        def cfg_vjp(self, cfg):
            return Placed(7, "triton")

        def supports(self, inv, platform):
            return platform != "triton"

    executor = new_executor()
    got = jax.grad(lambda x: executor(Elsewhere(), x, jnp.ones(4), cfg=Scale(2)).sum())(X)
    np.testing.assert_allclose(got, jnp.cos(X), rtol=1e-6)


class Named(Residuals):
    def fwd_with_residuals(self, x, y, *, cfg):
        sin = checkpoint_name(jnp.sin(x), "sin")
        return cfg.factor * sin * y, (sin, jnp.cos(x))


@jax.custom_vjp
def named(x, y):
    return jnp.sin(x) * y


def named_forward(x, y):
    sin = checkpoint_name(jnp.sin(x), "sin")
    return sin * y, (sin, jnp.cos(x), y)


named.defvjp(named_forward, lambda saved, dout: (dout * saved[1] * saved[2], dout * saved[0]))


def count(primitive, jaxpr):
    inner = [eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr") for eqn in jaxpr.eqns]
    nested = sum(count(primitive, getattr(j, "jaxpr", j)) for j in inner if j is not None)
    return nested + sum(str(eqn.primitive) == primitive for eqn in jaxpr.eqns)


@pytest.mark.parametrize(
    "policy",
    [
        jax.checkpoint_policies.save_only_these_names("sin"),
        jax.checkpoint_policies.save_anything_except_these_names("sin"),
        jax.checkpoint_policies.everything_saveable,
        jax.checkpoint_policies.nothing_saveable,
    ],
    ids=["sin", "not sin", "everything", "nothing"],
)
def test_policies_see_the_names_inside_of_a_forward(policy):
    executor, x = new_executor(), jnp.linspace(0.1, 1.0, 4)
    call = lambda x, y: executor(Named(), x, y)

    def sines(f):
        grad = jax.grad(lambda x: jax.checkpoint(lambda x: (f(x, x) ** 2).sum(), policy=policy)(x))
        return count("sin", jax.make_jaxpr(grad)(x).jaxpr)

    assert sines(call) == sines(named)


def test_forward_without_names_stays_one_operation_under_checkpoint():
    executor, x = new_executor(), jnp.linspace(0.1, 1.0, 4)
    policy = jax.checkpoint_policies.save_only_these_names("sin")
    loss = jax.checkpoint(lambda x: executor(Residuals(), x, x).sum(), policy=policy)
    assert count("ejkernel_call", jax.make_jaxpr(jax.grad(loss))(x).jaxpr) == 3  # Forward, forward again, backward.


def test_compiled_call_freezes_the_backwards_config_too():
    executor, kernel, y = new_executor(), OwnBackward(), jnp.ones(4)
    compiled = executor.compile(kernel, X, y)
    jax.grad(lambda x: executor(kernel, x, y).sum())(X)
    for key in list(registry._traced):
        executor.chooser.cache.put(*key, Scale(9))
    np.testing.assert_allclose(compiled(X, y), jnp.sin(X), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: compiled(x, y).sum())(X), jnp.cos(X), rtol=1e-6)
    np.testing.assert_allclose(executor(kernel, X, y), 9 * jnp.sin(X), rtol=1e-6)


class TwoOutputs(Kernel):
    """The backward loops over a cotangent, which must have the type that the output has."""

    def run(self, x, *, cfg):
        return x, 2 * x

    def heuristic_cfg(self, inv):
        return None

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        one, two = cotangents
        total = jax.lax.scan(lambda c, _: (c + one, None), two, None, length=2)[0]
        return (total,)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_cotangent_of_an_unused_output_has_the_type_of_the_output(kind):
    executor = new_executor()
    kind = getattr(jax.sharding.AxisType, kind)
    mesh, spec = jax.make_mesh((4,), ("d",), axis_types=(kind,)), jax.sharding.PartitionSpec("d")
    local = lambda x: jax.grad(lambda x: executor(TwoOutputs(), x)[0].sum())(x)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.NamedSharding(mesh, spec))
        got = jax.shard_map(local, in_specs=spec, out_specs=spec)(x)
        np.testing.assert_array_equal(jax.device_get(got), 2 * np.ones(4))
        np.testing.assert_array_equal(jax.device_get(jax.jit(local)(x)), 2 * np.ones(4))


def test_compiled_call_has_the_gradient_of_the_call_where_backends_differ():
    @dataclass(frozen=True)
    class Cfg:
        platform: str | None = None
        factor: int = 1

    class Backends(Kernel[Cfg, jax.Array]):
        def heuristic_cfg(self, inv):
            return Cfg("pallas")

        def run_xla(self, x, *, cfg):
            return x

        run_pallas = run_xla

        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            return (cfg.factor * cotangents[0],)

        def heuristic_cfg_vjp_xla(self, inv):
            return Cfg(factor=100)

        def heuristic_cfg_vjp_pallas(self, inv):
            return Cfg(factor=7)

    executor = new_executor()
    for call in (lambda x: executor(Backends(), x), executor.compile(Backends(), X)):
        np.testing.assert_array_equal(jax.grad(lambda x, call=call: call(x).sum())(X), jnp.full(4, 7.0))


class OnlyForward(Plain):
    def fwd_with_residuals(self, x, y, *, cfg):
        return self.run(x, y, cfg=cfg), None


class OnlyBackward(Plain):
    def vjp(self, residuals, out, dout, x, y, *, cfg):
        return dout, dout


class WithBoth(OnlyForward, OnlyBackward):
    pass


class BackwardElsewhere(OnlyForward):
    """On this device JAX differentiates."""

    def vjp_pallas(self, residuals, out, dout, x, y, *, cfg):
        return dout, dout


def test_a_forward_without_residuals_is_refused_and_not_taken_apart():
    class Alone(OnlyBackward):
        def fwd_with_residuals(self, x, y, *, cfg):
            return jnp.stack([x, y])

    with pytest.raises(GradientError, match=r"alone: fwd_with_residuals must return a pair.*got DynamicJaxprTracer"):
        jax.grad(lambda x: new_executor()(Alone("alone"), x, X).sum())(X)


def test_what_is_kept_for_the_backward_must_be_arrays_and_the_kernel_is_named():
    class Static(OnlyBackward):
        def fwd_with_residuals(self, x, y, *, cfg):
            return x * y, {"x": x, "cfg": cfg}

    with pytest.raises(GradientError, match=r"static: what fwd_with_residuals returns .* got a Scale at \['cfg'\]"):
        jax.grad(lambda x: new_executor()(Static("static"), x, X).sum())(X)


@pytest.mark.parametrize(("cls", "missing"), [(OnlyForward, "vjp"), (OnlyBackward, "fwd_with_residuals")])
@pytest.mark.parametrize("transform", [lambda f: f, jax.grad, jax.jit], ids=["call", "grad", "jit"])
def test_half_a_gradient_is_refused(cls, missing, transform):
    executor = new_executor()
    with pytest.raises(
        KernelDefinitionError, match=rf"has .* and no {missing}, so its own gradient would never be used"
    ):
        transform(lambda x: executor(cls("half"), x, X).sum())(X)


def test_gradient_in_two_classes_or_for_other_platforms_is_whole():
    executor = new_executor()
    grad = lambda cls: jax.grad(lambda x: executor(cls(cls.__name__), x, X).sum())(X)
    np.testing.assert_array_equal(grad(WithBoth), jnp.ones(4))
    np.testing.assert_allclose(grad(BackwardElsewhere), jnp.cos(X) * X, rtol=1e-6)


def test_equations_with_a_gradient_keep_no_tracer_of_a_keyword_array():
    living = lambda: sum(isinstance(x, jax.core.Tracer) for x in gc.get_objects())
    gc.collect()
    executor, kernel, before = new_executor(), WithGrads(lambda ct: (ct[0],)), living()
    traced = jax.jit(lambda x: executor(kernel, x, bias=x)).trace(X)
    gc.collect()
    assert living() == before
    assert len(traced.jaxpr.eqns) == 1
