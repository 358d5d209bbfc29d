import types
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel.ops import Kernel, get_device_platform
from ejkernel.ops.core import dispatch
from ejkernel.ops.core.dispatch import PlatformError, UnsupportedCallError
from ejkernel.ops.core.kernel import KernelDefinitionError
from tests.support import new_executor

X = jnp.ones((4, 2))


@dataclass(frozen=True)
class Backend:
    platform: str | None = None


class Base(Kernel[Backend, jax.Array]):
    def heuristic_cfg(self, inv):
        return Backend()


def kernel_with(**methods):
    """A kernel whose methods return the number that stands for them."""
    runs = {name: (lambda self, x, *, cfg, n=n: x * n) for name, n in methods.items()}
    return types.new_class("Made", (Base,), exec_body=lambda ns: ns.update(runs))()


@pytest.fixture
def pretend(monkeypatch):
    """Makes dispatch believe in other hardware."""

    def set_kind(kind):
        monkeypatch.setattr(dispatch, "device_kind", lambda: kind)
        preferred = {"gpu": "triton", "tpu": "pallas", "cpu": "xla"}[kind]
        monkeypatch.setattr(dispatch, "get_device_platform", lambda: preferred)

    return set_kind


@pytest.mark.parametrize(
    ("kind", "methods", "order"),
    [
        ("cpu", ["run_xla", "run_cpu", "run"], ["run_xla", "run_cpu"]),
        ("cpu", ["run_triton", "run"], ["run"]),
        ("gpu", ["run_xla", "run_cudnn", "run_mosaic", "run_triton", "run"],
         ["run_triton", "run_mosaic", "run_cudnn", "run_xla", "run"]),
        ("gpu", ["run_mosaic", "run"], ["run_mosaic", "run"]),
        ("gpu", ["run_xla", "run_gpu", "run"], ["run_gpu", "run_xla"]),
        ("gpu", ["run_xla"], ["run_xla"]),
        ("gpu", ["run_xla", "run"], ["run_xla", "run"]),
        ("tpu", ["run_pallas", "run_xla"], ["run_pallas", "run_xla"]),
        ("tpu", ["run_tpu", "run_xla"], ["run_tpu", "run_xla"]),
    ],
)  # fmt: skip
def test_implementations_are_tried_in_the_order_of_the_contract(pretend, kind, methods, order):
    pretend(kind)
    kernel = kernel_with(**{m: i for i, m in enumerate(methods)})
    found = [run for _, run in dispatch.implementations(kernel, None)]
    assert found == [getattr(kernel, name) for name in order]


def test_lookup_goes_from_the_most_specific_name_to_the_plain_one():
    names = ["run_shard_map_xla", "run_shard_map", "run_xla", "run_cpu", "run"]
    while names:
        kernel = kernel_with(**dict.fromkeys(names, 1))
        assert dispatch.find(kernel, "run", "shard_map", "xla") == getattr(kernel, names[0])
        names.pop(0)
    assert dispatch.find(kernel_with(), "run", None, "xla") is None


def test_platform_of_this_machine():
    assert get_device_platform() == {"cpu": "xla", "gpu": "triton", "tpu": "pallas"}[jax.devices()[0].platform]


def test_shard_map_is_a_context_and_pmap_is_not():
    kernel, executor = kernel_with(run=1, run_shard_map=2), new_executor()
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    call = lambda x: executor(kernel, x)
    np.testing.assert_array_equal(call(X), X)
    for options in ({}, {"check_vma": False}):
        mapped = jax.shard_map(call, mesh=mesh, in_specs=P("d"), out_specs=P("d"), **options)
        np.testing.assert_array_equal(mapped(X), 2 * X)
        np.testing.assert_array_equal(jax.jit(mapped)(X), 2 * X)
    np.testing.assert_array_equal(jax.pmap(call)(X), X)
    np.testing.assert_array_equal(jax.pmap(call, axis_name="p")(X), X)
    np.testing.assert_array_equal(jax.vmap(call, axis_name="d")(X), X)


def test_context_is_part_of_the_key():
    executor, kernel, keys = new_executor(), kernel_with(run=1), []
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))

    def local(x):
        keys.append(executor.explain(kernel, x).key)
        return x

    jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P("d"))(X)
    local(X[:1])
    assert keys[0][:2] == keys[1][:2]
    assert keys[0][2] != keys[1][2]


def test_config_forces_its_platform():
    kernel, executor = kernel_with(run_xla=1, run_triton=2, run=3), new_executor()
    np.testing.assert_array_equal(executor(kernel, X), X)
    np.testing.assert_array_equal(executor(kernel, X, cfg=Backend("triton")), 2 * X)
    np.testing.assert_array_equal(executor(kernel, X, cfg=Backend("auto")), X)


def test_chosen_config_forces_its_platform():
    class Chosen(Base):
        def heuristic_cfg(self, inv):
            return Backend("cudnn")

        def run_xla(self, x, *, cfg):
            return x

        def run_cudnn(self, x, *, cfg):
            return x * 2

    np.testing.assert_array_equal(new_executor()(Chosen(), X), 2 * X)


@pytest.mark.parametrize(
    ("platform", "message"),
    [("cuda", "cfg.platform is 'cuda', allowed are 'triton'"), ("mosaic", r"implements only \['triton', 'xla'\]")],
)
def test_wrong_platform_says_which_are_right(platform, message):
    with pytest.raises(PlatformError, match=message):
        new_executor()(kernel_with(run_xla=1, run_triton=2), X, cfg=Backend(platform))


class Partial(Base):
    """Serves small arguments in one way, vectors in another, and nothing else."""

    def supports(self, inv, platform):
        return True if platform != "triton" or inv.args[0].size < 5 else "needs fewer than 5 elements"

    def run_triton(self, x, *, cfg):
        return x * 2

    def run_mosaic(self, x, *, cfg):
        raise NotImplementedError("only on Sundays")

    def run_xla(self, x, *, cfg):
        if x.ndim != 1:
            raise NotImplementedError
        return x * 3


def test_implementation_that_cannot_serve_is_passed_over(pretend):
    pretend("gpu")
    executor = new_executor()
    np.testing.assert_array_equal(executor(Partial(), X[:2]), 2 * X[:2])
    np.testing.assert_array_equal(executor(Partial(), X.reshape(-1)), 3 * X.reshape(-1))


def test_when_none_can_serve_one_error_lists_each_with_its_reason(pretend):
    pretend("gpu")
    with pytest.raises(UnsupportedCallError) as caught:
        new_executor()(Partial(), X)
    assert caught.value.reasons == {
        "triton": "needs fewer than 5 elements",
        "mosaic": "only on Sundays",
        "xla": "not implemented",
    }
    for text in ("no backend supports (float32[4,2]).", "triton: needs fewer", "mosaic: only on Sundays"):
        assert text in str(caught.value)
    assert isinstance(caught.value.__cause__, NotImplementedError)


def test_forced_platform_that_cannot_serve_is_an_error_and_not_something_else():
    with pytest.raises(UnsupportedCallError, match="triton: needs fewer than 5 elements"):
        new_executor()(Partial(), X, cfg=Backend("triton"))


def test_stored_config_whose_platform_cannot_serve_gives_way_to_the_guess():
    executor = new_executor()
    vector = X.reshape(-1)
    executor.chooser.cache.put(*executor.explain(Partial(), vector).key, Backend("triton"))
    np.testing.assert_array_equal(executor(Partial(), vector), 3 * vector)


@pytest.mark.parametrize("style", ["eager", "grad"])
def test_residuals_come_from_the_platform_that_serves(pretend, style):
    class Both(Base):
        def run_triton(self, x, *, cfg):
            raise NotImplementedError("no")

        def run_xla(self, x, *, cfg):
            return x**2

        def fwd_with_residuals_triton(self, x, *, cfg):
            raise AssertionError("triton does not serve")

        def vjp_triton(self, residuals, out, dout, x, *, cfg):
            raise AssertionError("triton does not serve")

        def fwd_with_residuals_xla(self, x, *, cfg):
            return x**2, 2 * x

        def vjp_xla(self, residuals, out, dout, x, *, cfg):
            return (dout * residuals,)

    pretend("gpu")
    executor = new_executor()
    f = lambda x: executor(Both(), x).sum()
    if style == "eager":
        np.testing.assert_array_equal(executor(Both(), X * 3), 9 * X)
    else:
        np.testing.assert_array_equal(jax.grad(f)(X * 3), 6 * X)


def test_forward_that_cannot_keep_residuals_is_passed_over(pretend):
    class Both(Base):
        def run_triton(self, x, *, cfg):
            return x**2

        def run_xla(self, x, *, cfg):
            return x**2

        def fwd_with_residuals_triton(self, x, *, cfg):
            raise NotImplementedError("forward only")

        def vjp_triton(self, residuals, out, dout, x, *, cfg):
            raise AssertionError("its forward never ran")

        def fwd_with_residuals_xla(self, x, *, cfg):
            return x**2, 2 * x

        def vjp_xla(self, residuals, out, dout, x, *, cfg):
            return (dout * residuals,)

    pretend("gpu")
    executor = new_executor()
    np.testing.assert_array_equal(jax.grad(lambda x: executor(Both(), x).sum())(X * 3), 6 * X)


def test_supports_must_answer():
    class Mute(Partial):
        def supports(self, inv, platform):
            return None

    with pytest.raises(KernelDefinitionError, match="returned None; return True, False or a reason"):
        new_executor()(Mute(), X)


def test_heuristic_and_space_are_looked_up_by_platform():
    class ByPlatform(Base):
        def run(self, x, *, cfg):
            return x * cfg

        def heuristic_cfg(self, inv):
            return 1

        def heuristic_cfg_xla(self, inv):
            return 2

        def heuristic_cfg_cpu(self, inv):
            return 3

    executor = new_executor()
    np.testing.assert_array_equal(executor(ByPlatform(), X), 2 * X)
    assert executor.choose_config(ByPlatform(), X) == 2
