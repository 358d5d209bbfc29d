"""One process measures, the others wait and read, and the dead block nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ejkernel.ops.store import locks
from ejkernel.ops.store.persistent import PersistentCache

KEY = ("dev", "op", "key")
ROOT = Path(__file__).parents[3]


def spawn(script, *args):
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, args)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


MEASURE_ONCE = """
import sys, time
from ejkernel.ops.store.persistent import PersistentCache
cache = PersistentCache(sys.argv[1])
key = ("dev", "op", "key")
print("ready", flush=True)
with cache.tuning_lock(key) as held:
    assert held
    if cache.get(*key) is None:
        time.sleep(0.2)
        cache.put(*key, 7)
        print("measured")
print(cache.get(*key))
"""

HOLD = """
import sys, time
from ejkernel.ops.store.persistent import PersistentCache
with PersistentCache(sys.argv[1]).tuning_lock(("dev", "op", "key")):
    print("held", flush=True)
    time.sleep(600)
"""


def test_one_process_measures_and_all_read(tmp_path):
    outputs = [p.communicate()[0].split() for p in [spawn(MEASURE_ONCE, tmp_path) for _ in range(4)]]
    assert sorted(outputs) == [["ready", "7"]] * 3 + [["ready", "measured", "7"]]


def test_a_dead_holder_blocks_nobody(tmp_path):
    holder = spawn(HOLD, tmp_path)
    assert holder.stdout.readline() == "held\n"
    cache = PersistentCache(tmp_path)
    started = time.monotonic()
    with cache.tuning_lock(KEY, timeout=0.2) as held:
        assert not held
    assert 0.2 <= time.monotonic() - started < 30
    os.kill(holder.pid, signal.SIGKILL)
    holder.communicate()
    with cache.tuning_lock(KEY, timeout=10) as held:
        assert held


def test_a_waiter_gets_it_while_the_holder_dies(tmp_path):
    holder = spawn(HOLD, tmp_path)
    assert holder.stdout.readline() == "held\n"
    threading.Timer(0.3, holder.kill).start()
    with PersistentCache(tmp_path).tuning_lock(KEY) as held:
        assert held
    holder.communicate()


def test_locks_of_other_keys_are_free(tmp_path):
    cache = PersistentCache(tmp_path)
    with cache.tuning_lock(KEY), cache.tuning_lock(("dev", "op", "other"), timeout=0) as held:
        assert held


def test_a_thread_that_holds_it_may_take_it_again(tmp_path):
    cache = PersistentCache(tmp_path)
    with cache.tuning_lock(KEY), PersistentCache(tmp_path).tuning_lock(KEY, timeout=0) as held:
        assert held
    with cache.tuning_lock(KEY, timeout=0) as held:
        assert held


def test_an_error_inside_releases_it_and_comes_through(tmp_path):
    cache = PersistentCache(tmp_path)
    with pytest.raises(OSError, match="mine"), cache.tuning_lock(KEY):
        raise OSError("mine")
    outcome = []
    thread = threading.Thread(target=lambda: outcome.append(take(cache)))
    thread.start()
    thread.join()
    assert outcome == [True]


def take(cache):
    with cache.tuning_lock(KEY, timeout=0) as held:
        return held


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.filterwarnings("ignore::ejkernel.ops.store.persistent.StoreWarning")
def test_threads_exclude_each_other(tmp_path, writable):
    cache = PersistentCache(tmp_path if writable else "/proc/self/ejkernel")
    inside, most = [], []

    def work():
        with cache.tuning_lock(KEY):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.01)
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 8


FORK_INSIDE = """
import os, subprocess, sys, threading
from ejkernel.ops.store.persistent import PersistentCache

cache, key = PersistentCache(sys.argv[1]), ("dev", "op", "key")

def is_free():
    with cache.tuning_lock(key, timeout=0) as held:
        return held

def forked(do):
    pid = os.fork()
    if pid == 0:
        os._exit(10 + do())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) - 10

inside, done = threading.Event(), threading.Event()

def hold():
    with cache.tuning_lock(key):
        inside.set()
        done.wait()

with cache.tuning_lock(key):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        print("held by the parent:", forked(is_free) == 0)
if child == 0:  # It has left the block.
    os._exit(0)
print("free:", is_free())
thread = threading.Thread(target=hold)
thread.start()
inside.wait()
print("held by another thread of the parent:", forked(is_free) == 0)
done.set()
thread.join()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_holds_nothing_and_releases_nothing(tmp_path):
    process = spawn(FORK_INSIDE, tmp_path)
    try:
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert [line.rpartition(" ")[2] for line in out.splitlines()] == ["True", "True", "True"], out


def test_a_lock_that_nobody_holds_or_waits_for_is_forgotten(tmp_path):
    for n in range(50):
        with locks.thread_lock(tmp_path / str(n)) as held:
            assert held
    assert not locks._threads
    got = []

    def take():
        with locks.thread_lock(tmp_path, timeout=0) as held:
            got.append(held)

    with locks.thread_lock(tmp_path), locks.thread_lock(tmp_path):
        other = threading.Thread(target=take)
        other.start()
        other.join()
    take()
    assert got == [False, True]
