"""Documents for scripts: the standard output has only what a command writes, not what kernels print."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TextIO

_alone: ContextVar[TextIO | None] = ContextVar("_alone", default=None)


def stream() -> TextIO:
    """Where documents go: the standard output, even while `alone` redirects all other output."""
    return _alone.get() or sys.stdout


def write_utf8(text: str) -> None:
    """Writes a document as UTF-8, whatever the locale says."""
    out = stream()
    out.flush()
    if (binary := getattr(out, "buffer", None)) is None:
        out.write(text)
    else:
        binary.write(text.encode())
        binary.flush()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Sends to the standard error what kernels, their compilers and programs print to the standard output."""
    with contextlib.ExitStack() as stack:
        token = _alone.set(stack.enter_context(_apart(sys.stdout)))
        stack.callback(_alone.reset, token)
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


@contextlib.contextmanager
def _apart(out: TextIO) -> Iterator[TextIO]:
    """A stream to the target of `out`, while the file descriptor of `out` leads to the standard error."""
    try:
        fd, aside = out.fileno(), sys.stderr.fileno()
    except (OSError, AttributeError, ValueError):  # The stream was replaced by the program, or is closed.
        yield out
        return
    out.flush()
    with os.fdopen(os.dup(fd), "w", encoding="utf-8") as own:
        os.dup2(aside, fd)
        try:
            yield own
        finally:
            out.flush()
            os.dup2(own.fileno(), fd)
