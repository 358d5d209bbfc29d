"""Suites: the named calls of an operation, forward and backward, tuned for this device."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from ejkernel.cli import calls, gradients, jax_start, operations
from ejkernel.cli.calls import Call
from ejkernel.errors import EjkernelError
from ejkernel.ops.config.asking import source_of
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.operation import Operation
from ejkernel.ops.core.workload import Workload
from ejkernel.ops.execution.pipeline import prepared
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
        if (
            entry is None
            or not entry.complete
            or entry.clock is not None
            or provenance.changes(entry.provenance, source_of(kernel))
        ):
            return False
        try:
            return entry.typed(source_of(kernel).cfg_type).cfg is not None
        except ConfigMismatchError:
            return False


def find(name: str, only: Sequence[str] = (), *, with_data: bool = True) -> list[NamedCall]:
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
    calls_of_one = lambda w: _with_data(calls_of(kernel, w), w) if with_data else calls_of(kernel, w)
    return [NamedCall(w.name, inv) for w in chosen for inv in calls_of_one(w)]


def _matcher(name: str) -> Callable[[str], bool]:
    return lambda pattern: pattern in name or fnmatch.fnmatchcase(name, pattern)


def _quoted(workloads: Sequence[Workload]) -> str:
    return ", ".join(repr(w.name) for w in workloads)


def calls_of(kernel: Operation[Any, Any], workload: Workload) -> list[Call]:
    """The forward of a workload and what is tuned of its gradient: its backward, or calls of other operations."""
    args, kwargs = workload.abstract()
    forward = calls.abstract(kernel, args, kwargs, f"the workload {workload.name!r}")
    return [forward, *gradients.calls_of(kernel, args, kwargs, forward)]


def _with_data(found: Sequence[Call], workload: Workload) -> Iterator[Call]:
    """Calls with the data of their workload, if it has some: only it knows which integers are legal."""
    forward = found[0]
    if workload.draw is not None and forward.kernel is not None:
        args, kwargs = prepared(forward.kernel, *workload.inputs())
        forward = replace(forward, args=jax.device_get(args), kwargs=kwargs)
    for inv in found:
        has_its_arguments = inv is found[0] or isinstance(inv.kernel, BackwardKernel)
        yield replace(inv, args=forward.args, kwargs=forward.kwargs) if has_its_arguments else inv
