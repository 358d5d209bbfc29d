"""The store as a tier of selection: persistent entries, staleness, nearest shapes, what frozen says about a miss."""

import itertools
import os
import shlex
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.cli import calls
from ejkernel.ops import (
    Autotuner,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    PersistentCache,
    autotune,
    overlay_cache,
    policy_override,
)
from ejkernel.ops.config.selection import ConfigNotFoundError
from ejkernel.ops.store.packs import PackError
from ejkernel.ops.store.persistent import StoreWarning
from ejkernel.ops.tuning.shortfall import TuningWarning
from tests import recorded_kernels
from tests.support import OwnBackward, Plain, Scale
from tests.tuning_kernels import busy

X = jnp.ones((8, 4))


class Shaped(Plain):
    """A kernel whose factor must divide its rows."""

    def __init__(self, mode="a"):
        super().__init__("shaped")

    def run(self, x, *, cfg, mode="a"):
        return x * cfg.factor

    def config_space(self, inv):
        return [Scale(f) for f in (1, 2, 4, 8, 16, 32) if inv.args[0].shape[0] % f == 0]


class Tiled(Shaped):
    """The same numbers with every config that it can run with; shows what it was traced with."""

    traced: ClassVar[list[Scale]] = []

    def run(self, x, *, cfg):
        type(self).traced.append(cfg)
        return jnp.concatenate([2 * tile for tile in x.reshape(cfg.factor, -1, *x.shape[1:])])


def traced_with(call, *args):
    """The config that a call is traced with in the end: its proof comes first."""
    Tiled.traced.clear()
    np.testing.assert_array_equal(call(*args), 2 * args[0])
    return Tiled.traced[-1]


class Slow(Shaped):
    """A kernel whose guess loses against 2, which its reference says is right."""

    def reference(self, x):
        return 2 * x

    def config_space(self, inv):
        return [Scale(1), Scale(2)]


class Slowed(Shaped):
    """A kernel whose guess wastes time, and computes the same."""

    def run(self, x, *, cfg):
        return busy(x, 3000 if cfg == Scale() else 1)


class Unbeaten(Shaped):
    """The same, but all others waste time."""

    def run(self, x, *, cfg):
        return busy(x, 1 if cfg == Scale() else 3000)


def new(path, **kwargs):
    store = PersistentCache(path=path)
    return Executor(ConfigSelectorChain(cache=ConfigCache(), persistent=store, **kwargs)), store


def put(executor, store, cfg, *args, kernel=None, statistics=None, **kwargs):
    kernel = kernel or Shaped()
    inv = executor.explain(kernel, *args, **kwargs).selection.inv
    store.put(*inv.key, cfg, signature=inv.signature, kernel=kernel, statistics=statistics)
    return inv


def test_stored_config_serves_another_process_and_memory_stands_above_it(tmp_path):
    executor, store = new(tmp_path)
    put(executor, store, Scale(2), X)
    other, _ = new(tmp_path)
    np.testing.assert_array_equal(other(Shaped(), X), 2 * X)
    explanation = other.explain(Shaped(), X)
    assert (explanation.tier, explanation.cfg) == ("persistent", Scale(2))
    other.chooser.cache.put(*explanation.key, Scale(4))
    np.testing.assert_array_equal(other(Shaped(), X), 4 * X)


def test_put_and_delete_reach_jitted_functions(tmp_path):
    executor, store = new(tmp_path)
    jitted = jax.jit(lambda x: executor(Shaped(), x))
    np.testing.assert_array_equal(jitted(X), X)
    inv = put(executor, store, Scale(2), X)
    np.testing.assert_array_equal(jitted(X), 2 * X)
    store.delete(*inv.key)
    np.testing.assert_array_equal(jitted(X), X)


def test_running_never_writes_what_was_not_measured(tmp_path):
    executor, store = new(tmp_path / "store")
    executor(Shaped(), X)
    executor(Shaped(), X, cfg=Scale(2))
    jax.grad(lambda x: executor(OwnBackward(), x, X).sum())(X)
    assert len(store) == 0
    assert not (tmp_path / "store").exists()


def test_default_executor_reads_the_default_store(monkeypatch, tmp_path):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    executor, _ = new(tmp_path / "configs")
    put(executor, PersistentCache(), Scale(8), X)
    np.testing.assert_array_equal(Shaped()(X), 8 * X)


class TestStale:
    @pytest.fixture
    def setting(self, tmp_path):
        executor, store = new(tmp_path)
        inv = executor.explain(Shaped(), X).selection.inv
        store.put(*inv.key, Scale(2), signature=inv.signature, provenance={"jax": "0.0.1"})
        return executor

    def test_is_used_by_default_and_named(self, setting):
        np.testing.assert_array_equal(setting(Shaped(), X), 2 * X)
        assert "stale: jax 0.0.1 ->" in str(setting.explain(Shaped(), X))

    def test_is_ignored_on_request(self, setting):
        with policy_override(stale="ignore", transfer=False):
            np.testing.assert_array_equal(setting(Shaped(), X), X)
        np.testing.assert_array_equal(setting(Shaped(), X), 2 * X)

    def test_is_tuned_again_on_request_if_tuning_is_on(self, setting):
        class Last:
            def autotune(self, make_fn, args, kwargs, candidates):
                return list(candidates)[-1]

        setting.chooser.tuner = Last()
        with policy_override(stale="retune"):
            np.testing.assert_array_equal(setting(Shaped(), X), 2 * X)
        with policy_override(stale="retune", autotune="on"):
            np.testing.assert_array_equal(setting(Shaped(), X), 8 * X)

    @pytest.mark.parametrize("autotune", ["off", "record", "on"])
    def test_config_that_an_edited_kernel_no_longer_lists_is_not_used(self, tmp_path, autotune):
        executor, store = new(tmp_path)
        inv = executor.explain(Shaped(), X).selection.inv
        for factor in (4, 16):  # 16 does not divide the rows.
            store.put(*inv.key, Scale(factor), signature=inv.signature, provenance={"kernel_source": "of yesterday"})
            listed = factor == 4
            explanation = executor.explain(Shaped(), X)
            assert explanation.tier == ("persistent" if listed else "heuristic")
            assert ("no candidate any more: kernel source changed" in str(explanation)) is not listed
            with policy_override(autotune=autotune):
                np.testing.assert_array_equal(executor(Shaped(), X), (4 if listed else 1) * X)
        store.put(*inv.key, Scale(16), signature=inv.signature, provenance={"kernel_source": "of yesterday"})
        executor.chooser.cache.clear()
        with policy_override(autotune="frozen"), pytest.raises(ConfigNotFoundError):
            executor(Shaped(), X)

    def test_guess_is_a_candidate_whether_it_is_listed_or_not(self, tmp_path):
        class Unlisted(Shaped):
            def config_space(self, inv):
                return [Scale(2)]

        executor, store = new(tmp_path)
        inv = executor.explain(Unlisted(), X).selection.inv
        store.put(*inv.key, Scale(1), signature=inv.signature, provenance={"kernel_source": "of yesterday"})
        assert executor.explain(Unlisted(), X).tier == "persistent"


class TestTransfer:
    def test_nearest_tuned_shape_serves_and_is_marked(self, tmp_path):
        executor, store = new(tmp_path)
        put(executor, store, Scale(4), jnp.ones((16, 4)), kernel=Tiled())
        put(executor, store, Scale(2), jnp.ones((32, 4)), kernel=Tiled())
        assert "to be checked at the first call" in str(executor.explain(Tiled(), X))
        assert executor.choose_config(Tiled(), X) == Scale(4)
        np.testing.assert_array_equal(executor(Tiled(), X), 2 * X)
        explanation = executor.explain(Tiled(), X)
        assert explanation.tier == "transferred"
        assert "to be checked at the first call" not in str(explanation)
        assert "args[0].shape: (16, 4) -> (8, 4)" in str(explanation)
        assert len(store) == 2

    def test_config_that_does_not_fit_the_shape_is_passed_over(self, tmp_path):
        executor, store = new(tmp_path)
        put(executor, store, Scale(16), jnp.ones((16, 4)))
        assert executor.explain(Shaped(), X).tier == "heuristic"
        put(executor, store, Scale(2), jnp.ones((32, 4)))
        assert executor.explain(Shaped(), X).cfg == Scale(2)

    def test_config_that_the_kernel_knows_to_be_slow_is_passed_over(self, tmp_path, monkeypatch):
        executor, store = new(tmp_path)
        put(executor, store, Scale(4), jnp.ones((16, 4)))
        put(executor, store, Scale(2), jnp.ones((32, 4)))
        monkeypatch.setattr(Shaped, "transfers", lambda self, inv, cfg: cfg != Scale(4), raising=False)
        assert executor.explain(Shaped(), X).cfg == Scale(2)

    def test_guess_that_was_not_beaten_passes_on_as_a_guess(self, tmp_path):
        executor, store = new(tmp_path)
        outcome = lambda guess: {"candidates": [{"cfg": "", "status": "winner", "guess": guess}]}
        put(executor, store, Scale(2), jnp.ones((32, 4)), statistics=outcome(False))
        assert executor.explain(Shaped(), X).cfg == Scale(2)
        # Nearer, but its config says only what the guess was there: not even one that X could run with.
        put(executor, store, Scale(16), jnp.ones((16, 4)), statistics=outcome(True))
        explanation = executor.explain(Shaped(), X)
        assert (explanation.tier, explanation.cfg) == ("heuristic", Scale())
        assert "the guess was not beaten for args[0].shape: (16, 4) -> (8, 4)" in str(explanation)
        np.testing.assert_array_equal(executor(Shaped(), X), X)

    @pytest.mark.parametrize("how", ["call", "autotune"])
    def test_tuning_reaches_neighbours_that_were_traced_with_a_guess(self, tmp_path, how, caplog):
        executor, _ = new(tmp_path)
        jitted = jax.jit(lambda x: executor(Slow(), x))
        near = jnp.ones((16, 4))
        np.testing.assert_array_equal(jitted(near), near)
        if how == "call":
            with policy_override(autotune="on"):
                executor(Slow(), X)
            assert "the guess Scale(factor=1) is wrong" in caplog.text
        else:
            with pytest.warns(TuningWarning, match=r"the guess Scale\(factor=1\) is wrong"):
                autotune(Slow(), X, selector=executor.chooser)
        assert executor.choose_config(Slow(), near) == Scale(2)
        np.testing.assert_array_equal(executor(Slow(), near), 2 * near)
        np.testing.assert_array_equal(jitted(near), 2 * near)

    def test_put_that_changes_nothing_traces_nothing_again(self, tmp_path):
        executor, store = new(tmp_path)
        traces = []

        @jax.jit
        def jitted(x):
            traces.append(x.shape)
            return executor(Tiled(), x)

        near, far = jnp.ones((16, 4)), jnp.ones((32, 4))
        put(executor, store, Scale(2), near, kernel=Tiled())
        for x in (X, near):
            assert traced_with(jitted, x) == Scale(2)
        for _ in range(3):
            put(executor, store, Scale(2), near, kernel=Tiled())
            jitted(X), jitted(near)
        assert len(traces) == 2
        put(executor, store, Scale(4), far, kernel=Tiled())  # New, and perhaps nearer to somebody.
        jitted(X)
        count = len(traces)
        for _ in range(3):
            put(executor, store, Scale(4), far, kernel=Tiled())
            jitted(X)
        assert len(traces) == count

    def test_interrupted_tuning_that_kept_the_guess_says_nothing(self, tmp_path):
        executor, store = new(tmp_path)
        kept = {"candidates": [{"cfg": "", "status": "winner", "guess": True}]}
        inv = put(executor, store, Scale(1), jnp.ones((16, 4)))
        store.put(*inv.key, Scale(1), signature=inv.signature, statistics=kept, complete=False)
        put(executor, store, Scale(4), jnp.ones((32, 4)))
        assert executor.explain(Shaped(), X).cfg == Scale(4)

    def test_damaged_signature_is_near_nothing(self, tmp_path):
        executor, store = new(tmp_path)
        inv = put(executor, store, Scale(4), jnp.ones((16, 4)))
        signature = {**inv.signature, "args": [{"dtype": "float32", "shape": ["a", 4]}]}
        store.put(*inv.key, Scale(4), signature=signature)
        assert executor.explain(Shaped(), X).tier == "heuristic"

    def test_outcome_of_a_real_tuning_says_whether_the_guess_was_beaten(self, tmp_path):
        near = jnp.ones((16, 4))
        for kernel, beaten in ((Unbeaten(), False), (Slowed(), True)):
            executor, store = new(tmp_path / type(kernel).__name__)
            inv = executor.explain(kernel, near).selection.inv
            executor.chooser.tune(inv, kernel, tuner=Autotuner(progress=False))
            assert store.own(*inv.key).kept_guess is not beaten

    @pytest.mark.parametrize("statistics", [None, {}, {"candidates": 3}, {"candidates": [None, "x", {"guess": 1}]}])
    def test_entry_without_an_outcome_passes_its_config_on(self, tmp_path, statistics):
        executor, store = new(tmp_path)
        put(executor, store, Scale(4), jnp.ones((16, 4)), statistics=statistics)
        assert executor.explain(Shaped(), X).cfg == Scale(4)

    def test_other_dtypes_and_statics_do_not_count(self, tmp_path):
        executor, store = new(tmp_path)
        put(executor, store, Scale(4), jnp.ones((16, 4), jnp.bfloat16))
        put(executor, store, Scale(4), jnp.ones((16, 4)), mode="b")
        assert executor.explain(Shaped(), X).tier == "heuristic"

    def test_policy_switches_it_off(self, tmp_path):
        executor, store = new(tmp_path)
        put(executor, store, Scale(4), jnp.ones((16, 4)), kernel=Tiled())
        jitted = jax.jit(lambda x: executor(Tiled(), x))
        assert traced_with(jitted, X) == Scale(4)
        with policy_override(transfer=False):
            assert traced_with(jitted, X) == Scale(1)

    def test_entry_of_a_neighbour_reaches_a_function_that_was_guessing(self, tmp_path):
        executor, store = new(tmp_path)
        jitted = jax.jit(lambda x: executor(Tiled(), x))
        assert traced_with(jitted, X) == Scale(1)
        put(executor, store, Scale(4), jnp.ones((16, 4)), kernel=Tiled())
        assert traced_with(jitted, X) == Scale(4)
        assert executor.choose_config(Tiled(), X) == Scale(4)

    def test_symbolic_shapes_are_near_nothing(self, tmp_path):
        executor, store = new(tmp_path)
        put(executor, store, Scale(4), jnp.ones((16, 4)))
        shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 4"), jnp.float32)

        class Any(Shaped):
            def config_space(self, inv):
                return [Scale(1)]

        exported = jax.export.export(jax.jit(lambda x: executor(Any(), x)))(shape)
        np.testing.assert_array_equal(exported.call(X), X)

    def test_space_of_axes_is_understood(self, tmp_path):
        class Axes(Shaped):
            def config_space(self, inv):
                rows = inv.args[0].shape[0]
                return {"factor": (1, 2, 4, 8, 16), "fits": lambda cfg: rows % cfg.factor == 0}

        executor, store = new(tmp_path)
        for factor, rows in ((16, 16), (4, 32)):
            inv = executor.explain(Axes(), jnp.ones((rows, 4))).selection.inv
            store.put(*inv.key, Scale(factor), signature=inv.signature)
        assert executor.explain(Axes(), X).cfg == Scale(4)


def test_frozen_miss_names_the_key_the_closest_entry_and_the_differing_fields(tmp_path):
    executor, store = new(tmp_path, autotune="frozen")
    with policy_override(autotune="off"):
        near = put(executor, store, Scale(2), jnp.ones((16, 4)))
        put(executor, store, Scale(2), jnp.ones((16, 3), jnp.bfloat16), mode="b")
        want = executor.explain(Shaped(), X).key
    with pytest.raises(ConfigNotFoundError) as caught:
        executor(Shaped(), X)
    text = str(caught.value)
    assert want[2] in text
    assert f"closest stored call is {near.call_key}:\n  args[0].shape: (16, 4) -> (8, 4)" in text
    np.testing.assert_array_equal(executor(Shaped(), jnp.ones((16, 4))), 2 * jnp.ones((16, 4)))


def missed(executor, kernel, *args, **kwargs):
    with pytest.raises(ConfigNotFoundError) as caught:
        executor(kernel, *args, **kwargs)
    return str(caught.value)


def test_frozen_miss_shows_the_call_and_the_command_that_tunes_it(tmp_path):
    kernel, words = recorded_kernels.Anything(), {"mode": "a b", "mask": X[0], "on": True, "left": None}
    text = missed(new(tmp_path, autotune="frozen")[0], kernel, X, **words)
    assert "The call: float32[8,4], left=None, mask=float32[4], mode='a b', on=True" in text
    (line,) = (line for line in text.splitlines() if line.startswith("To tune it: "))
    command, target, *options = shlex.split(line.removeprefix("To tune it: "))[1:]
    assert command == "tune"
    settings = [value for option, value in itertools.pairwise(options) if option == "--set"]
    (call,) = calls.named(target, options[options.index("--args") + 1], settings, grad=False)
    assert call.call_key in text


def test_frozen_miss_of_a_backward_asks_for_the_gradient(tmp_path):
    executor, _ = new(tmp_path, autotune="frozen")
    key = executor.explain(OwnBackward(), X, X).key
    with overlay_cache({key: Scale(1)}), pytest.raises(ConfigNotFoundError, match=r"ejkernel tune .* --grad"):
        jax.grad(lambda x: executor(OwnBackward(), x, X).sum())(X)


@pytest.mark.parametrize(
    ("kernel", "args", "kwargs"),
    [
        (recorded_kernels.Anything(power=3), (X,), {}),
        (recorded_kernels.Anything(), (X, 3), {}),
        (recorded_kernels.Anything(), (X,), {"mode": jnp.sin}),
        (recorded_kernels.Anything(), ({"a": X},), {}),
        (type("Local", (Plain,), {"__qualname__": "f.<locals>.Local"})("local"), (X, X), {}),
    ],
    ids=["state", "static argument", "callable", "tree", "local class"],
)
def test_frozen_miss_that_no_command_describes_says_how_to_record_it(tmp_path, kernel, args, kwargs):
    text = missed(new(tmp_path, autotune="frozen")[0], kernel, *args, **kwargs)
    assert "To tune it: EJKERNEL_OPS_RECORD=1 " in text


def test_frozen_call_under_vmap_says_how_to_record_it(tmp_path):
    executor, _ = new(tmp_path, autotune="frozen")
    with pytest.raises(ConfigNotFoundError, match="EJKERNEL_OPS_RECORD=1"):
        jax.vmap(lambda x: executor(Shaped(), x))(X[None])


def test_pack_that_cannot_be_read_is_an_error_where_the_policy_is_frozen(tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_PACKS", str(tmp_path / "mistyped.json"))
    executor = Executor(ConfigSelectorChain(persistent=PersistentCache()))
    with policy_override(autotune="frozen"):
        for _ in range(2):
            with pytest.raises(PackError, match=r"mistyped\.json"):
                executor(Shaped(), X)
    with pytest.warns(StoreWarning, match=r"mistyped\.json.*left out"):
        np.testing.assert_array_equal(executor(Shaped(), X), X)
    with policy_override(autotune="frozen"), pytest.raises(PackError, match=r"mistyped\.json"):
        executor(Shaped(), X)


def test_store_that_cannot_be_listed_is_left_out(tmp_path, monkeypatch):
    executor, store = new(tmp_path)
    put(executor, store, Scale(4), jnp.ones((16, 4)))
    real = os.listdir

    def refuse(path):
        if str(path).startswith(str(tmp_path)):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.warns(StoreWarning, match="cannot be listed"):
        np.testing.assert_array_equal(executor(Shaped(), X), X)
    with pytest.warns(StoreWarning, match="cannot be listed"):
        assert len(PersistentCache(tmp_path)) == 0
