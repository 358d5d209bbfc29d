"""Agreement: all processes of a program make one decision a call, over JAX's own key-value store.

Every question has a number, the same in all processes because they run the same program. Each process posts its
question under the number before anybody answers, so programs that differ are found out instead of waited for. The first
answer that is inserted counts, whoever gave it: late ones follow.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ejkernel import _compat
from ejkernel.errors import EjkernelError
from ejkernel.ops.config.differences import differences
from ejkernel.ops.utils.fingerprint import short_hash, stable_json

Data = dict[str, Any]


class KeySequenceError(EjkernelError, RuntimeError):
    """Processes of one program ask for different configs, or for the same ones in different order."""


class DecisionError(EjkernelError, RuntimeError):
    """The process that decides could not; the message is its own."""


@dataclass(frozen=True)
class Question:
    """What all processes ask at the same time.

    Attributes:
      number: Its place in the sequence.
      data: The call, as every process must see it.
      posts: What each process that has arrived holds, by process; those that have not are not among them.
    """

    number: int
    data: Data
    posts: Mapping[int, Any]

    def decider(self, count: int) -> int:
        """The process that answers: another one for each call, so that tuning is spread."""
        return int(short_hash(self.data), 16) % count


@dataclass
class Agreement:
    """The questions of this process, and the answers of all."""

    client: Any
    index: int
    count: int
    lock: threading.RLock = field(default_factory=threading.RLock)
    _asked: int = 0
    _missed: dict[int, int] = field(default_factory=dict)
    """The first question that a process did not come to, for those that did not."""
    _owners: weakref.WeakKeyDictionary[Any, int] = field(default_factory=weakref.WeakKeyDictionary)
    _ordinals: Iterator[int] = field(default_factory=itertools.count)

    def ordinal(self, owner: Any) -> int:
        """The number of an object in the order in which they first asked: its name in all processes."""
        with self.lock:
            if owner not in self._owners:
                # Counted, not the number of those that live: they are collected at another time in each process.
                self._owners[owner] = next(self._ordinals)
            return self._owners[owner]

    def ask(self, data: Data, mine: Any, timeout_s: float) -> Question:
        """Posts a question with what this process holds, and collects the posts of the others.

        Raises:
          KeySequenceError: A process asks something else, or has done so before and come no more.
        """
        number, self._asked = self._asked, self._asked + 1
        self.insert(f"{number}/post/{self.index}", {"question": data, "holds": mine})
        posts = {self.index: {"question": data, "holds": mine}, **self.gather(f"{number}/post", timeout_s)}
        for process, post in sorted(posts.items()):
            if post["question"] != data:
                text = _diff(number, self.index, data, process, post["question"])
                # For those that have not seen both questions, now or when they wait for this process in vain.
                self.insert(f"{number}/answer", {"diverged": text})
                self.insert("diverged", text)
                raise KeySequenceError(text)
        self._note_missed(number, posts)
        return Question(number, data, {process: post["holds"] for process, post in posts.items()})

    def decides(self, question: Question) -> bool:
        """Whether this process is the one that answers."""
        return question.decider(self.count) == self.index

    def answer(
        self, question: Question, decide: Callable[[], Data], fallback: Callable[[], Data], timeout_s: float
    ) -> Data:
        """What counts for all: the decider's `decide()`, or a `fallback()` if it does not come in time.

        Raises:
          DecisionError: The decider's `decide` raised.
          KeySequenceError: Another process has seen that questions differ.
        """
        place, decider = f"{question.number}/answer", question.decider(self.count)
        if self.decides(question):
            try:
                found = self.insert(place, decide())
            except BaseException as error:
                found = self.insert(place, {"error": f"{type(error).__name__}: {error}"})
                if "error" in found or not isinstance(error, Exception):
                    raise
        else:
            found = self.read(place, self.patience(decider, timeout_s))
            if found is None:
                found = self.insert(place, fallback())
        if "diverged" in found:
            raise KeySequenceError(found["diverged"])
        if "error" in found:
            raise DecisionError(f"process {decider}, which decides, failed: {found['error']}")
        return found

    # --- Values by place ---

    def insert(self, place: str, value: Any) -> Any:
        """Puts a value where there is none yet; returns the one that is there."""
        if _compat.key_value_insert(self.client, _PREFIX + place, stable_json(value)):
            return value
        found = self.read(place, 60.0)
        assert found is not None, "somebody else was first"
        return found

    def read(self, place: str, timeout_s: float) -> Any:
        """The value at a place; None if there is none within the time."""
        text = _compat.key_value_get(self.client, _PREFIX + place, timeout_s)
        return None if text is None else json.loads(text)

    def gather(self, place: str, timeout_s: float) -> dict[int, Any]:
        """What the other processes insert at `place/<process>` within the time."""
        deadline = time.monotonic() + timeout_s
        found: dict[int, Any] = {}
        for process in (p for p in range(self.count) if p != self.index):
            value = self.read(f"{place}/{process}", self.patience(process, deadline - time.monotonic()))
            if value is not None:
                found[process] = value
        return found

    def patience(self, process: int, timeout_s: float) -> float:
        """Little for one that has not come yet to where it was missed: if it is gone, no call should wait for it."""
        missed = self._missed.get(process)
        if missed is not None and self.read(f"{missed}/post/{process}", 0.0) is not None:
            del self._missed[process]  # It was only late.
            missed = None
        return min(max(timeout_s, 0.0), timeout_s if missed is None else _GRACE_S)

    def _note_missed(self, number: int, posts: Mapping[int, Any]) -> None:
        missed = set(range(self.count)) - posts.keys()
        self._missed = {process: self._missed.get(process, number) for process in missed}
        if missed and (text := self.read("diverged", 0.0)) is not None:
            raise KeySequenceError(text)


_PREFIX = "ejkernel/agreement/"
_GRACE_S = 0.25
"""For one that was missed: it may be only a little behind now."""

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


def _diff(number: int, here: int, mine: Data, there: int, theirs: Data) -> str:
    lines = [f"  {line}" for line in differences(mine, theirs)]
    return "\n".join(
        [
            f"Processes {here} and {there} ask for different configs, and programs that differ dead-lock. The first "
            f"difference is call {number} of each: process {here} asks for {_name(mine)}, process {there} for "
            f"{_name(theirs)}.",
            f"Process {here} -> process {there}:",
            *lines,
            "Call the same kernels in the same order everywhere, or wrap what one process does alone in "
            "policy_override(agree=False).",
        ]
    )


def _name(data: Data) -> str:
    return f"{data['op_id']} {data['call_key']}"
