"""Tuning by all processes: candidates spread over them, and kernels that communicate measured by all at once."""

import textwrap
from types import SimpleNamespace

import pytest

from ejkernel.ops.processes.shared_tuning import TogetherBench
from ejkernel.ops.tuning.bench import Rejected
from tests import processes

SHARDED = """
from dataclasses import dataclass
from ejkernel.ops.tuning.bench import Bench
@dataclass(frozen=True)
class Cfg:
    n: int = 0
SECONDS = [5.0, 9.0, 4.0, 7.0, 3.0, 8.0, 3.5, 6.0, 2.0, 10.0, 2.5, 11.0]
class Sim(Kernel[Cfg, jax.Array]):
    def run(self, x, *, cfg):
        return (x * (1.0 + cfg.n)) / (1.0 + cfg.n)
    def heuristic_cfg(self, inv):
        return Cfg(0)
    def config_space(self, inv):
        return [Cfg(n) for n in range(len(SECONDS))]
timed, built = set(), {}
build = Bench.build
def noting_build(bench, candidates):
    built.update({number: cfg.n for number, cfg in candidates})
    return build(bench, candidates)
def simulated(bench, order):
    timed.update(built[number] for number in order)
    return {number: 1e-3 * SECONDS[built[number]] * (1 + index / 2) for number in order}
Bench.build, Bench.measure = noting_build, simulated
x = jnp.ones((4, 4))
"""


@pytest.mark.full
def test_sharded_tuning_finds_the_winner_of_a_single_process(tmp_path):
    script = """
    selector = ConfigSelectorChain(policy=AutotunePolicy(autotune="on", sharded=True, agree_s=60))
    sharded = Executor(selector).choose_config(Sim(), x).n
    mine = sorted(timed)
    with policy_override(agree=False):
        alone = Autotuner().tune(Invocation(kernel=Sim(), args=(x,)), Sim()).cfg.n
    tell(sharded=sharded, alone=alone, timed=mine)
    """
    found = processes.told(processes.start(SHARDED + textwrap.dedent(script), 4, tmp_path))
    assert [each["sharded"] for each in found] == [each["alone"] for each in found] == [8] * 4
    assert sorted(len(each["timed"]) for each in found)[:3] <= [4, 4, 4], "three candidates and the guess each"
    assert {n for each in found for n in each["timed"]} == set(range(12))


def test_eager_call_on_an_array_of_all_processes_is_tuned_on_data_of_one(tmp_path):
    script = """
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec
    host = np.arange(16, dtype=np.float32)
    mesh = jax.make_mesh((2,), ("d",))
    sharding = NamedSharding(mesh, PartitionSpec("d"))
    x = jax.make_array_from_callback(host.shape, sharding, lambda i: host[i])
    executor = Executor(ConfigSelectorChain(policy=AutotunePolicy(autotune="on", agree_s=20)))
    out = executor(Plain(), x, x)
    for shard in out.addressable_shards:
        np.testing.assert_allclose(shard.data, np.sin(host[shard.index]) * host[shard.index], rtol=1e-5)
    tuned = autotune(Plain(), x, x, selector=ConfigSelectorChain())
    worker = Autotuner(isolation="process", max_candidates=1)
    assert autotune(Plain(), x, x, selector=ConfigSelectorChain(), tuner=worker) == tuned
    class Integers(Plain):
        record_integers = True
    whole = jax.make_array_from_callback(host.shape, sharding, lambda i: host[i].astype(int))
    record_invocation(Integers(), Invocation(kernel=Integers(), args=(whole, whole)))
    (recorded,) = get_invocations()["tests.integers"].values()
    assert recorded[1][0].shape == (16,)
    tell(shape=out.shape, tuned=tuned.factor, tier=executor.explain(Plain(), x, x).tier)
    """
    a, b = processes.told(processes.start(script, 2, tmp_path))
    assert a == b
    assert a["shape"] == [16]
    assert a["tier"] != "heuristic"


@pytest.mark.full
def test_process_that_fails_in_a_sharded_tuning_is_not_waited_for(tmp_path):
    script = """
    import warnings
    warnings.simplefilter("ignore")
    tune, got, start = Autotuner.tune, [], time.monotonic()
    def failing(tuner, inv, kernel, **options):
        if "configs" in options and index == inv.args[0].shape[0] % 2:
            raise RuntimeError("out of memory here")
        return tune(tuner, inv, kernel, **options)
    Autotuner.tune = failing
    executor = Executor(ConfigSelectorChain(policy=AutotunePolicy(autotune="on", sharded=True, agree_s=60)))
    for n in (1, 2, 3, 4):
        try:
            got.append(executor.choose_config(Sim(), jnp.ones((n, 4))).n)
        except RuntimeError:
            got.append("failed")
    tell(got=got, took=time.monotonic() - start)
    time.sleep(1)
    """
    a, b = processes.told(processes.start(SHARDED + textwrap.dedent(script), 2, tmp_path))
    assert a["got"] == b["got"]
    assert set(a["got"]) <= {8, "failed"}, "the decider's failure is everybody's, another's share is the decider's"
    assert max(a["took"], b["took"]) < 60


COLLECTIVE = """
from dataclasses import dataclass
from jax.sharding import PartitionSpec as P
from ejkernel.ops.tuning.bench import Bench
@dataclass(frozen=True)
class Cfg:
    n: int = 1
class Mean(Kernel[Cfg, jax.Array]):
    collective = True
    def run(self, x, *, cfg, axis):
        if cfg.n == 3 and index == 1:
            raise RuntimeError("broken here only")
        return sum(jax.lax.pmean(x / cfg.n, axis) for _ in range(cfg.n))
    def heuristic_cfg(self, inv):
        return Cfg(4)
    def config_space(self, inv):
        return [Cfg(1), Cfg(2), Cfg(3), Cfg(4)]
mesh = jax.make_mesh((count,), ("d",))
"""


@pytest.mark.full
def test_kernel_that_communicates_is_measured_by_all_and_fails_if_it_fails_anywhere(tmp_path):
    script = """
    import os
    os.cpu_count = lambda: 1 + index  # Hosts differ, and must compile in step all the same.
    selector = ConfigSelectorChain(autotune=True)
    executor = Executor(selector)
    measure = Bench.measure
    def slow_here(bench, order):
        found = measure(bench, order)
        # Fastest for one process is slowest for the other: only together is config 2 best.
        slow = {0: {1: 9.0, 2: 2.0, 4: 3.0}, 1: {1: 1.0, 2: 2.0, 4: 9.0}}[index]
        return {n: slow[configs[n]] * 1e-3 for n in found}
    configs = {}
    build = Bench.build
    def noting(bench, candidates):
        configs.update({number: cfg.n for number, cfg in candidates})
        return build(bench, candidates)
    Bench.build, Bench.measure = noting, slow_here
    x = jax.make_array_from_callback((4,), jax.NamedSharding(mesh, P("d")), lambda i: jnp.ones(2))
    out = executor(Mean(), x, mesh=mesh, in_specs=P("d"), out_specs=P("d"), axis="d")
    (key,) = list(selector.cache)
    tell(cfg=selector.cache.get(key).n, out=[float(s.data[0]) for s in out.addressable_shards])
    """
    found = processes.told(processes.start(COLLECTIVE + textwrap.dedent(script), 2, tmp_path))
    assert [each["cfg"] for each in found] == [2, 2]
    assert all(each["out"] == [1.0] for each in found)


@pytest.mark.full
def test_process_that_was_given_up_runs_nothing_that_communicates_with_the_program(tmp_path):
    script = """
    class Late(Mean):
        def run(self, x, *, cfg, axis):
            if cfg.n == 2 and index == late:
                time.sleep(5)  # A slow compiler on one host.
            return jax.lax.pmean(x, axis)
    policy = AutotunePolicy(autotune="on", agree_s=2)
    got, cfgs = [], []
    for late in (0, 1):
        selector = ConfigSelectorChain(policy=policy)
        threes = lambda i: jnp.full(2 + 2 * late, 3.0)
        x = jax.make_array_from_callback((4 + 4 * late,), jax.NamedSharding(mesh, P("d")), threes)
        out = Executor(selector)(Late(), x, mesh=mesh, in_specs=P("d"), out_specs=P("d"), axis="d")
        got.append([float(s.data[0]) for s in out.addressable_shards])
        cfgs.append(len(list(selector.cache)))
    tell(got=got, measured=cfgs)
    time.sleep(1)
    """
    for each in processes.told(processes.start(COLLECTIVE + textwrap.dedent(script), 2, tmp_path)):
        assert each == {"got": [[3.0], [3.0]], "measured": [0, 0]}


def test_process_that_fails_in_a_tuning_by_all_ends_it_at_once(tmp_path):
    script = """
    import warnings
    warnings.simplefilter("ignore")
    def broken(bench, number):
        raise MemoryError("here only")
    if index == 1:
        Bench.set_truth = broken
    executor, start = Executor(ConfigSelectorChain(policy=AutotunePolicy(autotune="on", agree_s=60))), time.monotonic()
    x = jax.make_array_from_callback((4,), jax.NamedSharding(mesh, P("d")), lambda i: jnp.ones(2))
    class Local(Mean):
        def run(self, x, *, cfg, axis):
            return x * cfg.n / cfg.n
    try:
        executor(Local(), x, mesh=mesh, in_specs=P("d"), out_specs=P("d"), axis="d")
        tell(kind="", took=time.monotonic() - start)
    except Exception as error:
        tell(kind=type(error).__name__ if "MemoryError: here only" in str(error) else str(error),
             took=time.monotonic() - start)
    time.sleep(1)
    """
    a, b = processes.told(processes.start(COLLECTIVE + textwrap.dedent(script), 2, tmp_path))
    # Who came first decides; if it is the one that fails, its failure is everybody's.
    assert (a["kind"], b["kind"]) in [("", ""), ("DecisionError", "TuningError")]
    assert max(a["took"], b["took"]) < 60


@pytest.mark.full
def test_what_one_process_tunes_alone_is_not_spread_and_what_communicates_is_guessed_with_a_warning(tmp_path):
    script = """
    import warnings
    from jax.experimental.multihost_utils import sync_global_devices
    sync_global_devices("the first use of them waits for all")
    found = {}
    if index == 0:
        start = time.monotonic()
        executor = Executor(ConfigSelectorChain(policy=AutotunePolicy(autotune="on", sharded=True)))
        found["cfg"], found["took"] = executor.choose_config(Sim(), x).n, time.monotonic() - start
        class Talks(Sim):
            collective = True
        executor = Executor(ConfigSelectorChain(policy=AutotunePolicy(autotune="on", agree_s=1)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found["guess"] = executor.choose_config(Talks(), x).n
        found["told"] = [str(w.message) for w in caught if "not all have come within 1 s" in str(w.message)]
    sync_global_devices("process 0 is done")
    tell(**found)
    """
    a, b = processes.told(processes.start(SHARDED + textwrap.dedent(script), 2, tmp_path))
    assert b == {}
    assert (a["cfg"], a["guess"], len(a["told"])) == (8, 0, 1)
    assert a["took"] < 60


def test_slowest_process_counts_and_a_failure_of_any():
    nothing = lambda *_: None
    own = {"timer": None, "forget": nothing, "close": nothing, "set_truth": nothing}
    bench = SimpleNamespace(measure=lambda order: {7: 1.0, 8: 2.0, 9: 3.0}, **own)
    failed = {"outcome": "failed", "reason": "no memory"}
    others = lambda mine: [mine, [5.0, 1.0, failed]]
    found = TogetherBench(bench, SimpleNamespace(together=others)).measure([7, 8, 9])
    assert found == {7: 5.0, 8: 2.0, 9: Rejected("failed", "on process 1: no memory")}
