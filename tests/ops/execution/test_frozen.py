"""Tuned offline, then frozen: a program asks for nothing that tuning its lowered text did not store."""

import itertools
import os

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel.modules.flash_attention import FlashAttention
from ejkernel.ops import ConfigSelectorChain, Executor, autotune_lowered, policy_override
from ejkernel.ops.config.asking import candidates
from ejkernel.ops.config.selection import ConfigNotFoundError
from ejkernel.ops.tuning.foreign import Chosen
from ejkernel.ops.utils.meta import find_labels_in_lowered
from tests.support import CustomVjp, OwnBackward, Plain, Residuals, Scale, new_executor

SHAPE = (4, 8)


class Last:
    """Measures nothing: the last candidate wins, which is not the guess."""

    autotune = None

    def tune(self, inv, kernel, **_):
        return Chosen(list(candidates(inv, kernel))[-1])


# --- Kernels ---


class OwnCustom(CustomVjp):
    """The forward's output is not wanted by the backward, so under `jit` a gradient alone leaves it out."""

    heuristic_cfg_vjp = OwnBackward.heuristic_cfg_vjp
    config_space_vjp = OwnBackward.config_space_vjp


class Shapely(OwnBackward):
    """How many residuals there are depends on the config."""

    def fwd_with_residuals(self, x, y, *, cfg):
        return self.run(x, y, cfg=cfg), (jnp.sin(x), *[jnp.cos(x)] * cfg.factor)

    def vjp(self, residuals, out, dout, x, y, *, cfg):
        return super().vjp(residuals[:2], out, dout, x, y, cfg=cfg)


class Native(OwnBackward):
    def run_batched(self, x, y, *, cfg, in_axes):
        return self.run(x, y, cfg=cfg)


class Leading(Plain):
    leading_batch = True


class Attention(FlashAttention):
    """Of one sequence and one head, with rows as they come."""

    def prepare(self, x, y):
        x, y = (jnp.atleast_2d(a)[None, :, None] for a in (x, y))
        return super().prepare(x, y, y)


def call_of(executor, style):
    kernel = style()
    if style is Attention:
        return lambda x, y: executor(kernel, x, y).reshape(x.shape)
    return lambda x, y: executor(kernel, x, y)


KERNELS = [Plain, CustomVjp, Residuals, OwnBackward, OwnCustom, Native, Attention]

# --- Programs: functions of two arrays of one shape, that give one array of this shape ---


def grad(f):
    return jax.grad(lambda x, y: f(x, y).sum())


def vmap(f):
    return lambda x, y: jax.vmap(f)(x[None], y[None])[0]


def scan(f):
    return lambda x, y: jax.lax.scan(lambda c, _: (f(c, y), None), x, None, length=2)[0]


def shard_map(f):
    if jax.sharding.get_abstract_mesh().manual_axes:
        return f
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    return lambda x, y: jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P("d"))(x, y)


def plain(f):
    return f


LAYERS = [plain, jax.jit, grad, vmap, scan, jax.checkpoint, shard_map]


def program(executor, style, layers):
    f = call_of(executor, style)
    for layer in reversed(layers):
        f = layer(f)
    return f


def pairwise():
    """Three layers and a kernel: every two of the four meet in every way (columns of Latin squares of order 7)."""
    for i, j in itertools.product(range(7), repeat=2):
        yield (LAYERS[i], LAYERS[(i + j) % 7], LAYERS[j]), KERNELS[(i + 2 * j) % 7]


def names(parts):
    return "-".join(part.__name__ for part in parts)


def check(layers, style):
    if layers.count(shard_map) > 1:
        layers = tuple(dict.fromkeys(layers))
    selector = ConfigSelectorChain(tuner=Last())
    executor, x = Executor(selector), jnp.linspace(0.1, 1.0, 32).reshape(SHAPE)
    lowered = jax.jit(program(executor, style, layers)).lower(x, x)
    result = autotune_lowered(selector, lowered)
    assert result.entries
    assert result.unmatched == ()
    with policy_override(autotune="frozen"):
        # A config that is missing is missed when a program is lowered: it need not be compiled to know.
        again = jax.jit(program(executor, style, layers)).lower(x, x)
    assert set(find_labels_in_lowered(again)) == set(find_labels_in_lowered(lowered))


@pytest.mark.thin(2)
@pytest.mark.parametrize("row", list(pairwise()), ids=lambda row: names([*row[0], row[1]]))
def test_program_asks_for_what_was_tuned(row):
    check(*row)


@pytest.mark.thin(2)
@pytest.mark.parametrize("style", [Plain, CustomVjp, OwnBackward, OwnCustom, Attention], ids=lambda s: s.__name__)
@pytest.mark.parametrize(
    "layers", [(vmap, grad), (vmap, jax.jit, grad), (vmap, grad, jax.checkpoint), (vmap, scan, grad)], ids=names
)
def test_derivative_inside_of_a_batch_asks_for_what_was_tuned(layers, style):
    check(layers, style)


@pytest.mark.slow
@pytest.mark.skipif("TESTS_FULL_TABLE" not in os.environ, reason="ten minutes: set TESTS_FULL_TABLE")
def test_every_program_asks_for_what_was_tuned():
    for layers, style in itertools.product(itertools.product(LAYERS, repeat=3), [*KERNELS, Shapely, Leading]):
        check(layers, style)


@pytest.mark.parametrize("layers", [(vmap, jax.jit, grad), (vmap, grad, jax.checkpoint), (vmap, grad)], ids=names)
def test_residuals_of_another_config_are_no_reason_for_a_miss(layers):
    check(layers, Shapely)


@pytest.mark.parametrize("layers", [(vmap, grad), (vmap, grad, vmap), (vmap, scan, grad)], ids=names)
def test_batch_that_the_kernel_runs_at_once_is_found(layers):
    check(layers, Leading)


# --- What is demanded ---

X = jnp.linspace(0.1, 1.0, 4)


def test_forward_that_is_dead_is_not_demanded():
    executor, kernel = new_executor(autotune="frozen"), OwnCustom()
    step = jax.jit(jax.grad(lambda x: executor(kernel, x, x).sum()))
    with pytest.raises(ConfigNotFoundError, match=r"owncustom\.vjp: no config"):
        step(X)
    with pytest.raises(ConfigNotFoundError, match="owncustom: no config"):
        jax.jit(jax.value_and_grad(lambda x: executor(kernel, x, x).sum()))(X)
    assert jax.jit(lambda x: (executor(Plain(), x, x), 2 * x)[1])(X).shape == X.shape


def test_call_with_effects_is_demanded_too():
    class Prints(Plain):
        def run(self, x, y, *, cfg):
            jax.debug.callback(lambda: None)
            return x * y

    with pytest.raises(ConfigNotFoundError):
        new_executor(autotune="frozen")(Prints(), X, X)


def test_kernel_without_jit_does_not_run_before_it_is_refused():
    class Eager(Plain):
        jit = False

        def run(self, x, y, *, cfg):
            raise AssertionError

    with pytest.raises(ConfigNotFoundError):
        new_executor(autotune="frozen")(Eager(), X, X)


def test_nothing_but_the_batch_is_demanded_of_a_derivative_inside_of_it():
    selector = ConfigSelectorChain(tuner=Last())
    executor, kernel = Executor(selector), Plain()
    each = jax.jit(jax.vmap(jax.grad(lambda x: executor(kernel, x, x).sum())))
    (entry,) = autotune_lowered(selector, each.lower(X[None]))
    assert entry.cfg == Scale(2)
    with policy_override(autotune="frozen"):
        each(X[None])
        with pytest.raises(ConfigNotFoundError):
            executor(kernel, X, X)
