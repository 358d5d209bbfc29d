"""Identity of devices, calls and objects: text that is equal in every process and on every host."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
from jax.sharding import PartitionSpec

from ejkernel import _compat
from ejkernel.errors import EjkernelError
from ejkernel.ops.utils import devices
from ejkernel.ops.utils.arguments import is_array

DeviceKind = Literal["gpu", "tpu", "cpu"]
Device: TypeAlias = Any
"""A `jax.Device`, which type checkers take for a variable."""

_PREFERRED = {"gpu": "triton", "tpu": "pallas", "cpu": "xla"}


def stable_json(value: Any) -> str:
    """Canonical JSON text, the same in every process: sorted keys, no spaces, ASCII only.

    Configs count by their fields, sets by their members, callables, classes and enums by their qualified names, arrays
    by shape and dtype, and other objects by the name of their class.
    """
    dumps = functools.partial(json.dumps, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    try:
        return dumps(value, default=_jsonable)
    except (TypeError, ValueError):  # Keys that JSON does not have or cannot sort; nan and inf.
        return dumps(_plain(value))


def _jsonable(value: Any) -> Any:
    """A JSON form of values that JSON does not have; unlike in a call's key, floats count."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {"object": qualified_name(type(value)), "fields": fields}
    if isinstance(fields := getattr(type(value), "model_fields", None), Mapping):  # pydantic's.
        return {"object": qualified_name(type(value)), "fields": {name: getattr(value, name) for name in fields}}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (set, frozenset)):
        return {"set": sorted(value, key=stable_json)}
    if isinstance(value, functools.partial):
        return {"partial": [value.func, value.args, value.keywords]}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, PartitionSpec):
        return {"spec": list(value)}
    if isinstance(value, (np.ndarray, jax.Array, jax.ShapeDtypeStruct)):
        return {"dtype": str(value.dtype), "shape": _sizes(value)}
    return describe_static(value)


def _plain(value: Any) -> Any:
    """`value` as plain JSON values, whatever it holds."""
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if not isinstance(value, dict):
        return _plain(_jsonable(value))
    if all(isinstance(k, str) for k in value):
        return {k: _plain(v) for k, v in value.items()}
    return {"mapping": sorted(([_plain(k), _plain(v)] for k, v in value.items()), key=stable_json)}


def short_hash(value: Any) -> str:
    """16 hex digits that identify `value`: text, data, a config."""
    text = value if isinstance(value, str) else stable_json(value)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


# --- Devices ---


def current_device() -> Device:
    """The device that a program traced here will run on: that of the mesh around it, else the default device.

    It may be one that is not here, if a program is compiled ahead: see `is_here`.
    """
    chosen = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if chosen is None:
        device = jax.local_devices()[0]
    else:
        device = jax.local_devices(backend=chosen)[0] if isinstance(chosen, str) else chosen
    wanted = _compat.mesh_device()
    if wanted is None or _looks_like(device, wanted):
        return device
    return _local_device(wanted) or wanted


def _looks_like(device: Device, wanted: Any) -> bool:
    return device.device_kind == wanted.device_kind and device_kind(device) == device_kind(wanted)


@functools.cache
def _local_device(wanted: Any) -> Device | None:
    """A device of this process of the kind that a mesh names."""
    try:
        found = jax.local_devices(backend=wanted.platform)
    except RuntimeError:  # There is no such backend here.
        return None
    return next((device for device in found if _looks_like(device, wanted)), None)


def is_here(device: Device | None = None) -> bool:
    """Whether programs can be run on a device: not if it is only described, to compile for it."""
    return not _compat.compiles_only(device or current_device())


class AbsentDeviceError(EjkernelError, RuntimeError):
    """Something would have to run on a device that is only described."""


def require_here(what: str) -> None:
    """Raises an error if the current device can be compiled for only; `what` cannot be done then."""
    if not is_here():
        raise AbsentDeviceError(
            f"{what}: {current_device().device_kind} is only described here, to compile for it, so nothing can be "
            "measured. `ejkernel tune ... --for` ranks configs by what the compiler says; EJKERNEL_AUTOTUNE=off takes "
            "what is stored, or the guess."
        )


def device_kind(device: Device | None = None) -> DeviceKind:
    """`"gpu"`, `"tpu"` or `"cpu"`."""
    name = (device or current_device()).platform
    if name in ("gpu", "cuda", "rocm"):
        return "gpu"
    return "tpu" if name == "tpu" else "cpu"


def get_device_platform(device: Device | None = None) -> str:
    """The preferred platform of the hardware at hand: `"triton"`, `"pallas"` or `"xla"`."""
    return _PREFERRED[device_kind(device)]


def compute_capability(device: Device | None = None) -> tuple[int, int]:
    """Of an NVIDIA GPU, (9, 0) for Hopper; (0, 0) for other devices."""
    found = re.fullmatch(r"(\d+)\.(\d+)[a-z]?", _capability(device or current_device()))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def multiprocessors(device: Device | None = None) -> int:
    """How many blocks of work a device runs in parallel: the SMs of a GPU, else 1."""
    return _sms(device or current_device()) or 1


def block_bytes(device: Device | None = None) -> int:
    """Shared memory that a block of a GPU has; on one that is not known, what the smallest has."""
    return devices.find((device or current_device()).device_kind).block_bytes or devices.LEAST_BLOCK_BYTES


def _capability(device: Device) -> str:
    """As the device says it, or as its data sheet does: an abstract device has only a name."""
    return str(getattr(device, "compute_capability", None) or devices.find(device.device_kind).capability)


def _sms(device: Device) -> int:
    told = getattr(device, "core_count", None)
    if told is None and not is_here(device):
        told = devices.find(device.device_kind).sms
    return int(told or 0)


_USUAL_SHARE = 0.75


def _share() -> float:
    """The share of a GPU's memory that JAX may use in this process."""
    named = os.environ.get("XLA_CLIENT_MEM_FRACTION") or os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
    return float(named) if named else _USUAL_SHARE


@functools.cache
def _fingerprint_of(device: Device) -> str:
    kind = device_kind(device)
    if kind == "cpu":
        return f"cpu-{platform.machine().lower()}-{_vector_width()}-{_cores()}c"
    if kind == "tpu":
        # Its kind says all: cores and memory are reported differently by chips, topologies and versions of libtpu.
        return _spelt("tpu", devices.find(device.device_kind).generation or device.device_kind)
    parts = [kind, device.device_kind]
    if capability := _capability(device):
        parts.append(f"sm{capability}".replace(".", ""))
    if cores := _sms(device):
        parts.append(f"{cores}c")
    if usual := _usual_memory(device):
        # Rounded to a power of two: it must not depend on settings of a process.
        parts.append(f"{2 ** round(np.log2(usual / 2**30))}g")
    return _spelt(*parts)


def _spelt(*parts: str) -> str:
    return re.sub(r"[^a-z0-9.-]+", "_", "-".join(parts).lower())


def _usual_memory(device: Device) -> float:
    """The bytes of a GPU that JAX uses by default; 0 if they are not known."""
    if not is_here(device):
        return devices.find(device.device_kind).memory_bytes * _USUAL_SHARE
    return (device.memory_stats() or {}).get("bytes_limit", 0) * _USUAL_SHARE / _share()


def device_fingerprint(device: Device | None = None) -> str:
    """Names the kind of `device`: hosts with the same hardware share it, driver versions are not in it."""
    return _fingerprint_of(device or current_device())


def _cores() -> int:
    # Not every system can say which cores a process may use.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _vector_width() -> str:
    """The widest vector extension of this CPU: the one feature that decides which blocks are good."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text() if cpuinfo.exists() else ""
    return next((name for name in ("avx512f", "avx2", "avx", "sve", "asimd") if f" {name} " in f"{flags} "), "base")


# --- Calls ---


def abstractify(tree: Any) -> Any:
    """`tree` with a ShapeDtypeStruct in place of every array: it keeps no tracer and no device memory alive."""
    return jax.tree.map(lambda x: _abstract(x) if is_array(x) else x, tree)


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(x) if not isinstance(x, jax.ShapeDtypeStruct) else x
    dtype = aval.dtype
    if isinstance(dtype, np.dtype):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(aval.shape, dtype, sharding=_typed_sharding(x, aval))


def _typed_sharding(x: Any, aval: Any) -> Any:
    """The sharding that is part of a type: that of explicit meshes; an automatic one may change at any time."""
    sharding = getattr(x if isinstance(x, jax.ShapeDtypeStruct) else aval, "sharding", None)
    explicit = isinstance(sharding, jax.NamedSharding) and any(axis is not None for axis in sharding.spec)
    return sharding if explicit else None


def signature(
    op_id: str,
    version: str,
    args: Iterable[Any],
    kwargs: Mapping[str, Any],
    *,
    batch_axes: Any = None,
    context: str | None = None,
    axes: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Everything that the key of a call is a hash of, readable and JSON-able."""
    return {
        "op": op_id,
        "version": version,
        "args": [describe(x) for x in args],
        "kwargs": {k: describe(v) for k, v in sorted(kwargs.items())},
        "batch_axes": None if batch_axes is None else describe_static(batch_axes),
        "context": context,
        **({"axes": dict(sorted(axes.items()))} if axes else {}),
    }


def describe(tree: Any) -> Any:
    """JSON-able description of an argument: structure, shapes, dtypes and static values, nothing of the data."""
    if is_array(tree):
        x = _abstract(tree)
        return {"dtype": str(x.dtype), "shape": _sizes(x)}
    if tree is None:
        return {"node": "None", "aux": None, "children": []}
    paths = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)[0]
    if len(paths) == 1 and paths[0][1] is tree:
        return {"float": None} if type(tree) in (float, complex) else {"static": describe_static(tree)}
    plain = type(tree) in (dict, list, tuple)
    return {
        "node": type(tree).__name__ if plain else qualified_name(type(tree)),
        "aux": None if plain else describe_static(_aux(tree)),
        "children": [[jax.tree_util.keystr(path), describe(child)] for path, child in paths],
    }


def _sizes(x: Any) -> list[int | str]:
    return [d if isinstance(d, int) else str(d) for d in x.shape]


def _aux(node: Any) -> Any:
    """What a pytree node holds beside its children: static fields of registered classes."""
    one_level = jax.tree_util.default_registry.flatten_one_level(node)
    return one_level[1] if one_level is not None else None


def describe_static(value: Any) -> Any:
    """JSON-able description of a static value, without memory addresses, file paths or line numbers."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, enum.Enum):
        return {"enum": f"{qualified_name(type(value))}.{value.name}"}
    if isinstance(value, int):
        return int(value)
    if isinstance(value, (float, complex)):
        return {"float": None}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if (dtype := _as_dtype(value)) is not None:
        return {"dtype": dtype}
    if isinstance(value, (tuple, list)):
        return [describe_static(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return {"set": sorted((describe_static(v) for v in value), key=stable_json)}
    if isinstance(value, Mapping):
        items = [[describe_static(k), describe_static(v)] for k, v in value.items()]
        return {"mapping": sorted(items, key=stable_json)}
    if isinstance(value, functools.partial):
        return {"partial": [describe_static(value.func), describe_static(value.args), describe_static(value.keywords)]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        values = {f.name: describe_static(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"object": qualified_name(type(value)), "fields": values}
    if isinstance(value, (slice, range)):
        return {type(value).__name__: [describe_static(x) for x in (value.start, value.stop, value.step)]}
    if isinstance(value, PartitionSpec):
        return {"spec": [describe_static(x) for x in value]}
    name = getattr(value, "__qualname__", None) or (callable(value) and getattr(value, "__name__", None))
    if isinstance(name, str):  # A function or class; ufuncs have no qualified name.
        return {"object": f"{getattr(value, '__module__', None) or 'builtins'}.{name}"}
    return {"object": qualified_name(type(value))}


def qualified_name(value: Any) -> str:
    """`module.Name` of a class or function."""
    return f"{getattr(value, '__module__', None) or 'builtins'}.{value.__qualname__}"


def _as_dtype(value: Any) -> str | None:
    """Name of a dtype, however it is spelt: `np.dtype("f4")`, `np.float32`, `jnp.float32`."""
    if isinstance(value, np.dtype):
        return value.name
    if isinstance(value, type) and issubclass(value, np.generic):
        return np.dtype(value).name
    # jnp.float32 is neither a dtype nor a numpy type, but carries its dtype.
    inner = getattr(value, "dtype", None)
    return inner.name if isinstance(inner, np.dtype) and callable(value) else None


# --- Shardings ---


def sharding_fingerprint(tree: Any) -> str:
    """16 hex digits of how the arrays of `tree` are laid out: mesh axis sizes and specs, never device ids."""
    return short_hash([_describe_sharding(x) for x in jax.tree.leaves(tree) if is_array(x)])


def _describe_sharding(x: Any) -> Any:
    sharding = getattr(x, "sharding", None) if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)) else None
    if isinstance(sharding, jax.NamedSharding):
        sizes = [[describe_static(name), size] for name, size in sharding.mesh.shape.items()]
        return {"mesh": sizes, "spec": describe_static(tuple(sharding.spec)), "memory": sharding.memory_kind}
    return None if sharding is None else {"devices": sharding.num_devices, "memory": sharding.memory_kind}


def default_key_builder_with_sharding(call: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> str:
    """The key of a call that includes the shardings of its arguments: of an `inv`, or of `(kernel, args, kwargs)`.

    A `key_builder` for kernels whose best config depends on the shardings.
    """
    inv: Any = next((x for x in (call, args) if hasattr(x, "abstract_args")), None)  # A kernel's method gets both.
    if inv is None:
        kernel: Any = call
        described = signature(kernel.op_id, kernel.version, args, kwargs or {})
        return short_hash([described, sharding_fingerprint((args, kwargs or {}))])
    return short_hash([inv.signature, sharding_fingerprint((inv.args, inv.kwargs))])
