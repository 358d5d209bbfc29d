"""Process: a worker that can be killed, for jobs that may crash, hang or use too much memory.

A job is a function that can be imported by name, with arguments that can be pickled. The worker keeps its state between
jobs, so one job may compile what the next one runs, each under its own limit. A job that breaks a limit is killed with
everything it started; the next job gets a new worker.
"""

import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import IO, Any, Self

from ejkernel import _compat
from ejkernel.errors import EjkernelError

logger = logging.getLogger(__name__)

_POLL_S = 0.02
# One thread for the life of the process starts all workers: on Linux a child gets a signal at the end of the *thread*
# that started it, and the caller's thread may end long before the worker does.
_spawner = ThreadPoolExecutor(1, thread_name_prefix="ejkernel-spawner")


def _new_spawner() -> None:
    """A forked child has none of its parent's threads."""
    global _spawner
    _spawner = ThreadPoolExecutor(1, thread_name_prefix="ejkernel-spawner")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_spawner)


class JobError(EjkernelError):
    """A job did not return."""

    @property
    def summary(self) -> str:
        """What happened, for a user, who does not read tracebacks of workers."""
        return str(self)


class JobRaised(JobError):
    """The job raised an exception; the message holds its traceback, `kind` the name of its type, `text` its text."""

    def __init__(self, message: str, kind: str, text: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.text = text

    @property
    def summary(self) -> str:
        """The exception alone."""
        return f"{self.kind}: {self.text}"


class JobTimedOut(JobError):
    """The job was killed at its time limit."""


class JobOutOfMemory(JobError):
    """The job was killed at the memory limit, or could not allocate."""


class JobCrashed(JobError):
    """The worker died on the job."""


class ProcessWorker:
    """A process that runs one job at a time. It starts at the first job. As a context manager it ends with the block.

    Args:
      memory_bytes: The most resident memory that the worker and its child processes may use; None is three quarters of
        what is available at the start.
      start_s: How long starting may take.
      env: Added to the environment. By default the worker does not reserve device memory.
    """

    def __init__(
        self, *, memory_bytes: int | None = None, start_s: float = 120.0, env: Mapping[str, str] | None = None
    ) -> None:
        self.memory_bytes = memory_bytes
        self.start_s = start_s
        self.env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Any = None  # Of `Pipe`, whose type depends on the platform.
        self._log: IO[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process id of the running worker."""
        return self._process.pid if self._process is not None else None

    def run(self, fn: Callable[..., Any], *args: Any, limit_s: float) -> Any:
        """Returns `fn(*args)` as the worker computes it.

        Raises:
          JobError: The job raised, timed out, ran out of memory or crashed; the worker is ready for the next one.
        """
        job = _pickled(fn, args)
        if self._process is None:
            self._start()
        return self._ask(job, limit_s, getattr(fn, "__qualname__", repr(fn)))

    def close(self) -> None:
        """Kills the worker with everything it started."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            logger.debug("Worker %d was gone already.", process.pid)
        process.wait()
        for handle in (self._connection, self._log):
            if handle is not None:
                handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start(self) -> None:
        ours, theirs = Pipe()
        self._log = tempfile.TemporaryFile(prefix="ejkernel-worker-")  # noqa: SIM115 - closed with the worker.
        command = [sys.executable, "-m", "ejkernel.ops.tuning.workers.child", str(theirs.fileno()), str(os.getpid())]
        self._process = _spawner.submit(
            subprocess.Popen,
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # A separate process group, killed as one; the terminal's Ctrl-C does not reach it.
            # The caller's import path, since jobs are found by name.
            env={**os.environ, **self.env, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        ).result()
        theirs.close()
        self._connection = ours
        self._limit = self.memory_bytes or available_bytes() * 3 // 4
        self._ask(pickle.dumps((_hello, (_compat.config_values(),))), self.start_s, "start")

    def _ask(self, job: bytes, limit_s: float, name: str) -> Any:
        try:
            self._connection.send_bytes(job)
            self._wait(limit_s, name)
            kind, value, where = pickle.loads(self._connection.recv_bytes())
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            raise JobCrashed(f"{name}: the worker died{self._last_words()}.") from error
        except BaseException:  # A limit, or the caller's Ctrl-C: the worker is killed, whatever it is doing.
            self.close()
            raise
        if kind == "ok":
            return value
        if kind == "MemoryError":
            raise JobOutOfMemory(f"{name}: {where}")
        raise JobRaised(f"{name}: {where}", kind, value)

    def _wait(self, limit_s: float, name: str) -> None:
        deadline = time.monotonic() + limit_s
        while not self._connection.poll(_POLL_S):
            assert self._process is not None
            if self._process.poll() is not None:  # A child process may still hold the connection open.
                raise EOFError
            if time.monotonic() > deadline:
                raise JobTimedOut(f"{name}: killed after its limit of {limit_s:g} s.")
            held = resident_bytes(self.pid)
            if held > self._limit:
                raise JobOutOfMemory(f"{name}: killed at {held >> 20} MiB, the limit is {self._limit >> 20} MiB.")

    def _last_words(self) -> str:
        """Returns how the worker died and the end of its output, and removes its files."""
        assert self._process is not None
        assert self._log is not None
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            how = " to us: it closed its connection"
        else:
            how = f" of {signal.Signals(-code).name}" if code < 0 else f" with exit status {code}"
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip()[-2000:]
        self.close()
        return f"{how}, having said:\n{said}\n" if said else how


def resident_bytes(pid: int | None) -> int:
    """Returns the memory that a process and its descendants hold; zero if the system does not say."""
    if pid is None:
        return 0
    root = Path(f"/proc/{pid}")
    try:
        pages = int((root / "statm").read_text().split()[1])
        children = (root / "task" / str(pid) / "children").read_text().split()
    except (OSError, IndexError):  # The process has ended, or this is not Linux.
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(resident_bytes(int(child)) for child in children)


def _hello(config: dict[str, Any]) -> None:
    _compat.set_config_values(config)


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    if getattr(fn, "__module__", None) == "__main__":
        raise JobError(
            f"{fn.__qualname__}: a job must be importable by name, but it is defined in the script that runs. "
            "Move it, and the kernel it belongs to, into a module."
        )
    try:
        return pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise JobError(f"{fn!r}: a job and its arguments must be picklable ({error}).") from error


def available_bytes() -> int:
    """Available memory of the host; infinite if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return sys.maxsize
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
