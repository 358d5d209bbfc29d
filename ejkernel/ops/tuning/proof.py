"""Checks that a config that was tuned for another call is right for this one, before it is used.

It is compared with the guess: two programs, each run once on generated data. Only if these differ, it is checked as in
a tuning, with the reference if there is one, which may cost far more. The result is kept in this process and beside the
trials of the call.
"""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from functools import partial
from typing import Any, NamedTuple

from ejkernel.ops.config.asking import forward_of, heuristic, source_of
from ejkernel.ops.config.policy import as_stored
from ejkernel.ops.core import context
from ejkernel.ops.core.kernel import Invocation, Kernel
from ejkernel.ops.store.persistent import PersistentCache
from ejkernel.ops.tuning.bench import Bench, Rejected
from ejkernel.ops.tuning.history import History
from ejkernel.ops.tuning.problem import UNDER_GRADIENT, Problem, from_call
from ejkernel.ops.tuning.workers import run_outside
from ejkernel.ops.tuning.workers.process import available_bytes
from ejkernel.ops.utils import arguments
from ejkernel.ops.utils.canonical import same_cfg
from ejkernel.ops.utils.fingerprint import current_device, is_here
from ejkernel.ops.utils.serialize import cfg_id

logger = logging.getLogger("ejkernel.tuning")

_COMPILE_S = 120.0
_SHARE = 8
"""Generated data may use this fraction of the free memory, as its inverse: the user did not ask for the check."""
_GUESS, _CFG = 0, 1
MAX_PROOFS = 4096
"""How many proofs of a kernel class are remembered; the store has them all."""


class Proof(NamedTuple):
    """Why a config may not be used for a call; None if it may."""

    reason: str | None
    certain: bool = True
    """Whether the result would be the same next time: not if the check could not be completed."""


_proofs: weakref.WeakKeyDictionary[type, dict[Any, Proof]] = weakref.WeakKeyDictionary()


def prove(
    inv: Invocation[Any, Any], kernel: Kernel[Any, Any], cfg: Any, store: PersistentCache | None, *, now: bool = True
) -> Proof | None:
    """Whether a config that was tuned for another call may be used for `inv`; safe while the caller is tracing.

    Without `now` nothing is run: None if it is not known yet.
    """
    guess = heuristic(inv, kernel)
    if same_cfg(cfg, guess):
        return Proof(None)
    # The inputs of a backward depend on the forward that ran.
    name = "/".join(cfg_id(x) for x in (cfg, inv.metadata.get("forward_cfg")) if x is not None)
    known = _proofs.setdefault(type(source_of(kernel)), {})
    if (found := known.get((inv.key, name))) is not None:
        return found
    history = History(store, inv.key, source_of(kernel))
    if name in history.proofs:
        found = Proof(history.proofs[name])
    elif not is_here():
        return Proof("it cannot be checked: the device is not here", certain=False)
    elif now:
        found = run_outside(partial(_prove, inv, kernel, cfg, guess), contexts=[context.same_scope(), as_stored()])
        logger.debug("%s %s: %r of another call: %s", inv.op_id, inv.call_key, cfg, found.reason or "proved")
        if found.certain:
            history.add_proof(name, cfg, found.reason)
    if found is not None:
        if len(known) >= MAX_PROOFS:
            known.clear()
        known[inv.key, name] = found
    return found


def _prove(inv: Invocation[Any, Any], kernel: Kernel[Any, Any], cfg: Any, guess: Any) -> Proof:
    if not _is_affordable(inv):
        return Proof("its data would take too much memory to check it", certain=False)
    try:
        rejected = _differs_from_guess(from_call(inv, kernel, whole=True), cfg, guess)
        if rejected is not None and getattr(forward_of(kernel), "reference", None) is not None:
            rejected = _differs_from_reference(from_call(inv, kernel), cfg)
    except Exception as error:  # noqa: BLE001 - if the check cannot be made, the call gets the guess.
        return Proof(f"it cannot be checked: {type(error).__name__}: {error}", certain=False)
    return Proof(None) if rejected is None else _refused(rejected)


def _differs_from_guess(problem: Problem, cfg: Any, guess: Any) -> Rejected | None:
    with _bench(problem) as bench:
        guessed, built = bench.build([(_GUESS, guess), (_CFG, cfg)])
        for each in (built, guessed):
            if isinstance(each, Rejected):
                return each
        bench.set_truth(_GUESS)
        rejected = bench.prove(_CFG)
        if rejected is not None and rejected.reason.startswith(UNDER_GRADIENT):
            # Residuals may differ although the gradients are right.
            rejected = bench.prove_gradient(cfg)
        return rejected


def _differs_from_reference(problem: Problem, cfg: Any) -> Rejected | None:
    with _bench(problem) as bench:
        (built,) = bench.build([(_CFG, cfg)])
        if isinstance(built, Rejected):
            return built
        bench.set_truth(None)
        return bench.prove(_CFG) or bench.prove_gradient(cfg)


def _bench(problem: Problem) -> contextlib.closing[Bench]:
    return contextlib.closing(Bench(problem, timer="wall", compile_s=_COMPILE_S))


def _refused(rejected: Rejected) -> Proof:
    # A failure may be due to lack of memory or a bug that will be fixed, so it is not stored; wrong numbers are.
    wrong = rejected.outcome == "wrong"
    return Proof(f"it {'is wrong' if wrong else 'failed'} here: {rejected.reason}", certain=wrong)


def _is_affordable(inv: Invocation[Any, Any]) -> bool:
    arrays = arguments.split((inv.args, dict(inv.kwargs)))[0]
    needed = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
    stats = current_device().memory_stats() or {}
    free = stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else available_bytes()
    return needed * _SHARE <= free
