"""Specs: a call as data, so that another process can tune it, later or on another machine.

A spec names the kernel's class and holds its simple attributes, the abstract arguments, the static values, and the
call's context. Creating the call again imports the kernel's module: read only record files that you trust.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ejkernel._compat import Axis
from ejkernel.errors import EjkernelError
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.batched import Batch, BatchedKernel, stacked
from ejkernel.ops.core.kernel import PROGRAMS, Invocation, Kernel
from ejkernel.ops.utils import classes, jsontext, tagged
from ejkernel.ops.utils.fingerprint import short_hash
from ejkernel.ops.utils.serialize import decode_cfg, encode_cfg
from ejkernel.ops.utils.shapes import wrong

FORMAT = 1
MAX_BYTES = 256 << 20

Spec = dict[str, Any]

logger = logging.getLogger("ejkernel.record")


class SpecError(EjkernelError, ValueError):
    """A call cannot be written as data, or cannot be created from it."""


# --- Calls ---


def to_spec(inv: Invocation[Any, Any]) -> Spec:
    """The call as JSON-able data.

    Raises:
      SpecError: Something in it is neither an array nor data.
    """
    device, op_id, call_key = inv.key
    backward = isinstance(inv.kernel, BackwardKernel)
    whole = inv.kernel.forward if isinstance(inv.kernel, BackwardKernel) else inv.kernel
    if whole is None:
        raise SpecError(f"{op_id}: the call has no kernel.")
    kernel, batches = _without_batches(whole)
    forward_cfg = inv.metadata.get("forward_cfg")
    try:
        return {
            "device": device,
            "op_id": op_id,
            "call_key": call_key,
            "kernel": classes.name_of(type(kernel)),
            "state": {k: _encode(v, f"attribute {k!r}") for k, v in _attributes(kernel).items()},
            "backward": backward,
            "batches": batches,
            "forward": list(replace(inv, kernel=whole, op_id=kernel.op_id).key[1:]) if backward else None,
            "args": [_encode(x, f"argument {i}") for i, x in enumerate(inv.args)],
            "kwargs": {k: _encode(v, f"argument {k!r}") for k, v in inv.kwargs.items()},
            "context": inv.context,
            "platform": inv.platform,
            "axes": None if inv.axes is None else dict(inv.axes),
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
    _import_named(spec)
    kernel = stacked(_kernel(spec), [Batch(Axis(*axis), tuple(dims)) for axis, dims in spec.get("batches", ())])
    kernel = BackwardKernel(kernel) if spec["backward"] else kernel
    forward_cfg = spec.get("forward_cfg")
    try:
        return _checked(spec, _made(spec, kernel, forward_cfg))
    except (KeyError, TypeError, AttributeError) as error:
        raise SpecError(f"{spec['op_id']} {spec['call_key']}: not a recorded call ({error!r}).") from error


def _without_batches(kernel: Kernel[Any, Any]) -> tuple[Kernel[Any, Any], list[Any]]:
    """A kernel, and the batches around it, innermost first."""
    batches: list[Any] = []
    while isinstance(kernel, BatchedKernel):
        axis = kernel.batch.axis
        batches.insert(0, [[axis.size, tagged.encode(axis.name, "axis_name"), None], list(kernel.batch.dims)])
        kernel = kernel.inner
    return kernel, batches


def _made(spec: Mapping[str, Any], kernel: Kernel[Any, Any], forward_cfg: Any) -> Invocation[Any, Any]:
    return Invocation(
        kernel=kernel,
        args=tuple(_decode(x) for x in spec["args"]),
        kwargs={k: _decode(v) for k, v in spec["kwargs"].items()},
        context=spec["context"],
        platform=spec["platform"],
        axes=spec.get("axes"),
        batch_axes=tagged.decode(spec["batch_axes"]),
        metadata={} if forward_cfg is None else {"forward_cfg": decode_cfg(forward_cfg)},
    )


def _checked(spec: Mapping[str, Any], inv: Invocation[Any, Any]) -> Invocation[Any, Any]:
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
    for name, value in spec["state"].items():
        # Not through the class, which may be a frozen dataclass.
        object.__setattr__(kernel, name, _decode(value))
    return kernel


def _attributes(kernel: Kernel[Any, Any]) -> dict[str, Any]:
    """What an instance holds, in its `__dict__` or in slots, without caches."""
    members = {name: member for base in type(kernel).__mro__ for name, member in vars(base).items()}
    slots = {k: getattr(kernel, k) for k, m in members.items() if inspect.ismemberdescriptor(m) and hasattr(kernel, k)}
    cached = {k for k, member in members.items() if isinstance(member, functools.cached_property)}
    return {k: v for k, v in {**slots, **vars(kernel)}.items() if k != PROGRAMS and k not in cached}


def _import_named(data: Any) -> None:
    """Imports the modules of the classes that a spec names: decoding only finds what is loaded."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            if key in ("$enum", "$type", "type", "node") and isinstance(value, str) and ":" in value:
                find(value, "class")
            _import_named(value)
    elif isinstance(data, list):
        for value in data:
            _import_named(value)


def find(name: str, what: str) -> Any:
    """What `module:Qualified.name` names, imported."""
    module, _, path = name.partition(":")
    if module == "__main__" or "<locals>" in path:
        raise SpecError(f"{what} {name} cannot be imported: move it to the top level of a module.")
    try:
        return functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except Exception as error:
        raise SpecError(f"{what} {name} cannot be imported ({type(error).__name__}: {error}).") from error


# --- Arguments ---


def _encode(x: Any, where: str) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        if not all(isinstance(size, int) for size in x.shape):
            raise SpecError(f"{where} has a symbolic shape, {x.shape}: only calls of known sizes can be tuned.")
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
        return {"callable": _callable_name(x, name, where)}
    if classes.is_record(type(x)) and not isinstance(x, type) and jax.tree.leaves(x) != [x]:
        fields = {name: getattr(x, name) for name in _field_names(x)}
        return {"node": classes.name_of(type(x)), "fields": {k: _encode(v, f"{where}.{k}") for k, v in fields.items()}}
    return {"static": tagged.encode(x, where)}


def _callable_name(x: Any, qualname: str, where: str) -> str:
    name = f"{x.__module__}:{qualname}"
    if "<" not in qualname and find(name, where) is not x:
        raise SpecError(
            f"{where}: {name} is another object than the one that was passed, so it cannot be found by name."
        )
    return name


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
        return _node(find(data["node"], "argument of class"), {k: _decode(v) for k, v in data["fields"].items()})
    return tagged.decode(data["static"])


def _node(cls: Any, fields: dict[str, Any]) -> Any:
    if not dataclasses.is_dataclass(cls):
        return cls(**fields)
    node: Any = object.__new__(cls)  # pyright: ignore[reportArgumentType]
    for name, value in fields.items():  # Also fields that its __init__ does not accept.
        object.__setattr__(node, name, value)
    return node


def _dtype(name: str) -> Any:
    if name.startswith("key<"):
        found = {str(jax.random.key(0, impl=impl).dtype): impl for impl in ("threefry2x32", "rbg", "unsafe_rbg")}
        return jax.random.key(0, impl=found[name]).dtype
    return jax.numpy.dtype(name)


# --- Files ---


def record_path() -> Path:
    """Where calls are written while `EJKERNEL_OPS_RECORD` is 1."""
    from ejkernel.ops.store.persistent import default_root

    return default_root().parent / "record.json"


def record(inv: Invocation[Any, Any]) -> None:
    """Adds a call to the record file, which other processes may share; a call that cannot be written is logged."""
    path = record_path()
    try:
        add([to_spec(inv)], path)
    except OSError as error:
        logger.warning("%s: calls cannot be recorded there (%s). Set EJKERNEL_CACHE_DIR.", path, error)
    except Exception as error:  # noqa: BLE001 - recording a program must never break it.
        # As text: the error itself would keep its frames alive, and with them what is being traced.
        logger.warning("%s %s: not recorded for tuning elsewhere: %s", inv.op_id, inv.call_key, str(error))


_known: dict[Path, dict[tuple[str, str, str], str]] = {}
"""The calls that this process has seen in record files: key -> hash of the spec."""


def add(specs: Iterable[Spec], path: str | os.PathLike[str]) -> None:
    """Adds calls to a record file, replacing those with the same key: one appended line each, whatever its length."""
    import filelock

    from ejkernel.ops.store import files

    path = Path(path).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path.with_name(path.name + ".lock")):
        if path not in _known or not path.exists():
            held = read(path) if path.exists() else []
            write(held, path)  # Lines that were appended become part of the document.
            _known[path] = {key_of(spec): short_hash(spec) for spec in held}
        new = {key_of(spec): spec for spec in specs if _known[path].get(key_of(spec)) != short_hash(spec)}
        for spec in new.values():
            files.append_line(path, spec)
        _known[path] |= {key: short_hash(spec) for key, spec in new.items()}


def key_of(spec: Spec) -> tuple[str, str, str]:
    """Device, op id and call key."""
    return spec["device"], spec["op_id"], spec["call_key"]


def write(specs: Iterable[Spec], path: str | os.PathLike[str]) -> None:
    """Writes a record file in one step, each call once."""
    from ejkernel.ops.store import files

    distinct = {key_of(spec): spec for spec in specs}
    data = {"ejkernel_record": FORMAT, "calls": [distinct[key] for key in sorted(distinct)]}
    files.write(Path(path).absolute(), json.dumps(data, indent=1, allow_nan=False).encode() + b"\n")


def read(path: str | os.PathLike[str]) -> list[Spec]:
    """Calls of a record file, each once: of its document, and of the lines that were added to it since.

    Raises:
      SpecError: It is not one.
    """
    try:
        raw = Path(path).read_bytes()
        document, end, lines = raw.partition(b"\n}\n")
        data = jsontext.parse(document + end, max_bytes=MAX_BYTES)
    except (jsontext.JsonTextError, OSError) as error:
        raise SpecError(f"{path}: {error}") from error
    if not isinstance(data, dict) or data.get("ejkernel_record") != FORMAT or not isinstance(data.get("calls"), list):
        raise SpecError(f"{path}: is not a record of calls of format {FORMAT}. EJKERNEL_OPS_RECORD=1 writes one.")
    calls = [*data["calls"], *_added(lines, path)]
    for index, call in enumerate(calls):
        if (fault := wrong(call, _SHAPE, f"call {index}")) is not None:
            raise SpecError(f"{path}: {fault}.")
    return list({key_of(call): call for call in calls}.values())


def _added(lines: bytes, path: str | os.PathLike[str]) -> Iterator[Any]:
    for line in filter(None, lines.splitlines()):
        try:
            yield jsontext.parse(line, max_bytes=MAX_BYTES)
        except jsontext.JsonTextError as error:
            logger.warning("%s: a call that was not written to its end is left out (%s)", path, error)


_SHAPE = {
    "device": str,
    "op_id": str,
    "call_key": str,
    "kernel": str,
    "state": dict,
    "backward": bool,
    "args": list,
    "kwargs": dict,
    "signature": dict,
}
