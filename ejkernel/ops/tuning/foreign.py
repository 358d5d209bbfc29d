"""Tuners that are not ours: anything with `autotune(make_fn, args, kwargs, candidates) -> cfg`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ejkernel.ops.config.asking import candidates, heuristic
from ejkernel.ops.config.policy import as_stored
from ejkernel.ops.config.selection import Tuner
from ejkernel.ops.core import context
from ejkernel.ops.core.kernel import Invocation, Kernel
from ejkernel.ops.tuning.autotuner import Autotuner, TunerSettingError
from ejkernel.ops.tuning.problem import from_call
from ejkernel.ops.tuning.search.space import MAX_LISTED, Space
from ejkernel.ops.tuning.workers import run_outside


@dataclass(frozen=True)
class Chosen:
    """The result of a foreign tuner: a config. How it was measured is the tuner's business."""

    cfg: Any
    complete: bool = True
    timer: str = "unknown"
    measurement: str = "by another tuner"
    candidates: tuple[Any, ...] = (None,)

    def statistics(self) -> Mapping[str, Any]:
        """Only the name of the tuner is known."""
        return {"timer": self.timer, "chosen": self.measurement}

    def shortfall(self, place: str) -> None:
        """Nothing is known of it."""


@dataclass(frozen=True)
class ProtocolTuner:
    """Runs a foreign tuner like ours: with concrete data, in a thread in which nothing is being traced."""

    tuner: Tuner

    def tune(self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any], *, configs: Any = None, **_: Any) -> Chosen:
        """The foreign tuner's choice from the kernel's space or from `configs`; it gets no store and no seeds."""

        def run() -> Any:
            problem = from_call(inv, kernel, as_given=True)
            space = candidates(inv, kernel) if configs is None else configs
            if isinstance(space, Mapping):
                space = list(itertools.islice(Space.of(space, heuristic(inv, kernel)), MAX_LISTED))
            return self.tuner.autotune(problem.make_fn, problem.args, problem.kwargs, space)

        return Chosen(run_outside(run, contexts=[context.same_scope(), as_stored()]))


def as_tuner(tuner: Any) -> Any:
    """The tuner of a selector that was given `tuner`: ours by default, or a foreign one in a `ProtocolTuner`.

    Raises:
      TunerSettingError: It is not a tuner.
    """
    if tuner is None:
        return Autotuner()
    if isinstance(tuner, type) or not (hasattr(tuner, "tune") or hasattr(tuner, "autotune")):
        raise TunerSettingError(
            f"tuner must be an Autotuner, or have autotune(make_fn, args, kwargs, candidates), got {tuner!r}. "
            "Settings are Autotuner(budget_s=30, ...)."
        )
    return tuner if hasattr(tuner, "tune") else ProtocolTuner(tuner)
