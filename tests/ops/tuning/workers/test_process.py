import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from ejkernel.ops.tuning.workers import JobCrashed, JobError, JobOutOfMemory, JobRaised, JobTimedOut, ProcessWorker
from ejkernel.ops.tuning.workers.process import resident_bytes
from tests.ops.tuning.workers import jobs
from tests.support import fully

ROOT = Path(__file__).parents[4]
LIMIT = 30.0


@pytest.fixture(scope="module")
def shared():
    with ProcessWorker(memory_bytes=2 << 30) as worker:
        yield worker


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def gone(pid, within_s=5.0):
    deadline = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def test_a_job_runs_elsewhere_and_returns(shared):
    assert shared.run(jobs.add, 2, 3, limit_s=LIMIT) == 5
    assert shared.run(jobs.process_id, limit_s=LIMIT) == shared.pid != os.getpid()


def test_the_worker_keeps_its_state_between_jobs(shared):
    shared.run(jobs.keep, "compiled", [1, 2], limit_s=LIMIT)
    assert shared.run(jobs.kept, "compiled", limit_s=LIMIT) == [1, 2]


def test_an_exception_is_told_with_its_traceback_and_costs_nothing(shared):
    shared.run(jobs.add, 0, 0, limit_s=LIMIT)
    before = shared.pid
    with pytest.raises(JobRaised, match=r"fail: (.|\n)*ValueError: wrong block") as caught:
        shared.run(jobs.fail, "wrong block", limit_s=LIMIT)
    assert (caught.value.kind, caught.value.summary) == ("ValueError", "ValueError: wrong block")
    with pytest.raises(JobRaised, match="pickle"):
        shared.run(jobs.return_unpicklable, limit_s=LIMIT)
    assert shared.run(jobs.process_id, limit_s=LIMIT) == before


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("job", "args", "message"),
    [
        (jobs.segfault, (), "segfault: the worker died of SIGSEGV"),
        (jobs.read_null, (), "read_null: the worker died of SIGSEGV"),
        (jobs.leave, (7,), "leave: the worker died with exit status 7"),
        (jobs.say_and_die, (), r"say_and_die: the worker died of SIGABRT, having said:\nlast words"),
        (jobs.fork_and_die, (), "fork_and_die: the worker died with exit status 3"),
    ],
)
def test_a_crash_is_told_and_the_next_job_gets_a_new_worker(shared, job, args, message):
    with pytest.raises(JobCrashed, match=message):
        shared.run(job, *args, limit_s=LIMIT)
    assert shared.run(jobs.add, 1, 1, limit_s=LIMIT) == 2


@pytest.mark.parametrize("job", [jobs.sleep_forever, jobs.hang_deaf])
def test_a_hanging_job_costs_its_limit(shared, job):
    shared.run(jobs.add, 0, 0, limit_s=LIMIT)
    pid, start = shared.pid, time.monotonic()
    with pytest.raises(JobTimedOut, match=r"killed after its limit of 0\.3 s"):
        shared.run(job, limit_s=0.3)
    assert time.monotonic() - start < 60
    assert not alive(pid)
    assert shared.run(jobs.add, 1, 1, limit_s=LIMIT) == 2


def test_an_interrupted_job_takes_its_worker_along(shared, monkeypatch):
    def interrupt(limit_s, name):
        raise KeyboardInterrupt

    pid = shared.run(jobs.process_id, limit_s=LIMIT)
    with monkeypatch.context() as patch:
        patch.setattr(shared, "_wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            shared.run(jobs.add, 1, 2, limit_s=LIMIT)
    assert not alive(pid)
    assert shared.run(jobs.add, 1, 1, limit_s=LIMIT) == 2, "the answer to this job, not to the one before"


@pytest.mark.parametrize("job", [*fully(jobs.eat_memory), jobs.eat_memory_in_a_child])
def test_a_job_that_eats_memory_is_killed_at_the_limit(job):
    with ProcessWorker(memory_bytes=600 << 20) as worker:
        worker.run(jobs.add, 0, 0, limit_s=LIMIT)
        with pytest.raises(JobOutOfMemory, match=r"killed at \d+ MiB, the limit is 600 MiB"):
            worker.run(job, limit_s=LIMIT)
        assert worker.run(jobs.add, 1, 1, limit_s=LIMIT) == 2


def test_an_allocation_that_fails_is_out_of_memory_too(shared):
    with pytest.raises(JobOutOfMemory, match="MemoryError"):
        shared.run(jobs.ask_for_too_much, limit_s=LIMIT)


def test_what_a_killed_job_started_is_killed_too(shared, tmp_path):
    note = tmp_path / "pid"
    with pytest.raises(JobTimedOut):
        shared.run(jobs.sleep_after_starting_a_sleeper, str(note), limit_s=2.0)
    assert gone(int(note.read_text()))


def test_closing_ends_the_worker():
    with ProcessWorker() as worker:
        pid = worker.run(jobs.process_id, limit_s=LIMIT)
        assert alive(pid)
    assert not alive(pid)
    worker.close()  # Again: no harm.


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_a_worker_dies_with_its_parent_even_in_the_middle_of_a_job():
    code = """
import os, signal, threading
from tests.ops.tuning.workers import jobs
from ejkernel.ops.tuning.workers import ProcessWorker
worker = ProcessWorker()
print(worker.run(jobs.process_id, limit_s=60), flush=True)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
worker.run(jobs.hang_deaf, limit_s=60)
"""
    parent = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    assert parent.returncode == -signal.SIGKILL
    assert gone(int(parent.stdout))


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_a_worker_outlives_the_thread_that_started_it():
    from ejkernel.ops.tuning.workers import run_outside

    with ProcessWorker() as worker:
        pid = run_outside(lambda: worker.run(jobs.process_id, limit_s=LIMIT))
        time.sleep(0.2)
        assert worker.run(jobs.process_id, limit_s=LIMIT) == pid


def test_options_of_the_caller_hold_in_the_worker():
    with jax.enable_x64(True), jax.default_matmul_precision("highest"), ProcessWorker() as worker:
        assert worker.run(jobs.jax_dtype, limit_s=LIMIT) == "float64"
        assert worker.run(jobs.option, "jax_default_matmul_precision", limit_s=LIMIT) == "highest"
    with ProcessWorker() as worker:
        assert worker.run(jobs.jax_dtype, limit_s=LIMIT) == "float32"


def test_a_job_that_cannot_travel_is_refused_with_the_way_out(shared, monkeypatch):
    with pytest.raises(JobError, match="must be picklable"):
        shared.run(lambda: 1, limit_s=LIMIT)
    monkeypatch.setattr(jobs.add, "__module__", "__main__")
    with pytest.raises(JobError, match=r"into a module"):
        shared.run(jobs.add, 1, 1, limit_s=LIMIT)


def test_resident_memory_counts_descendants():
    child = subprocess.Popen([sys.executable, "-c", "x = bytearray(200 << 20); print(1, flush=True); input()"],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    try:
        child.stdout.readline()
        assert resident_bytes(os.getpid()) > resident_bytes(child.pid) > 200 << 20
    finally:
        child.communicate(b"\n")
    assert resident_bytes(child.pid) == 0


AFTER_FORK = """
import os
from ejkernel.ops.tuning.workers import ProcessWorker, process
from tests.ops.tuning.workers import jobs

process._spawner.submit(int).result()  # As the first worker of this process would.
if os.fork() == 0:
    with ProcessWorker() as worker:
        os._exit(worker.run(jobs.add, 2, 3, limit_s=30))
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_starts_workers_of_its_own():
    command = [sys.executable, "-W", "ignore", "-c", AFTER_FORK]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "5\n", done.stderr
