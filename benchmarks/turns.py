"""Turns: of several processes, one at a time has the device, and none for ever."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
from collections.abc import Iterator


@contextlib.contextmanager
def turn(lock: str | None) -> Iterator[None]:
    """Holds a lock file, which also the end of a process gives back."""
    if lock is None:
        yield
        return
    with open(lock, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def guard(seconds: float) -> Iterator[None]:
    """Ends the process with a traceback if what is inside takes longer: a hanging device stops no Python thread."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
