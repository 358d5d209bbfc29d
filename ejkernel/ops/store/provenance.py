"""Where a measurement comes from, and what has changed since."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import platform
import socket
import sys
from collections.abc import Mapping
from typing import Any

import ejkernel
from ejkernel.ops.store.entry import SOURCE_CHANGED
from ejkernel.ops.utils.source import is_source, source_hash

_TOOLCHAIN = ("jax", "jaxlib")


def collect(kernel: Any = None) -> dict[str, Any]:
    """The provenance of a measurement made now: versions, host, time, and the source of `kernel` (or its class)."""
    found = {
        "ejkernel": ejkernel.__version__,
        **{name: version(name) for name in _TOOLCHAIN},
        "python": platform.python_version(),
        "driver": driver(),
        "kernel_source": None if kernel is None else source_hash(kernel),
        "host": socket.gethostname(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    return {name: value for name, value in found.items() if value is not None}


def changes(stored: Mapping[str, Any], kernel: Any) -> str | None:
    """What differs between an entry's provenance and the present one; None if nothing known on both sides does."""
    current = {name: version(name) for name in _TOOLCHAIN}
    found = [f"{name} {stored[name]} -> {now}" for name, now in current.items() if now and stored.get(name, now) != now]
    source = stored.get("kernel_source")
    if source is not None and not is_source(kernel, str(source)):
        found.insert(0, SOURCE_CHANGED)
    return "; ".join(found) or None


@functools.cache
def version(package: str) -> str | None:
    """Installed version of `package`, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def driver() -> str | None:
    """Version of the driver or libtpu, if a backend is already running: this must not start one."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    started = getattr(bridge, "backends_are_initialized", lambda: False)
    if not started():
        return None
    import jax

    return jax.devices()[0].client.platform_version.strip() or None
