"""A bench: what runs candidates of two tunings in one process."""

import threading

import jax.numpy as jnp
import pytest

from ejkernel.ops.execution.bench import Bench
from ejkernel.ops.execution.problem import Problem


class Clock:
    """Calls what it is given while it measures."""

    name = "clock"
    device_time = True

    def __init__(self, meanwhile=lambda: None):
        self.meanwhile = meanwhile

    def measure(self, calls):
        self.meanwhile()
        return [1.0 for _ in calls]


def ready(clock):
    """A bench whose only candidate is compiled, and taken as right."""
    bench = Bench(Problem("double", lambda cfg: lambda x: x * cfg, (jnp.arange(8.0),), {}), timer=clock)
    bench.build([(0, 2.0)])
    bench.set_truth(0)
    return bench


@pytest.mark.parametrize("run", [Bench.prove, Bench.set_truth])
def test_nothing_of_one_tuning_runs_while_another_one_measures(run):
    thread = threading.Thread(target=run, args=(ready(Clock()), 0))

    def meanwhile():
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()

    bench = ready(Clock(meanwhile))
    bench.prove(0)
    assert bench.measure([0]) == {0: 1.0}
    thread.join(60)
    assert not thread.is_alive()
