"""Every JAX transformation x every gradient style: values and gradients equal those of plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.experimental.jet import jet
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.support import STYLES, Plain, Residuals, new_executor, reference_of, table, true

SHAPE = (4, 8)


def inputs(dtype=jnp.float32):
    return tuple(jnp.asarray(x, dtype) for x in np.random.default_rng(0).standard_normal((2, *SHAPE)))


def same(got, want):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6), got, want)


def loss(f):
    return lambda x, y: (f(x, y) ** 2).sum()


def eager(f):
    return f


def jit(f):
    return jax.jit(f)


def nested_jit(f):
    return jax.jit(lambda x, y: jax.jit(f)(x, y))


def grad(f):
    return jax.grad(loss(f), argnums=(0, 1))


def jit_of_grad(f):
    return jax.jit(grad(f))


def grad_of_jit(f):
    return grad(jax.jit(f))


def value_and_grad(f):
    return jax.value_and_grad(loss(f), argnums=(0, 1))


def vjp(f):
    def run(x, y):
        out, pull = jax.vjp(f, x, y)
        return out, pull(jnp.cos(out))

    return run


def linearize_transposed(f):
    """Differentiates with respect to one argument only, so that the other is not perturbed."""
    return lambda x, y: (jax.grad(lambda y: loss(f)(x, y))(y), jax.grad(lambda x: loss(f)(x, y))(x))


def vmap(f):
    return jax.vmap(f)


def vmap_one_axis(f):
    return jax.vmap(lambda x, y: f(x, y[0]), in_axes=(0, None))


def vmap_of_vmap(f):
    return lambda x, y: jax.vmap(jax.vmap(f), in_axes=1)(x[None], y[None])


def vmap_of_grad(f):
    return jax.vmap(jax.grad(loss(f), argnums=(0, 1)))


def grad_of_vmap(f):
    return grad(jax.vmap(f))


def vjp_of_vmap_over_columns(f):
    return vjp(jax.vmap(f, in_axes=1, out_axes=1))


def jit_of_vjp_of_vmap_of_vmap_over_columns(f):
    return jax.jit(vjp(jax.vmap(jax.vmap(f), in_axes=1)))


def scan(f):
    def run(x, y):
        carry, outs = jax.lax.scan(lambda c, row: (f(c, row), f(row, c)), x[0], y)
        return carry, outs

    return run


def grad_of_scan(f):
    def total(x, y):
        carry, outs = jax.lax.scan(lambda c, row: (f(c, row), f(row, c)), x[0], y)
        return carry.sum() + (outs**2).sum()

    return jax.grad(total, argnums=(0, 1))


def while_loop(f):
    return lambda x, y: jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, f(s[1], y)), (0, x))[1]


def fori_loop(f):
    return lambda x, y: jax.lax.fori_loop(0, 3, lambda i, s: f(s, y), x)


def cond(f):
    return lambda x, y: jax.lax.cond(x[0, 0] > 0, f, lambda x, y: f(y, x), x, y)


def grad_of_cond(f):
    return grad(lambda x, y: jax.lax.cond(x[0, 0] > 0, f, lambda x, y: f(y, x), x, y))


def remat(f):
    return jax.grad(loss(jax.checkpoint(f)), argnums=(0, 1))


def remat_in_scan(f):
    def total(x, y):
        step = jax.checkpoint(lambda c, row: (f(c, row), c))
        return jax.lax.scan(step, x[0], y)[0].sum()

    return jax.grad(total, argnums=(0, 1))


def mesh_of(kind):
    return jax.make_mesh((4,), ("d",), axis_types=(kind,))


def shard_map(f):
    return jax.shard_map(f, mesh=mesh_of(AxisType.Auto), in_specs=P("d"), out_specs=P("d"))


def shard_map_in_jit(f):
    return jax.jit(shard_map(f))


def shard_map_unchecked(f):
    return jax.shard_map(f, mesh=mesh_of(AxisType.Auto), in_specs=P("d"), out_specs=P("d"), check_vma=False)


def shard_map_explicit(f):
    def run(x, y):
        with jax.set_mesh(mesh_of(AxisType.Explicit)):
            x, y = (jax.device_put(a, jax.NamedSharding(mesh_of(AxisType.Explicit), P("d"))) for a in (x, y))
            out = jax.shard_map(f, in_specs=P("d"), out_specs=P("d"))(x, y)
        return jax.device_get(out)

    return run


def explicit_mesh_without_shard_map(f):
    def run(x, y):
        with jax.set_mesh(mesh_of(AxisType.Explicit)):
            x, y = (jax.device_put(a, jax.NamedSharding(mesh_of(AxisType.Explicit), P("d"))) for a in (x, y))
            return jax.device_get(jax.jit(f)(x, y))

    return run


def sharded_loss(f, mesh_kind=AxisType.Auto, check_vma=True):
    """`y[0]` is shared by all devices, so its gradient is a sum over the mesh."""
    mapped = jax.shard_map(f, mesh=mesh_of(mesh_kind), in_specs=(P("d"), P()), out_specs=P("d"), check_vma=check_vma)
    return lambda x, y: (mapped(x, y[:1]) ** 2).sum()


def grad_outside_shard_map(f):
    return jax.grad(sharded_loss(f), argnums=(0, 1))


def grad_outside_shard_map_unchecked(f):
    return jax.grad(sharded_loss(f, check_vma=False), argnums=(0, 1))


def grad_inside_shard_map(f):
    """The gradient of a shared argument, taken inside, is the sum over all devices."""

    def local(x, y):
        return jax.grad(lambda x, y: (f(x, y) ** 2).sum(), argnums=(0, 1))(x, y)

    mapped = jax.shard_map(local, mesh=mesh_of(AxisType.Auto), in_specs=(P("d"), P()), out_specs=(P("d"), P()))
    return lambda x, y: mapped(x, y[:1])


def grad_in_explicit_shard_map(f):
    def run(x, y):
        with jax.set_mesh(mesh_of(AxisType.Explicit)):
            x = jax.device_put(x, jax.NamedSharding(mesh_of(AxisType.Explicit), P("d")))
            y = jax.device_put(y[:1], jax.NamedSharding(mesh_of(AxisType.Explicit), P()))
            local = lambda x, y: jax.grad(lambda x, y: (f(x, y) ** 2).sum(), argnums=(0, 1))(x, y)
            return jax.device_get(jax.shard_map(local, in_specs=(P("d"), P()), out_specs=(P("d"), P()))(x, y))

    return run


def pmap(f):
    return jax.pmap(f, axis_name="d")


def pmap_of_grad(f):
    return jax.pmap(jax.grad(loss(f), argnums=(0, 1)))


def export_round_trip(f):
    def run(x, y):
        exported = jax.export.export(jax.jit(f))(x, y)
        return jax.export.deserialize(exported.serialize(vjp_order=0)).call(x, y)

    return run


def export_with_gradient(f):
    def run(x, y):
        exported = jax.export.export(jax.jit(f))(x, y)
        return grad(jax.export.deserialize(exported.serialize(vjp_order=1)).call)(x, y)

    return run


def donated(f):
    return lambda x, y: jax.jit(f, donate_argnums=0)(jnp.array(x, copy=True), y)


def lowered_and_compiled(f):
    return lambda x, y: jax.jit(f).lower(x, y).compile()(x, y)


def without_jit(f):
    def run(x, y):
        with jax.disable_jit():
            return f(x, y)

    return run


def remat_without_jit(f):
    def run(x, y):
        with jax.disable_jit():
            return remat(f)(x, y)

    return run


TRANSFORMATIONS = [
    eager, jit, nested_jit, grad, jit_of_grad, grad_of_jit, value_and_grad, vjp, linearize_transposed,
    vmap, vmap_one_axis, vmap_of_vmap, vmap_of_grad, grad_of_vmap,
    vjp_of_vmap_over_columns, jit_of_vjp_of_vmap_of_vmap_over_columns,
    scan, grad_of_scan, while_loop, fori_loop, cond, grad_of_cond, remat, remat_in_scan,
    shard_map, shard_map_in_jit, shard_map_unchecked, shard_map_explicit, explicit_mesh_without_shard_map,
    grad_outside_shard_map, grad_outside_shard_map_unchecked, grad_inside_shard_map, grad_in_explicit_shard_map,
    pmap, pmap_of_grad, export_round_trip, export_with_gradient, donated, lowered_and_compiled, without_jit,
    remat_without_jit,
]  # fmt: skip


@functools.cache
def expected(transform, reference):
    """What plain JAX gives, on the host; styles with the same reference share it."""
    return jax.tree.map(np.asarray, transform(reference)(*inputs()))


@pytest.mark.parametrize(("transform", "style"), table(TRANSFORMATIONS, STYLES, [eager, grad, vmap, shard_map]))
def test_call_equals_plain_jax(transform, style):
    executor, kernel = new_executor(), style()
    x, y = inputs()
    same(transform(lambda x, y: executor(kernel, x, y))(x, y), expected(transform, reference_of(style)))


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("transform", "style"),
    table([jit, grad, vmap_of_grad, grad_inside_shard_map, pmap_of_grad, eager], STYLES, [grad]),
)
def test_compiled_call_equals_plain_jax(transform, style):
    executor, kernel = new_executor(), style()
    x, y = inputs()
    compiled = executor.compile(kernel, x, y)
    same(transform(compiled)(x, y), expected(transform, reference_of(style)))


@pytest.mark.parametrize(("transform", "style"), table([eager, grad, vmap_of_grad, scan], STYLES, [grad]))
def test_explicit_config_equals_plain_jax(transform, style):
    from tests.support import Scale

    executor, kernel = new_executor(), style()
    x, y = inputs()
    same(transform(lambda x, y: executor(kernel, x, y, cfg=Scale(1)))(x, y), expected(transform, reference_of(style)))


@pytest.mark.thin(2)
@pytest.mark.parametrize(("transform", "style"), table([eager, grad, vmap, scan], STYLES, [grad]))
def test_x64(transform, style):
    with jax.enable_x64(True):
        executor, kernel = new_executor(), style()
        x, y = inputs(jnp.float64)
        got = transform(lambda x, y: executor(kernel, x, y))(x, y)
        assert all(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(got))
        jax.tree.map(
            lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-12), got, transform(reference_of(style))(x, y)
        )


@pytest.mark.parametrize(
    ("wrap", "style"),
    [*((eager, style) for style in STYLES), (jit, Residuals), (vmap, Plain)],
    ids=lambda x: x.__name__,
)
def test_checkify_looks_inside_of_a_call(wrap, style):
    executor, kernel = new_executor(), style()
    x, y = inputs()
    call = checkify.checkify(wrap(lambda x, y: executor(kernel, x, y)), errors=checkify.all_checks)
    error, out = call(x, y)
    assert error.get() is None
    same(out, reference_of(style)(x, y))
    assert "nan generated by primitive: sin" in call(jnp.nan * x, y)[0].get()


def test_checkify_of_a_gradient():
    executor = new_executor()
    x, y = inputs()
    error, got = checkify.checkify(grad(lambda x, y: executor(Residuals(), x, y)), errors=checkify.float_checks)(x, y)
    assert error.get() is None
    same(got, grad(reference_of(Residuals))(x, y))


@pytest.mark.parametrize("wrap", [eager, jit, vmap], ids=lambda t: t.__name__)
def test_taylor_series_of_a_call(wrap):
    executor, kernel = new_executor(), Plain()
    x, y = inputs()
    series = ((x, y, 0 * x), (y, 0 * x, x))
    same(jet(wrap(lambda x, y: executor(kernel, x, y)), (x, y), series), jet(true, (x, y), series))


def equations(jaxpr, depth=0):
    """(depth, primitive) of every equation that is not a wrapping jit or gradient rule."""
    for eqn in jaxpr.eqns:
        inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
        if inner is None:
            yield str(eqn.primitive)
        else:
            yield from equations(getattr(inner, "jaxpr", inner), depth + 1)


@pytest.mark.parametrize("style", STYLES, ids=lambda s: s.__name__)
def test_jaxpr_holds_the_kernels_own_equations_in_one_jit_and_nothing_else(style):
    executor, kernel = new_executor(), style()
    x, y = inputs()
    cfg = kernel.heuristic_cfg(None)
    jaxpr = jax.make_jaxpr(lambda x, y: executor(kernel, x, y))(x, y).jaxpr
    plain = jax.make_jaxpr(lambda x, y: kernel.run(x, y, cfg=cfg))(x, y).jaxpr
    assert list(equations(jaxpr)) == list(equations(plain))
    assert len(jaxpr.eqns) == 1
    (call,) = jaxpr.eqns
    inner = [str(e.primitive) for e in call.params["jaxpr"].eqns]
    own_rule = ["custom_vjp_call"]
    assert inner == (list(equations(plain)) if style is STYLES[0] else own_rule)
