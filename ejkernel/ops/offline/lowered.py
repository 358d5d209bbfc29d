"""Offline: tune every ejkernel call that a program contains, before it runs, on this machine or others."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

from ejkernel.errors import EjkernelError
from ejkernel.ops import registry
from ejkernel.ops.config.asking import on_its_platform, source_line
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.offline import fleet, specs
from ejkernel.ops.offline.result import AutotuningResult, Entry, TunedCall
from ejkernel.ops.utils import meta
from ejkernel.ops.utils.fingerprint import device_fingerprint
from ejkernel.ops.utils.meta import ProgramError as ProgramError
from ejkernel.ops.utils.services import services

logger = logging.getLogger("ejkernel.tuning")

ProgramLike = Any
"""`jax.stages.Lowered` or `Compiled`, an object that holds one, the text of either, or a file with it."""
Specs = str | os.PathLike[str] | Iterable[specs.Spec] | None


class UnmatchedCallWarning(UserWarning):
    """A program contains calls that could not be tuned."""


def autotune_lowered(
    selector: ConfigSelectorChain,
    program: ProgramLike,
    *,
    specs: Specs = None,
    tuner: Any = None,
    executor: Executor | None = None,
) -> AutotuningResult:
    """Tunes every distinct call in a program, forward and backward, and stores the results in the selector's caches.

    Args:
      selector: Its caches get the results, and its tuner measures unless one is given.
      program: `jax.stages.Lowered` or `Compiled`, an object that holds one (`flax.nnx.jit(f).lower(...)`), the text of
        either, or a file with it.
      specs: A record file, or what `specs_of` returned, for programs that were traced in another process.
      tuner: How to measure.
      executor: Any `concurrent.futures.Executor`, to measure each call on one of its workers instead of here.

    Returns:
      A result with one entry per call. Calls that could not be tuned are in `unmatched` with the reason, and cause a
      warning.
    """
    if not isinstance(selector, ConfigSelectorChain):
        raise ProgramError(
            f"autotune_lowered: selector must be a ConfigSelectorChain, got {type(selector).__name__}. "
            "Write autotune_lowered(selector, lowered)."
        )
    labels = labels_of(program)
    if not labels:
        warnings.warn(
            "autotune_lowered: the program has no labels. The text of a Lowered has them only with "
            "as_text(debug_info=True), and EJKERNEL_OPS_STAMP=none leaves them out.",
            UnmatchedCallWarning,
            stacklevel=2,
        )
    calls, missing = match(labels, specs)
    result = tune_calls(selector, calls, tuner, executor)
    result = AutotuningResult(result.device, result.entries, (*missing, *result.unmatched))
    if result.unmatched:
        lines = "\n".join(f"  {line}" for line in result.unmatched)
        warnings.warn(f"autotune_lowered: not tuned:\n{lines}", UnmatchedCallWarning, stacklevel=2)
    return result


def labels_of(program: ProgramLike) -> list[str]:
    """The labels in a program, each once."""
    if isinstance(program, str) and "\n" in program:
        return meta.extract_labels_from_hlo_text(program)
    if isinstance(program, (str, os.PathLike)):
        try:
            return meta.extract_labels_from_hlo_text(Path(program).read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise ProgramError(f"{program}: not the text of a program ({error}).") from error
    return meta.find_labels_in_lowered(program)


def specs_of(program: ProgramLike) -> list[specs.Spec]:
    """Specs of the calls in a program that was traced in this process, to be tuned in another."""
    calls, missing = match(labels_of(program), None)
    found = []
    for inv in calls:
        try:
            found.append(specs.to_spec(inv))
        except specs.SpecError as error:
            missing.append(str(error))
    if missing:
        lines = "\n".join(f"  {line}" for line in missing)
        warnings.warn(f"specs_of: left out:\n{lines}", UnmatchedCallWarning, stacklevel=2)
    return found


def match(labels: Iterable[str], given: Specs) -> tuple[list[Invocation[Any, Any]], list[str]]:
    """The calls of the labels, and why some labels have none."""
    table = _table(given)
    calls: dict[tuple[str, str], Invocation[Any, Any]] = {}
    missing: list[str] = []
    for text in labels:
        parts = meta.parse_label(text)
        key = parts.op_id, parts.call_key
        try:
            inv = specs.from_spec(table[key]) if key in table else registry.traced(*key)
        except EjkernelError as error:
            missing.append(f"{parts.op_id} {parts.call_key}: {error}")
            continue
        if inv is None:
            source = "nor is it in the specs" if given is not None else "and no specs= were given"
            missing.append(f"{parts.op_id} {parts.call_key}: was not traced in this process, {source}")
        else:
            calls[key] = inv
    return list(calls.values()), missing


def _table(given: Specs) -> Mapping[tuple[str, str], specs.Spec]:
    if given is None:
        return {}
    listed = specs.read(given) if isinstance(given, (str, os.PathLike)) else given
    return {(spec["op_id"], spec["call_key"]): spec for spec in listed}


def tune_calls(
    selector: ConfigSelectorChain,
    calls: Iterable[Invocation[Any, Any]],
    tuner: Any = None,
    executor: Executor | None = None,
) -> AutotuningResult:
    """Tunes calls, one after the other or on an executor; those that could not be tuned are in `unmatched`."""
    if executor is not None:
        return fleet.tune_calls(selector, calls, executor, tuner)
    entries, failed = [], []
    for call in tune_each(selector, calls, tuner):
        if isinstance(call.entry, Entry):
            entries.append(call.entry)
        else:
            failed.append(f"{' '.join(call.key[1:])}: {call.error}")
            logger.warning("%s %s: not tuned: %s", *call.key[1:], call.error)
    return AutotuningResult(device_fingerprint(), tuple(entries), tuple(failed))


def tune_each(
    selector: ConfigSelectorChain, calls: Iterable[Invocation[Any, Any]], tuner: Any = None
) -> Iterator[TunedCall]:
    """Tunes calls one after the other, forwards before the backwards that depend on them."""
    if tuner is not None:
        services.make_tuner(tuner)  # A wrong `tuner` is the caller's mistake, not a failure of one call.
    chosen: dict[tuple[str, str], Any] = {}
    for inv in sorted(calls, key=lambda inv: isinstance(inv.kernel, BackwardKernel)):
        assert inv.kernel is not None
        try:
            here = on_its_platform(_after_forward(inv, chosen), inv.kernel)
            tuning = selector.tune(here, inv.kernel, tuner=tuner)
        except Exception as error:  # noqa: BLE001 - the failure of one kernel must not stop the tuning of others.
            known = isinstance(error, EjkernelError)
            yield TunedCall(inv.key, None, str(error) if known else f"{type(error).__name__}: {error}")
            continue
        if tuning.measurement is None and not tuning.rounds:
            measuring = tuner if tuner is not None else selector.tuner
            yield TunedCall(inv.key, None, fleet.unmeasured(tuning, getattr(measuring, "budget_s", None)))
        else:
            chosen[inv.op_id, inv.call_key] = tuning.cfg
            if (text := tuning.shortfall(source_line(here, inv.kernel))) is not None:
                logger.warning("%s %s: %s", inv.op_id, inv.call_key, text)
            yield TunedCall(inv.key, Entry.of(inv, inv.kernel, tuning))


def _after_forward(inv: Invocation[Any, Any], chosen: Mapping[tuple[str, str], Any]) -> Invocation[Any, Any]:
    """A backward is measured on the residuals of the forward config that will run before it."""
    if not isinstance(inv.kernel, BackwardKernel):
        return inv
    forward = replace(inv, kernel=inv.kernel.forward, op_id=inv.kernel.forward.op_id)
    cfg = chosen.get((forward.op_id, forward.call_key))
    return inv if cfg is None else replace(inv, metadata={**inv.metadata, "forward_cfg": cfg})
