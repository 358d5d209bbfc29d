"""Which candidates may win, how a tuning ends early, and that nothing is measured twice."""

import dataclasses
import functools
import itertools
import re
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import (
    AutotunePolicy,
    Autotuner,
    ConfigSelectorChain,
    Executor,
    Invocation,
    Kernel,
    PersistentCache,
    autotune,
)
from ejkernel.ops.tuning.autotuner import TunerSettingError
from ejkernel.ops.tuning.bench import Bench, Rejected
from ejkernel.ops.tuning.history import History
from ejkernel.ops.tuning.problem import TuningInputsError, outline, with_noise
from ejkernel.ops.tuning.session import TuningError
from ejkernel.ops.tuning.shortfall import TuningWarning
from tests.support import pairwise, table
from tests.tuning_kernels import (
    FAST,
    MIDDLE,
    SLOW,
    BrokenReference,
    ByValue,
    Doubling,
    OwnBackward,
    Referenced,
    WithCustomVjp,
    WithResiduals,
    Work,
    busy,
    call,
)

X = jnp.linspace(0.1, 1, 256)
QUIET = Autotuner(progress=False)


class Watch:
    """Counts what the bench is asked for."""

    def __init__(self, monkeypatch):
        self.rounds = []
        self.built = []
        measure, build = Bench.measure, Bench.build

        def counting_measure(bench, order):
            self.rounds.append(list(order))
            return measure(bench, order)

        def counting_build(bench, candidates):
            self.built += [cfg for _, cfg in candidates]
            return build(bench, candidates)

        monkeypatch.setattr(Bench, "measure", counting_measure)
        monkeypatch.setattr(Bench, "build", counting_build)

    def clear(self):
        self.rounds.clear()
        self.built.clear()


@pytest.fixture
def watch(monkeypatch):
    return Watch(monkeypatch)


@pytest.fixture
def store(tmp_path):
    return PersistentCache(tmp_path / "store")


def kernel_with(*space, base=Doubling, **attributes):
    """A kernel over a space, with the same source whatever the space."""
    kernel = base()
    vars(kernel).update(space=space, **attributes)
    return kernel


def statuses(tuning):
    return {(c.cfg.loops, c.cfg.fault, c.cfg.tag): c.status for c in tuning.candidates}


# --- Who may win ---


def test_fastest_config_wins_with_its_time_and_speedup():
    tuning = QUIET.tune(call(Doubling(), X), Doubling())
    assert tuning.cfg == Work(FAST)
    assert tuning.complete
    assert tuning.timer == tuning.measurement.timer == "wall"
    assert tuning.measurement.low_ms <= tuning.measurement.median_ms <= tuning.measurement.high_ms
    assert tuning.speedup.low > 1
    assert tuning.counts()["winner"] == 1


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        ("wrong", "wrong", "above the tolerance"),
        ("nan", "wrong", "1 of 256 elements are NaN or infinite"),
        ("inf", "wrong", "1 of 256 elements are NaN or infinite"),
        ("shape", "wrong", "shape (1, 256) instead of (256,)"),
        ("dtype", "wrong", "dtype bfloat16 instead of float32"),
        ("structure", "wrong", "structure"),
        ("raise", "failed", "ZeroDivisionError: division by zero"),
        ("raise in run", "failed", "the callback is broken"),
        ("exit", "failed", "SystemExit: 3"),
    ],
)
@pytest.mark.parametrize("base", [Doubling, Referenced])
def test_wrong_or_broken_candidate_is_named_and_loses(base, fault, status, reason):
    kernel = kernel_with(Work(MIDDLE), Work(FAST, fault), Work(SLOW), base=base)
    tuning = QUIET.tune(call(kernel, X), kernel)
    assert tuning.cfg == Work(MIDDLE)
    broken = next(c for c in tuning.candidates if c.cfg.fault)
    assert broken.status == status
    assert reason in broken.reason
    assert reason.splitlines()[0] in tuning.summary()


def test_settings_may_be_numbers_of_numpy():
    tuner = Autotuner(progress=False, num_iters=np.int64(3), budget_s=np.float32(30))
    assert tuner.tune(call(Doubling(), X), Doubling()).cfg == Work(FAST)


class Reversed(Kernel[Work, jax.Array]):
    """The fast config confuses the rows, which only shows if they differ."""

    def run(self, x, *, cfg):
        return busy(2 * (x[::-1] if cfg.loops == FAST else x), cfg.loops)

    def reference(self, x):
        return 2 * x

    def heuristic_cfg(self, inv):
        return Work(MIDDLE)

    def config_space(self, inv):
        return [Work(MIDDLE), Work(FAST)]


@pytest.mark.parametrize(
    "x",
    [
        jnp.ones((64, 4)), jnp.zeros((64, 4)), np.ones((64, 4), np.float32), jnp.full((64, 4), 2, jnp.bfloat16),
        jax.ShapeDtypeStruct((64, 4), jnp.float32),
    ],
    ids=["ones", "zeros", "numpy", "bfloat16", "abstract"],
)  # fmt: skip
def test_constant_data_does_not_hide_a_wrong_candidate(x):
    kernel = Reversed("reversed")
    tuning = QUIET.tune(call(kernel, x), kernel)
    assert tuning.cfg == Work(MIDDLE)
    assert tuning.counts() == {"winner": 1, "wrong": 1}


def test_data_that_says_something_is_used_as_it_is():
    x, index = jnp.arange(4.0), jnp.zeros(3, jnp.int32)
    lone, infinite = jnp.ones(1), jnp.full(3, jnp.inf)
    tree = {"x": x, "index": index, "lone": lone, "infinite": infinite, "text": "a", "number": 1.0}
    assert all(got is tree[name] for name, got in with_noise(tree, seed=0).items())
    noisy = with_noise({"ones": jnp.ones(1000), "zeros": jnp.zeros(1000)}, seed=0)
    assert 0.9 <= float(noisy["ones"].min()) < float(noisy["ones"].max()) <= 1
    assert 0 <= float(noisy["zeros"].min()) < float(noisy["zeros"].max()) <= 0.1


@pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2, np.float64], ids=str
)
def test_noise_stays_within_the_dtype_and_where_the_array_was(dtype):
    info, devices = jnp.finfo(dtype), jax.devices()
    for value in (info.min, info.max, info.tiny, 1, -1, 0):
        x = np.full((64,), value, dtype)
        (noisy,) = with_noise([x], seed=1)
        wide = noisy.astype(np.float64)
        assert (noisy.dtype, noisy.shape) == (x.dtype, x.shape)
        assert np.isfinite(wide).all()
        assert (np.sign(wide) * np.sign(float(value)) >= 0).all()
        assert len(np.unique(wide)) > 1 or value == info.tiny
    free, held = with_noise([jnp.ones(8), jax.device_put(jnp.ones(8), devices[1])], seed=0)
    assert not free.committed
    assert held.committed
    assert held.devices() == {devices[1]}


def test_constant_beside_a_sharded_array_can_be_tuned():
    class Adding(Doubling):
        def run(self, x, y, *, cfg):
            return super().run(x + y, cfg=cfg)

    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    y = jax.device_put(jax.random.normal(jax.random.key(0), (8, 8)), jax.NamedSharding(mesh, jax.P("d")))
    assert QUIET.tune(call(Adding(), jnp.ones((8, 8)), y), Adding()).cfg == Work(FAST)


def test_reference_unmasks_a_wrong_guess():
    kernel = kernel_with(Work(MIDDLE), guess=Work(FAST, "wrong"), base=Referenced)
    tuning = QUIET.tune(call(kernel, X), kernel)
    assert tuning.cfg == Work(MIDDLE)
    assert tuning.speedup is None


def test_without_reference_the_guess_is_right():
    kernel = kernel_with(Work(FAST), guess=Work(SLOW, "wrong"))
    assert QUIET.tune(call(kernel, X), kernel).cfg == Work(SLOW, "wrong")


def test_when_the_guess_cannot_run_another_one_is_right(caplog):
    kernel = kernel_with(Work(MIDDLE), Work(FAST), Work(FAST, "wrong"), guess=Work(SLOW, "raise"))
    assert QUIET.tune(call(kernel, X), kernel).cfg == Work(FAST)
    assert "the guess cannot run" in caplog.text


def test_when_nothing_runs_every_reason_is_told():
    kernel = kernel_with(Work(1, "raise"), Work(1, "raise in run"), guess=Work(2, "exit"))
    with pytest.raises(TuningError, match="no candidate can be used") as error:
        QUIET.tune(call(kernel, X), kernel)
    for text in ("ZeroDivisionError", "the callback is broken", "SystemExit", "fault='exit'"):
        assert text in str(error.value)


class Unspeakable(Exception):
    def __str__(self):
        return self.args[0]  # There is none.


def test_candidate_whose_error_has_no_text_is_a_failed_one():
    class Raising(Doubling):
        def run(self, x, *, cfg):
            if cfg.fault:
                raise Unspeakable
            return super().run(x, cfg=cfg)

    kernel = kernel_with(Work(FAST), Work(FAST, "mute"), guess=Work(SLOW), base=Raising)
    tuning = QUIET.tune(call(kernel, X), kernel)
    assert "Unspeakable: its text cannot be made" in next(c.reason for c in tuning.candidates if c.cfg.fault)


def test_failing_reference_is_an_error_of_its_own():
    with pytest.raises(TuningError, match="the reference failed: no truth today"):
        QUIET.tune(call(BrokenReference(), X), BrokenReference())


@pytest.mark.parametrize("tolerance", [0.2, {"float32": 0.2}])
def test_kernel_may_widen_its_tolerance(tolerance):
    kernel = kernel_with(Work(FAST, "wrong"), guess=Work(SLOW), tolerance=tolerance)
    assert QUIET.tune(call(kernel, X), kernel).cfg == Work(FAST, "wrong")


def test_kernel_may_judge_by_itself():
    class OwnJudge(Doubling):
        def mismatch(self, got, want):
            return None if got.shape == (256,) else "not my shape"

    kernel = kernel_with(Work(FAST, "nan"), Work(FAST, "shape"), guess=Work(SLOW), base=OwnJudge)
    tuning = QUIET.tune(call(kernel, X), kernel)
    assert tuning.cfg == Work(FAST, "nan")
    assert next(c.reason for c in tuning.candidates if c.cfg.fault == "shape") == "not my shape"


@pytest.mark.parametrize(("fault", "base"), table(["wrong", "nan", "shape", "raise"], [WithCustomVjp, WithResiduals]))
def test_config_with_a_wrong_gradient_does_not_win(base, fault):
    kernel = kernel_with(Work(SLOW), Work(FAST, fault), Work(MIDDLE), base=base, guess=Work(SLOW))
    tuning = QUIET.tune(call(kernel, X), kernel)
    assert tuning.cfg == Work(MIDDLE)
    assert next(c.reason for c in tuning.candidates if c.cfg.fault).startswith("gradient: ")


class WrongUnderGrad(Doubling):
    """Right as long as nobody differentiates it: the fault is in what `fwd_with_residuals` gives."""

    def fwd_with_residuals(self, x, *, cfg):
        out = busy(2 * x, cfg.loops)
        return (3 * out if cfg.fault == "output" else out), jnp.full_like(x, 6.0 if cfg.fault == "residuals" else 2.0)

    def run(self, x, *, cfg):
        return busy(2 * x, cfg.loops)

    def vjp(self, residuals, out, dout, x, *, cfg):
        return (dout * residuals,)


class WrongUnderGradWithOwnBackward(WrongUnderGrad):
    def heuristic_cfg_vjp(self, inv):
        return Work(FAST, tag=1)

    def config_space_vjp(self, inv):
        return [Work(FAST, tag=1), Work(FAST, tag=2)]


@pytest.mark.parametrize(
    ("base", "fault", "referenced"),
    pairwise([WrongUnderGrad, WrongUnderGradWithOwnBackward], ["output", "residuals"], [False, True]),
)
def test_forward_that_is_wrong_only_under_grad_does_not_win(base, fault, referenced):
    if referenced:
        base = type(base.__name__, (base,), {"reference": lambda self, x: x + x})
    kernel = kernel_with(Work(SLOW), Work(FAST, fault), Work(MIDDLE), base=base, guess=Work(SLOW))
    tuning = QUIET.tune(call(kernel, X), kernel)
    assert tuning.cfg == Work(MIDDLE)
    reason = next(c.reason for c in tuning.candidates if c.cfg.fault)
    assert reason.startswith("output under grad: " if fault == "output" else "gradient: ")


class NoBackward(WrongUnderGradWithOwnBackward):
    def vjp(self, residuals, out, dout, x, *, cfg):
        raise NotImplementedError("not on this device")


class GuessCannotBeDifferentiated(WrongUnderGradWithOwnBackward):
    def fwd_with_residuals(self, x, *, cfg):
        if cfg == Work(MIDDLE):
            raise NotImplementedError("for decoding only")
        return super().fwd_with_residuals(x, cfg=cfg)


class GuessCannotRun(GuessCannotBeDifferentiated):
    def run(self, x, *, cfg):
        if cfg == Work(MIDDLE):
            raise ValueError("the tile does not fit")
        return super().run(x, cfg=cfg)


class ReferenceCannotBeDifferentiated(WrongUnderGradWithOwnBackward):
    def reference(self, x):
        return jax.lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, c[1] * 2), (0, x))[1]


@pytest.mark.parametrize(
    "base", [NoBackward, GuessCannotBeDifferentiated, GuessCannotRun, ReferenceCannotBeDifferentiated]
)
def test_forward_is_tuned_where_nobody_knows_the_right_gradient(base):
    assert QUIET.tune(call(base(), X), base()).cfg == Work(FAST)


def test_others_with_the_same_program_are_not_tried_when_the_time_is_over():
    proved = []

    class Slow(WithCustomVjp):
        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            proved.append(cfg)
            time.sleep(1)
            raise ValueError("this tile does not fit")

    kernel = kernel_with(Work(MIDDLE), *(Work(FAST, tag=i) for i in range(9)), base=Slow)
    Autotuner(progress=False, budget_s=2).tune(call(kernel, X), kernel)
    assert len(proved) < 9


def test_interrupted_by_its_own_limit_a_tuning_that_beat_the_stored_config_counts(store):
    kernel, chain = kernel_with(Work(SLOW), Work(MIDDLE), guess=Work(SLOW)), ConfigSelectorChain(persistent=store)
    assert autotune(kernel, X, selector=chain, tuner=QUIET) == Work(MIDDLE)
    kernel.space = (*kernel.space, Work(FAST), Work(MIDDLE + 1))
    few = Autotuner(progress=False, max_candidates=3)
    assert autotune(kernel, X, selector=chain, tuner=few) == Work(FAST)
    assert store.own(*call(kernel, X).key).cfg == Work(FAST)


@pytest.mark.parametrize("stale", ["ignore", "retune"])
def test_interrupted_tuning_replaces_what_may_not_serve(store, stale):
    kernel, key = Doubling(), call(Doubling(), X).key
    autotune(kernel, X, selector=ConfigSelectorChain(persistent=store), tuner=QUIET)
    entry = store.own(*key)
    store.add(dataclasses.replace(entry, provenance={**entry.provenance, "jax": "0.1"}))
    policy = AutotunePolicy(autotune="on", stale=stale)
    chain = ConfigSelectorChain(
        persistent=PersistentCache(store.path), policy=policy, tuner=Interrupted(progress=False)
    )
    assert Executor(chain).choose_config(kernel, X) == Work(MIDDLE)
    renewed = PersistentCache(store.path).own(*key)
    assert (renewed.cfg, renewed.complete) == (Work(MIDDLE), False)
    assert renewed.provenance["jax"] == jax.__version__


def test_configs_with_the_forward_of_one_whose_gradient_is_wrong_are_tried():
    class Tiled(WithCustomVjp):
        def custom_vjp(self, primals, cfg, kwargs, cotangents):
            if cfg.loops == FAST and cfg.tag != 3:
                raise ValueError("this tile does not fit")
            return (2 * cotangents[0],)

    kernel = kernel_with(Work(MIDDLE), *(Work(FAST, tag=i) for i in range(5)), base=Tiled)
    tuning = QUIET.tune(call(kernel, X), kernel)
    assert tuning.cfg == Work(FAST, tag=3)
    assert tuning.complete
    assert {c.cfg.tag: c.status for c in tuning.candidates if c.cfg.loops == FAST} == {
        **dict.fromkeys((0, 1, 2), "failed"),
        3: "winner",
        4: "duplicate",
    }


def test_candidate_on_a_platform_that_the_kernel_refuses_does_not_win():
    @dataclasses.dataclass(frozen=True)
    class Placed:
        loops: int = MIDDLE
        platform: str | None = None

    class Refusing(Kernel[Placed, jax.Array]):
        def supports(self, inv, platform):
            return platform != "pallas" or "not this shape"

        def run_pallas(self, x, *, cfg):
            return 2 * x

        def run_xla(self, x, *, cfg):
            return busy(2 * x, cfg.loops)

        def heuristic_cfg(self, inv):
            return Placed(SLOW)

        def config_space(self, inv):
            return [Placed(SLOW), Placed(MIDDLE), Placed(FAST, "pallas")]

    class MakesFirst:
        def autotune(self, make_fn, args, kwargs, candidates):
            made = {cfg: make_fn(cfg) for cfg in candidates}
            return next(cfg for cfg in made if cfg.loops == MIDDLE)

    assert autotune(Refusing(), X, selector=ConfigSelectorChain(), tuner=MakesFirst()) == Placed(MIDDLE)
    chain = ConfigSelectorChain()
    assert autotune(Refusing(), X, selector=chain, tuner=QUIET) == Placed(MIDDLE)
    assert Executor(chain).choose_config(Refusing(), X) == Placed(MIDDLE)


def test_reference_proves_gradients_too():
    class ReferencedVjp(WithCustomVjp):
        def reference(self, x):
            return x + x

    kernel = kernel_with(Work(SLOW), Work(MIDDLE), base=ReferencedVjp, guess=Work(FAST, "wrong"))
    assert QUIET.tune(call(kernel, X), kernel).cfg == Work(MIDDLE)


def test_gradient_is_proved_even_when_time_is_over():
    kernel = kernel_with(Work(SLOW), Work(FAST, "wrong"), base=WithCustomVjp, guess=Work(SLOW))
    rounds, stop = [], threading.Event()
    session = session_of(QUIET, kernel, stop)
    session.effort = Autotuner(num_iters=1).effort()
    measure = session.bench.measure

    def measure_then_stop(order):
        rounds.append(order)
        if len(rounds) == 3:
            stop.set()
        return measure(order)

    session.bench.measure = measure_then_stop
    tuning = session.run()
    assert not tuning.complete
    assert tuning.cfg == Work(SLOW)


def session_of(tuner, kernel, stop, store=None):
    from ejkernel.ops.tuning.history import History
    from ejkernel.ops.tuning.problem import from_call
    from ejkernel.ops.tuning.session import Session

    inv = call(kernel, X)
    bench = tuner.bench(from_call(inv, kernel))
    history = History(store, inv.key, kernel)
    session = Session(tuner.effort(), outline(inv, kernel), lambda: bench, history, stop)
    session.bench = bench
    return session


def test_backward_is_a_problem_of_its_own_with_its_own_entry(store):
    selector = ConfigSelectorChain(persistent=store, autotune=True, tuner=QUIET)
    from ejkernel.ops import Executor

    kernel, executor = OwnBackward(), Executor(selector)
    grad = jax.grad(lambda x: executor(kernel, x).sum())(X)
    np.testing.assert_allclose(grad, 2 * np.ones_like(X), rtol=1e-6)
    entries = {entry.key[1]: entry.typed(Work) for entry in store.entries()}
    assert set(entries) == {"tests.doubling", "tests.doubling.vjp"}
    assert entries["tests.doubling"].cfg == Work(FAST)
    assert entries["tests.doubling.vjp"].cfg == Work(FAST)
    wrong = [c for c in entries["tests.doubling.vjp"].statistics["candidates"] if c["status"] == "wrong"]
    assert len(wrong) == 1
    assert "'wrong'" in wrong[0]["cfg"]


def test_identical_programs_are_timed_once(watch):
    kernel = kernel_with(Work(FAST), Work(FAST, tag=1), Work(SLOW), Work(FAST, tag=2), guess=Work(SLOW))
    tuning = QUIET.tune(call(kernel, X), kernel)
    assert statuses(tuning) == {
        (SLOW, "", 0): "raced out" if len(watch.rounds[-1]) == 1 else "finalist",
        (FAST, "", 0): "winner",
        (FAST, "", 1): "duplicate",
        (FAST, "", 2): "duplicate",
    }
    assert max(map(len, watch.rounds)) == 2


# --- Spaces ---


def test_space_may_be_a_generator():
    kernel = kernel_with()
    kernel.space = (Work(loops) for loops in (SLOW, FAST))
    assert QUIET.tune(call(kernel, X), kernel).cfg == Work(FAST)


def test_space_may_be_axes_with_conditions():
    kernel = kernel_with()
    kernel.space = {"loops": (FAST, MIDDLE, SLOW), "tag": (0, 1), "odd": lambda cfg: cfg.tag == 1}
    tuning = QUIET.tune(call(kernel, X), kernel)
    assert tuning.cfg == Work(FAST, tag=1)
    assert {c.cfg.tag for c in tuning.candidates if c.cfg != Work(MIDDLE)} == {1}


def test_large_space_is_walked_not_listed(watch):
    kernel = kernel_with()
    kernel.space = {"loops": tuple(range(1, 28000, 400))}
    tuning = QUIET.tune(call(kernel, X), kernel)
    assert len(tuning.candidates) < 70
    assert tuning.cfg.loops < MIDDLE
    assert tuning.complete


# --- Ending early ---


def test_budget_in_candidates_is_kept_and_incomplete():
    tuner = Autotuner(progress=False, max_candidates=2)
    tuning = tuner.tune(call(Doubling(), X), Doubling())
    assert [c.cfg for c in tuning.candidates] == [Work(MIDDLE), Work(FAST)]
    assert tuning.cfg == Work(FAST)
    assert not tuning.complete


def test_candidate_budget_that_cuts_nothing_is_complete():
    assert Autotuner(progress=False, max_candidates=3).tune(call(Doubling(), X), Doubling()).complete


def test_no_time_at_all_gives_the_guess_and_stores_nothing(store):
    selector = ConfigSelectorChain(persistent=store)
    tuner = Autotuner(progress=False, budget_s=0)
    with pytest.warns(TuningWarning, match=r"tests\.doubling: stopped before anything was measured"):
        assert autotune(Doubling(), X, selector=selector, tuner=tuner) == Work(MIDDLE)
    assert len(store) == 0
    assert len(selector.cache) == 0


def test_no_time_never_gives_a_guess_that_is_known_to_be_wrong(store):
    kernel = kernel_with(Work(SLOW), guess=Work(FAST, "wrong"), base=Referenced)
    QUIET.tune(call(kernel, X), kernel, store=store)
    store_without_races = PersistentCache(store.path)
    stop = threading.Event()
    session = session_of(QUIET, kernel, stop, store_without_races)
    session.history._records = [r for r in session.history._records if "rejected" in r]
    prove = session.bench.prove

    def prove_then_stop(number):
        stop.set()
        return prove(number)

    session.bench.prove = prove_then_stop
    assert session.run().cfg == Work(SLOW)


def stopped_after(rounds, store, kernel):
    """A tuning that Ctrl-C ends after so many rounds."""
    stop = threading.Event()
    session = session_of(QUIET, kernel, stop, store)
    measure, count = session.bench.measure, itertools.count(1)

    def measure_and_stop(order):
        if next(count) == rounds:
            stop.set()
        return measure(order)

    session.bench.measure = measure_and_stop
    return session.run()


def test_interrupted_tuning_goes_on_from_its_rounds(store, watch):
    kernel = Doubling()
    first = stopped_after(5, store, kernel)
    assert not first.complete
    assert first.rounds == 5
    assert first.cfg == Work(FAST)
    watch.clear()
    second = QUIET.tune(call(kernel, X), kernel, store=store)
    assert second.complete
    assert second.cfg == Work(FAST)
    assert len(watch.rounds) == second.rounds - 5


def test_interrupted_tuning_is_stored_as_incomplete_and_completed_later(store):
    kernel, selector = Doubling(), ConfigSelectorChain(persistent=store)

    class Interrupted(Autotuner):
        def tune(self, inv, kernel, **kwargs):
            return stopped_after(5, kwargs["store"], kernel)

    assert autotune(kernel, X, selector=selector, tuner=Interrupted()) == Work(FAST)
    assert not store.own(*call(kernel, X).key).complete
    assert autotune(kernel, X, selector=selector, tuner=QUIET) == Work(FAST)
    assert store.own(*call(kernel, X).key).complete


def test_candidate_limit_is_lifted_later_and_only_the_rest_is_measured(store, watch):
    kernel = Doubling()
    Autotuner(progress=False, max_candidates=2).tune(call(kernel, X), kernel, store=store)
    watch.clear()
    tuning = QUIET.tune(call(kernel, X), kernel, store=store)
    assert tuning.complete
    assert Work(SLOW) in watch.built
    assert len(tuning.candidates) == 3


# --- Nothing twice ---


@pytest.mark.parametrize(
    "space",
    [
        (Work(FAST), Work(SLOW), Work(FAST, tag=1)),
        {"loops": tuple(range(1, 28000, 400))},
    ],
    ids=["duplicates", "large"],
)
def test_second_tuning_answers_at_once(store, watch, space):
    selector = ConfigSelectorChain(persistent=store)
    kernel = kernel_with()
    kernel.space = space
    first = autotune(kernel, X, selector=selector, tuner=QUIET)
    before = store.own(*call(kernel, X).key)
    watch.clear()
    # As in a new process: nothing but the files is shared.
    second = ConfigSelectorChain(persistent=PersistentCache(store.path))
    assert autotune(kernel, X, selector=second, tuner=QUIET) == first
    assert watch.rounds == watch.built == []
    after = store.own(*call(kernel, X).key)
    assert after.statistics == before.statistics
    assert second.cache.get(*call(kernel, X).key) == first


def test_lost_entry_is_written_again_from_the_trials(store, watch):
    kernel, key = Doubling(), call(Doubling(), X).key
    selector = ConfigSelectorChain(persistent=store)
    autotune(kernel, X, selector=selector, tuner=QUIET)
    before = store.own(*key)
    next(store.path.rglob("*.json")).unlink()
    watch.clear()
    again = ConfigSelectorChain(persistent=PersistentCache(store.path))
    assert autotune(kernel, X, selector=again, tuner=QUIET) == Work(FAST)
    assert watch.rounds == []
    after = PersistentCache(store.path).own(*key)
    assert after.complete
    assert after.statistics["measurement"] == before.statistics["measurement"]


def test_what_is_no_ordinary_error_while_compiling_ends_the_tuning_at_once():
    class Cancelled(BaseException):
        pass

    class Cancelling(Doubling):
        def run(self, x, *, cfg):
            raise Cancelled

    start = time.monotonic()
    with pytest.raises(Cancelled):
        QUIET.tune(call(Cancelling(), X), Cancelling())
    assert time.monotonic() - start < 60  # Compiling may take 120 s.


def test_entry_of_an_older_source_is_renewed_from_trials_that_still_hold(store, watch):
    """Only the list of candidates was edited, and no candidate is new."""
    kernel, key = Doubling(), call(Doubling(), X).key
    autotune(kernel, X, selector=ConfigSelectorChain(persistent=store), tuner=QUIET)
    entry = store.own(*key)
    store.add(dataclasses.replace(entry, provenance={**entry.provenance, "kernel_source": "older"}))
    watch.clear()
    again = ConfigSelectorChain(persistent=PersistentCache(store.path))
    assert autotune(kernel, X, selector=again, tuner=QUIET) == Work(FAST)
    assert watch.rounds == []
    assert again.persistent.own(*key).provenance["kernel_source"] == entry.provenance["kernel_source"]


def test_added_candidate_races_only_against_the_incumbent_and_the_guess(store, watch):
    kernel = kernel_with(Work(MIDDLE), Work(SLOW), Work(300), guess=Work(MIDDLE))
    assert QUIET.tune(call(kernel, X), kernel, store=store).cfg == Work(300)
    watch.clear()
    kernel.space = (*kernel.space, Work(FAST))
    tuning = QUIET.tune(call(kernel, X), kernel, store=store)
    assert tuning.cfg == Work(FAST)
    assert set(watch.built) == {Work(MIDDLE), Work(300), Work(FAST)}
    assert statuses(tuning)[SLOW, "", 0] == "raced out"
    watch.clear()
    kernel.space = (*kernel.space, Work(MIDDLE + 1))
    assert QUIET.tune(call(kernel, X), kernel, store=store).cfg == Work(FAST)
    assert set(watch.built) == {Work(MIDDLE), Work(FAST), Work(MIDDLE + 1)}


def test_winner_that_left_the_space_does_not_win_again(store):
    kernel = Doubling()
    assert QUIET.tune(call(kernel, X), kernel, store=store).cfg == Work(FAST)
    kernel = kernel_with(Work(MIDDLE), Work(SLOW))
    assert QUIET.tune(call(kernel, X), kernel, store=store).cfg == Work(MIDDLE)


def test_winner_that_was_rejected_since_does_not_win_again(store):
    kernel, inv = Doubling(), call(Doubling(), X)
    assert QUIET.tune(inv, kernel, store=store).cfg == Work(FAST)
    # As a tuning leaves it that was stopped after it had found something wrong with the winner.
    History(store, inv.key, kernel).reject(Work(FAST), Rejected("wrong", "of late"))
    assert QUIET.tune(inv, kernel, store=PersistentCache(store.path)).cfg == Work(MIDDLE)


class Interrupted(Autotuner):
    """Stops before anything is sure, as a budget or Ctrl-C does."""

    def tune(self, inv, kernel, **options):
        tuning = super().tune(inv, kernel, **options)
        return dataclasses.replace(tuning, cfg=kernel.heuristic_cfg(inv), complete=False, decided=False)


@pytest.mark.parametrize("older", [False, True], ids=["imported", "of an older JAX"])
def test_interrupted_tuning_does_not_replace_one_that_was_finished(store, older):
    kernel, key = Doubling(), call(Doubling(), X).key
    autotune(kernel, X, selector=ConfigSelectorChain(persistent=store), tuner=QUIET)
    entry = store.own(*key)
    assert entry.complete
    for trials in store.path.rglob("trials.jsonl"):
        trials.unlink()
    if older:
        store.add(dataclasses.replace(entry, provenance={**entry.provenance, "jax": "0.1"}))
    chain = ConfigSelectorChain(persistent=PersistentCache(store.path))
    with pytest.warns(TuningWarning, match="stopped before anything was measured"):
        assert autotune(kernel, X, selector=chain, tuner=Interrupted(progress=False)) == entry.cfg
    assert chain.persistent.own(*key).cfg == entry.cfg
    assert chain.persistent.own(*key).complete
    assert Executor(chain).choose_config(kernel, X) == entry.cfg


def test_failures_are_not_tried_again(store, watch):
    kernel = kernel_with(Work(MIDDLE), Work(FAST, "wrong"), Work(FAST, "raise"))
    QUIET.tune(call(kernel, X), kernel, store=store)
    watch.clear()
    kernel.space = (*kernel.space, Work(SLOW))
    tuning = QUIET.tune(call(kernel, X), kernel, store=store)
    assert not {cfg for cfg in watch.built if cfg.fault}
    assert all("in an earlier tuning" in c.reason for c in tuning.candidates if c.cfg.fault)


def test_where_nothing_is_left_all_are_tried_again(store):
    """As when a bug in a module that the kernel uses was fixed: nothing about the kernel tells."""
    broken = []

    class Fixable(Doubling):
        def run(self, x, *, cfg):
            if broken:
                raise ZeroDivisionError("a bug")
            return super().run(x, cfg=cfg)

    kernel, selector = Fixable(), ConfigSelectorChain(persistent=store)
    broken.append(True)
    for _ in range(2):
        with pytest.raises(TuningError, match=r"3 failed, such as .*: ZeroDivisionError: a bug"):
            autotune(kernel, X, selector=selector, tuner=QUIET)
    broken.clear()
    assert autotune(kernel, X, selector=selector, tuner=QUIET) == Work(FAST)
    # And nobody stays rejected for what is long over.
    again = QUIET.tune(call(kernel, X), kernel, store=PersistentCache(store.path), configs=[Work(SLOW), Work(FAST)])
    assert not [c for c in again.candidates if c.status == "failed"]


def test_caller_is_told_that_all_other_candidates_failed_once_and_where(store):
    kernel = kernel_with(Work(MIDDLE), *(Work(n, "raise") for n in range(2, 8)), Work(FAST, "wrong"))
    with pytest.warns(TuningWarning) as told:
        assert autotune(kernel, X, selector=ConfigSelectorChain(), tuner=QUIET) == Work(MIDDLE)
    (text,) = (str(w.message) for w in told)
    first, failed, wrong = text.splitlines()
    assert "stays because all other candidates failed or are wrong (7)" in first
    assert re.search(
        r"6 failed, such as Work\(loops=2, .*ZeroDivisionError: division by zero \(.*tuning_kernels\.py:\d+\)", failed
    )
    assert "wrong: Work(loops=1, fault='wrong'" in wrong


@pytest.mark.parametrize("fault", ["wrong", "raise"])
def test_caller_is_told_that_the_guess_itself_is_out(fault, caplog):
    kernel = kernel_with(Work(FAST), Work(SLOW), guess=Work(MIDDLE, fault), base=Referenced)
    match = rf"the guess Work\(loops={MIDDLE}, .*(is wrong|failed), and is still used.*\n.*tuning_kernels\.py:\d+\)"
    with pytest.warns(TuningWarning, match=match):
        assert autotune(kernel, X, selector=ConfigSelectorChain(), tuner=QUIET) == Work(FAST)
    Executor(ConfigSelectorChain(autotune=True, tuner=QUIET))(kernel, X)
    assert re.search(match, caplog.text)


def test_nobody_is_told_when_only_some_candidates_are_out():
    kernel = kernel_with(Work(MIDDLE), Work(MIDDLE, tag=1), Work(FAST, "wrong"), Work(SLOW))
    assert autotune(kernel, X, selector=ConfigSelectorChain(), tuner=QUIET) == Work(MIDDLE)


def test_failure_at_a_tight_limit_is_tried_again_at_a_wide_one(store):
    from ejkernel.ops.tuning.bench import Rejected
    from ejkernel.ops.tuning.history import History

    kernel = Doubling()
    inv = call(kernel, X)
    history = History(store, inv.key, kernel)
    history.reject(Work(FAST), Rejected("failed", "too slow", ("compile_s", 1.0)))
    tune = lambda seconds: Autotuner(progress=False, compile_s=seconds).tune(inv, kernel, store=store)
    assert tune(1.0).cfg == Work(MIDDLE)
    assert tune(100.0).cfg == Work(FAST)


def test_changed_source_is_measured_again(store, watch):
    class Doubling2(Doubling):
        def run(self, x, *, cfg):
            return super().run(x, cfg=cfg)

    QUIET.tune(call(Doubling(), X), Doubling(), store=store)
    watch.clear()
    QUIET.tune(call(Doubling2(), X), Doubling2(), store=store)
    assert watch.rounds


# --- Settings ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"isolation": "container"}, "isolation must be 'thread' or 'process', got 'container'"),
        ({"timer": "sundial"}, "timer must be 'auto', 'wall' or a Timer, got 'sundial'"),
        ({"num_iters": 0}, "num_iters must be at least 1, got 0"),
        ({"num_iters": "x"}, "num_iters must be at least 1, got 'x'"),
        ({"budget_s": float("nan")}, "budget_s must be at least 0, got nan"),
        ({"max_candidates": 0}, "max_candidates must be at least 1"),
        ({"budget_s": -1}, "budget_s must be at least 0"),
    ],
)
def test_meaningless_settings_are_refused(settings, message):
    with pytest.raises(TunerSettingError, match=message):
        Autotuner(**settings)


def test_num_iters_is_the_least_number_of_samples():
    tuning = Autotuner(progress=False, num_iters=40).tune(call(Doubling(), X), Doubling())
    assert tuning.measurement.samples >= 40


def test_own_timer_is_used_and_named():
    class Backwards:
        """Says that the slowest is the fastest."""

        name = "backwards"
        device_time = True

        def measure(self, calls):
            import time

            seconds = []
            for each in calls:
                start = time.perf_counter()
                jax.block_until_ready(each())
                seconds.append(1e-6 / (time.perf_counter() - start))
            return seconds

    kernel = kernel_with(Work(FAST), Work(SLOW), guess=Work(FAST))
    tuning = Autotuner(progress=False, timer=Backwards()).tune(call(kernel, X), kernel)
    assert tuning.cfg == Work(SLOW)
    assert tuning.measurement.timer == "backwards"


def test_timer_that_breaks_is_replaced_by_the_wall_clock(store, caplog):
    from ejkernel.ops.tuning.timers import TimerError

    class Breaking:
        name = "breaking"
        device_time = True
        samples = 0

        def measure(self, calls):
            type(self).samples += 1
            if self.samples > 3:
                raise TimerError("breaking: somebody else profiles.")
            return [1.0] * len(calls)

    tuning = Autotuner(progress=False, timer=Breaking()).tune(call(Doubling(), X), Doubling(), store=store)
    assert tuning.cfg == Work(FAST)
    assert tuning.timer == "wall"
    assert "Starting over with the wall clock" in caplog.text


def test_cold_timing_finds_the_winner_too():
    assert Autotuner(progress=False, cold=True).tune(call(Doubling(), X), Doubling()).cfg == Work(FAST)


# --- The protocol of selectors ---


def test_autotune_of_functions_takes_the_first_candidate_as_truth():
    from tests.tuning_kernels import FAULTS, busy

    make_fn = lambda cfg: lambda x, *, twice: busy(FAULTS[cfg.fault](x), cfg.loops) if twice else x
    best = QUIET.autotune(make_fn, (X,), {"twice": True}, [Work(SLOW), Work(FAST, "wrong"), Work(MIDDLE)])
    assert best == Work(MIDDLE)


def test_autotune_of_functions_works_on_shapes_and_inside_jit():
    from tests.tuning_kernels import busy

    make_fn = lambda cfg: lambda x: busy(2 * x, cfg.loops)
    found = []

    @jax.jit
    def program(x):
        found.append(QUIET.autotune(make_fn, (x,), {}, [Work(SLOW), Work(FAST)]))
        return x

    program(X)
    assert found == [Work(FAST)]


def test_autotune_of_functions_needs_candidates_and_threads():
    with pytest.raises(TunerSettingError, match="at least one config"):
        QUIET.autotune(lambda cfg: lambda x: x, (X,), {}, [])
    with pytest.raises(TunerSettingError, match="cannot be sent to a worker"):
        Autotuner(isolation="process").autotune(lambda cfg: lambda x: x, (X,), {}, [1])


def test_keywords_of_a_call_are_kept_as_text():
    class Keyed(Doubling):
        def run(self, x, *, cfg, **kwargs):
            return super().run(x, cfg=cfg)

    given = {"flag": True, "word": "a", "fn": max, "part": functools.partial(max, 1), "none": None, "y": jnp.ones(2)}
    inv = Invocation(kernel=Keyed(), args=(jnp.ones(64),), kwargs=given)
    kept = Autotuner(max_candidates=1).tune(inv, Keyed()).statistics()["keywords"]
    part = "functools.partial(<built-in function max>, 1)"
    assert kept == {"flag": "True", "word": "'a'", "fn": "builtins.max", "part": part}


# --- Several data sets ---


@pytest.mark.thin(2)
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_config_that_is_fast_on_one_data_set_only_does_not_win(isolation, tmp_path):
    tuner = Autotuner(progress=False, isolation=isolation, cases=("positive", "negative"))
    kernel, store = ByValue("tests.by_value"), PersistentCache(tmp_path)
    assert QUIET.tune(call(kernel, X), kernel).cfg.tag == 1
    tuning = tuner.tune(call(kernel, X), kernel, store=store)
    assert tuning.cfg == Work(tag=0)
    times = {c.cfg.tag: c.cases for c in tuning.candidates if not c.cfg.fault}
    assert times[1]["negative"] > 3 * times[1]["positive"]
    assert set(times[0]) == {"positive", "negative"}
    assert "positive" in tuning.summary()
    assert {c["cases"].keys() == {"positive", "negative"} for c in tuning.statistics()["candidates"][:2]} == {True}
    # It was right on the first data set, and other data is another tuning.
    (wrong,) = [c for c in tuning.candidates if c.cfg.fault]
    assert wrong.status == "wrong"
    assert wrong.reason.startswith("case negative: ")


def test_cases_that_are_not_there_or_do_not_fit_are_named():
    kernel = ByValue("tests.by_value")
    with pytest.raises(TuningInputsError, match="no case is named zero; it has positive, negative, short"):
        Autotuner(cases=["zero"]).tune(call(kernel, X), kernel)
    with pytest.raises(TuningInputsError, match=r"case 'short' has float32\[255\] where the call has float32\[256\]"):
        Autotuner(cases=["short"]).tune(call(kernel, X), kernel)
    with pytest.raises(TuningInputsError, match="it has no example_cases"):
        Autotuner(cases=["positive"]).tune(call(Doubling(), X), Doubling())
    with pytest.raises(TunerSettingError, match="cases must be a sequence of names, got 'positive'"):
        Autotuner(cases="positive")
