"""What was called: abstract signatures of the latest traced calls, and the calls that were recorded on request."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from ejkernel.errors import EjkernelError
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.batched import BatchedKernel
from ejkernel.ops.core.kernel import PROGRAMS, Invocation, Kernel, holds_tracers
from ejkernel.ops.utils import arguments, env
from ejkernel.ops.utils.fingerprint import Device, abstractify, device_fingerprint
from ejkernel.ops.utils.services import services

SMALL_INTEGERS = 65536
"""Integer arrays up to this many elements are kept for kernels with `record_integers`."""

MAX_TRACED = 4096
"""How many of the latest traced calls are remembered; calls that were recorded on request are always kept."""

Key = tuple[str, str, str]
Recorded = tuple[Kernel[Any, Any], tuple[Any, ...], dict[str, Any]]


class KernelGoneError(EjkernelError, LookupError):
    """A call is known, but its kernel, which holds more than plain data, has been garbage collected."""


class _Call(NamedTuple):
    inv: Invocation[Any, Any]
    """Without its kernel."""
    kernel: Callable[[], Kernel[Any, Any] | None]


_lock = threading.Lock()
_traced: dict[Key, _Call] = {}
_recorded: dict[Key, _Call] = {}


def record_invocation(kernel: Kernel[Any, Any], inv: Invocation[Any, Any]) -> None:
    """Remembers a call for `get_invocations`, without its data."""
    _record(kernel, inv)


def note_traced(kernel: Kernel[Any, Any], inv: Invocation[Any, Any]) -> None:
    """Remembers that a call was traced; it is recorded too, also in a file, if `EJKERNEL_OPS_RECORD` says so."""
    if env.recording():
        if _record(kernel, inv):
            services.record(_kept(kernel, inv))
        return
    call = _Call(dataclasses.replace(_kept(kernel, inv), kernel=None), _holder(kernel, _is_data))
    with _lock:
        _traced.pop(inv.key, None)  # Newer calls are at the end.
        _traced[inv.key] = call
        if len(_traced) > MAX_TRACED:
            del _traced[next(iter(_traced))]


def _record(kernel: Kernel[Any, Any], inv: Invocation[Any, Any]) -> bool:
    """Keeps a call without its data; whether it is recorded for the first time."""
    kept = dataclasses.replace(_kept(kernel, inv), kernel=None)
    call = _Call(kept, _holder(kernel, lambda kernel: not holds_tracers(kernel)))
    with _lock:
        held = _recorded.get(inv.key)
        # Data that an eager call left is worth more than the shapes of a later trace.
        if held is None or held.kernel() is None or _has_data(call.inv) or not _has_data(held.inv):
            _recorded[inv.key] = call
        return held is None


def _has_data(inv: Invocation[Any, Any]) -> bool:
    return any(isinstance(x, np.ndarray) for x in jax.tree.leaves((inv.args, dict(inv.kwargs))))


def _holder(
    kernel: Kernel[Any, Any], keep: Callable[[Kernel[Any, Any]], bool]
) -> Callable[[], Kernel[Any, Any] | None]:
    """A function that returns the kernel, and keeps it alive only if `keep` is true."""
    if isinstance(kernel, BackwardKernel):
        return _around(BackwardKernel, _holder(kernel.forward, keep))
    if isinstance(kernel, BatchedKernel):
        batch = kernel.batch
        return _around(lambda inner: BatchedKernel(inner, batch), _holder(kernel.inner, keep))
    return (lambda: kernel) if keep(kernel) else weakref.ref(kernel)


def _around(wrap: Callable[[Any], Kernel[Any, Any]], held: Callable[[], Any]) -> Callable[[], Kernel[Any, Any] | None]:
    return lambda: None if (inner := held()) is None else wrap(inner)


def _is_data(kernel: Kernel[Any, Any]) -> bool:
    """Whether a kernel holds nothing but small data, and so may be kept."""
    return kernel.state() is not None or all(
        arguments.is_data(value) for name, value in vars(kernel).items() if name != PROGRAMS
    )


def _kept(kernel: Kernel[Any, Any], inv: Invocation[Any, Any]) -> Invocation[Any, Any]:
    return dataclasses.replace(inv, kernel=kernel, args=_keep(kernel, inv.args), kwargs=_keep(kernel, dict(inv.kwargs)))


def _keep(kernel: Kernel[Any, Any], tree: Any) -> Any:
    """`tree` without device memory: shapes, and small integers as numpy arrays if the kernel asks for them."""

    def keep(x: Any) -> Any:
        concrete = isinstance(x, (jax.Array, np.ndarray)) and not arguments.has_no_data(x)
        if kernel.record_integers and concrete and x.size <= SMALL_INTEGERS and np.issubdtype(x.dtype, np.integer):
            return np.array(x)
        return abstractify(x)

    return jax.tree.map(keep, tree)


def traced(op_id: str, call_key: str, kernel: Kernel[Any, Any] | None = None) -> Invocation[Any, Any] | None:
    """The call with this identity on this device, or on any other if there is none, with its kernel or the one given.

    Raises:
      KernelGoneError: Its kernel is gone, and none is given.
    """
    here = (device_fingerprint(), op_id, call_key)
    with _lock:
        found = [calls[here] for calls in (_recorded, _traced) if here in calls]
        if not found:
            found = [call for calls in (_recorded, _traced) for key, call in calls.items() if key[1:] == here[1:]]
    if not found or kernel is not None:
        return dataclasses.replace(found[0].inv, kernel=kernel) if found else None
    for call in found:
        if (held := call.kernel()) is not None:
            return dataclasses.replace(call.inv, kernel=held)
    raise KernelGoneError(
        f"{op_id}: the kernel that made the call {call_key} is gone. One that holds arrays or other objects is not "
        "kept for this: keep it yourself, or record its calls (EJKERNEL_OPS_RECORD=1)."
    )


def get_invocations(device: str | Device | None = None) -> dict[str, dict[str, Recorded]]:
    """Recorded calls of one device, by default this one: op id -> call key -> (kernel, args, kwargs).

    Arguments are abstract. Holds what `record_invocation` was given and what ran while `EJKERNEL_OPS_RECORD` was 1;
    while it is 1, also what was traced before.
    """
    name = device if isinstance(device, str) else device_fingerprint(device)
    with _lock:
        found = {**(_traced if env.recording() else {}), **_recorded}
    calls: dict[str, dict[str, Recorded]] = {}
    for key, call in found.items():
        kernel = call.kernel() if key[0] == name else None
        if kernel is not None:
            calls.setdefault(key[1], {})[key[2]] = (kernel, call.inv.args, dict(call.inv.kwargs))
    return calls


def clear() -> None:
    """Forgets every call."""
    with _lock:
        _traced.clear()
        _recorded.clear()
