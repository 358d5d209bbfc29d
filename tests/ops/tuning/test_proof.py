"""A config that was tuned for another shape serves a call only if it computes the same there."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import _compat
from ejkernel.ops import ConfigSelectorChain, Executor, Kernel, PersistentCache, policy_override
from ejkernel.ops.tuning import proof
from ejkernel.ops.tuning.bench import Bench
from tests.support import within


@dataclass(frozen=True)
class Chunks:
    size: int = 1


class Total(Kernel[Chunks, jax.Array]):
    """Twice a vector, piece by piece. The space ignores the shape, as many do; the guess always fits."""

    def __init__(self, name="total"):
        super().__init__(name)

    def run(self, x, *, cfg):
        return 2 * x.reshape(-1, cfg.size).reshape(x.shape)

    def heuristic_cfg(self, inv):
        return Chunks()

    def config_space(self, inv):
        return [Chunks(1), Chunks(2), Chunks(8)]


class Dropping(Total):
    """Leaves out the tail, silently."""

    def run(self, x, *, cfg):
        kept = x.shape[0] // cfg.size * cfg.size
        return jnp.zeros_like(x).at[:kept].set(2 * x[:kept])


class WrongGradient(Total):
    """Forward right, backward not where the tail is left out."""

    def run(self, x, *, cfg):
        return 2 * x

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return (Dropping.run(self, cotangents[0], cfg=cfg),)


class WrongResiduals(Total):
    """The same, written with residuals."""

    def run(self, x, *, cfg):
        return 2 * x

    def fwd_with_residuals(self, x, *, cfg):
        return 2 * x, None

    def vjp(self, residuals, out, dout, x, *, cfg):
        return (Dropping.run(self, dout, cfg=cfg),)


class WrongOwnBackward(WrongResiduals):
    """The same with configs of its own for the backward, of which the wrong one is transferred."""

    def heuristic_cfg_vjp(self, inv):
        return Chunks()

    def config_space_vjp(self, inv):
        return self.config_space(inv)


class Gathering(Total):
    """Integers that must be legal."""

    def run(self, x, index, *, cfg):
        return 2 * x.reshape(-1, cfg.size).reshape(x.shape)[index]


class GatheringWithExamples(Gathering):
    def example_inputs(self, inv, key):
        x, index = inv.args
        return (jax.random.normal(key, x.shape, x.dtype), jnp.zeros(index.shape, index.dtype)), {}


class WrongGuess(Dropping):
    """The guess is wrong, and the reference knows it."""

    def heuristic_cfg(self, inv):
        return Chunks(16)

    def reference(self, x):
        return x + x


class OwnGradient(Dropping):
    """Its gradient is a call of itself: the proof of a config, wrong here, meets the call that is being traced."""

    executor: Executor

    def reference(self, x):
        return x + x

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return (self.executor(self, cotangents[0]),)


FAR = jnp.ones(64)


@pytest.fixture
def setting(tmp_path):
    """An executor over a store in which the neighbour of a call has been tuned."""

    def make(kernel, *args, op_id=None):
        store = PersistentCache(tmp_path)
        executor = Executor(ConfigSelectorChain(persistent=store))
        inv = executor.explain(kernel, *(args or (FAR,))).selection.inv
        key = inv.key if op_id is None else (inv.key[0], op_id, inv.call_key)
        store.put(*key, Chunks(8), signature={**inv.signature, "op": op_id or inv.op_id}, kernel=kernel)
        return executor

    return make


def count_builds(monkeypatch):
    built, build = [], Bench.build

    def counting(bench, candidates):
        built.extend(cfg for _, cfg in candidates)
        return build(bench, candidates)

    monkeypatch.setattr(Bench, "build", counting)
    return built


@pytest.fixture(autouse=True)
def forgotten():
    proof._proofs.clear()


WAYS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, y: (c, f(y)), 0, x[None])[1][0],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kernel", [Total, Dropping], ids=["illegal", "wrong"])
def test_config_that_fails_or_is_wrong_at_another_shape_is_the_guess_instead(setting, kernel, way):
    executor, x = setting(kernel()), jnp.arange(23.0)
    np.testing.assert_array_equal(WAYS[way](lambda x: executor(kernel(), x))(x), 2 * x)
    assert executor.choose_config(kernel(), x) == Chunks(1)


def test_config_that_is_right_at_another_shape_serves(setting):
    executor, x = setting(Dropping()), jnp.arange(32.0)
    assert executor.choose_config(Dropping(), x) == Chunks(8)
    np.testing.assert_array_equal(jax.jit(lambda x: executor(Dropping(), x))(x), 2 * x)


@pytest.mark.parametrize("kernel", [WrongGradient, WrongResiduals])
def test_gradient_is_proved_too(setting, kernel):
    executor, x = setting(kernel()), jnp.arange(23.0)
    np.testing.assert_array_equal(jax.grad(lambda x: executor(kernel(), x).sum())(x), 2.0)
    assert executor.choose_config(kernel(), x) == Chunks(1)


def test_backward_with_its_own_configs_is_proved_on_its_own(setting):
    executor, kernel = setting(WrongOwnBackward(), op_id="total.vjp"), WrongOwnBackward()
    for n in (23, 32):
        x = jnp.arange(float(n))
        np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: executor(kernel, x).sum()))(x), 2.0)


class OtherResiduals(Total):
    """Keeps something else with every config, all of it right for its backward."""

    def run(self, x, *, cfg):
        return 2 * x

    def fwd_with_residuals(self, x, *, cfg):
        return 2 * x, jnp.full((cfg.size,), 2.0)

    def vjp(self, residuals, out, dout, x, *, cfg):
        return (residuals[0] * dout,)

    def heuristic_cfg_vjp(self, inv):
        return Chunks()


def test_what_is_kept_for_the_backward_may_differ_if_the_gradient_is_right(setting):
    executor, kernel, x = setting(OtherResiduals()), OtherResiduals(), jnp.arange(23.0)
    assert executor.choose_config(kernel, x) == Chunks(8)
    np.testing.assert_array_equal(jax.grad(lambda x: executor(kernel, x).sum())(x), 2.0)


class Coarse(Total):
    """Its gradient is off by a hundred-thousandth with any config but the guess: more than it says it may."""

    tolerance = 1e-6

    def run(self, x, *, cfg):
        return 2 * x

    def fwd_with_residuals(self, x, *, cfg):
        return 2 * x, jnp.where(cfg.size > 1, 2.00002, 2.0)

    def vjp(self, residuals, out, dout, x, *, cfg):
        return (residuals * dout,)


class CoarseResiduals(Coarse):
    """The same with configs of its own for the backward."""

    def heuristic_cfg_vjp(self, inv):
        return Chunks()


@pytest.mark.parametrize("kernel", [Coarse, CoarseResiduals])
def test_the_kernels_own_tolerance_counts_for_what_its_backward_gets(setting, kernel):
    assert setting(kernel()).choose_config(kernel(), jnp.arange(24.0)) == Chunks(1)


def test_proof_is_made_once_and_remembered(setting, monkeypatch, tmp_path):
    built = count_builds(monkeypatch)
    for kernel, n in ((Total("right"), 32), (Dropping("wrong"), 23)):
        executor, x = setting(kernel), jnp.ones(n)
        chosen = executor.choose_config(kernel, x)
        assert len(built) == 2
        jax.jit(lambda x, executor=executor, kernel=kernel: executor(kernel, x))(x)
        executor(kernel, x)
        proof._proofs.clear()  # As in the next process.
        again = Executor(ConfigSelectorChain(persistent=PersistentCache(tmp_path)))
        assert again.choose_config(kernel, x) == chosen
        assert len(built) == 2
        built.clear()


def test_store_that_cannot_be_written_takes_no_proofs_and_says_nothing(setting, monkeypatch):
    from ejkernel.ops.store.files import StoreFiles

    def refuse(self, place, record):
        raise PermissionError(13, "Permission denied")

    executor = setting(Total())
    monkeypatch.setattr(StoreFiles, "append_trial", refuse)
    assert executor.choose_config(Total(), jnp.ones(32)) == Chunks(8)


def test_explaining_proves_nothing_but_tells_what_is_known(setting, monkeypatch):
    executor, x = setting(Dropping()), jnp.ones(23)
    built = count_builds(monkeypatch)
    assert "to be checked at the first call" in str(executor.explain(Dropping(), x))
    assert not built
    executor(Dropping(), x)
    explanation = executor.explain(Dropping(), x)
    assert explanation.tier == "heuristic"
    assert "tuned for args[0].shape: (64,) -> (23,), but it is wrong here" in str(explanation)


def test_integers_that_nobody_knows_leave_the_guess(setting):
    index, x = jnp.arange(4), jnp.ones(32)
    for kernel, cfg in ((Gathering("unknown"), Chunks(1)), (GatheringWithExamples("known"), Chunks(8))):
        executor = setting(kernel, FAR, index)
        assert executor.choose_config(kernel, x, index) == cfg
        np.testing.assert_array_equal(executor(kernel, x, index), 2.0)


def test_where_the_guess_is_wrong_the_reference_decides(setting):
    executor = setting(WrongGuess())
    np.testing.assert_array_equal(executor(WrongGuess(), jnp.ones(24)), 2.0)
    assert executor.choose_config(WrongGuess(), jnp.ones(31)) == Chunks(16)


def test_call_too_large_to_be_made_up_takes_the_guess(setting, monkeypatch):
    monkeypatch.setattr(proof, "available_bytes", lambda: 100)
    executor = setting(Total())
    assert executor.choose_config(Total(), jnp.ones(32)) == Chunks(1)
    assert "too much memory" in str(executor.explain(Total(), jnp.ones(32)))


def test_collective_kernel_of_many_processes_takes_the_guess(setting, monkeypatch):
    class Together(Total):
        collective = True

    executor = setting(Together())
    monkeypatch.setattr(_compat, "distributed_client", object)
    with policy_override(agree=False):
        assert executor.choose_config(Together(), jnp.ones(32)) == Chunks(1)


@pytest.mark.parametrize("context", [partial(jax.debug_nans, True), partial(jax.enable_x64, True)], ids=["nans", "x64"])
def test_options_of_the_caller_count(setting, context):
    executor = setting(Total())
    with context():
        np.testing.assert_array_equal(
            jax.jit(lambda x: executor(Total(), x))(jnp.arange(24.0, dtype="float32")), 2 * np.arange(24.0)
        )
        assert executor.choose_config(Total(), jnp.ones(24, jnp.float32)) == Chunks(8)


def test_proof_of_a_kernel_whose_gradient_calls_the_kernel_again_ends(setting):
    executor = setting(kernel := OwnGradient())
    kernel.executor = executor
    x = jnp.ones(24)
    assert jnp.array_equal(within(60, lambda: executor(kernel, x)), 2 * x)
    assert executor.explain(kernel, x).tier == "transferred"
    x = jnp.ones(25)  # Here the last one would be left out.
    assert jnp.array_equal(within(60, lambda: executor(kernel, x)), 2 * x)
    assert executor.explain(kernel, x).tier == "heuristic"
