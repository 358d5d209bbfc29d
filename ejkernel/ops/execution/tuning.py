"""The functions that users call to tune."""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ejkernel.errors import EjkernelError
from ejkernel.ops import registry
from ejkernel.ops.config.asking import on_its_platform
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.kernel import Invocation, Kernel, KernelDefinitionError
from ejkernel.ops.core.types import Cfg
from ejkernel.ops.execution.executor import Executor, default_executor
from ejkernel.ops.execution.pipeline import any_tracer, invocation, prepared
from ejkernel.ops.offline.lowered import tune_calls
from ejkernel.ops.offline.result import AutotuningResult as AutotuningResult
from ejkernel.ops.offline.result import Entry as Entry
from ejkernel.ops.tuning import shortfall
from ejkernel.ops.tuning.autotuner import Autotuner as Autotuner
from ejkernel.ops.tuning.autotuner import TuningError as TuningError
from ejkernel.ops.tuning.outcome import Tuning as Tuning
from ejkernel.ops.tuning.shortfall import TuningWarning as TuningWarning
from ejkernel.ops.tuning.standings import Candidate as Candidate
from ejkernel.ops.tuning.standings import Measurement as Measurement
from ejkernel.ops.tuning.stopwatch import benchmark as benchmark

logger = logging.getLogger("ejkernel.tuning")

Recorded = Mapping[str, Mapping[str, tuple[Kernel[Any, Any], tuple[Any, ...], Mapping[str, Any]]]]


class RecordedCallsError(EjkernelError, TypeError):
    """The argument is neither recorded calls nor a selector."""


def autotune(
    kernel: Kernel[Cfg, Any],
    /,
    *args: Any,
    configs: Any = None,
    num_warmup: int = 3,
    num_iters: int = 10,
    selector: ConfigSelectorChain | None = None,
    tuner: Autotuner | None = None,
    **kwargs: Any,
) -> Cfg:
    """The fastest correct config for a call, measured now.

    Args:
      kernel: What to tune.
      *args: The call's arguments, abstract or not.
      configs: The candidates, besides the kernel's guess, which always takes part and stays unless it is beaten; by
        default the kernel's own `config_space`. With it nothing is stored.
      num_warmup: Runs of each candidate before its first sample.
      num_iters: The least number of samples behind the winner's figures.
      selector: The selector whose caches get the result; by default the default executor's. A call that was tuned on
        its disk already is not measured again, except against candidates that are new.
      tuner: Further settings; `num_warmup` and `num_iters` are then its own.
      **kwargs: The call's keyword arguments.
    """
    _check_kernel(kernel)
    tuner = tuner if tuner is not None else Autotuner(num_warmup=num_warmup, num_iters=num_iters)
    args, kwargs = prepared(kernel, args, kwargs)
    inv = invocation(kernel, args, kwargs)
    if not any_tracer(args, kwargs):
        inv = replace(inv, args=args, kwargs=kwargs)
    inv = on_its_platform(inv, kernel)
    if configs is not None and selector is None and not isinstance(default_executor().chooser, ConfigSelectorChain):
        selector = ConfigSelectorChain()  # Nothing will be stored, so any selector will do.
    tuning = _selector(selector).tune(inv, kernel, tuner=tuner, configs=configs)
    shortfall.warn(tuning, inv, kernel, stacklevel=2)
    return tuning.cfg


def autotune_recorded(
    invocations: Recorded | ConfigSelectorChain | None = None,
    selector: ConfigSelectorChain | Recorded | None = None,
    *,
    tuner: Autotuner | None = None,
    executor: concurrent.futures.Executor | None = None,
) -> AutotuningResult:
    """Tunes recorded calls, each once, and stores the results in the selector's caches.

    Args:
      invocations: What `get_invocations()` returned, which is the default. A selector here is taken as `selector`.
      selector: The selector whose caches get the results; by default the default executor's.
      tuner: How to measure; by default the selector's own.
      executor: Any `concurrent.futures.Executor`, to measure each call on one of its workers instead of here.

    Returns:
      A result with one entry per call; a call that could not be tuned is in `unmatched`, with the reason.
    """
    if isinstance(invocations, ConfigSelectorChain):
        invocations, selector = (selector, invocations)
    calls = registry.get_invocations() if invocations is None else invocations
    if not isinstance(calls, Mapping) or (selector is not None and not isinstance(selector, ConfigSelectorChain)):
        raise RecordedCallsError(
            "autotune_recorded: give the mapping of get_invocations() and, optionally, a ConfigSelectorChain, got "
            f"{type(calls).__name__} and {type(selector).__name__}."
        )
    recorded = [
        _recorded_invocation(op_id, call_key, *call)
        for op_id, by_key in calls.items()
        for call_key, call in by_key.items()
    ]
    return tune_calls(_selector(selector), recorded, tuner, executor)


def _recorded_invocation(
    op_id: str, call_key: str, kernel: Kernel[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Invocation[Any, Any]:
    """The call as it was traced: its context and platform are in the registry, not in the mapping."""
    traced = registry.traced(op_id, call_key, kernel)
    if traced is not None:
        return replace(traced, args=tuple(args), kwargs=dict(kwargs))
    return Invocation(kernel=kernel, op_id=op_id, args=tuple(args), kwargs=dict(kwargs))


def _check_kernel(kernel: Any) -> None:
    if isinstance(kernel, Kernel):
        return
    name = getattr(kernel, "__name__", repr(kernel))
    way = (
        f"Write {name}()." if isinstance(kernel, type) and issubclass(kernel, Kernel) else "Put it into a Kernel's run."
    )
    raise KernelDefinitionError(f"autotune: expected a Kernel instance, got {name}, a {type(kernel).__name__}. {way}")


def _selector(selector: ConfigSelectorChain | None) -> ConfigSelectorChain:
    if selector is not None:
        if not isinstance(selector, ConfigSelectorChain):
            hint = " An executor's selector is its .chooser." if isinstance(selector, Executor) else ""
            raise RecordedCallsError(f"selector must be a ConfigSelectorChain, got {type(selector).__name__}.{hint}")
        return selector
    executor: Executor = default_executor()
    if not isinstance(executor.chooser, ConfigSelectorChain):
        raise RecordedCallsError(
            f"The default executor chooses with {type(executor.chooser).__name__}; pass selector= to store results."
        )
    return executor.chooser
