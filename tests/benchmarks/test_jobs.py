"""The queue of jobs, with small programs."""

import io
import sys
import time

import pytest

from benchmarks import jobs
from benchmarks.jobs import Job


def program(name, code, **fields):
    return Job(name, (sys.executable, "-S", "-c", code), **fields)


@pytest.fixture
def run(monkeypatch):
    """Runs jobs: their outcomes by name, what they handed on, the log."""
    monkeypatch.setattr(jobs, "GRACE_S", 0.3)

    def go(*queue, seconds=10.0, cores=1):
        log, found = io.StringIO(), []
        outcomes = jobs.run(queue, seconds=seconds, cores=cores, log=log, mark="FOUND ", found=found.append)
        return {outcome.name: outcome for outcome in outcomes}, found, log.getvalue()

    return go


def test_jobs_run_in_their_order_and_hand_on_what_is_marked(run):
    outcomes, found, log = run(*(program(name, f"print('FOUND {name}'); print('and more')") for name in "abc"))
    assert found == ["a", "b", "c"]
    assert "b| and more\n" in log
    assert all(outcome.good for outcome in outcomes.values())


def test_a_job_that_crashes_is_reported_and_the_others_go_on(run):
    outcomes, found, _ = run(
        program("raises", "print('FOUND before', flush=True); raise SystemExit('this went wrong')"),
        program("dies", "import os; os.abort()"),
        program("good", "print('FOUND after')"),
    )
    assert found == ["before", "after"]
    assert "exit code 1" in str(outcomes["raises"])
    assert "this went wrong" in str(outcomes["raises"])
    assert "SIGABRT" in outcomes["dies"].state
    assert outcomes["good"].good


def test_a_job_that_hangs_is_killed_with_what_it_has_started(run, tmp_path):
    ticking = f"while :; do echo >> {tmp_path}/ticks; sleep 0.02; done"
    deaf = "import signal, subprocess, time; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    hangs = f"{deaf}; print('FOUND half', flush=True); subprocess.Popen(['sh', '-c', {ticking!r}]); time.sleep(60)"
    outcomes, found, _ = run(program("hangs", hangs, seconds=0.8), program("good", "print('FOUND whole')"))
    assert found == ["half", "whole"]
    assert "stopped after its 0.8 s" in outcomes["hangs"].state
    ticks = (tmp_path / "ticks").stat().st_size
    time.sleep(0.2)
    assert (tmp_path / "ticks").stat().st_size == ticks > 0


def test_at_the_limit_what_runs_may_write_what_it_has_and_the_rest_is_not_started(run):
    writes = "import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('FOUND at the end', flush=True)"
    started = time.monotonic()
    outcomes, found, _ = run(program("long", writes), program("later", "print('FOUND later')"), seconds=0.5)
    assert time.monotonic() - started < 5
    assert found == ["at the end"]
    assert "cut at the limit of 0.5 s" in outcomes["long"].state
    assert outcomes["later"].state == "not started"


def test_jobs_run_at_the_same_time_if_there_are_cores_for_them(run, tmp_path):
    waits = "import os, time; open({!r}, 'w')\nwhile not os.path.exists({!r}): time.sleep(0.01)"
    pair = [program(a, waits.format(f"{tmp_path}/{a}", f"{tmp_path}/{b}"), cores=2, seconds=5) for a, b in ("xy", "yx")]
    outcomes, _, _ = run(*pair, cores=4)
    assert all(outcome.good for outcome in outcomes.values())


def test_a_job_that_wants_more_cores_than_there_are_runs_alone(run):
    code = "import time; print('FOUND {0} begins', flush=True); time.sleep(0.1); print('FOUND {0} ends', flush=True)"
    queue = [program(name, code.format(name), cores=cores) for name, cores in (("large", 8), ("small", 1))]
    assert run(*queue, cores=2)[1] == ["large begins", "large ends", "small begins", "small ends"]
