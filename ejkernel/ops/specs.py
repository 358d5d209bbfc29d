"""Specs: a call as data, so that another process, later and elsewhere, can tune it.

A spec names the kernel's class and holds its simple attributes, the abstract arguments, the static values, and where
the call stood. Making the call again imports the kernel's module: read only record files that you trust.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ejkernel.errors import EjkernelError
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.kernel import PROGRAMS, Invocation, Kernel
from ejkernel.ops.utils import classes, jsontext, tagged
from ejkernel.ops.utils.serialize import decode_cfg, encode_cfg

FORMAT = 1
MAX_BYTES = 256 << 20

Spec = dict[str, Any]

logger = logging.getLogger("ejkernel.record")


class SpecError(EjkernelError, ValueError):
    """A call cannot be written as data, or cannot be made from it."""


# --- Calls ---


def to_spec(inv: Invocation[Any, Any]) -> Spec:
    """The call as JSON-able data.

    Raises:
      SpecError: Something in it is neither an array nor data.
    """
    device, op_id, call_key = inv.key
    backward = isinstance(inv.kernel, BackwardKernel)
    kernel = inv.kernel.forward if isinstance(inv.kernel, BackwardKernel) else inv.kernel
    if kernel is None:
        raise SpecError(f"{op_id}: the call has no kernel.")
    forward_cfg = inv.metadata.get("forward_cfg")
    try:
        return {
            "device": device,
            "op_id": op_id,
            "call_key": call_key,
            "kernel": classes.name_of(type(kernel)),
            "state": {k: tagged.encode(v, k) for k, v in vars(kernel).items() if k != PROGRAMS},
            "backward": backward,
            "args": [_encode(x, f"argument {i}") for i, x in enumerate(inv.args)],
            "kwargs": {k: _encode(v, f"argument {k!r}") for k, v in inv.kwargs.items()},
            "context": inv.context,
            "platform": inv.platform,
            "batch_axes": tagged.encode(inv.batch_axes, "batch_axes"),
            "forward_cfg": None if forward_cfg is None else encode_cfg(forward_cfg),
            "signature": inv.signature,
        }
    except tagged.ConfigEncodeError as error:
        raise SpecError(f"{op_id}: {error}") from error


def from_spec(spec: Mapping[str, Any]) -> Invocation[Any, Any]:
    """The call that `to_spec` wrote; imports its kernel.

    Raises:
      SpecError: The kernel cannot be imported, or is no longer what it was when the call was recorded.
    """
    kernel = _kernel(spec)
    kernel = BackwardKernel(kernel) if spec["backward"] else kernel
    forward_cfg = spec.get("forward_cfg")
    inv = Invocation(
        kernel=kernel,
        args=tuple(_decode(x) for x in spec["args"]),
        kwargs={k: _decode(v) for k, v in spec["kwargs"].items()},
        context=spec["context"],
        platform=spec["platform"],
        batch_axes=tagged.decode(spec["batch_axes"]),
        metadata={} if forward_cfg is None else {"forward_cfg": decode_cfg(forward_cfg)},
    )
    if (inv.op_id, inv.call_key) != (spec["op_id"], spec["call_key"]):
        raise SpecError(
            f"{spec['op_id']}: the recorded call {spec['call_key']} is {inv.op_id} {inv.call_key} with today's "
            f"{spec['kernel']} (another version, or another JAX). Record it again."
        )
    return inv


def _kernel(spec: Mapping[str, Any]) -> Kernel[Any, Any]:
    cls = find(spec["kernel"], f"{spec['op_id']}: kernel")
    if not (isinstance(cls, type) and issubclass(cls, Kernel)):
        raise SpecError(f"{spec['op_id']}: {spec['kernel']} is not a Kernel.")
    kernel = cls.__new__(cls)
    vars(kernel).update({k: tagged.decode(v, where=k) for k, v in spec["state"].items()})
    return kernel


def find(name: str, what: str) -> Any:
    """What `module:Qualified.name` names, imported."""
    module, _, path = name.partition(":")
    if module == "__main__" or "<locals>" in path:
        raise SpecError(f"{what} {name} cannot be imported: move it to the top level of a module.")
    try:
        return functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise SpecError(f"{what} {name} cannot be imported ({error}).") from error


# --- Arguments ---


def _encode(x: Any, where: str) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return {"array": str(x.dtype), "shape": list(x.shape)}
    if isinstance(x, np.ndarray):
        return {"values": x.tolist(), "dtype": str(x.dtype)}
    if type(x) in (list, tuple):
        return {type(x).__name__: [_encode(v, f"{where}[{i}]") for i, v in enumerate(x)]}
    if type(x) is dict:
        return {"dict": [[tagged.encode(k, where), _encode(v, f"{where}[{k!r}]")] for k, v in x.items()]}
    if isinstance(x, functools.partial):
        return {"partial": [_encode(part, where) for part in (x.func, x.args, x.keywords)]}
    if callable(x) and (name := getattr(x, "__qualname__", None)):
        return {"callable": f"{x.__module__}:{name}"}
    if classes.is_record(type(x)) and not isinstance(x, type) and jax.tree.leaves(x) != [x]:
        fields = {name: getattr(x, name) for name in _field_names(x)}
        return {"node": classes.name_of(type(x)), "fields": {k: _encode(v, f"{where}.{k}") for k, v in fields.items()}}
    return {"static": tagged.encode(x, where)}


def _field_names(x: Any) -> Iterable[str]:
    from ejkernel.ops.utils.records import fields_of

    return fields_of(x)


def _decode(data: Mapping[str, Any]) -> Any:
    if "array" in data:
        return jax.ShapeDtypeStruct(tuple(data["shape"]), _dtype(data["array"]))
    if "values" in data:
        return np.array(data["values"], data["dtype"])
    if "partial" in data:
        func, args, keywords = (_decode(part) for part in data["partial"])
        return functools.partial(func, *args, **keywords)
    if "callable" in data:
        return find(data["callable"], "callable")
    if "list" in data:
        return [_decode(v) for v in data["list"]]
    if "tuple" in data:
        return tuple(_decode(v) for v in data["tuple"])
    if "dict" in data:
        return {tagged.decode(k): _decode(v) for k, v in data["dict"]}
    if "node" in data:
        return find(data["node"], "argument of class")(**{k: _decode(v) for k, v in data["fields"].items()})
    return tagged.decode(data["static"])


def _dtype(name: str) -> Any:
    if name.startswith("key<"):
        found = {str(jax.random.key(0, impl=impl).dtype): impl for impl in ("threefry2x32", "rbg", "unsafe_rbg")}
        return jax.random.key(0, impl=found[name]).dtype
    return jax.numpy.dtype(name)


# --- Files ---


def record_path() -> Path:
    """Where calls are written while `EJKERNEL_OPS_RECORD` is 1."""
    from ejkernel.ops.config.persistent import default_root

    return default_root().parent / "record.json"


def record(inv: Invocation[Any, Any]) -> None:
    """Adds a call to the record file, among all processes that write there; what cannot be written is logged."""
    path = record_path()
    try:
        add([to_spec(inv)], path)
    except SpecError as error:
        logger.warning("Not recorded for tuning elsewhere: %s", error)
    except OSError as error:
        logger.warning("%s: calls cannot be recorded there (%s). Set EJKERNEL_CACHE_DIR.", path, error)


def add(specs: Iterable[Spec], path: str | os.PathLike[str]) -> None:
    """Adds calls to a record file, in place of those with the same key."""
    import filelock

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path.with_name(path.name + ".lock")):
        write([*(read(path) if path.exists() else []), *specs], path)


def write(specs: Iterable[Spec], path: str | os.PathLike[str]) -> None:
    """Writes a record file in one step, each call once."""
    from ejkernel.ops.config import store_files

    distinct = {(s["device"], s["op_id"], s["call_key"]): s for s in specs}
    data = {"ejkernel_record": FORMAT, "calls": [distinct[key] for key in sorted(distinct)]}
    store_files.write(Path(path).absolute(), json.dumps(data, indent=1, allow_nan=False).encode() + b"\n")


def read(path: str | os.PathLike[str]) -> list[Spec]:
    """Calls of a record file.

    Raises:
      SpecError: It is not one.
    """
    try:
        data = jsontext.parse(Path(path).read_bytes(), max_bytes=MAX_BYTES)
    except (jsontext.JsonTextError, OSError) as error:
        raise SpecError(f"{path}: {error}") from error
    if not isinstance(data, dict) or data.get("ejkernel_record") != FORMAT or not isinstance(data.get("calls"), list):
        raise SpecError(f"{path}: is not a record of calls of format {FORMAT}. EJKERNEL_OPS_RECORD=1 writes one.")
    return data["calls"]
