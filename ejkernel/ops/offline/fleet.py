"""Tuning on many machines: specs go out through any `concurrent.futures.Executor`, entries come back.

`autotune_lowered(..., executor=pool)` and `autotune_recorded(..., executor=pool)` use it; `tune_specs` is for callers
that store the entries themselves.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, as_completed
from contextlib import contextmanager
from typing import Any

from ejkernel.errors import EjkernelError
from ejkernel.ops.config.asking import on_its_platform
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.offline import specs
from ejkernel.ops.offline.result import AutotuningResult, Entry, TunedCall
from ejkernel.ops.store import entry as entries
from ejkernel.ops.store.entry import StoredEntry
from ejkernel.ops.store.persistent import PersistentCache
from ejkernel.ops.tuning.outcome import Tuning
from ejkernel.ops.utils.fingerprint import device_fingerprint


class FleetError(EjkernelError, ValueError):
    """An executor cannot be created."""


def tune_spec(spec: specs.Spec, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Tunes one call on this worker's device and returns its entry as data; runs on the worker."""
    from ejkernel.ops.tuning.autotuner import Autotuner

    inv = specs.from_spec(spec)
    kernel = inv.kernel
    assert kernel is not None
    inv = on_its_platform(inv, kernel)
    tuning = Autotuner(**settings).tune(inv, kernel)
    if tuning.measurement is None:
        raise EjkernelError(unmeasured(tuning, settings.get("budget_s")))
    return entries.to_data(Entry.of(inv, kernel, tuning).stored(inv.key[0]))


def unmeasured(tuning: Tuning, budget_s: float | None) -> str:
    """Why a tuning has no result: its budget was used up, or it was stopped."""
    if budget_s is None or tuning.seconds < budget_s:
        return "stopped before anything was measured"
    return (
        f"stopped before anything was measured: its budget of {budget_s:g} s was used up while candidates were still "
        "compiled and checked. Give it a larger one"
    )


def tune_calls(
    selector: ConfigSelectorChain, calls: Iterable[Invocation[Any, Any]], executor: Executor, tuner: Any = None
) -> AutotuningResult:
    """Tunes each distinct call on one worker, and stores the results in the selector's caches as they come in.

    The result is for this device or, if no worker has such a device, for that of the workers. Calls that could not be
    tuned are in `unmatched`, and so are calls that were tuned on another device: these are only in the store.
    """
    settings = _settings(tuner if tuner is not None else selector.tuner)
    sent, unmatched, found = {}, [], {}
    for inv in calls:
        try:
            sent[inv.op_id, inv.call_key] = inv, specs.to_spec(inv)
        except specs.SpecError as error:
            unmatched.append(f"{inv.op_id} {inv.call_key}: {error}")
    for call in tune_specs([spec for _, spec in sent.values()], executor, settings):
        name, entry = call.key[1:], call.entry
        if not isinstance(entry, StoredEntry):
            unmatched.append(f"{' '.join(name)}: {call.error}")
            continue
        if selector.persistent is not None and selector.persist_autotune:
            entry = keep(selector.persistent, entry)
        cfg = entry.typed(sent[name][0].kernel.cfg_type).cfg
        selector.cache.put(*entry.place, cfg)
        found.setdefault(entry.place.device, []).append(Entry.read(entry, cfg))
    here = device_fingerprint()
    device = here if here in found else min(found, default=here)
    elsewhere = [(e, d) for d, each in found.items() if d != device for e in each]
    unmatched += [f"{e.op_id} {e.call_key}: was tuned on another device, {d}" for e, d in elsewhere]
    return AutotuningResult(device, tuple(found.get(device, ())), tuple(unmatched))


def keep(cache: PersistentCache, entry: StoredEntry) -> StoredEntry:
    """Stores a worker's result, and returns what is stored then: a stopped tuning replaces no finished one."""
    mine = cache.own(*entry.place)
    if mine is not None and mine.complete and not entry.complete:
        return mine
    cache.add(entry)
    return entry


def _settings(tuner: Any) -> dict[str, Any]:
    from ejkernel.ops.tuning.autotuner import Autotuner

    if tuner is None:
        return {}
    if not isinstance(tuner, Autotuner):
        raise FleetError(f"executor: workers measure with an Autotuner, got a {type(tuner).__name__} as tuner.")
    return {f.name: getattr(tuner, f.name) for f in dataclasses.fields(tuner)}


def tune_specs(
    calls: Iterable[specs.Spec], executor: Executor, settings: Mapping[str, Any] | None = None
) -> Iterator[TunedCall]:
    """Tunes each distinct call on one worker, and yields the results as they come in.

    Forwards go first, because a backward is measured on its forward's residuals.
    """
    distinct = {(spec["op_id"], spec["call_key"]): spec for spec in calls}
    chosen: dict[tuple[str, str], Any] = {}
    for call in _wave([s for s in distinct.values() if not s["backward"]], executor, settings):
        if isinstance(call.entry, StoredEntry):
            chosen[call.key[1:]] = call.entry.cfg_data
        yield call
    backwards = [
        {**s, "forward_cfg": chosen.get(tuple(s["forward"]), s["forward_cfg"])}
        for s in distinct.values()
        if s["backward"]
    ]
    yield from _wave(backwards, executor, settings)


def _wave(calls: list[specs.Spec], executor: Executor, settings: Mapping[str, Any] | None) -> Iterator[TunedCall]:
    waiting: dict[Future[dict[str, Any]], specs.Spec] = {}
    for spec in calls:
        try:
            waiting[executor.submit(tune_spec, spec, dict(settings or {}))] = spec
        except Exception as error:  # noqa: BLE001 - the pool broke; what it has finished still counts.
            yield TunedCall(specs.key_of(spec), None, f"{type(error).__name__}: {error}")
    try:
        for future in as_completed(waiting):
            key, error = specs.key_of(waiting[future]), future.exception()
            if error is not None:
                # A failure on a worker concerns only this call; the others continue.
                known = isinstance(error, EjkernelError)
                yield TunedCall(key, None, str(error) if known else f"{type(error).__name__}: {error}")
            else:
                yield TunedCall(key, entries.from_data(future.result()))
    finally:
        for future in waiting:  # After Ctrl-C: calls that have not begun are cancelled.
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
