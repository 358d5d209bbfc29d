"""Processes of one program get one config a call: measured by one of them, told to all, waited for in finite time."""

import time

import pytest

from ejkernel.ops import AutotunePolicy
from ejkernel.ops.config.policy import PolicyError
from tests import processes

SIZES = "range(1, 7)"


@pytest.mark.parametrize("count", [2, 4])
def test_processes_whose_timings_disagree_choose_alike_and_share_the_work(count, tmp_path):
    script = f"""
    events = []
    selector = ConfigSelectorChain(tuner=Prefers(index + 1), autotune=True, on_event=lambda n, **d: events.append(n))
    tell(got=choices(Executor(selector), Plain(), {SIZES}), tuned=events.count("tuned"))
    """
    found = processes.told(processes.start(script, count, tmp_path))
    assert all(each["got"] == found[0]["got"] for each in found)
    assert sum(each["tuned"] for each in found) == 6, "each call is measured once"
    assert sum(each["tuned"] > 0 for each in found) > 1, "and not all by one process"


def test_agreed_configs_run_a_sharded_program(tmp_path):
    script = """
    from jax.sharding import PartitionSpec as P
    mesh = jax.make_mesh((count,), ("d",))
    executor = Executor(ConfigSelectorChain(tuner=Prefers(index + 1), autotune=True))
    def local(x):
        return jax.lax.psum(executor(Plain(), x, x), "d")
    x = jax.make_array_from_callback((2 * count,), jax.NamedSharding(mesh, P("d")), lambda i: jnp.ones(2))
    out = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P()))(x)
    tell(out=float(out[0]) / count / float(jnp.sin(1.0)))
    """
    a, b = processes.told(processes.start(script, 2, tmp_path))
    assert a["out"] == pytest.approx(b["out"])
    assert min(abs(a["out"] - factor) for factor in (1, 2)) < 1e-5


@pytest.mark.parametrize("warm", [0, 1])
@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_process_with_an_entry_gives_it_to_those_without(tier, warm, tmp_path):
    script = f"""
    store = PersistentCache(sys.argv[4] + f"/{{index}}")
    selector = ConfigSelectorChain(persistent=store, autotune="on", tuner=Prefers(7))
    executor, x = Executor(selector), jnp.ones((3, 4))
    if index == {warm}:
        holder = selector.cache if "{tier}" == "memory" else store
        holder.put(*executor.explain(Plain(), x, x).key, Scale(5))
    tell(got=choices(executor, Plain(), [3, 4]), written=len(list(store.entries())))
    """
    found = processes.told(processes.start(script, 2, tmp_path, tmp_path))
    assert [each["got"] for each in found] == [[5, 7], [5, 7]]
    assert sum(each["written"] for each in found) == 1 + (tier == "disk"), "only the deciding process stores"


def test_other_order_is_an_error_everywhere_that_shows_the_first_difference(tmp_path):
    script = """
    executor = Executor(ConfigSelectorChain(policy=AutotunePolicy(agree_s=30)))
    sizes = [1, 2, 3] if index != 1 else [1, 3, 2]
    start = time.monotonic()
    try:
        choices(executor, Plain(), sizes)
    except EjkernelError as error:
        tell(kind=type(error).__name__, text=str(error), took=time.monotonic() - start)
        time.sleep(2)  # The first to end would take the others' coordinator with it.
    """
    for each in processes.told(processes.start(script, 4, tmp_path)):
        assert each["kind"] == "KeySequenceError"
        assert "call 1 of each" in each["text"]
        assert "args[0].shape: (" in each["text"]
        assert "policy_override(agree=False)" in each["text"]
        assert each["took"] < 30


def test_collected_selectors_do_not_change_the_names_of_new_ones(tmp_path):
    script = """
    import gc
    gc.disable()
    def one(n):
        return choices(Executor(ConfigSelectorChain(policy=AutotunePolicy(agree_s=30))), Plain(), [n])
    got = one(1)
    if index == 0:
        gc.collect()
    tell(got=got + one(2))
    time.sleep(1)
    """
    assert [each["got"] for each in processes.told(processes.start(script, 2, tmp_path))] == [[1, 1], [1, 1]]


def test_killed_process_costs_the_others_one_wait_and_the_guess(tmp_path):
    script = """
    policy = AutotunePolicy(autotune="on", agree_s=4)
    executor = Executor(ConfigSelectorChain(policy=policy, tuner=Prefers(index + 2)))
    first = choices(executor, Plain(), [1])
    if index == 1:
        os.kill(os.getpid(), 9)
    start = time.monotonic()
    rest = choices(executor, Plain(), range(2, 8))
    tell(got=first + rest, took=time.monotonic() - start)
    sys.stdout.flush()
    time.sleep(1)
    os._exit(0)  # Leaving in order would wait for the one that is gone.
    """
    a, b, c = processes.told(processes.start(script, 3, tmp_path), may_fail={1})
    assert b is None
    assert a["got"] == c["got"]
    assert 3 < a["took"] < 25, "one wait, not one for each call"
    assert 1 in a["got"], "what the lost process would have decided is the guess"
    assert {2, 4} & set(a["got"]), "what the others decide is measured"


def test_slow_decider_follows_the_guess_that_the_others_took(tmp_path):
    script = """
    class Slow(Prefers):
        def autotune(self, *call):
            time.sleep(6)
            return super().autotune(*call)
    policy = AutotunePolicy(autotune="on", agree_s=2)
    executor = Executor(ConfigSelectorChain(policy=policy, tuner=Slow(9)))
    tell(got=choices(executor, Plain(), [1]))
    time.sleep(1)
    """
    assert [each["got"] for each in processes.told(processes.start(script, 2, tmp_path))] == [[1], [1]]


def test_stored_configs_serve_when_the_decider_is_late_and_frozen_never_guesses(tmp_path):
    script = """
    from ejkernel.ops.config.selection import ConfigNotFoundError
    executor, got = Executor(ConfigSelectorChain(policy=AutotunePolicy(autotune="frozen", agree_s=2))), []
    for n in range(1, 6):
        x = jnp.ones((n, 4))
        executor.chooser.cache.put(*executor.explain(Plain(), x, x).key, Scale(7))
    time.sleep(5 * index)
    for n in range(1, 9):
        try:
            got += choices(executor, Plain(), [n])
        except ConfigNotFoundError:
            got.append("missing")
    tell(got=got)
    time.sleep(8 - 5 * index)
    """
    for each in processes.told(processes.start(script, 2, tmp_path)):
        assert each["got"] == [7] * 5 + ["missing"] * 3


def test_process_that_was_late_is_waited_for_again_and_a_difference_found_by_all(tmp_path):
    script = """
    executor, got = Executor(ConfigSelectorChain(policy=AutotunePolicy(agree_s=4))), []
    def ask(n):
        try:
            got.extend(choices(executor, Plain(), [n]))
        except EjkernelError as error:
            got.append(type(error).__name__)
    jax.devices()  # The first use of them waits for all processes.
    if index == 1:
        time.sleep(6)
    ask(1)
    time.sleep(4)  # The other one has come, and is still behind.
    ask(2 + index)
    tell(got=got)
    time.sleep(3)
    """
    for each in processes.told(processes.start(script, 2, tmp_path)):
        assert each["got"] == [1, "KeySequenceError"]


def test_process_that_is_ahead_learns_of_a_difference_that_another_has_found(tmp_path):
    script = """
    executor, got = Executor(ConfigSelectorChain(policy=AutotunePolicy(agree_s=2))), []
    jax.devices()  # The first use of them waits for all processes.
    time.sleep(8 * index)
    try:
        for n in (1, 2 + index, 4, 5):
            got += choices(executor, Plain(), [n])
            if n == 4:
                time.sleep(10)
    except EjkernelError as error:
        got.append(type(error).__name__)
    tell(got=got)
    time.sleep(8 * index)
    """
    a, b = processes.told(processes.start(script, 2, tmp_path))
    assert a["got"] == [1, 1, 1, "KeySequenceError"]
    assert b["got"] == [1, "KeySequenceError"]


def test_error_of_the_decider_is_an_error_of_all(tmp_path):
    script = """
    class Fails:
        def autotune(self, *call):
            raise RuntimeError("broken clock")
    policy = AutotunePolicy(autotune="on", agree_s=30)
    executor = Executor(ConfigSelectorChain(policy=policy, tuner=Fails()))
    start = time.monotonic()
    try:
        choices(executor, Plain(), [1])
    except RuntimeError as error:
        tell(kind=type(error).__name__, text=str(error), took=time.monotonic() - start)
        time.sleep(2)
    """
    found = processes.told(processes.start(script, 2, tmp_path))
    assert sorted(each["kind"] for each in found) == ["DecisionError", "RuntimeError"]
    assert all("broken clock" in each["text"] and each["took"] < 30 for each in found)


def test_config_that_nobody_has_stored_is_missing_in_every_process_alike(tmp_path):
    script = """
    from ejkernel.ops.config.selection import ConfigNotFoundError
    executor, texts = Executor(ConfigSelectorChain(policy=AutotunePolicy(autotune="frozen", agree_s=30))), []
    for n in (1, 1, 2):
        try:
            choices(executor, Plain(), [n])
        except ConfigNotFoundError as error:
            texts.append(str(error))
    tell(texts=texts)
    time.sleep(1)
    """
    a, b = processes.told(processes.start(script, 2, tmp_path))
    assert a == b
    assert len(a["texts"]) == 3
    assert all("frozen" in text for text in a["texts"])


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
    time.sleep(1)
    """
    assert [each["ratio"] for each in processes.told(processes.start(script, 2, tmp_path))] == [pytest.approx(7)] * 2


def test_tuning_in_all_processes_is_agreed_on_anew_and_reaches_jitted_code(tmp_path):
    script = """
    executor = Executor(ConfigSelectorChain())
    kernel, x = Plain(), jnp.ones(4)
    call = jax.jit(lambda x: executor(kernel, x, x))
    before = float(call(x)[0])
    autotune(kernel, x, x, selector=executor.chooser, tuner=Prefers(3))
    tell(ratio=float(call(x)[0]) / before)
    """
    assert all(each["ratio"] == pytest.approx(3) for each in processes.told(processes.start(script, 2, tmp_path)))


def test_what_one_process_tunes_alone_does_not_change_what_all_have_agreed_on(tmp_path):
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
    time.sleep(1)
    """
    found = processes.told(processes.start(script, 2, tmp_path))
    assert [each["alone"] for each in found] == [9, None]
    assert all(each["ratio"] == 1 and each["got"] == [1, 1, 1] for each in found)


def test_what_one_process_does_alone_needs_no_agreement(tmp_path):
    script = """
    executor = Executor(ConfigSelectorChain())
    start = time.monotonic()
    if index == 0:
        with policy_override(agree=False):
            choices(executor, Plain(), [1, 2])
    tell(got=choices(executor, Plain(), [3]), took=time.monotonic() - start)
    """
    assert all(each["took"] < 60 for each in processes.told(processes.start(script, 2, tmp_path)))


def test_explicit_tuning_in_every_process_ends_with_one_config(tmp_path):
    script = """
    selector = ConfigSelectorChain()
    x = jnp.ones((3, 4))
    tuned = autotune(Plain(), x, x, selector=selector, tuner=Prefers(index + 2))
    tell(tuned=tuned.factor, chosen=choices(Executor(selector), Plain(), [3]))
    """
    a, b = processes.told(processes.start(script, 2, tmp_path))
    assert a == b
    assert a["chosen"] == [a["tuned"]]


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


def test_explicit_configs_follow_the_default_executors_policy(tmp_path):
    script = """
    set_default_executor(Executor(ConfigSelectorChain(policy=AutotunePolicy(agree=False))))
    x = jnp.ones((3, 4))
    if index == 0:  # Alone: nobody else is asked.
        assert autotune(Plain(), x, x, configs=[Scale(5)], tuner=Prefers(5)) == Scale(5)
    tell(chosen=choices(Executor(ConfigSelectorChain(policy=AutotunePolicy(agree_s=30))), Plain(), [3]))
    """
    a, b = processes.told(processes.start(script, 2, tmp_path))
    assert a == b


def test_explicit_tuning_that_fails_for_the_decider_fails_at_once_for_all_and_else_only_there(tmp_path):
    script = """
    class Fails:
        def __init__(self, where): self.where = where
        def autotune(self, *call):
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
    time.sleep(1)
    """
    a, b = processes.told(processes.start(script, 2, tmp_path))
    assert a["after"] == b["after"]
    failed = ["RuntimeError", True]
    for where, here, after in zip((1, 0, 1, 0), zip(a["got"], b["got"], strict=True), a["after"], strict=True):
        assert here[where] == failed
        assert here[1 - where] == (4 if after == 4 else ["DecisionError", True])
    assert max(a["took"], b["took"]) < 40


def test_alone_nothing_is_asked():
    from ejkernel.ops.config import agreement

    start = time.monotonic()
    assert agreement.current() is None
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("field", "value"), [("agree", "yes"), ("agree_s", 0), ("agree_s", float("inf")), ("agree_s", "1"), ("sharded", 1)]
)
def test_policy_without_meaning_is_refused(field, value):
    with pytest.raises(PolicyError, match=f"{field} must be"):
        AutotunePolicy(**{field: value})
