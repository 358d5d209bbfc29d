"""Specs spread over workers: each call on one of them, and nothing that was finished is lost."""

import os
import signal
import sys
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops import (
    Autotuner,
    ConfigSelectorChain,
    Invocation,
    PersistentCache,
    autotune_lowered,
    autotune_recorded,
)
from ejkernel.ops.offline import fleet, specs
from ejkernel.ops.store import entry as entries
from tests import offline_program

ROOT = str(Path(__file__).parents[3])
SETTINGS = {"num_iters": 1, "isolation": "thread", "progress": False}


def recorded(count):
    shapes = [jax.ShapeDtypeStruct((1, 2 + i, 4), jnp.float32) for i in range(count)]
    return [specs.to_spec(Invocation(kernel=offline_program.MIX, args=(x,), kwargs={"causal": True})) for x in shapes]


class Counting(ThreadPoolExecutor):
    def __init__(self):
        super().__init__(1)
        self.submitted = []

    def submit(self, fn, /, *args, **kwargs):
        self.submitted.append(args[0]["call_key"])
        return super().submit(fn, *args, **kwargs)


def test_the_same_call_goes_to_one_worker_only():
    calls = recorded(2)
    with Counting() as executor:
        done = list(fleet.tune_specs([*calls, *calls], executor, SETTINGS))
    assert sorted(executor.submitted) == sorted(s["call_key"] for s in calls)
    assert {f.entry.place.call_key for f in done} == {s["call_key"] for s in calls}


def test_stopped_tuning_of_a_worker_replaces_no_finished_one(tmp_path):
    cache, key = PersistentCache(tmp_path), ("cpu", "op", "key")
    steps = [(1, False, 1), (2, False, 2), (3, True, 3), (4, False, 3), (5, True, 5)]
    for cfg, complete, stored in steps:
        kept = fleet.keep(cache, entries.make(key, cfg, complete=complete))
        assert kept.cfg == cache.get(*key) == stored


def test_call_that_breaks_its_worker_costs_only_itself():
    class Breaking(Counting):
        def submit(self, fn, /, *args, **kwargs):
            if len(self.submitted) == 1:
                broken = Future()
                broken.set_exception(RuntimeError("worker lost"))
                self.submitted.append("broken")
                return broken
            return super().submit(fn, *args, **kwargs)

    with Breaking() as executor:
        done = list(fleet.tune_specs(recorded(3), executor, SETTINGS))
    assert sorted(f.error or "" for f in done) == ["", "", "RuntimeError: worker lost"]


def test_recorded_calls_are_tuned_by_an_executor_and_stored_here(tmp_path):
    selector = ConfigSelectorChain(persistent=PersistentCache(tmp_path))
    tuner = Autotuner(isolation="thread", progress=False)
    mix = offline_program.MIX
    x = jax.ShapeDtypeStruct((1, 2, 4), jnp.float32)
    inv = Invocation(kernel=mix, args=(x,), kwargs={"causal": True})
    with Counting() as executor:
        result = autotune_recorded(
            {mix.op_id: {inv.call_key: (mix, (x,), {"causal": True})}}, selector, tuner=tuner, executor=executor
        )
    assert executor.submitted == [inv.call_key]
    (entry,) = result
    assert (entry.call_key, result.unmatched) == (inv.call_key, ())
    assert selector.cache.get(*inv.key) == PersistentCache(tmp_path).get(*inv.key) == entry.cfg


def test_program_is_tuned_by_an_executor():
    selector = ConfigSelectorChain(tuner=Autotuner(isolation="thread", progress=False))
    lowered = jax.jit(lambda x: offline_program.MIX(x, causal=True)).lower(jnp.ones((1, 2, 4)))
    with Counting() as executor:
        result = autotune_lowered(selector, lowered, executor=executor)
    assert [e.call_key for e in result] == executor.submitted
    assert len(selector.cache) == 1


def test_foreign_tuner_cannot_be_sent_to_workers():
    class Other:
        def autotune(self, make_fn, args, kwargs, candidates):
            return candidates[0]

    with Counting() as executor, pytest.raises(fleet.FleetError, match="got a Other as tuner"):
        autotune_recorded({}, ConfigSelectorChain(tuner=Other()), executor=executor)


def test_worker_of_another_device_gives_a_result_of_that_device(monkeypatch):
    def elsewhere(calls, *_):
        for i, spec in enumerate(calls):
            data = entries.make(("gpu-x" if i else "gpu-y", spec["op_id"], spec["call_key"]), offline_program.Rows(1))
            yield fleet.TunedCall(specs.key_of(spec), data)

    monkeypatch.setattr(fleet, "tune_specs", elsewhere)
    calls = [specs.from_spec(spec) for spec in recorded(3)]
    result = fleet.tune_calls(ConfigSelectorChain(), calls, ThreadPoolExecutor(1))
    assert (result.device, len(result)) == ("gpu-x", 2)
    (line,) = result.unmatched
    assert line.endswith("was tuned on another device, gpu-y")


def test_budget_that_is_over_too_soon_is_named_without_repeating_the_call():
    with Counting() as executor:
        (finished,) = fleet.tune_specs(recorded(1), executor, {**SETTINGS, "budget_s": 0.0})
    assert finished.error.startswith("stopped before anything was measured: its budget of 0 s was used up")


def make_executor():
    return ThreadPoolExecutor(1)


def test_executor_is_found_by_its_address():
    with fleet.executor_at("tests.ops.offline.test_fleet:make_executor") as executor:
        assert isinstance(executor, ThreadPoolExecutor)
    with (
        pytest.raises(fleet.FleetError, match=r"neither dask://host:port nor module:factory"),
        fleet.executor_at("nonsense"),
    ):
        pass
    with (
        pytest.raises(specs.SpecError, match=r"executor factory no\.such:thing cannot be imported"),
        fleet.executor_at("no.such:thing"),
    ):
        pass


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ROOT)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with warnings.catch_warnings():
        # Of dask's own making, about ports and its dependencies.
        warnings.simplefilter("ignore")
        from distributed import LocalCluster

        with LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, host="127.0.0.1"
        ) as cluster:
            yield cluster


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_dask_workers_tune_what_a_single_process_would(cluster, tmp_path):
    calls = recorded(20)
    store = PersistentCache(tmp_path)
    address = cluster.scheduler_address.replace("tcp://", "dask://")
    with fleet.executor_at(address) as executor:
        for finished in fleet.tune_specs(calls, executor, SETTINGS):
            assert finished.error is None
            assert finished.entry.place not in store
            store.add(finished.entry)
    assert {e.place.call_key for e in store.entries()} == {s["call_key"] for s in calls}
    assert all(e.cfg in (offline_program.Rows(1), offline_program.Rows(4)) for e in store.entries())


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_worker_killed_in_the_middle_loses_nothing_that_was_finished(cluster, tmp_path):
    calls, store = recorded(8), PersistentCache(tmp_path)
    pids = [worker.process.pid for worker in cluster.workers.values()] if sys.platform == "linux" else []
    address = cluster.scheduler_address.replace("tcp://", "dask://")
    with fleet.executor_at(address) as executor:
        for count, finished in enumerate(fleet.tune_specs(calls, executor, SETTINGS)):
            if count == 1:
                os.kill(pids[0], signal.SIGKILL)
            assert finished.error is None, finished.error
            store.add(finished.entry)
    assert {e.place.call_key for e in store.entries()} == {s["call_key"] for s in calls}
