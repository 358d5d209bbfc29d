"""`ejkernel info` and `ejkernel kernels`: what is installed, and what can run."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from typing import Any

import typer

import ejkernel
from ejkernel.cli import jax_start, operations
from ejkernel.cli.options import AsJson, Store
from ejkernel.cli.output import counted, print_json, print_table, tell, working
from ejkernel.cli.store import open_store
from ejkernel.errors import EjkernelError
from ejkernel.ops.core import dispatch
from ejkernel.ops.store import layers, packs, provenance
from ejkernel.ops.utils import env

_MODULES = {
    "triton": "jax.experimental.pallas.triton",
    "mosaic": "jax.experimental.pallas.mosaic_gpu",
    "pallas": "jax.experimental.pallas.tpu",
}
_CAPABILITY = {"triton": (8, 0), "mosaic": (9, 0), "cudnn": (8, 0)}
_PACKAGES = ("jax", "jaxlib", "numpy", "pydantic", "fsspec")


def info(store: Store = None, as_json: AsJson = False) -> None:
    """Show devices, versions, the store, and which backends can run here; exit code 1 if a variable has a wrong value.

    For example:

    ejkernel info

    ejkernel info --json
    """
    with working("starting JAX"):
        jax_start.start()
        found = _info(store)
    if as_json:
        print_json(found)
    else:
        _show(found)
    for problem in found["problems"]:
        tell(problem, error=True)
    if found["problems"]:
        raise typer.Exit(1)


def _show(found: dict[str, Any]) -> None:
    rows = [("ejkernel", ejkernel.__version__), ("python", found["versions"]["python"])]
    rows += [(name, version) for name, version in found["versions"].items() if name != "python"]
    rows += [(f"device {i}", _device_text(d)) for i, d in enumerate(found["devices"])]
    rows += [("fingerprint", found["fingerprint"]), ("clock", found["timer"])]
    rows += [("store", f"{found['store']['path']} ({_store_text(found['store'])})")]
    rows += [("pack", f"{p['path']} ({counted(p['entries'], 'entry', 'entries')})") for p in found["store"]["packs"]]
    rows += [(name, value) for name, value in found["environment"].items()]
    print_table(["WHAT", "VALUE"], rows)
    print()
    print_table(["BACKEND", "RUNS HERE", "WHY NOT"], [_backend_row(b) for b in found["backends"]])


def kernels(as_json: AsJson = False) -> None:
    """List the installed operations and their backends.

    A package registers its own with entry points of the group "ejkernel.kernels".
    """
    with working("starting JAX"):
        jax_start.start()
        backends = {b["name"]: b for b in _backends()}
        found = [_operation(name, where, backends) for name, where in operations.installed().items()]
    if as_json:
        print_json(found)
        return
    print_table(
        ["OP", "RUNS HERE", "ELSEWHERE", "KERNEL"],
        [[o["name"], ", ".join(o["here"]) or "-", ", ".join(o["elsewhere"]) or "-", o["kernel"]] for o in found],
    )
    for operation in found:
        if operation["error"]:
            tell(f"{operation['name']}: {operation['error']}")


def _info(store: str | None) -> dict[str, Any]:
    import jax

    from ejkernel.ops.tuning import timers
    from ejkernel.ops.utils.fingerprint import current_device, device_fingerprint

    # What is stale plays no part here: a wrong EJKERNEL_STALE is one of the problems to show.
    cache = open_store(store, stale="use")
    versions = {name: provenance.version(name) for name in _PACKAGES}
    return {
        "ejkernel": ejkernel.__version__,
        "versions": {"python": platform.python_version(), **{k: v for k, v in versions.items() if v is not None}},
        "devices": [_device(d) for d in jax.local_devices()],
        "fingerprint": device_fingerprint(),
        "timer": timers.available(current_device())[0].name,
        "store": {
            "path": str(cache.path),
            "exists": cache.path.is_dir(),
            "writable": _writable(str(cache.path)),
            "entries": sum(1 for _ in cache.entries(packs=False)),
            "packs": [_pack(source) for source in packs.default()] if store is None else [],
        },
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("EJKERNEL_")},
        "problems": env.problems(),
        "backends": _backends(),
    }


def _pack(source: str) -> dict[str, Any]:
    return {"path": source, "entries": sum(1 for layer in layers.layers_of(source) for _ in layer.entries())}


def _device(device: Any) -> dict[str, Any]:
    memory = (device.memory_stats() or {}).get("bytes_limit")
    return {
        "id": device.id,
        "platform": device.platform,
        "kind": device.device_kind,
        "capability": getattr(device, "compute_capability", None),
        "memory_bytes": memory,
    }


def _device_text(device: dict[str, Any]) -> str:
    memory = f", {device['memory_bytes'] / 2**30:.0f} GiB" if device["memory_bytes"] else ""
    capability = f", compute capability {device['capability']}" if device["capability"] else ""
    return f"{device['platform']}: {device['kind']}{capability}{memory}"


def _store_text(store: dict[str, Any]) -> str:
    entries = counted(store["entries"], "entry", "entries")
    return entries if store["writable"] else f"{entries}; cannot be written"


def _writable(path: str) -> bool:
    """Whether a store could be created or changed there; checks the nearest directory that exists."""
    while not os.path.exists(path):
        path = os.path.dirname(path) or os.curdir
    return os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)


# --- Backends ---


def _backends() -> list[dict[str, Any]]:
    found = [(name, _why_not(name)) for name in dispatch.ALL_PLATFORMS]
    return [{"name": name, "runs": reason is None, "reason": reason} for name, reason in found]


def _backend_row(backend: dict[str, Any]) -> tuple[str, ...]:
    return backend["name"], "yes" if backend["runs"] else "no", backend["reason"] or ""


def _why_not(name: str) -> str | None:
    """Why kernels of this backend cannot run on the default device; None if they can."""
    from ejkernel.ops.utils.fingerprint import current_device, device_kind

    kind = device_kind()
    if name not in dispatch.PLATFORMS[kind]:
        needed = next(k for k, platforms in dispatch.PLATFORMS.items() if name in platforms)
        return f"needs a {needed.upper()}, this is a {kind.upper()}"
    if (least := _CAPABILITY.get(name)) is not None:
        text = str(getattr(current_device(), "compute_capability", ""))
        have = re.fullmatch(r"(\d+)\.(\d+)", text)
        if have is None:
            return f"needs an NVIDIA GPU, this is {current_device().device_kind}"
        if (int(have[1]), int(have[2])) < least:
            return f"needs compute capability {least[0]}.{least[1]}, this is {text}"
    module = _MODULES.get(name)
    if module is not None and importlib.util.find_spec(module) is None:
        return f"this JAX has no {module}"
    return None


def _operation(name: str, where: str, backends: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "kernel": where, "here": [], "elsewhere": [], "error": None}
    try:
        kernel = operations.make(where)
    except EjkernelError as error:
        return {**found, "error": str(error)}
    written = [p for p in dispatch.ALL_PLATFORMS if hasattr(kernel, f"run_{p}")]
    found["here"] = [p for p in written if backends[p]["runs"]] or (["run"] if hasattr(kernel, "run") else [])
    found["elsewhere"] = [p for p in written if not backends[p]["runs"]]
    return found
