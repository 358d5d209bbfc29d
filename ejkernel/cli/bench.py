"""`ejkernel bench`: the backends of an operation against each other."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import typer

from ejkernel.cli import calls, jax_start
from ejkernel.cli.options import AsJson, Grad, Operation, Settings, Store
from ejkernel.cli.output import print_json, print_table, short_arguments, short_repr, tell, working
from ejkernel.cli.store import open_store
from ejkernel.errors import EjkernelError
from ejkernel.ops.config import asking
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core import dispatch
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.kernel import Invocation, Kernel
from ejkernel.ops.tuning.bench import Bench, Rejected, seconds_of
from ejkernel.ops.tuning.problem import Problem, from_call
from ejkernel.ops.tuning.standings import Measurement

Say = Callable[[str], None]
_REFERENCE = "reference"
_STORED = "stored"


@dataclass(kw_only=True)
class Contender:
    """A way to run a call, and its result."""

    name: str
    platform: str | None = None
    run: Callable[..., Any] | None = None
    """The method of the kernel; None for the one that the config selects."""
    cfg: Any = None
    reason: str = ""
    samples: list[float] | None = None


def bench(
    op: Operation,
    args: Annotated[list[str], typer.Option(help="Arrays of a call: f32[1024,64],s32[16]. Repeat it for more shapes.")],
    settings: Settings = None,
    grad: Grad = False,
    rounds: Annotated[int, typer.Option(min=3, help="Samples of each backend; they take turns in random order.")] = 20,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Time every backend of an operation against the others, each with its guess, and with what is stored.

    Outputs are compared with the operation's reference first. Exit code 1 if one was wrong or failed, or if none could
    run.

    For example:

    ejkernel bench flash_attention --args "f32[1,512,4,64],f32[1,512,4,64],f32[1,512,4,64]" --set causal=true

    ejkernel bench my_pkg.kernels:MyKernel --args "f32[1024]" --args "f32[4096]" --json
    """
    cache, results = open_store(store), []
    with working("starting JAX") as say:
        jax_start.start()
        for text in args:
            for inv in calls.named(op, text, settings or [], grad):
                results.append(_told(inv, ConfigSelectorChain(persistent=cache), rounds, say))
    if as_json:
        print_json(results)
    else:
        for result in results:
            _print(result)
    ran = [row for result in results for row in result["backends"]]
    for row in ran:
        if row["status"] in ("wrong", "failed"):
            tell(f"{row['backend']}: {row['status']}: {row['reason']}", error=True)
    timed = lambda row: row["backend"] != _REFERENCE and row["median_ms"] is not None
    good = all(any(map(timed, result["backends"])) for result in results)
    raise typer.Exit(0 if good and not any(row["status"] in ("wrong", "failed") for row in ran) else 1)


def _told(inv: Invocation[Any, Any], selector: ConfigSelectorChain, rounds: int, say: Say) -> dict[str, Any]:
    try:
        return _measure(inv, selector, rounds, say)
    except EjkernelError:
        raise
    except Exception as error:
        raise EjkernelError(f"{inv.op_id}: the kernel's own code failed ({type(error).__name__}: {error}).") from error


def _measure(inv: Invocation[Any, Any], selector: ConfigSelectorChain, rounds: int, say: Say) -> dict[str, Any]:
    kernel = inv.kernel
    assert kernel is not None
    found = _contenders(inv, kernel, selector)
    problem = from_call(inv, kernel)
    bench = Bench(replace(problem, make_fn=lambda contender: _function(problem, contender)))
    try:
        ready = _prepare(bench, [c for c in found if not c.reason], problem.truth is not None, say)
        _race(bench, ready, rounds, say)
        timer = bench.timer.name
    finally:
        bench.close()
    return _result(inv, found, timer, rounds)


def _function(problem: Problem, contender: Contender) -> Callable[..., Any]:
    run, cfg = contender.run, contender.cfg
    if contender.name == _REFERENCE and problem.reference is not None:
        return problem.reference
    return problem.make_fn(cfg) if run is None else lambda *args, **kwargs: run(*args, cfg=cfg, **kwargs)


def _contenders(inv: Invocation[Any, Any], kernel: Kernel[Any, Any], selector: ConfigSelectorChain) -> list[Contender]:
    found = list(_backends(inv, kernel))
    serving = next((c for c in found if not c.reason), None)
    if serving is not None:
        chosen = selector.explain(replace(inv, platform=serving.platform), kernel)
        if chosen.tier in ("memory", "persistent"):
            named = dispatch.forced_platform(kernel, chosen.cfg)
            found.append(Contender(name=_STORED, run=serving.run if named is None else None, cfg=chosen.cfg))
    if getattr(kernel, "reference", None) is not None:
        found.append(Contender(name=_REFERENCE))
    return found


def _backends(inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Iterator[Contender]:
    """Backends by platform; a second one for the same platform is named by its method."""
    is_backward, seen = isinstance(kernel, BackwardKernel), set()
    for platform, run in dispatch.implementations(asking.source_of(kernel), inv.context):
        cfg, reason = _guess(inv, kernel, platform)
        if platform not in seen:
            yield Contender(name=platform, platform=platform, run=None if is_backward else run, cfg=cfg, reason=reason)
        elif not is_backward:  # Its method is found by platform, so a second one never runs.
            yield Contender(name=run.__name__, platform=platform, run=run, cfg=cfg, reason=reason)
        seen.add(platform)


def _guess(inv: Invocation[Any, Any], kernel: Kernel[Any, Any], platform: str) -> tuple[Any, str]:
    """The best config that the kernel has for a platform, or why there is none."""
    here = replace(inv, platform=platform)
    if (reason := dispatch.refusal(kernel, here, platform)) is not None:
        return None, reason
    guess = asking.heuristic(here, kernel)
    named = dispatch.forced_platform(kernel, guess)
    if named is None and isinstance(kernel, BackwardKernel) and platform != inv.platform:
        return None, f"its forward runs on {inv.platform}"
    if named in (None, platform):
        return guess, ""
    space = asking.candidates(here, kernel)
    listed = () if isinstance(space, dict) else space
    cfg = next((cfg for cfg in listed if dispatch.forced_platform(kernel, cfg) == platform), None)
    return cfg, "" if cfg is not None else "the kernel has no config for it"


def _prepare(bench: Bench, contenders: list[Contender], has_truth: bool, say: Say) -> dict[int, Contender]:
    """Those that compile and compute the right answer, by number."""
    say("compiling")
    ready: dict[int, Contender] = {}
    for number, built in enumerate(bench.build(list(enumerate(contenders)))):
        if isinstance(built, Rejected):
            contenders[number].reason = f"{built.outcome}: {built.reason}"
        else:
            ready[number] = contenders[number]
    if not ready:
        return {}
    say("checking")
    bench.set_truth(None if has_truth else next(iter(ready)))
    for number in list(ready):
        if (rejected := bench.prove(number)) is not None:
            ready.pop(number).reason = f"{rejected.outcome}: {rejected.reason}"
    return ready


def _race(bench: Bench, ready: dict[int, Contender], rounds: int, say: Say) -> None:
    rng, order = random.Random(0), list(ready)
    for contender in ready.values():
        contender.samples = []
    for done in range(rounds):
        say(f"round {done + 1} of {rounds}")
        rng.shuffle(order)
        for number, seconds in bench.measure(order).items():
            contender = ready[number]
            if isinstance(seconds, Rejected):
                contender.reason, contender.samples = f"failed: {seconds.reason}", None
            elif contender.samples is not None:
                contender.samples.append(seconds_of(seconds))
        order = [number for number in order if ready[number].samples is not None]


def _result(inv: Invocation[Any, Any], found: list[Contender], timer: str, rounds: int) -> dict[str, Any]:
    device, op_id, call_key = inv.key
    measured = [Measurement.of(np.array(c.samples or []), timer) for c in found]
    best = min((m.median_ms for m in measured if m is not None), default=None)
    rows = []
    for contender, m in zip(found, measured, strict=True):
        status, _, reason = contender.reason.partition(": ")
        known = status in ("wrong", "failed")
        rows.append(
            {
                "backend": contender.name,
                "cfg": None if contender.cfg is None else short_repr(contender.cfg),
                "status": "measured" if m is not None else status if known else "refused",
                "reason": reason if known else contender.reason,
                "median_ms": None if m is None else m.median_ms,
                "low_ms": None if m is None else m.low_ms,
                "high_ms": None if m is None else m.high_ms,
                "of_best": None if m is None or best is None else m.median_ms / best,
            }
        )
    place = {"device": device, "op_id": op_id, "call_key": call_key, "arrays": short_arguments(inv.signature)}
    return {**place, "timer": timer, "rounds": rounds, "backends": rows}


def _print(result: dict[str, Any]) -> None:
    tell(f"{result['op_id']} {result['arrays']} on {result['device']}, {result['timer']} clock")
    print_table(
        ["BACKEND", "TIME, MS", "95 % INTERVAL", "OF THE BEST", "CONFIG"], [_row(r) for r in result["backends"]]
    )
    print()


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    if row["median_ms"] is None:
        return row["backend"], "-", "-", "-", f"{row['status']}: {row['reason'].splitlines()[0]}"
    interval = "-" if row["low_ms"] is None else f"{row['low_ms']:.4g} to {row['high_ms']:.4g}"
    return row["backend"], f"{row['median_ms']:.4g}", interval, f"{row['of_best']:.2f} x", row["cfg"] or ""
