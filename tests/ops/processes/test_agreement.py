"""Processes of one program get one config a call, in whatever order they ask: measured by one of them, told to all."""

import time

import pytest

from ejkernel.ops import AutotunePolicy
from ejkernel.ops.config.policy import PolicyError
from tests import processes


def test_processes_that_ask_in_any_order_choose_alike_and_measure_each_call_once(tmp_path):
    script = """
    import threading
    events = []
    class Slow(Prefers):
        def autotune(self, *call):
            time.sleep(0.3)
            return super().autotune(*call)
    tuner = Slow(index + 1)
    selector = ConfigSelectorChain(tuner=tuner, autotune=True, on_event=lambda n, **d: events.append(n))
    executor, got = Executor(selector), {}
    def ask(sizes):
        got.update(zip(sizes, choices(executor, Plain(), sizes)))
    sizes = list(range(1, 6))
    threads = [threading.Thread(target=ask, args=(some,)) for some in (sizes[index:] + sizes[:index], [7 - index, 6])]
    [t.start() for t in threads], [t.join() for t in threads]
    tell(got=got, tuned=events.count("tuned"))
    """
    found = processes.told(processes.start(script, 3, tmp_path))
    for size in "123456":
        assert len({each["got"][size] for each in found}) == 1
    assert sum(each["tuned"] for each in found) == len({size for each in found for size in each["got"]})


def test_what_one_process_does_alone_waits_for_nobody_and_counts_for_those_who_come_later(tmp_path):
    script = """
    from jax.experimental.multihost_utils import sync_global_devices
    executor = Executor(ConfigSelectorChain(policy=AutotunePolicy(autotune="on"), tuner=Prefers(2 + index)))
    sync_global_devices("the first use of them waits for all")
    start = time.monotonic()
    if index == 0:
        choices(executor, Plain(), [1, 2, 3])
        with policy_override(autotune="off"):
            choices(executor, Plain(), [4, 5, 6])
        autotune(Plain(), jnp.ones((4, 4)), jnp.ones((4, 4)), selector=executor.chooser, tuner=Prefers(5))
    took = time.monotonic() - start
    sync_global_devices("process 0 is done")
    tell(got=choices(executor, Plain(), [3, 2, 1]), took=took)
    """
    a, b = processes.told(processes.start(script, 2, tmp_path))
    assert a["got"] == b["got"] == [2, 2, 2]
    assert a["took"] < 5


@pytest.mark.full
def test_agreed_configs_run_a_sharded_program(tmp_path):
    script = """
    from jax.sharding import PartitionSpec as P
    mesh = jax.make_mesh((count,), ("d",))
    executor = Executor(ConfigSelectorChain(tuner=Prefers(index + 1), autotune=True))
    if index == 0:  # A line in a log must not end the job.
        executor(Plain(), jnp.ones(3), jnp.ones(3))
    def local(x):
        return jax.lax.psum(executor(Plain(), x, x), "d")
    x = jax.make_array_from_callback((2 * count,), jax.NamedSharding(mesh, P("d")), lambda i: jnp.ones(2))
    out = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P()))(x)
    tell(out=float(out[0]) / count / float(jnp.sin(1.0)))
    """
    a, b = processes.told(processes.start(script, 2, tmp_path))
    assert a["out"] == pytest.approx(b["out"])
    assert min(abs(a["out"] - factor) for factor in (1, 2)) < 1e-5


@pytest.mark.full
def test_process_with_an_entry_gives_it_to_those_without(tmp_path):
    script = """
    class Slow(Prefers):
        def autotune(self, *call):
            time.sleep(4)
            return super().autotune(*call)
    store = PersistentCache(sys.argv[4] + f"/{index}")
    selector = ConfigSelectorChain(persistent=store, autotune="on", tuner=Prefers(7))
    executor = Executor(selector)
    def put(holder, n):
        holder.put(*executor.explain(Plain(), jnp.ones((n, 4)), jnp.ones((n, 4))).key, Scale(5))
    put(selector.cache, 1 + index), put(store, 3 + index)
    got = choices(executor, Plain(), [1, 2, 3, 4, 5])
    selector.tuner = Slow(7)
    if index == 1:
        time.sleep(2)  # The other one measures by now.
        put(selector.cache, 6)
    tell(got=got + choices(executor, Plain(), [6]), written=len(list(store.entries())))
    """
    found = processes.told(processes.start(script, 2, tmp_path, tmp_path))
    assert [each["got"] for each in found] == [[5, 5, 5, 5, 7, 5]] * 2
    assert sum(each["written"] for each in found) == 2 + 1 + 1, "only the process that measures stores"


@pytest.mark.full
def test_job_that_is_started_again_measures_nothing(tmp_path):
    script = """
    events = []
    selector = ConfigSelectorChain(persistent=PersistentCache(sys.argv[4] + f"/{index}"), autotune="on",
                                   tuner=Prefers(index + 3), on_event=lambda n, **d: events.append(n))
    sizes = [1, 2] if index == 0 else [2, 1]
    got = dict(zip(sizes, choices(Executor(selector), Plain(), sizes)))
    tell(got=got, tuned=events.count("tuned"))
    """
    first = processes.told(processes.start(script, 2, tmp_path, tmp_path))
    again = processes.told(processes.start(script, 2, tmp_path, tmp_path))
    assert all(each["got"] == first[0]["got"] for each in [*first, *again])
    assert [sum(each["tuned"] for each in run) for run in (first, again)] == [2, 0]


@pytest.mark.full
def test_selectors_made_in_another_order_choose_alike(tmp_path):
    script = """
    made = {}
    for factor in (2, 3) if index == 0 else (3, 2):
        made[factor] = Executor(ConfigSelectorChain(tuner=Prefers(factor), autotune="on"))
    got = {}
    for factor in (2, 3) if index == 0 else (3, 2):
        got[factor] = choices(made[factor], Plain(), [1])
    tell(got=got)
    """
    a, b = processes.told(processes.start(script, 2, tmp_path))
    assert a["got"] == b["got"]


@pytest.mark.full
def test_process_that_is_killed_while_it_measures_costs_the_others_one_wait_and_the_guess(tmp_path):
    script = """
    class Dies(Prefers):
        def autotune(self, *call):
            if index == 1:
                os.kill(os.getpid(), 9)
            return super().autotune(*call)
    policy = AutotunePolicy(autotune="on", agree_s=4)
    executor = Executor(ConfigSelectorChain(policy=policy, tuner=Dies(index + 2)))
    if index != 1:
        jax.devices()
        time.sleep(2)  # The other one has claimed the call by now.
    start = time.monotonic()
    got = choices(executor, Plain(), range(1, 6))
    tell(got=got, took=time.monotonic() - start)
    sys.stdout.flush()
    time.sleep(1)
    os._exit(0)  # Leaving in order would wait for the one that is gone.
    """
    a, b, c = processes.told(processes.start(script, 3, tmp_path), may_fail={1})
    assert b is None
    assert a["got"] == c["got"]
    assert a["got"][0] == 1, "what the lost process has claimed is the guess"
    assert set(a["got"][1:]) <= {2, 4}, "the rest is measured"
    assert a["took"] < 15, "one wait, not one for each call"


@pytest.mark.full
def test_slow_process_follows_the_guess_that_the_others_took(tmp_path):
    script = """
    import warnings
    class Slow(Prefers):
        def autotune(self, *call):
            time.sleep(6)
            return super().autotune(*call)
    policy = AutotunePolicy(autotune="on", agree_s=2)
    executor = Executor(ConfigSelectorChain(policy=policy, tuner=Slow(9)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = choices(executor, Plain(), [1])
    tell(got=got, told=[str(w.message) for w in caught if "has not answered within 2 s" in str(w.message)])
    """
    found = processes.told(processes.start(script, 2, tmp_path))
    assert [each["got"] for each in found] == [[1], [1]]
    assert sorted(len(each["told"]) for each in found) == [0, 1], "the process whose wait was over says so"


def test_frozen_serves_what_anybody_has_stored_and_never_guesses(tmp_path):
    script = """
    from ejkernel.ops.config.selection import ConfigNotFoundError
    executor, got = Executor(ConfigSelectorChain(policy=AutotunePolicy(autotune="frozen"))), []
    key = lambda n: executor.explain(Plain(), jnp.ones((n, 4)), jnp.ones((n, 4))).key
    if index == 0:
        executor.chooser.cache.put(*key(1), Scale(7))
    def ask(*sizes):
        for n in sizes:
            try:
                got.extend(choices(executor, Plain(), [n]))
            except ConfigNotFoundError as error:
                got.append("missing" if "frozen" in str(error) else str(error))
    ask(1, 2, 2)
    if index == 0:
        executor.chooser.cache.put(*key(2), Scale(8))
        ask(2)
        tell(got=got)
    else:
        time.sleep(3)
        ask(2)
        tell(got=got)
    """
    for each in processes.told(processes.start(script, 2, tmp_path)):
        assert each["got"] == [7, "missing", "missing", 8], "and who has it later gives it to all"


def test_error_of_the_process_that_measures_is_an_error_of_all(tmp_path):
    script = """
    class Fails:
        def autotune(self, *call):
            raise RuntimeError("broken clock")
    executor, found = Executor(ConfigSelectorChain(autotune="on", tuner=Fails())), []
    start = time.monotonic()
    for _ in range(2):
        try:
            choices(executor, Plain(), [1])
        except RuntimeError as error:
            found.append([type(error).__name__, "broken clock" in str(error)])
    tell(found=found, took=time.monotonic() - start)
    """
    found = processes.told(processes.start(script, 2, tmp_path))
    again = ["DecisionError", True]
    assert sorted(each["found"] for each in found) == [[again, again], [["RuntimeError", True], again]]
    assert all(each["took"] < 30 for each in found)


def test_frozen_batch_whose_single_call_is_not_stored_runs_in_every_process(tmp_path):
    script = """
    executor = Executor(ConfigSelectorChain(policy=AutotunePolicy(autotune="frozen", agree_s=30)))
    seen, x = [], jnp.ones((4, 2, 4))
    class Seeing:
        def choose(self, inv, kernel):
            seen.append(inv)
            return Scale(1)
    batched = lambda executor: jax.vmap(jax.jit(lambda x: executor(Plain(), x, x)))(x)
    before = batched(Executor(Seeing()))
    (batch,) = {inv.key for inv in seen if inv.batch_axes is not None}
    executor.chooser.cache.put(*batch, Scale(7))
    tell(ratio=float(jnp.mean(batched(executor) / before)))
    """
    assert [each["ratio"] for each in processes.told(processes.start(script, 2, tmp_path))] == [pytest.approx(7)] * 2


@pytest.mark.full
def test_tuning_in_all_processes_is_agreed_on_anew_and_reaches_jitted_code(tmp_path):
    script = """
    from jax.experimental.multihost_utils import sync_global_devices
    executor = Executor(ConfigSelectorChain())
    kernel, x = Plain(), jnp.ones((3, 4))
    call = jax.jit(lambda x: executor(kernel, x, x))
    before = float(call(x)[0, 0])
    ratios, tuned = [], []
    for factor in (3, 5):
        tune = lambda: autotune(kernel, x, x, selector=executor.chooser, tuner=Prefers(factor + index)).factor
        if index == 0:  # Alone, it changes nothing that all have agreed on.
            tune()
        sync_global_devices(f"alone {factor}")
        ratios.append(float(call(x)[0, 0]) / before)
        tuned.append(tune())
        ratios.append(float(call(x)[0, 0]) / before)
    tell(ratios=ratios, tuned=tuned, chosen=choices(executor, kernel, [3]))
    """
    a, b = processes.told(processes.start(script, 2, tmp_path))
    assert a == b
    first, second = a["tuned"]
    assert a["ratios"] == [1, pytest.approx(first), pytest.approx(first), pytest.approx(second)]
    assert first in (3, 4)
    assert second in (5, 6)
    assert a["chosen"] == [second]


@pytest.mark.full
def test_processes_that_do_not_agree_are_left_to_themselves(tmp_path):
    script = """
    executor = Executor(ConfigSelectorChain(policy=AutotunePolicy(agree_s=30)))
    kernel, x = Plain(), jnp.ones((2, 4))
    call = jax.jit(lambda x: executor(kernel, x, x))
    before = float(call(x)[0, 0])
    alone = None
    if index == 0:
        with policy_override(agree=False, autotune="on"):
            alone = autotune(kernel, x, x, selector=executor.chooser, tuner=Prefers(9)).factor
    tell(ratio=float(call(x)[0, 0]) / before, got=choices(executor, kernel, [2, 3, 4]), alone=alone)
    """
    found = processes.told(processes.start(script, 2, tmp_path))
    assert [each["alone"] for each in found] == [9, None]
    assert all(each["ratio"] == 1 and each["got"] == [1, 1, 1] for each in found)


@pytest.mark.full
def test_explicit_configs_end_with_one_of_them_for_all_and_nothing_stored(tmp_path):
    script = """
    selector = ConfigSelectorChain()
    x = jnp.ones((3, 4))
    class Prefer(Prefers):
        def autotune(self, make_fn, args, kwargs, candidates): return list(candidates)[self.factor]
    tuned = [autotune(Plain(), x, x, configs=[Scale(5), Scale(6)], selector=selector, tuner=Prefer(index)).factor
             for _ in range(3)]
    tell(tuned=tuned, stored=len(selector.cache), chosen=choices(Executor(selector), Plain(), [3]))
    """
    a, b = processes.told(processes.start(script, 2, tmp_path))
    assert a == b
    assert set(a["tuned"]) <= {5, 6}
    assert (a["stored"], a["chosen"]) == (0, [1])


@pytest.mark.full
def test_explicit_tuning_that_fails_for_the_first_process_fails_for_all_and_else_only_there(tmp_path):
    script = """
    class Fails:
        def __init__(self, where): self.where = where
        def autotune(self, *call):
            time.sleep(0.5)
            if index == self.where: raise RuntimeError("out of memory here")
            return Scale(4)
    selector = ConfigSelectorChain(policy=AutotunePolicy(agree_s=40))
    executor, got, start = Executor(selector), [], time.monotonic()
    before = choices(executor, Plain(), [1, 2, 3, 4])
    for n in (1, 2, 3, 4):
        x = jnp.ones((n, 4))
        try:
            got.append(autotune(Plain(), x, x, selector=selector, tuner=Fails(n % 2)).factor)
        except RuntimeError as error:
            got.append([type(error).__name__, "out of memory here" in str(error)])
    took = time.monotonic() - start
    tell(got=got, after=choices(executor, Plain(), [1, 2, 3, 4]), took=took)
    """
    a, b = processes.told(processes.start(script, 2, tmp_path))
    assert a["after"] == b["after"]
    failed = ["RuntimeError", True]
    for where, here, after in zip((1, 0, 1, 0), zip(a["got"], b["got"], strict=True), a["after"], strict=True):
        assert here[where] == failed
        assert here[1 - where] == (4 if after == 4 else ["DecisionError", True])
    assert max(a["took"], b["took"]) < 40


def test_alone_nothing_is_asked():
    from ejkernel.ops.processes import agreement

    start = time.monotonic()
    assert agreement.current() is None
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("field", "value"), [("agree", "yes"), ("agree_s", 0), ("agree_s", float("inf")), ("agree_s", "1"), ("sharded", 1)]
)
def test_policy_without_meaning_is_refused(field, value):
    with pytest.raises(PolicyError, match=f"{field} must be"):
        AutotunePolicy(**{field: value})
