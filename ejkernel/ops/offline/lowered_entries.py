"""The programs of stored entries, made by whichever ejkernel is on the path: one side of a comparison.

`adoption` imports this file for today's code, and runs it as a script with older code on the path. So it imports only
names that have not moved since entries were first stored, and nothing that stands beside it.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh

import ejkernel
from ejkernel.errors import EjkernelError
from ejkernel.ops.core import dispatch
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.kernel import Invocation, Kernel
from ejkernel.ops.utils import arguments, fingerprint
from ejkernel.ops.utils.serialize import decode_cfg
from ejkernel.ops.utils.source import source_hash

Kernels = dict[str, Kernel[Any, Any]]
Job = Mapping[str, Any]


class NotRebuiltError(EjkernelError):
    """The description of a call does not say all that is needed to make it again."""


def answer(job: Job, kernels: Kernels) -> dict[str, Any]:
    """The kernel's source, the texts of the entry's programs, and why there are none if there are none.

    A job may name the source that is wanted: with another one there is nothing to be lowered.
    """
    found: dict[str, Any] = {"here": job["device"] == fingerprint.device_fingerprint()}
    try:
        kernel = _kernel(job, kernels)
        found["sources"] = _sources(kernel)
        if job["source"] not in (None, *found["sources"]):
            return found
        with _without_places(), contextlib.nullcontext() if found["here"] else _away(job):
            lowered = [_lower(job, *program) for program in _programs(job, kernel)]
        compiled = job["wanted"] == "compiled"
        found["texts"] = [x.compile().as_text() if compiled else x.as_text() for x in lowered]
    except Exception as error:  # noqa: BLE001 - one entry's failure is its answer, and must not cost the others theirs.
        text = str(error).strip().partition("\n")[0]
        found["error"] = text if isinstance(error, NotRebuiltError) else f"{type(error).__name__}: {text}"
    return found


def _kernel(job: Job, kernels: Kernels) -> Kernel[Any, Any]:
    op_id = job["op_id"].removesuffix(".vjp")
    if op_id not in kernels:
        module, _, name = op_id.rpartition(".")  # By default an op id is the name of the class.
        try:
            kernels[op_id] = _made(f"{module}:{name}")
        except Exception as error:
            raise NotRebuiltError(f"no kernel of {op_id} was found") from error
    return kernels[op_id]


def known(names: Iterable[str]) -> Kernels:
    """Kernels by their op id; names that are not there are left out, because older code has fewer operations."""
    found = {}
    for name in names:
        with contextlib.suppress(ImportError, AttributeError):
            kernel = _made(name)
            found[kernel.op_id] = kernel
    return found


def sources(job: Job, kernels: Kernels) -> list[str | None]:
    """The hash of the kernel's source by each definition that this version has, today's first.

    Raises:
      NotRebuiltError: There is no such kernel.
    """
    return _sources(_kernel(job, kernels))


def _made(name: str) -> Kernel[Any, Any]:
    """The kernel that `module:Class` or `module:instance` names."""
    module, _, path = name.partition(":")
    found: Any = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    return found() if isinstance(found, type) else found


def _sources(kernel: Kernel[Any, Any]) -> list[str | None]:
    older = "first" in inspect.signature(source_hash).parameters
    return [source_hash(kernel), *([source_hash(kernel, first=True)] if older else [])]


# --- The call ---


def _call(job: Job, kernel: Kernel[Any, Any]) -> Invocation[Any, Any]:
    """The call that the entry's key stands for, made from its signature and the keywords that were written down."""
    signature = job["signature"]
    if signature is None or signature.get("batch_axes") is not None or signature.get("axes") is not None:
        raise NotRebuiltError("a batch, a call on a mesh or one without a signature cannot be made again")
    args = tuple(_value(x) for x in signature["args"])
    written = {name: _literal(text) for name, text in job["keywords"].items()}
    kwargs = {name: _value(x) for name, x in signature["kwargs"].items() if name not in written and _is_known(x)}
    found: list[Any] = []

    def trace(arrays: Any) -> tuple[()]:
        args, kwargs = arguments.merge(arrays, statics)
        found.append(fingerprint.abstractify(kernel.prepare(*args, **kwargs)))
        return ()

    arrays, statics = arguments.split((args, {**kwargs, **written}))
    jax.eval_shape(trace, arrays)
    inv = Invocation(kernel=kernel, args=tuple(found[0][0]), kwargs=found[0][1], context=signature["context"])
    owner = BackwardKernel(kernel) if job["op_id"].endswith(".vjp") else kernel
    key = replace(inv, kernel=owner, op_id=owner.op_id).call_key
    if key != job["call_key"]:
        raise NotRebuiltError(f"the call that its description gives has the key {key}")
    return inv


def _value(data: Any) -> Any:
    """An argument that `fingerprint.describe` has described."""
    if "shape" in data:
        return jax.ShapeDtypeStruct(tuple(data["shape"]), jax.numpy.dtype(data["dtype"]))
    if data.get("node") == "None":
        return None
    if data.get("node") in ("list", "tuple"):
        return {"list": list, "tuple": tuple}[data["node"]](_value(child) for _, child in data["children"])
    if data.get("node") == "dict":
        return {ast.literal_eval(path[1:-1]): _value(child) for path, child in data["children"]}
    if isinstance(data.get("static"), bool | int | str):
        return data["static"]
    raise NotRebuiltError(f"its description does not hold the value of an argument: {json.dumps(data)[:80]}")


def _is_known(data: Any) -> bool:
    """Whether a keyword argument can be made from its description; one that cannot may be another's doing."""
    try:
        _value(data)
    except NotRebuiltError:
        return False
    return True


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):  # Such as the name of a dtype.
        return text


# --- Its programs ---


def _programs(job: Job, kernel: Kernel[Any, Any]) -> Iterator[tuple[Any, ...]]:
    """What the entry's config runs, each as a function and its arguments: forwards, or a backward."""
    inv, cfg = _call(job, kernel), decode_cfg(job["cfg"], kernel.cfg_type)
    backward = job["op_id"].endswith(".vjp")
    platform = _platform(kernel, inv, cfg, backward)

    def find(method: str, platform: str = platform) -> Any:
        return dispatch.find(kernel, method, inv.context, platform)

    args, kwargs = inv.args, dict(inv.kwargs)
    own = all(find(method) is not None for method in ("fwd_with_residuals", "vjp"))
    if not backward:
        yield lambda a, k: dispatch.forced_implementation(kernel, inv.context, platform)(*a, cfg=cfg, **k), args, kwargs
        if own:
            yield lambda a, k: find("fwd_with_residuals")(*a, cfg=cfg, **k), args, kwargs
        return
    # What the backward is given: of the guess, because the entry does not say which forward ran before it.
    forward = find("heuristic_cfg")(replace(inv, platform=platform))
    first = dispatch.forced_platform(kernel, forward) or platform
    if own:
        out, saved = _types(lambda a, k: find("fwd_with_residuals", first)(*a, cfg=forward, **k), args, kwargs)
        yield lambda s, o, d, a, k: find("vjp")(s, o, d, *a, cfg=cfg, **k), saved, out, out, args, kwargs
    else:
        out = _types(lambda a, k: find("run", first)(*a, cfg=forward, **k), args, kwargs)
        douts = lambda d: tuple(d) if isinstance(d, tuple | list) else (d,)
        custom: Any = kernel.custom_vjp  # pyright: ignore[reportAttributeAccessIssue]
        yield lambda d, a, k: custom(a, cfg, k, douts(d)), out, args, kwargs


def _platform(kernel: Kernel[Any, Any], inv: Invocation[Any, Any], cfg: Any, backward: bool) -> str:
    """The platform of the backend that runs the call with this config."""
    named = dispatch.forced_platform(kernel, cfg)
    tried = [named] if named is not None else [name for name, _ in dispatch.implementations(kernel, inv.context)]
    owner = BackwardKernel(kernel) if backward else kernel
    refusals = []
    for platform in tried:
        reason = dispatch.refusal(kernel, replace(inv, kernel=owner, op_id=owner.op_id, platform=platform), platform)
        if reason is None:
            return platform
        refusals.append(f"{platform}: {reason}")
    raise NotRebuiltError("; ".join(refusals))


def _types(fn: Any, *trees: Any) -> Any:
    arrays, statics = arguments.split(trees)
    return jax.eval_shape(lambda arrays: fn(*arguments.merge(arrays, statics)), arrays)


def _lower(job: Job, fn: Any, *trees: Any) -> Any:
    arrays, statics = arguments.split(trees)
    traced = jax.jit(lambda arrays: fn(*arguments.merge(arrays, statics))).trace(arrays)
    return traced.lower(lowering_platforms=(_target(job["device"]),))


def _target(device: str) -> str:
    """What JAX calls the platform of a device, by its fingerprint."""
    kind = device.partition("-")[0]
    return kind if kind != "gpu" else "cuda" if re.search(r"-sm\d+", device) else "rocm"


# --- A device that is not here ---


class _Device:
    """What kernels ask about a device, from its fingerprint: `gpu-nvidia_h200-sm90-132c-128g`."""

    def __init__(self, job: Job) -> None:
        self.platform = job["device"].partition("-")[0]
        self.device_kind = job["device_name"]
        if (capability := re.search(r"-sm(\d+)(\d)(?:-|$)", job["device"])) is not None:
            self.compute_capability = f"{capability[1]}.{capability[2]}"
        cores = re.search(r"-(\d+)c(?:-|$)", job["device"])
        self.core_count = int(cores[1]) if cores is not None else 1

    def memory_stats(self) -> dict[str, Any]:
        return {}


@contextlib.contextmanager
def _without_places() -> Iterator[None]:
    """Inside, JAX writes no files and lines into programs: a Pallas kernel holds them where no text shows them."""
    name = "jax_traceback_in_locations_limit"
    before = jax.config.values[name]
    jax.config.update(name, 0)
    try:
        yield
    finally:
        jax.config.update(name, before)


@contextlib.contextmanager
def _away(job: Job) -> Iterator[None]:
    """Inside, kernels find the device of the entry, wherever they ask for it."""
    device, real = _Device(job), fingerprint.current_device
    places = [m for m in list(sys.modules.values()) if getattr(m, "current_device", None) is real]
    facts = {"platform": device.platform, "device_kind": device.device_kind, "num_cores": device.core_count}
    mesh = AbstractMesh((1,), ("device",), abstract_device=AbstractDevice(**facts))
    try:
        for module in places:
            setattr(module, "current_device", lambda: device)  # noqa: B010 - it need not be a module's own.
        with jax.sharding.use_abstract_mesh(mesh) if device.platform != "cpu" else contextlib.nullcontext():
            yield
    finally:
        for module in places:
            setattr(module, "current_device", real)  # noqa: B010


def main() -> None:
    """Answers the jobs in the file of the first argument, in the file of the second."""
    request = json.loads(Path(sys.argv[1]).read_text())
    kernels = known(request["kernels"])
    answers = [answer(job, kernels) for job in request["jobs"]]
    facts = {"jax": jax.__version__, "ejkernel": ejkernel.__version__, "home": ejkernel.__file__}
    Path(sys.argv[2]).write_text(json.dumps({**facts, "answers": answers}))


if __name__ == "__main__":
    main()
