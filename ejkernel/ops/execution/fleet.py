"""Tuning on many machines: specs go out through any `concurrent.futures.Executor`, entries come back."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ejkernel.errors import EjkernelError
from ejkernel.ops import specs
from ejkernel.ops.config import entry as entries
from ejkernel.ops.config.asking import on_its_platform, source_of
from ejkernel.ops.config.entry import StoredEntry
from ejkernel.ops.config.provenance import collect
from ejkernel.ops.utils.fingerprint import current_device


class FleetError(EjkernelError, ValueError):
    """An executor cannot be had."""


@dataclass(frozen=True)
class Finished:
    """One call's outcome: an entry for the store, or the reason why there is none."""

    spec: specs.Spec
    entry: StoredEntry | None
    error: str | None = None


def tune_spec(spec: specs.Spec, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Tunes one call on this worker's device and returns its entry as data; runs on the worker."""
    from ejkernel.ops.execution.tuner import Autotuner

    inv = specs.from_spec(spec)
    kernel = inv.kernel
    assert kernel is not None
    inv = on_its_platform(inv, kernel)
    tuning = Autotuner(**settings).tune(inv, kernel)
    if tuning.measurement is None:
        raise EjkernelError(f"{inv.op_id} {inv.call_key}: stopped before anything was measured.")
    made = entries.make(
        inv.key,
        tuning.cfg,
        signature=inv.signature,
        provenance=collect(source_of(kernel)) | {"timer": tuning.timer, "device": current_device().device_kind},
        statistics=tuning.statistics(),
        complete=tuning.complete,
    )
    return entries.to_data(made)


def tune_specs(
    calls: Iterable[specs.Spec], executor: Executor, settings: Mapping[str, Any] | None = None
) -> Iterator[Finished]:
    """Tunes each distinct call on one worker, and yields the outcomes as they come in.

    Forwards go first, because a backward is measured on what its forward leaves.
    """
    distinct = {(spec["op_id"], spec["call_key"]): spec for spec in calls}
    chosen: dict[tuple[str, str], Any] = {}
    for finished in _wave([s for s in distinct.values() if not s["backward"]], executor, settings):
        if finished.entry is not None:
            chosen[finished.spec["op_id"], finished.spec["call_key"]] = finished.entry.cfg_data
        yield finished
    backwards = [
        {**s, "forward_cfg": chosen.get(tuple(s["forward"]), s["forward_cfg"])}
        for s in distinct.values()
        if s["backward"]
    ]
    yield from _wave(backwards, executor, settings)


def _wave(calls: list[specs.Spec], executor: Executor, settings: Mapping[str, Any] | None) -> Iterator[Finished]:
    waiting: dict[Future[dict[str, Any]], specs.Spec] = {}
    for spec in calls:
        try:
            waiting[executor.submit(tune_spec, spec, dict(settings or {}))] = spec
        except Exception as error:  # noqa: BLE001 - a pool that broke meanwhile; what it has finished still counts.
            yield Finished(spec, None, f"{type(error).__name__}: {error}")
    try:
        for future in as_completed(waiting):
            spec = waiting[future]
            error = future.exception()
            if error is not None:
                # Whatever broke on a worker concerns this call alone; the others go on.
                yield Finished(spec, None, f"{type(error).__name__}: {error}")
            else:
                yield Finished(spec, entries.from_data(future.result()))
    finally:
        for future in waiting:  # After Ctrl-C: what has not begun need not.
            future.cancel()


@contextmanager
def executor_at(address: str) -> Iterator[Executor]:
    """The executor that an address names: `dask://host:port`, or `module:factory` for anything else."""
    if address.startswith("dask://"):
        try:
            distributed = importlib.import_module("distributed")
        except ImportError as error:
            raise FleetError(f"{address}: needs dask. Install it with `pip install distributed`.") from error
        with distributed.Client(address.replace("dask://", "tcp://")) as client, client.get_executor() as executor:
            yield executor
        return
    if ":" not in address:
        raise FleetError(f"--executor: {address!r} is neither dask://host:port nor module:factory.")
    factory: Callable[[], Executor] = specs.find(address, "executor factory")
    made = factory() if callable(factory) else factory
    if not isinstance(made, Executor):
        raise FleetError(f"--executor: {address} makes a {type(made).__name__}, not a concurrent.futures.Executor.")
    with made as executor:
        yield executor
