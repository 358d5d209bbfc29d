"""Tuning as users call it: functions, policy, the store, many threads and processes, Ctrl-C."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel.ops
from ejkernel.ops import (
    Autotuner,
    AutotuningResult,
    ConfigCache,
    ConfigSelectorChain,
    EjkernelError,
    Executor,
    PersistentCache,
    autotune,
    autotune_recorded,
    default_executor,
    get_invocations,
    policy_override,
    record_invocation,
)
from ejkernel.ops.config.selection import ConfigNotFoundError
from ejkernel.ops.execution.tuning import RecordedCallsError, TuningError
from tests.support import new_executor
from tests.tuning_kernels import FAST, MIDDLE, SLOW, Doubling, Gathering, OwnBackward, Referenced, Work, call

X = jnp.linspace(0.1, 1, 256)
QUIET = Autotuner(progress=False)


class Counted(Autotuner):
    """Counts tunings, and takes its time."""

    tunings = 0
    lock = threading.Lock()

    def tune(self, *args, **kwargs):
        with self.lock:
            type(self).tunings += 1
        time.sleep(0.1)
        return super().tune(*args, **kwargs)


@pytest.fixture
def counted():
    Counted.tunings = 0
    return Counted(progress=False)


@pytest.fixture
def store(tmp_path):
    return PersistentCache(tmp_path / "store")


# --- autotune ---


def test_autotune_returns_the_best_and_the_default_executor_uses_it():
    assert autotune(Doubling(), X) == Work(FAST)
    assert default_executor().explain(Doubling(), X).tier == "memory"
    assert default_executor().choose_config(Doubling(), X) == Work(FAST)
    assert PersistentCache().get(*call(Doubling(), X).key, cfg_type=Work) == Work(FAST)


def test_autotune_takes_configs_and_stores_nothing_then():
    best = autotune(Doubling(), X, configs=[Work(SLOW), Work(2 * SLOW)], num_warmup=1, num_iters=3)
    assert best == Work(MIDDLE)  # The guess is always among them.
    assert autotune(Doubling(), X, configs=(Work(n) for n in (SLOW, FAST, 5))) in (Work(FAST), Work(5))
    assert default_executor().explain(Doubling(), X).tier == "heuristic"


def test_autotune_works_on_shapes_keywords_and_prepared_arguments():
    class Prepared(Doubling):
        def prepare(self, x, *, scale=1.0):
            return (jnp.asarray(x).reshape(-1),), {"scale": scale}

        def run(self, x, *, scale, cfg):
            assert x.ndim == 1
            return super().run(x * scale, cfg=cfg)

    assert autotune(Prepared(), X.reshape(16, 16), scale=2.0) == Work(FAST)
    assert default_executor().explain(Prepared(), X.reshape(4, 64)).tier == "memory"
    assert autotune(Doubling(), jax.ShapeDtypeStruct((8,), jnp.float32)) == Work(FAST)


def test_autotune_inside_jit_does_not_touch_the_trace():
    found = []

    @jax.jit
    def program(x):
        found.append(autotune(Doubling(), x))
        return x

    program(X)
    assert found == [Work(FAST)]


def test_autotune_tells_a_chooser_that_stores_nothing():
    class Always:
        def choose(self, inv, kernel):
            return Work(FAST)

    ejkernel.ops.set_default_executor(Executor(Always()))
    with pytest.raises(RecordedCallsError, match="pass selector="):
        autotune(Doubling(), X)


def test_tuned_config_reaches_functions_that_were_jitted_before():
    executor, seen = Executor(ConfigSelectorChain()), []

    class Spy(Doubling):
        def run(self, x, *, cfg):
            seen.append(cfg)
            return super().run(x, cfg=cfg)

    jitted = jax.jit(lambda x: executor(Spy(), x))
    jitted(X)
    assert seen == [Work(MIDDLE)]
    autotune(Spy(), X, selector=executor.chooser, tuner=QUIET)
    seen.clear()
    jitted(X)
    assert seen == [Work(FAST)]


# --- autotune_recorded ---


def recorded(*kernels):
    for kernel in kernels:
        record_invocation(kernel, call(kernel, X))
    return get_invocations()


def test_recorded_calls_are_tuned_each_once_and_stored(counted):
    first, second = Doubling("tests.first"), Doubling("tests.second")
    selector = ConfigSelectorChain(tuner=counted)
    result = autotune_recorded(recorded(first, second, first), selector)
    assert isinstance(result, AutotuningResult)
    assert {(e.op_id, e.call_key, e.cfg) for e in result} == {
        (k.op_id, call(k, X).call_key, Work(FAST)) for k in (first, second)
    }
    assert Counted.tunings == 2
    assert selector.cache.get(*call(first, X).key) == Work(FAST)
    assert all(entry.statistics["timer"] == "wall" for entry in result)
    assert result.unmatched == ()


@pytest.mark.parametrize("order", ["mapping, selector", "selector, mapping", "selector", "nothing"])
def test_recorded_calls_and_selector_come_in_any_order(order):
    mapping, selector = recorded(Doubling()), ConfigSelectorChain(tuner=QUIET)
    given = {"mapping, selector": (mapping, selector), "selector, mapping": (selector, mapping)}
    result = autotune_recorded(*given.get(order, (selector,) if order == "selector" else ()))
    assert [entry.cfg for entry in result] == [Work(FAST)]
    chosen = selector if order != "nothing" else default_executor().chooser
    assert chosen.cache.get(*call(Doubling(), X).key) == Work(FAST)


def test_recorded_under_jit_with_gradient_tunes_the_backward_too(monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    executor = Executor(ConfigSelectorChain(tuner=QUIET))
    jax.jit(jax.grad(lambda x: executor(OwnBackward(), x).sum()))(X)
    result = autotune_recorded(get_invocations(), executor.chooser)
    assert {(entry.op_id, entry.cfg) for entry in result} == {
        ("tests.doubling", Work(FAST)),
        ("tests.doubling.vjp", Work(FAST)),
    }


def test_recorded_call_that_cannot_be_tuned_is_told_and_the_others_are_tuned(monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    executor = Executor(ConfigSelectorChain(tuner=QUIET))
    jax.jit(lambda x: executor(Gathering("tests.gather"), x, jnp.arange(3)))(X)
    executor(Doubling(), X)
    result = autotune_recorded(get_invocations(), executor.chooser)
    assert [entry.op_id for entry in result] == ["tests.doubling"]
    assert len(result.unmatched) == 1
    assert "tests.gather" in result.unmatched[0]
    assert "example_inputs" in result.unmatched[0]


def test_recorded_calls_must_be_a_mapping():
    with pytest.raises(RecordedCallsError, match="got list and NoneType"):
        autotune_recorded([1, 2])


# --- Policy ---


def test_off_guesses_and_measures_nothing(store, counted):
    executor = Executor(ConfigSelectorChain(persistent=store, tuner=counted))
    executor(Doubling(), X)
    assert executor.explain(Doubling(), X).tier == "heuristic"
    assert Counted.tunings == 0
    assert len(store) == 0


def test_on_measures_at_the_first_call_and_never_again(store, counted):
    executor = Executor(ConfigSelectorChain(persistent=store, autotune=True, tuner=counted))
    for _ in range(3):
        np.testing.assert_allclose(executor(Doubling(), X), 2 * X)
    jax.jit(lambda x: executor(Doubling(), x))(X)
    assert Counted.tunings == 1
    other = Executor(ConfigSelectorChain(persistent=PersistentCache(store.path), autotune=True, tuner=counted))
    other(Doubling(), X)
    assert other.explain(Doubling(), X).tier == "persistent"
    assert Counted.tunings == 1


class RefusesInside(Doubling):
    """Its first backend refuses long vectors while it runs; plain `run` serves them."""

    def run_xla(self, x, *, cfg):
        if x.size > 16:
            raise NotImplementedError("too long")
        return self.run(x, cfg=cfg)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_on_goes_to_the_next_backend_where_one_refuses_from_inside(store, isolation):
    tuner = Autotuner(progress=False, isolation=isolation)
    executor = Executor(ConfigSelectorChain(persistent=store, autotune=True, tuner=tuner))
    run = lambda x: executor(RefusesInside(), x)
    np.testing.assert_allclose(run(X), 2 * X)
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: run(x).sum()))(X), jnp.full_like(X, 2))
    assert len(store) == 0
    with pytest.raises(TuningError, match="too long"):
        autotune(RefusesInside(), X, tuner=tuner)


def test_record_notes_the_miss_and_guesses(store, counted):
    events = []
    selector = ConfigSelectorChain(
        persistent=store, autotune="record", tuner=counted, on_event=lambda name, **data: events.append(name)
    )
    Executor(selector)(Doubling(), X)
    assert events == ["miss", "select"]
    assert Counted.tunings == 0


def test_frozen_raises_on_a_miss_and_names_the_closest_call(store):
    selector = ConfigSelectorChain(persistent=store, tuner=QUIET)
    autotune(Doubling(), X, selector=selector, tuner=QUIET)
    with policy_override(autotune="frozen"):
        Executor(selector)(Doubling(), X)
        with pytest.raises(ConfigNotFoundError, match=r"(?s)tests\.doubling.*closest stored call.*128"):
            Executor(selector)(Doubling(), jnp.ones(128))


def test_environment_turns_tuning_on(monkeypatch):
    monkeypatch.setenv("EJKERNEL_AUTOTUNE", "on")
    np.testing.assert_allclose(Doubling()(X), 2 * X)
    assert default_executor().explain(Doubling(), X).cfg == Work(FAST)


def test_nothing_reaches_the_disk_without_persist_autotune(store):
    selector = ConfigSelectorChain(persistent=store, autotune=True, tuner=QUIET, persist_autotune=False)
    Executor(selector)(Doubling(), X)
    assert selector.cache.get(*call(Doubling(), X).key) == Work(FAST)
    assert [path for path in store.path.rglob("*") if path.is_file() and path.suffix != ".lock"] == []


def test_events_carry_the_statistics(store):
    seen = {}
    selector = ConfigSelectorChain(
        persistent=store, autotune=True, tuner=QUIET, on_event=lambda name, **data: seen.update({name: data})
    )
    Executor(selector)(Doubling(), X)
    assert seen["tuned"]["cfg"] == Work(FAST)
    assert seen["tuned"]["complete"]
    assert seen["tuned"]["statistics"]["measurement"]["median_ms"] > 0
    assert store.own(*call(Doubling(), X).key).statistics["counts"]["winner"] == 1


# --- Many at once ---


@pytest.mark.parametrize("persistent", [True, False])
def test_threads_that_miss_the_same_call_measure_once(store, counted, persistent):
    selector = ConfigSelectorChain(ConfigCache(), store if persistent else None, autotune=True, tuner=counted)
    executor, barrier, found = Executor(selector), threading.Barrier(8), []

    def miss():
        barrier.wait(30)
        found.append(np.asarray(executor(Doubling(), X)))

    threads = [threading.Thread(target=miss) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counted.tunings == 1
    assert len(found) == 8
    for each in found:
        np.testing.assert_allclose(each, 2 * X)


MISS = """
import sys, time, pathlib
import jax.numpy as jnp
from ejkernel.ops import Autotuner, ConfigSelectorChain, Executor, PersistentCache
from tests.tuning_kernels import Doubling

folder = pathlib.Path(sys.argv[1])

class Counted(Autotuner):
    def tune(self, *args, **kwargs):
        (folder / f"tuned-{sys.argv[2]}").touch()
        time.sleep(0.5)
        return super().tune(*args, **kwargs)

executor = Executor(ConfigSelectorChain(persistent=PersistentCache(folder / "store"), autotune=True, tuner=Counted()))
(folder / f"ready-{sys.argv[2]}").touch()
while len(list(folder.glob("ready-*"))) < 3:
    time.sleep(0.01)
executor(Doubling(), jnp.linspace(0.1, 1, 256))
print(executor.explain(Doubling(), jnp.linspace(0.1, 1, 256)).cfg.loops)
"""


def test_processes_that_miss_the_same_call_measure_once(tmp_path):
    commands = [[sys.executable, "-c", MISS, str(tmp_path), str(i)] for i in range(3)]
    processes = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c in commands]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [out for out, _ in outputs] == ["1\n"] * 3, outputs
    assert len(list(tmp_path.glob("tuned-*"))) == 1


# --- Ctrl-C ---

INTERRUPTED = """
import sys, threading, os, signal
import jax.numpy as jnp
from ejkernel.ops import Autotuner, ConfigSelectorChain, PersistentCache
from ejkernel.ops.tuning.bench import Bench
from tests.tuning_kernels import Doubling, Work, call

measure, rounds = Bench.measure, 0

def interrupting(bench, order):
    global rounds
    rounds += 1
    if rounds == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGINT)
        import time; time.sleep(0.3)
    return measure(bench, order)

Bench.measure = interrupting
kernel = Doubling()
kernel.guess = Work(30000)
inv = call(kernel, jnp.linspace(0.1, 1, 256))
selector = ConfigSelectorChain(persistent=PersistentCache(sys.argv[1]))
tuning = selector.tune(inv, kernel, tuner=Autotuner(num_iters=30))
print(tuning.cfg.loops, tuning.complete, tuning.rounds, rounds)
"""


def test_ctrl_c_gives_the_best_so_far_and_the_next_tuning_goes_on(store):
    run = lambda after: subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(store.path), str(after)], capture_output=True, text=True, timeout=120
    )
    first = run(8)
    assert first.returncode == 0, first.stderr
    assert first.stdout.split() == ["1", "False", "8", "8"]
    (entry,) = store.entries()
    assert not entry.complete
    second = run(0)
    loops, complete, rounds, measured = second.stdout.split()
    assert (loops, complete) == ("1", "True"), second.stderr
    assert int(measured) == int(rounds) - 8
    (entry,) = PersistentCache(store.path).entries()
    assert entry.complete


def test_second_ctrl_c_ends_the_program(tmp_path):
    script = textwrap.dedent("""
        import jax.numpy as jnp, os, time
        from ejkernel.ops import Autotuner
        from tests.tuning_kernels import Doubling, call

        class Hanging(Doubling):
            def run(self, x, *, cfg):
                os.write(1, b"compiling\\n")  # Candidates compile side by side: a line at a time.
                time.sleep(1000)

        Autotuner().tune(call(Hanging(), jnp.ones(4)), Hanging())
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "compiling\n"
    os.kill(process.pid, signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    for _ in range(30):  # On a busy machine two signals may be seen as one.
        os.kill(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            _, err = process.communicate(timeout=1)
            break
    else:
        process.kill()
        _, err = process.communicate()
    assert "KeyboardInterrupt" in err


class NoSpace(Doubling):
    def config_space(self, inv):
        return None


class Yes(Referenced):
    def mismatch(self, got, want):
        return True


class Tolerant(Referenced):
    def __init__(self, tolerance):
        super().__init__()
        self.tolerance = tolerance


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: autotune(Doubling, X),
            r"autotune: expected a Kernel instance, got Doubling, a type\. Write Doubling\(\)",
        ),
        (lambda: autotune(jnp.sin, X), r"autotune: expected a Kernel instance, got sin, .* Put it into a Kernel's run"),
        (lambda: autotune(None, X), "autotune: expected a Kernel instance, got None"),
        (lambda: autotune(Doubling(), X, tuner=30), r"tuner must be an Autotuner, .* got 30\. .*budget_s=30"),
        (lambda: autotune(Doubling(), X, tuner=Autotuner), "tuner must be an Autotuner"),
        (lambda: autotune_recorded({}, tuner=30), "tuner must be an Autotuner"),
        (
            lambda: autotune(Doubling(), X, selector=new_executor()),
            r"must be a ConfigSelectorChain, got Executor\. .*chooser",
        ),
        (lambda: autotune(Doubling(), X, selector=3), "must be a ConfigSelectorChain, got int"),
        (lambda: autotune(Doubling(), X, configs=7), r"tests\.doubling: configs must give configs: .* got 7"),
        (lambda: autotune(NoSpace(), X), r"tests\.doubling: config_space must give configs: .* got None"),
        (
            lambda: autotune(Yes(), X),
            r"mismatch\(got, want\) must return how the two differ, in words, or None; got True",
        ),
        (lambda: autotune(Tolerant({"float23": 0.1}), X), "tolerance has 'float23', which is no dtype"),
        (lambda: autotune(Tolerant({"float32": "1e-3"}), X), "tolerance must be a number from 0 on, .* got '1e-3'"),
        (lambda: autotune(Tolerant("tight"), X), "tolerance must be a number from 0 on, .* got 'tight'"),
    ],
)
def test_what_cannot_be_tuned_is_refused_in_words(call, message):
    with pytest.raises(EjkernelError, match=message):
        call()


def test_verdict_that_is_no_verdict_comes_back_from_a_worker_process():
    with pytest.raises(EjkernelError, match=r"^tests\.doubling: mismatch\(got, want\) must return"):
        autotune(Yes(), X, tuner=Autotuner(isolation="process", progress=False))


def test_tolerance_may_name_dtypes_by_what_stands_for_them():
    kernel = Tolerant({jnp.float32: 1.0})
    kernel.space = (Work(FAST, "wrong"), Work(SLOW))
    assert autotune(kernel, X, selector=ConfigSelectorChain()) == Work(FAST, "wrong")
