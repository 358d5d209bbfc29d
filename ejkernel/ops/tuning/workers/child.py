"""Child: what runs inside a worker process."""

import ctypes
import logging
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


def main(fd: int, parent: int) -> None:
    """Answers jobs from a connection until the other side closes it."""
    die_with(parent)
    connection = Connection(fd)
    while True:
        try:
            job = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(answer(job))


def answer(job: bytes) -> bytes:
    """Returns a job's result, or what it raised: the name, the text and the traceback."""
    try:
        fn, args = pickle.loads(job)
        return pickle.dumps(("ok", fn(*args), ""))
    except Exception as error:  # noqa: BLE001 - a candidate's failure is a result.
        return pickle.dumps((type(error).__name__, str(error), traceback.format_exc()))


def die_with(parent: int) -> None:
    """Asks Linux to kill this process when its parent ends; elsewhere the closed connection ends it after its job."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # The parent ended before the request.
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
