"""ejkernel's environment variables, read when they are needed and never at import."""

from __future__ import annotations

import difflib
import os

from ejkernel.errors import EjkernelError

ALLOWED = {
    "EJKERNEL_OPS_RECORD": ("0", "1"),
    "EJKERNEL_OPS_STAMP": ("hash", "json", "none"),
    "EJKERNEL_AUTOTUNE": ("off", "on", "record", "frozen"),
    "EJKERNEL_STALE": ("use", "retune", "ignore"),
}


FREE = ("EJKERNEL_CACHE_DIR", "EJKERNEL_CACHE_PACKS")
"""Variables whose value may be anything."""


class EnvironmentValueError(EjkernelError, ValueError):
    """An environment variable holds a value that ejkernel does not know."""


def read(name: str, default: str) -> str:
    """Value of the variable `name`, one of `ALLOWED[name]`; empty counts as unset."""
    value = os.environ.get(name) or default
    if value not in ALLOWED[name]:
        allowed = ", ".join(repr(v) for v in ALLOWED[name])
        raise EnvironmentValueError(f"{name}: {value!r} is not one of {allowed}.")
    return value


def problems() -> list[str]:
    """What is wrong with the variables that are set."""
    found = []
    for name in ALLOWED:
        try:
            read(name, ALLOWED[name][0])
        except EnvironmentValueError as error:
            found.append(str(error))
    known = [*ALLOWED, *FREE]
    for name in sorted(os.environ):
        if name.startswith("EJKERNEL_") and name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"Did you mean {close[0]}?" if close else f"There are {', '.join(known)}."
            found.append(f"{name}: there is no such variable, so it has no effect. {hint}")
    return found


def recording() -> bool:
    """Whether calls are recorded for `get_invocations`."""
    return read("EJKERNEL_OPS_RECORD", "0") == "1"
