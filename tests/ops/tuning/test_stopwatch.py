import time

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops.tuning import timers
from ejkernel.ops.tuning.stopwatch import BenchmarkError, benchmark


def test_the_time_is_in_milliseconds():
    assert 5 <= benchmark(lambda: time.sleep(0.005), num_iters=3) < 500


def test_arguments_reach_the_function():
    seen = []
    benchmark(lambda x, *, scale: seen.append((x, scale)), 3, scale=2.0, num_warmup=1, num_iters=1, timer="wall")
    assert set(seen) == {(3, 2.0)}


def test_closures_over_arrays_are_executed_and_not_folded():
    # A traced closure would have its arrays as constants, and XLA would compute the product while compiling.
    x = jnp.ones((600, 600))
    matmul = jax.jit(lambda a: a @ a @ a @ a)
    assert benchmark(lambda: matmul(x), num_iters=5) > benchmark(matmul, x, num_iters=5) / 10
    assert benchmark(lambda: matmul(x), num_iters=5) > 0.2


def test_work_that_is_still_running_is_waited_for():
    # Dispatch returns long before the product is there.
    x = jnp.ones((1500, 1500))
    matmul = jax.jit(lambda a: a @ a @ a)
    assert benchmark(lambda: matmul(x), num_warmup=1, num_iters=3) > 10


def test_warm_up_is_not_timed_and_happens_at_least_once():
    calls = []

    def slow_first():
        calls.append(time.sleep(0.005 if calls else 1.0))

    assert benchmark(slow_first, num_warmup=0, num_iters=3) < 300
    assert len(calls) >= 4


def test_auto_falls_back_when_no_kernel_is_launched(monkeypatch):
    class NoKernels:
        name, device_time = "cupti", True

        def measure(self, calls):
            raise timers.TimerError("no kernel")

    monkeypatch.setattr(timers, "choose", lambda device: NoKernels())
    assert benchmark(lambda: time.sleep(0.002), num_iters=2) >= 2
    with pytest.raises(timers.TimerError, match="no kernel"):
        benchmark(lambda: None, timer=NoKernels())


def test_an_unknown_timer_is_refused():
    with pytest.raises(timers.TimerError, match='"auto", "wall" or a Timer, got \'cuda\''):
        benchmark(lambda: None, timer="cuda")


def test_no_samples_are_refused():
    with pytest.raises(BenchmarkError, match="num_iters must be at least 1, got 0"):
        benchmark(lambda: jnp.ones(3), num_iters=0)
