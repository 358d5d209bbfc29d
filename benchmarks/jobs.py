"""Jobs: programs that run by priority within a time limit, some at the same time; none of them can stop the others.

What they print goes to one log, line by line. A line that begins with a mark is handed on as soon as it is there, so a
job that ends badly, or is cut, has lost nothing that it had printed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TextIO

GRACE_S = 15.0
"""How long a job that is interrupted has until it is killed: `ejkernel tune` writes what it has."""


@dataclass(frozen=True)
class Job:
    """A program.

    Attributes:
      name: What it is called in the log.
      command: Its arguments.
      seconds: Its own limit.
      cores: How many it keeps busy; those of jobs that run at the same time are no more than there are.
    """

    name: str
    command: tuple[str, ...]
    seconds: float = 300.0
    cores: int = 2


@dataclass
class Outcome:
    """What became of a job."""

    name: str
    state: str = "not started"
    seconds: float = 0.0
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=4))

    @property
    def good(self) -> bool:
        return self.state == "done"

    def __str__(self) -> str:
        last = "" if self.good else "".join(f"\n    {line[:160]}" for line in self.tail)
        return f"{self.name}: {self.state}, {self.seconds:.0f} s{last}"


def run(
    jobs: Sequence[Job], *, seconds: float, cores: int, log: TextIO, mark: str, found: Callable[[str], None]
) -> list[Outcome]:
    """Starts the jobs in their order, each as soon as enough cores are free, and ends all of them at the limit."""
    end = time.monotonic() + seconds
    outcomes = [Outcome(job.name) for job in jobs]
    waiting, running = deque(zip(jobs, outcomes, strict=True)), list[_Running]()
    hears = threading.Lock()

    def hear(outcome: Outcome, line: str) -> None:
        with hears:
            log.write(f"{outcome.name}| {line}\n")
            log.flush()
            if line.startswith(mark):
                found(line.removeprefix(mark))
            else:
                outcome.tail.append(line)

    with _none_left(running):
        while (waiting or running) and time.monotonic() < end:
            running[:] = [each for each in running if not each.has_ended()]
            while waiting and _fits(waiting[0][0], [each.job for each in running], cores):
                running.append(_Running(*waiting.popleft(), hear))
            time.sleep(0.02)
        for each in running:
            each.interrupt(f"cut at the limit of {seconds:g} s")
        while running and time.monotonic() < end + GRACE_S:
            running[:] = [each for each in running if not each.has_ended()]
            time.sleep(0.02)
    return outcomes


def _fits(job: Job, running: Sequence[Job], cores: int) -> bool:
    return not running or sum(other.cores for other in running) + job.cores <= cores


class _Running:
    """A job that has been started."""

    def __init__(self, job: Job, outcome: Outcome, hear: Callable[[Outcome, str], None]) -> None:
        self.job, self.outcome = job, outcome
        self.started = time.monotonic()
        # A group of its own, so that what it has started ends with it.
        self.process = subprocess.Popen(
            job.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", process_group=0
        )
        self.outcome.state = "running"
        self.killed_at: float | None = None
        self.reader = threading.Thread(target=self._read, args=(hear,), daemon=True)
        self.reader.start()

    def _read(self, hear: Callable[[Outcome, str], None]) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                hear(self.outcome, line.rstrip("\n"))

    def has_ended(self) -> bool:
        """Whether it is over; one that is over its limit is interrupted, then killed."""
        now = time.monotonic()
        self.outcome.seconds = now - self.started
        if self.process.poll() is None:
            if self.killed_at is None and now > self.started + self.job.seconds:
                self.interrupt(f"stopped after its {self.job.seconds:g} s")
            elif self.killed_at is not None and now > self.killed_at + GRACE_S:
                self.kill()
            return False
        self.kill()
        self.reader.join(1.0)
        if self.killed_at is None:
            code = self.process.returncode
            self.outcome.state = "done" if code == 0 else f"failed with {_told(code)}"
        return True

    def interrupt(self, why: str) -> None:
        if self.killed_at is None:
            self.killed_at, self.outcome.state = time.monotonic(), why
            self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def _told(code: int) -> str:
    return f"exit code {code}" if code > 0 else signal.Signals(-code).name


@contextlib.contextmanager
def _none_left(running: list[_Running]) -> Iterator[None]:
    """Ends what runs, also when this process is asked to end."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        for each in running:
            each.kill()
            each.process.wait()
            each.reader.join(1.0)
