"""Agreement: all processes of a program use the same value for a key of JAX's own key-value store.

Such a key is called a place. Its name depends only on what is to be agreed on: processes come to a place in any order,
at any time, or not at all. The first value that is inserted counts for all of them, for the life of the job.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ejkernel import _compat
from ejkernel.errors import EjkernelError
from ejkernel.ops.utils.fingerprint import stable_json

Data = dict[str, Any]


class DecisionError(EjkernelError, RuntimeError):
    """The process that measures for all of them failed; the message is that of its error."""


@dataclass
class Agreement:
    """What this process knows of the others."""

    client: Any
    index: int
    count: int
    known: dict[str, Any] = field(default_factory=dict)
    """The values by place that were agreed on last; the others are read again, because they stay at their places."""
    tuned: dict[str, Any] = field(default_factory=dict)
    """What all processes found in their last tuning on demand, by place. Always kept: no place says which was last."""
    tunings: dict[str, int] = field(default_factory=dict)
    """How often a call was tuned on demand, at least, by place."""
    _patience_s: float = field(default_factory=lambda: _MOMENT_S)
    _locks: weakref.WeakValueDictionary[str, threading.RLock] = field(default_factory=weakref.WeakValueDictionary)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def alone(self, place: str) -> threading.RLock:
        """Lets only one thread of this process at a time use a place."""
        with self._lock:
            return self._locks.setdefault(place, threading.RLock())

    def remember(self, place: str, value: Any) -> None:
        """Keeps an agreed value at hand."""
        with self._lock:
            self.known[place] = value
            if len(self.known) > MAX_KNOWN:
                del self.known[next(iter(self.known))]

    def arrive(self, place: str) -> bool:
        """Counts this process; returns whether all of them have come now."""
        if _compat.key_value_increment(self.client, f"{_PREFIX}{place}/came") < self.count:
            return False
        self.insert(f"{place}/all", True)
        return True

    def have_all_come(self, place: str) -> bool:
        """Whether all processes have come, now or in a moment."""
        return self._wait(f"{place}/all") is not None

    def first(self, place: str, opening: Callable[[bool], Data], wait_s: float | None = None) -> Data:
        """The first value at a place; if there is none, this process inserts `opening(all came)`.

        It waits for the others first: for `wait_s`, or for a short time, which gets shorter each time no process came.
        """
        together = self.arrive(place)
        found = None
        if not together:
            found = self._wait(f"{place}/first") if wait_s is None else self.read(f"{place}/first", wait_s)
        return found if found is not None else self.insert(f"{place}/first", opening(together))

    def _wait(self, place: str) -> Any:
        found = self.read(place, self._patience_s)
        self._patience_s = max(self._patience_s / 2, _SHORTEST_S) if found is None else _MOMENT_S
        return found

    # --- Values by place ---

    def insert(self, place: str, value: Any) -> Any:
        """Puts a value where there is none yet; returns the one that is there."""
        if _compat.key_value_insert(self.client, _PREFIX + place, stable_json(value)):
            return value
        found = self.read(place, 60.0)
        assert found is not None, "somebody else was first"
        return found

    def read(self, place: str, timeout_s: float = 0.0) -> Any:
        """The value at a place; None if there is none within the time."""
        text = _compat.key_value_get(self.client, _PREFIX + place, timeout_s)
        return None if text is None else json.loads(text)

    def gather(self, place: str, timeout_s: float) -> dict[int, Any]:
        """What the other processes insert at `place/<process>` within the time."""
        deadline = time.monotonic() + timeout_s
        others = [process for process in range(self.count) if process != self.index]
        found = {process: self.read(f"{place}/{process}", deadline - time.monotonic()) for process in others}
        return {process: value for process, value in found.items() if value is not None}


MAX_KNOWN = 4096
"""How many agreed values a process keeps at hand."""

_PREFIX = "ejkernel/agreement/"
_MOMENT_S, _SHORTEST_S = 1.0, 0.05
"""How long a process without a config waits for one that may have it."""

_lock = threading.Lock()
_current: Agreement | None = None


def current() -> Agreement | None:
    """The agreement of this process with the others; None if it is alone."""
    global _current
    client = _compat.distributed_client()
    if client is None:
        return None
    with _lock:
        if _current is None or _current.client is not client:
            index, count = _compat.process_place()
            _current = Agreement(client, index, count)
        return _current if _current.count > 1 else None
