"""Ctrl-C while many calls are worked on."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

EXIT_CODE = 130


@contextlib.contextmanager
def noted() -> Iterator[threading.Event]:
    """Gives an event that Ctrl-C sets before it is raised, because a tuning catches Ctrl-C and ends normally."""
    pressed = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        pressed.set()
        signal.default_int_handler(number, frame)

    ours = threading.current_thread() is threading.main_thread()
    # Another handler, or none as after nohup, was set on purpose.
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield pressed
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
