"""What was called: abstract signatures of every traced call, and the calls that were recorded on request."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import jax
import numpy as np

from ejkernel.ops.core.kernel import Invocation, Kernel
from ejkernel.ops.utils import arguments, env
from ejkernel.ops.utils.fingerprint import Device, abstractify, device_fingerprint

SMALL_INTEGERS = 65536
"""Integer arrays up to this many elements are kept for kernels with `record_integers`."""

Recorded = tuple[Kernel[Any, Any], tuple[Any, ...], dict[str, Any]]

_lock = threading.Lock()
_traced: dict[tuple[str, str, str], Invocation[Any, Any]] = {}
_recorded: set[tuple[str, str, str]] = set()


def record_invocation(kernel: Kernel[Any, Any], inv: Invocation[Any, Any]) -> None:
    """Remembers a call for `get_invocations`, without its data."""
    _remember(kernel, inv, record=True)


def note_traced(kernel: Kernel[Any, Any], inv: Invocation[Any, Any]) -> None:
    """Remembers that a call was traced; it is recorded too, also in a file, if `EJKERNEL_OPS_RECORD` says so."""
    record = env.recording()
    if _remember(kernel, inv, record=record) and record:
        from ejkernel.ops import specs

        specs.record(_traced[inv.key])


def _remember(kernel: Kernel[Any, Any], inv: Invocation[Any, Any], *, record: bool) -> bool:
    """Keeps a call without its data; whether it is recorded for the first time."""
    kept = dataclasses.replace(inv, kernel=kernel, args=_keep(kernel, inv.args), kwargs=_keep(kernel, dict(inv.kwargs)))
    with _lock:
        held = _traced.get(inv.key)
        # Data that an eager call left is worth more than the shapes of a later trace.
        if held is None or held.is_abstract:
            _traced[inv.key] = kept
        new = record and inv.key not in _recorded
        if record:
            _recorded.add(inv.key)
        return new


def _keep(kernel: Kernel[Any, Any], tree: Any) -> Any:
    """`tree` without device memory: shapes, and small integers as numpy arrays if the kernel asks for them."""

    def keep(x: Any) -> Any:
        concrete = isinstance(x, (jax.Array, np.ndarray)) and not arguments.has_no_data(x)
        if kernel.record_integers and concrete and x.size <= SMALL_INTEGERS and np.issubdtype(x.dtype, np.integer):
            return np.array(x)
        return abstractify(x)

    return jax.tree.map(keep, tree)


def traced(op_id: str, call_key: str) -> Invocation[Any, Any] | None:
    """The traced call with this identity on this device, or on any other if there is none."""
    with _lock:
        found = {device: inv for (device, op, key), inv in _traced.items() if (op, key) == (op_id, call_key)}
    return found.get(device_fingerprint()) or next(iter(found.values()), None)


def get_invocations(device: str | Device | None = None) -> dict[str, dict[str, Recorded]]:
    """Recorded calls of one device, by default this one: op id -> call key -> (kernel, args, kwargs).

    Arguments are abstract. Holds what `record_invocation` was given and what ran while `EJKERNEL_OPS_RECORD` was 1;
    while it is 1, also what was traced before.
    """
    name = device if isinstance(device, str) else device_fingerprint(device)
    everything = env.recording()
    calls: dict[str, dict[str, Recorded]] = {}
    with _lock:
        for key, inv in _traced.items():
            if key[0] == name and (everything or key in _recorded):
                assert inv.kernel is not None
                calls.setdefault(key[1], {})[key[2]] = (inv.kernel, inv.args, dict(inv.kwargs))
    return calls


def clear() -> None:
    """Forgets every call."""
    with _lock:
        _traced.clear()
        _recorded.clear()
