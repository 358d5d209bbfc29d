"""The ways to run a call of an operation: untuned, by one backend, tuned."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from ejkernel.cli import suites
from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, default_executor
from ejkernel.ops.core.workload import Workload


def ways(kernel: Any, workload: Workload, platforms: Iterable[str], *, dry: bool) -> dict[str, Callable[..., Any]]:
    """Functions of the call's arguments: what an untuned call runs, and these backends, each with its own guess.

    With them `tuned`, if a store or a pack has another config for the call or for its gradient. In a dry run XLA stands
    in for the backends.
    """
    plain = Executor(ConfigSelectorChain(cache=ConfigCache()))
    found: dict[str, Callable[..., Any]] = {"untuned": partial(plain, kernel)}
    for name in platforms:
        platform = "xla" if dry else name
        found[name] = partial(plain, kernel, cfg=kernel.cfg_type(platform=platform), platform=platform)
    cfg = lambda executor, inv: executor.chooser.explain(inv, inv.kernel).cfg
    shipped = default_executor()
    if not dry and any(cfg(shipped, inv) != cfg(plain, inv) for inv in suites.calls_of(kernel, workload)):
        found["tuned"] = partial(shipped, kernel)
    return found
