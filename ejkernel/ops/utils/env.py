"""ejkernel's environment variables, read when they are needed and never at import."""

from __future__ import annotations

import os

from ejkernel.errors import EjkernelError

ALLOWED = {
    "EJKERNEL_OPS_RECORD": ("0", "1"),
    "EJKERNEL_OPS_STAMP": ("hash", "json", "none"),
    "EJKERNEL_AUTOTUNE": ("off", "on", "record", "frozen"),
    "EJKERNEL_STALE": ("use", "retune", "ignore"),
}


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
    return found


def recording() -> bool:
    """Whether calls are recorded for `get_invocations`."""
    return read("EJKERNEL_OPS_RECORD", "0") == "1"
