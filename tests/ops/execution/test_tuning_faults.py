"""Candidates that crash, hang or eat all memory cost their limit and nothing else."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops import Autotuner, PersistentCache
from ejkernel.ops.tuning.isolated import IsolatedBench, IsolatedBenchError
from ejkernel.ops.tuning.session import TuningError
from tests.tuning_kernels import (
    FAST,
    MIDDLE,
    SLOW,
    BrokenReference,
    Doubling,
    GatheringWithExamples,
    OwnBackward,
    WithCustomVjp,
    Work,
    call,
)

X = jnp.linspace(0.1, 1, 256)
FRESH = (Work(MIDDLE), Work(FAST), Work(SLOW))


def isolated(**settings):
    limits = {"compile_s": 60, "run_s": 4, "memory_bytes": 3 << 29}
    return Autotuner(progress=False, isolation="process", **{**limits, **settings})


def kernel_with(*space, base=Doubling, **attributes):
    kernel = base()
    vars(kernel).update(space=space, **attributes)
    return kernel


def ends(tuning):
    return {c.cfg.fault: (c.status, c.reason) for c in tuning.candidates if c.cfg.fault}


@pytest.mark.parametrize("compiler", [[], pytest.param(["segfault"], marks=pytest.mark.full)], ids=["run", "compile"])
def test_every_fault_at_once_leaves_the_right_winner_and_the_others_times(tmp_path, compiler):
    faults = [*compiler, "segfault in run", "sleep in run", "raise", "wrong", "exit"]
    kernel = kernel_with(*FRESH, *(Work(FAST, fault) for fault in faults))
    store = PersistentCache(tmp_path / "store")
    tuning = isolated().tune(call(kernel, X), kernel, store=store)
    assert tuning.cfg == Work(FAST)
    assert tuning.complete
    found = ends(tuning)
    assert {fault: status for fault, (status, _) in found.items()} == {
        **dict.fromkeys(faults, "failed"),
        "wrong": "wrong",
    }
    assert all("SIGSEGV" in found[fault][1] for fault in [*compiler, "segfault in run"])
    assert "killed after its limit of 4 s" in found["sleep in run"][1]
    assert "ZeroDivisionError" in found["raise"][1]
    timed = {c.cfg.loops for c in tuning.candidates if c.measurement is not None}
    assert timed == {FAST, MIDDLE, SLOW}
    kernel.space = (*kernel.space, Work(SLOW + 1))
    again = isolated().tune(call(kernel, X), kernel, store=store)
    assert again.cfg == Work(FAST)
    assert all("in an earlier tuning" in reason for _, reason in ends(again).values())


@pytest.mark.full  # The worker's own test is in the short suite.
def test_candidate_that_allocates_without_end_is_killed_at_the_memory_limit():
    kernel = kernel_with(Work(MIDDLE), Work(FAST, "allocate in run"), Work(FAST))
    tuning = isolated(run_s=100, memory_bytes=1 << 30).tune(call(kernel, X), kernel)
    assert tuning.cfg == Work(FAST)
    assert re.match(r"JobOutOfMemory: killed at \d+ MiB, the limit is 1024 MiB", ends(tuning)["allocate in run"][1])


def test_compiler_that_hangs_costs_its_limit_and_the_others_are_kept(monkeypatch):
    workers = []
    opened = IsolatedBench._open
    monkeypatch.setattr(IsolatedBench, "_open", lambda bench: (workers.append(bench), opened(bench))[1])
    kernel = kernel_with(Work(MIDDLE), Work(FAST, "sleep"), Work(FAST))
    tuning = isolated(compile_s=6).tune(call(kernel, X), kernel)
    assert tuning.cfg == Work(FAST)
    assert ends(tuning)["sleep"] == ("failed", "compiling took more than 6 s")
    assert len(workers) == 2


def test_guess_that_kills_the_worker_does_not_end_the_tuning():
    kernel = kernel_with(Work(SLOW), Work(MIDDLE), Work(MIDDLE, "wrong"), guess=Work(FAST, "segfault in run"))
    tuning = isolated().tune(call(kernel, X), kernel)
    assert tuning.cfg == Work(MIDDLE)
    assert {fault: status for fault, (status, _) in ends(tuning).items()} == {
        "segfault in run": "failed",
        "wrong": "wrong",
    }


def test_gradient_that_kills_the_worker_loses():
    kernel = kernel_with(Work(SLOW), Work(FAST, "segfault"), Work(MIDDLE), base=WithCustomVjp, guess=Work(SLOW))
    tuning = isolated().tune(call(kernel, X), kernel)
    assert tuning.cfg == Work(MIDDLE)
    assert ends(tuning)["segfault"][1].startswith("gradient: JobCrashed")


def test_crash_in_the_middle_of_a_race_costs_only_the_one_that_crashed(tmp_path, monkeypatch):
    """The candidate is right when it is checked, and crashes at its twentieth run."""
    from tests import tuning_kernels

    monkeypatch.setenv("TESTS_CRASH_FILE", str(tmp_path / "runs"))
    kernel = kernel_with(Work(MIDDLE), Work(FAST, "late"), Work(SLOW), base=tuning_kernels.Late)
    tuning = isolated().tune(call(kernel, X), kernel)
    assert tuning.cfg == Work(MIDDLE)
    assert ends(tuning)["late"][0] == "failed"
    assert "SIGSEGV" in ends(tuning)["late"][1]


def test_backward_and_abstract_calls_are_tuned_in_a_worker_too():
    from ejkernel.ops.core.backward import BackwardKernel

    backward = BackwardKernel.of(OwnBackward())
    tuning = isolated().tune(call(backward, jax.ShapeDtypeStruct(X.shape, X.dtype)), backward)
    assert tuning.cfg == Work(FAST)
    assert ends(tuning)["wrong"][0] == "wrong"


def test_example_inputs_are_made_in_the_worker():
    kernel = GatheringWithExamples()
    inv = call(kernel, jax.ShapeDtypeStruct((256,), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32))
    before = GatheringWithExamples.examples
    assert isolated().tune(inv, kernel).cfg == Work(FAST)
    assert GatheringWithExamples.examples == before


def test_kernel_that_no_worker_can_import_says_so():
    script = (
        "import jax.numpy as jnp\n"
        "from ejkernel.ops import Autotuner\n"
        "from tests.tuning_kernels import Doubling, call\n"
        "class Mine(Doubling): pass\n"
        "Autotuner(isolation='process').tune(call(Mine(), jnp.ones(4)), Mine())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert "Mine is defined in the script that runs" in done.stderr
    assert 'isolation="thread"' in done.stderr


def test_what_a_worker_raised_is_told_without_its_traceback():
    with pytest.raises(TuningError, match=r"the reference failed: ValueError: no truth today$"):
        isolated().tune(call(BrokenReference(), X), BrokenReference())


def test_kernel_that_cannot_be_sent_says_so_and_blames_no_candidate(tmp_path):
    kernel, store = Doubling(), PersistentCache(tmp_path / "store")
    kernel.unsendable = lambda: None
    with pytest.raises(IsolatedBenchError, match=r"cannot be tuned in a separate process.* must be picklable"):
        isolated().tune(call(kernel, X), kernel, store=store)
    assert store.read_trials(call(kernel, X).key) == []


@pytest.mark.full  # The worker's own test is in the short suite.
def test_options_of_the_caller_hold_in_the_worker():
    with jax.enable_x64(True):
        x = jnp.linspace(0.1, 1, 64, dtype=jnp.float64)
        kernel = Doubling()
        tuning = isolated().tune(call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype)), kernel)
    assert tuning.cfg == Work(FAST)
