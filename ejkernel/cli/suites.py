"""Suites: the named calls of an operation, forward and backward, tuned for this device."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from ejkernel.cli import calls, jax_start, operations
from ejkernel.cli.calls import Call
from ejkernel.errors import EjkernelError
from ejkernel.ops.config.asking import on_its_platform, source_of
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.core.operation import Operation
from ejkernel.ops.core.workload import Workload
from ejkernel.ops.execution.pipeline import backward_invocation, prepared
from ejkernel.ops.store import provenance
from ejkernel.ops.store.entry import StoredEntry
from ejkernel.ops.utils.fingerprint import device_kind
from ejkernel.ops.utils.records import ConfigMismatchError


class NamedCall(NamedTuple):
    """A call of a suite."""

    workload: str
    inv: Call

    def is_decided_by(self, entry: StoredEntry | None) -> bool:
        """Whether `entry` is a finished measurement of this call, by today's kernel and JAX."""
        kernel = self.inv.kernel
        assert kernel is not None
        if entry is None or not entry.complete or provenance.changes(entry.provenance, source_of(kernel)):
            return False
        try:
            return entry.typed(source_of(kernel).cfg_type).cfg is not None
        except ConfigMismatchError:
            return False


def find(name: str, only: Sequence[str] = ()) -> list[NamedCall]:
    """The workloads of an operation for the device at hand, those whose names match one of `only` if there are any.

    A pattern is a part of a name, or a whole one with `*` and `?`.

    Raises:
      EjkernelError: The operation has no such workloads.
    """
    jax_start.start()
    kernel, kind = operations.make(name), device_kind()
    if not isinstance(kernel, Operation) or not (workloads := kernel.workloads(kind)):
        raise EjkernelError(f"--suite: {name} has no workloads for a {kind.upper()}. `workload_module` names them.")
    chosen = [w for w in workloads if not only or any(map(_matcher(w.name), only))]
    if not chosen:
        raise EjkernelError(f"--only: no workload matches {', '.join(only)}. There are: {_quoted(workloads)}.")
    return [NamedCall(w.name, inv) for w in chosen for inv in _calls(kernel, w)]


def _matcher(name: str) -> Callable[[str], bool]:
    return lambda pattern: pattern in name or fnmatch.fnmatchcase(name, pattern)


def _quoted(workloads: Sequence[Workload]) -> str:
    return ", ".join(repr(w.name) for w in workloads)


def _calls(kernel: Operation[Any, Any], workload: Workload) -> list[Call]:
    """The forward of a workload, and its backward if that has configs of its own."""
    if workload.draw is None:
        args, kwargs = workload.abstract()
        forward = calls.abstract(kernel, args, kwargs, f"the workload {workload.name!r}")
    else:  # Only it knows which integers are legal.
        args, kwargs = prepared(kernel, *workload.inputs())
        forward = Invocation(kernel=kernel, args=jax.device_get(args), kwargs=kwargs)
    own = BackwardKernel.of(kernel)
    if own is None:
        return [forward]
    backward = backward_invocation(own, on_its_platform(forward, kernel))
    return [forward, replace(backward, args=forward.args, kwargs=forward.kwargs)]
