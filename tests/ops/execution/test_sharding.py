"""Calls on a mesh: configs are chosen for a shard, values and gradients equal those of the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel.ops import Autotuner, ConfigSelectorChain, Executor, Invocation, Kernel
from ejkernel.ops.execution.sharding import ShardingArgumentError
from tests.support import STYLES, Plain, Scale, new_executor, reference_of, true


def mesh_of(kind=AxisType.Auto, shape=(4,), names=("d",)):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def normal(*shape):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


def same(got, want):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6), got, want)


class Recorder:
    def __init__(self):
        self.asked = []

    def choose(self, inv, kernel):
        self.asked.append(inv)
        return Scale(1)


@pytest.mark.thin(2)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("style", STYLES, ids=lambda s: s.__name__)
def test_call_on_a_mesh_equals_the_whole(style, kind):
    executor, kernel, mesh = new_executor(), style(), mesh_of(kind)
    x, y = normal(8, 3), normal(2, 3)
    call = lambda x, y: executor(kernel, x, y, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
    shards = lambda f: lambda x, y: jax.vmap(f, in_axes=(0, None))(x.reshape(4, 2, 3), y).reshape(8, 3)
    same(call(x, y), shards(true)(x, y))
    if kind is AxisType.Auto:
        loss = lambda f: lambda x, y: (f(x, y) ** 2).sum()
        plain = shards(reference_of(style))
        same(jax.grad(loss(call), (0, 1))(x, y), jax.grad(loss(plain), (0, 1))(x, y))


def test_a_mesh_may_have_axes_of_both_kinds():
    kinds = (AxisType.Auto, AxisType.Explicit)
    mesh, x = jax.make_mesh((2, 2), ("a", "e"), axis_types=kinds), normal(8, 6)
    call = lambda x: new_executor()(Plain(), x, x, mesh=mesh, in_specs=P("a", "e"), out_specs=P("a", "e"))
    same(call(x), true(x, x))


def test_config_is_chosen_for_the_shard_and_once():
    chooser = Recorder()
    executor, x = Executor(chooser), normal(8, 3)
    for _ in range(2):
        executor(Plain(), x, x, mesh=mesh_of(), in_specs=P("d"), out_specs=P("d"))
    (inv,) = chooser.asked
    assert [a.shape for a in inv.args] == [(2, 3), (2, 3)]
    assert inv.context == "shard_map"


class Options(Plain):
    def run(self, x, y, *, cfg, shift, mode):
        return super().run(x, y, cfg=cfg) + (shift if mode == "plus" else -shift)


def test_keywords_are_whole_on_every_device():
    x, shift = normal(8, 3), normal(3)
    specs = {"mesh": mesh_of(), "in_specs": [P("d"), P("d")], "out_specs": P("d")}
    got = new_executor()(Options(), x, x, shift=shift, mode="minus", **specs)
    same(got, true(x, x) - shift)


class Meshed(Plain):
    """A kernel with a keyword of its own that is called like one of the executor's."""

    def run(self, x, y, *, cfg, mesh=None):
        return super().run(x, y, cfg=cfg) * (1 if mesh is None else mesh.size)


def test_keyword_that_a_kernel_names_is_its_own():
    executor, x = new_executor(), normal(8, 3)
    same(executor(Meshed(), x, x, mesh=None), true(x, x))
    same(executor(Meshed(), x, x, mesh=mesh_of()), 4 * true(x, x))
    same(executor.compile(Meshed(), x, x, mesh=mesh_of())(x, x, mesh=mesh_of()), 4 * true(x, x))
    on_shards = executor(Meshed(), x, x, in_specs=P("d"), out_specs=P("d"), mesh=mesh_of())
    same(on_shards, true(x, x))


def test_attributes_that_are_no_methods_do_not_matter():
    class Odd(Plain):
        run_defaults = dict
        running = 3

    x = normal(8, 3)
    same(new_executor()(Odd(), x, x, mesh=mesh_of(), in_specs=P("d"), out_specs=P("d")), true(x, x))


@pytest.mark.parametrize("ask", ["compile", "choose_config", "explain"])
def test_only_a_call_can_be_sharded(ask):
    executor, x = new_executor(), normal(8, 3)
    with pytest.raises(ShardingArgumentError, match=f"{ask} takes no in_specs, mesh, out_specs"):
        getattr(executor, ask)(Plain(), x, x, mesh=mesh_of(), in_specs=P("d"), out_specs=P("d"))


def test_wrong_specs_are_named():
    executor, x, mesh = new_executor(), normal(8, 3), mesh_of()
    with pytest.raises(ShardingArgumentError, match=r"need mesh=.*got mesh=None"):
        executor(Plain(), x, x, in_specs=P("d"), out_specs=P("d"))
    with pytest.raises(ShardingArgumentError, match=r"mesh must be a jax\.sharding\.Mesh, got str"):
        executor(Plain(), x, x, mesh="d", in_specs=P("d"), out_specs=P("d"))
    with pytest.raises(ShardingArgumentError, match="out_specs is missing"):
        executor(Plain(), x, x, mesh=mesh, in_specs=P("d"))
    with pytest.raises(ShardingArgumentError, match=r"axes \['e'\], the mesh has \('d',\)"):
        executor(Plain(), x, x, mesh=mesh, in_specs=P("e"), out_specs=P("d"))
    with pytest.raises(ShardingArgumentError, match="one entry for each of the 2 positional arguments"):
        executor(Plain(), x, x, mesh=mesh, in_specs=(P("d"),), out_specs=P("d"))


class Mean(Kernel[Scale, jax.Array]):
    """Communicates; its config says in how many steps."""

    collective = True

    def run(self, x, *, cfg, axis="d"):
        return sum(jax.lax.pmean(x, axis) / cfg.factor for _ in range(cfg.factor))

    def fwd_with_residuals(self, x, *, cfg, axis="d"):
        return self.run(x, cfg=cfg, axis=axis), None

    def vjp(self, residuals, out, dout, x, *, cfg, axis="d"):
        return (jax.lax.pmean(dout, axis),)

    def heuristic_cfg(self, inv):
        return Scale(3)

    def config_space(self, inv):
        return [Scale(1), Scale(2), Scale(3)]


def test_key_of_a_kernel_that_communicates_holds_the_size_of_the_mesh():
    keys = []
    for shape, rows in (((4,), 8), ((2,), 4)):
        chooser = Recorder()
        mesh = jax.make_mesh(shape, ("d",), devices=jax.devices()[: shape[0]])
        Executor(chooser)(Mean(), normal(rows, 3), mesh=mesh, in_specs=P("d"), out_specs=P("d"))
        (inv,) = chooser.asked
        assert inv.args[0].shape == (2, 3)
        assert inv.axes == {"d": shape[0]}
        keys.append(inv.call_key)
    assert keys[0] != keys[1]


def test_kernel_that_communicates_is_tuned_on_a_mesh_of_its_own():
    selector = ConfigSelectorChain(autotune=True, tuner=Autotuner(timer="wall", max_candidates=3))
    x = normal(8, 3)
    out = Executor(selector)(Mean(), x, mesh=mesh_of(), in_specs=P("d"), out_specs=P("d"))
    same(out, jnp.tile(x.reshape(4, 2, 3).mean(0), (4, 1)))
    assert len(selector.cache) == 1


def test_kernel_that_communicates_needs_as_many_devices_to_be_tuned():
    inv = Invocation(kernel=Mean(), args=(normal(2, 3),), axes={"d": 512})
    with pytest.raises(RuntimeError, match="512 devices; there are 4"):
        Autotuner().tune(inv, Mean())
