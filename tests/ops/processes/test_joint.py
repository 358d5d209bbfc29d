"""Who measures a call that several processes ask for."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops import AutotunePolicy, ConfigSelectorChain
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.processes import agreement
from ejkernel.ops.processes.agreement import Agreement
from ejkernel.ops.processes.joint import JointSelection, _is_shared
from tests.support import Plain, Scale


@pytest.mark.parametrize(
    ("collective", "sharded", "together", "shared"),
    [
        (False, False, True, False),
        (False, True, False, False),
        (False, True, True, True),
        (True, False, False, True),
    ],
)
def test_candidates_are_spread_only_over_processes_that_have_all_come(collective, sharded, together, shared):
    kernel = Plain()
    kernel.collective = collective
    assert _is_shared(kernel, AutotunePolicy(sharded=sharded), {"together": together}) is shared


class Client:
    """JAX's key-value store, in one process."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value, allow_overwrite):
        with self.changed:
            if self.values.setdefault(key, value) is not value:
                raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
            self.changed.notify_all()

    def key_value_increment(self, key, step):
        with self.changed:
            self.values[key] = self.values.get(key, 0) + step
            return self.values[key]

    def key_value_try_get(self, key):
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("NOT_FOUND")
        return self.values[key]

    def blocking_key_value_get(self, key, timeout_ms):
        with self.changed:
            self.changed.wait_for(lambda: key in self.values, timeout_ms / 1000)
        return self.key_value_try_get(key)


class Tunes:
    """A tuner that finds another config in every process."""

    def __init__(self, factor):
        self.factor, self.count = factor, 0

    def autotune(self, make_fn, args, kwargs, candidates):
        self.count += 1
        return Scale(self.factor)


def test_agreed_configs_that_a_process_forgets_are_agreed_on_still(monkeypatch):
    monkeypatch.setattr(agreement, "MAX_KNOWN", 4)
    monkeypatch.setattr(agreement, "_MOMENT_S", 60.0)
    kernel, client, policy = Plain(), Client(), AutotunePolicy(autotune="on")
    invs = [Invocation(kernel=kernel, args=(jnp.ones(n), jnp.ones(n))) for n in range(1, 11)]
    tuners = [Tunes(1), Tunes(2)]
    everyone = [Agreement(client, index, 2) for index in range(2)]
    processes = [
        JointSelection(ConfigSelectorChain(policy=policy, tuner=tuner), each)
        for tuner, each in zip(tuners, everyone, strict=True)
    ]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda process: process.tune(invs[0], kernel, Tunes(3)), processes))
    monkeypatch.setattr(agreement, "_MOMENT_S", 0.0)
    monkeypatch.setattr(agreement, "_SHORTEST_S", 0.0)
    for each in everyone:
        each._patience_s = 0.0
    for process in (processes[0], processes[1], processes[0]):
        assert [process.choose(inv, kernel, policy).cfg.factor for inv in invs] == [3] + [1] * 9
    assert [tuner.count for tuner in tuners] == [9, 0]
    assert [len(each.known) for each in everyone] == [4, 4]
