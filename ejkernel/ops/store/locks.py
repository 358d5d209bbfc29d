"""Locks: one process measures a key, the others wait and then read."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

_guard = threading.Lock()
_threads: weakref.WeakValueDictionary[Path, threading.RLock] = weakref.WeakValueDictionary()
_held: set[Path] = set()


def _forget() -> None:
    """Forgets locks after a fork: the child holds none, and waits for its parent's like any other process."""
    global _guard
    _guard = threading.Lock()
    _threads.clear()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@contextlib.contextmanager
def thread_lock(path: Path, timeout: float | None = None) -> Iterator[bool]:
    """Holds the lock called `path` among the threads of this process; a thread that has it can take it again."""
    with _guard:
        lock = _threads.setdefault(path, threading.RLock())
    held = lock.acquire(timeout=-1 if timeout is None else max(timeout, 0))
    try:
        yield held
    finally:
        if held:
            lock.release()


@contextlib.contextmanager
def file_lock(path: Path, timeout: float | None = None) -> Iterator[bool]:
    """Holds the lock file `path`; gives False, without the lock, if it was not free within `timeout` seconds.

    The operating system releases the lock when its holder dies. A thread that holds it already gets it again.

    Raises:
      OSError: The file cannot be created or locked there.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    # Between threads first: on network filesystems the system's lock belongs to the whole process.
    with thread_lock(path, timeout) as first:
        if not first or path in _held:
            yield first
            return
        with _process_lock(path, deadline) as held:
            if held:
                _held.add(path)
            try:
                yield held
            finally:
                _held.discard(path)


@contextlib.contextmanager
def _process_lock(path: Path, deadline: float | None) -> Iterator[bool]:
    import filelock

    path.parent.mkdir(parents=True, exist_ok=True)
    # Writable for all: in a shared directory, another user may tune next.
    timeout = -1 if deadline is None else max(deadline - time.monotonic(), 0)
    lock, holder = filelock.FileLock(path, timeout=timeout, mode=0o666), os.getpid()
    try:
        lock.acquire(poll_interval=0.02)
    except filelock.Timeout:
        yield False
        return
    try:
        yield True
    finally:
        if os.getpid() == holder:  # A child that was forked inside must not release its parent's lock when it leaves.
            lock.release()
