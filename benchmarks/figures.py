"""Figures: functions compiled in threads, timed in turns on one device, as rows of Markdown tables.

A `Row` has contenders, functions of the same arrays. They run interleaved in random order, so that whatever else the
machine does hits all alike; a figure is the median over rounds. Times are those of the device where it has a clock
(CUPTI: the sum of a call's kernels), else of the host.

Several processes may share a lock file. They compile at the same time, and one of them at a time has the device. XLA
tries candidates of its own on the device while it compiles products: such a contender is `alone`, compiled in a turn.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import importlib.metadata
import json
import platform
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from benchmarks.turns import guard, turn
from ejkernel.ops import device_fingerprint
from ejkernel.ops.core.dispatch import UnsupportedCallError
from ejkernel.ops.tuning import timers
from ejkernel.ops.utils import targets

MARK = "FIGURE "
"""What the line of a figure begins with, in the output of a process."""
DATA = "data"
"""Stands for a row's arrays among the names of its contenders."""
ROW_S = 90
"""A row that has the device for longer hangs, and so the process ends."""


# --- What is measured ---


class Contender(NamedTuple):
    """A function that takes part in a row.

    Attributes:
      fn: Takes the row's arrays, or what `after` makes of them.
      after: Runs before, and is not timed.
      alone: XLA uses the device while it compiles it.
      same: Whether its result is that of the others.
      torch: It takes torch's tensors and returns a call without arguments.
      warm: Whether torch compiles it, at its first run.
    """

    fn: Callable[..., Any]
    after: Callable[..., Any] | None = None
    alone: bool = False
    same: bool = True
    torch: bool = False
    warm: bool = False


class Goal(NamedTuple):
    """`of` is to reach `least` times the speed of the fastest of `over`; or a rate; or to need at most so many MB."""

    least: float
    over: tuple[str, ...] = ()
    of: str = "untuned"
    what: Literal["speed", "rate", "MB"] = "speed"

    def __str__(self) -> str:
        than = {"speed": f" x {' or '.join(self.over)}", "rate": "", "MB": " MB"}[self.what]
        return f"{self.of} {'<=' if self.what == 'MB' else '>='} {self.least:.3g}{than}"

    def reached(self, figure: Figure) -> float | None:
        """The figure that is compared; None if something has not run."""
        mine, others = figure.ms.get(self.of), [figure.ms[name] for name in self.over if name in figure.ms]
        if mine is None or (self.what == "speed" and not others):
            return None
        if self.what == "speed":
            return min(others) / mine
        return figure.rate(self.of) if self.what == "rate" else figure.memory[self.of] / 1e6


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a table."""

    table: str
    name: str
    inputs: Callable[[], tuple[Any, ...]]
    contenders: Mapping[str, Contender]
    goals: tuple[Goal, ...] = ()
    work: float = 0.0
    unit: str = "TFLOP/s"


@dataclass(kw_only=True)
class Figure:
    """What came of a row: medians in milliseconds, quartile spreads, bytes of temporary memory, what did not run."""

    table: str
    name: str
    work: float
    unit: str
    timer: str = ""
    ms: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    goals: list[dict[str, Any]] = field(default_factory=list)

    def rate(self, name: str) -> float:
        """In `unit`, which begins with T or G."""
        return self.work / self.ms[name] / (1e6 if self.unit.startswith("G") else 1e9)

    def cell(self, name: str) -> str:
        parts = [f"{self.rate(name):.4g}"] if self.work and name in self.ms else []
        parts += [f"{self.memory[name] / 2**20:,.0f} MiB"] if name in self.memory else []
        shown = f"{self.ms[name]:.4f}" if name in self.ms else self.notes.get(name, "-").partition(":")[0]
        return f"{shown} ({', '.join(parts)})" if parts else shown

    def judge(self, goals: Iterable[Goal]) -> None:
        """Compares with the goals."""
        for goal in goals:
            got = goal.reached(self)
            met = got is not None and (got <= goal.least if goal.what == "MB" else got >= goal.least)
            self.goals.append({"goal": str(goal), "least": goal.least, "got": got, "met": met})

    def verdicts(self) -> Iterator[tuple[bool, str]]:
        """Each goal: whether it is met, and a line."""
        for goal in self.goals:
            got, least = goal["got"], goal["least"]
            if got is None:
                said = "not measured"
            elif goal["met"]:
                said = f"met, {got:.4g}"
            else:
                said = f"missed by {abs(got / least - 1):.1%}, {got:.4g}"
            yield bool(goal["met"]), f"{said}: {goal['goal']} | {self.table} | {self.name}"


# --- Compiling ---


class Program(NamedTuple):
    """A compiled contender."""

    run: Callable[..., Any]
    prepare: Callable[..., Any] | None
    memory: int | None
    out: Any


class Compiler(NamedTuple):
    """How programs are compiled: here, or for a described device, which nothing runs on."""

    lock: str | None = None
    target: targets.Target | None = None
    device: Any = None

    def setting(self) -> contextlib.AbstractContextManager[None]:
        return targets.compiling_for(self.target, self.device) if self.target else contextlib.nullcontext()

    def placed(self, tree: Any) -> Any:
        here = None if self.device is None else SingleDeviceSharding(self.device)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), tree)

    def program(self, fn: Callable[..., Any], args: Any, alone: bool = False) -> tuple[Any, Any]:
        """The compiled `fn(*args)` and the types of its results."""
        with self.setting():
            lowered = jax.jit(fn).lower(*self.placed(args))
            with turn(self.lock if alone else None):
                return lowered.compile(), lowered.out_info

    def contender(self, given: Contender, args: tuple[Any, ...]) -> Program:
        prepare = None
        if given.after is not None:
            prepare, args = self.program(given.after, args)
        run, out = self.program(given.fn, args, given.alone)
        return Program(run, prepare, run.memory_analysis().temp_size_in_bytes, out)

    def row(self, pool: concurrent.futures.Executor, row: Row) -> dict[str, Any]:
        """Futures of all that a row needs; torch's contenders are not among them."""
        args = jax.eval_shape(row.inputs)
        made = {n: pool.submit(self.contender, c, args) for n, c in row.contenders.items() if not c.torch}
        return made if self.target else {DATA: pool.submit(self.program, row.inputs, ()), **made}


def _from_torch(given: Contender, args: Any) -> Program:
    """A contender of torch, compiled with zeros if it has to be."""
    import torch

    if given.warm:
        zeros = lambda x: torch.zeros(x.shape, dtype=getattr(torch, x.dtype.name), device="cuda")
        given.fn(*jax.tree.map(zeros, args))()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def prepare(*arrays):
        return (given.fn(*jax.tree.map(torch.from_dlpack, arrays)),)

    return Program(lambda call: (call(), torch.cuda.synchronize())[0], prepare, None, None)


# --- Measuring ---


def run(
    rows: Iterable[Row],
    emit: Callable[[Figure], None],
    *,
    rounds: int = 30,
    threads: int = 4,
    lock: str | None = None,
    target: targets.Target | None = None,
) -> None:
    """Compiles all rows, then measures one after the other; with a target, only compiles."""
    compiler = Compiler(lock, target, targets.describe(target)[0] if target else None)
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        jobs = [(row, compiler.row(pool, row)) for row in rows]
        found = []
        for row, futures in jobs:
            figure = Figure(table=row.table, name=row.name, work=row.work, unit=row.unit)
            by_torch = {n: partial(_from_torch, c, jax.eval_shape(row.inputs)) for n, c in _torch_of(row, target)}
            results = {name: future.result for name, future in futures.items()} | by_torch
            found.append((row, figure, _attempted(results, figure)))
    if target is not None:
        for _, figure, programs in found:
            figure.memory = {name: program.memory for name, program in programs.items()}
            emit(figure)
        return
    # All is compiled: cuDNN's first run fails, or takes the process along, when another thread uses the device.
    with turn(lock):
        timer = timers.choose(exclusive=True)
        for row, figure, programs in found:
            with guard(ROW_S):
                _attempted({DATA: partial(_measure, row, figure, programs, timer, rounds)}, figure)
            figure.judge(row.goals)
            emit(figure)


def _torch_of(row: Row, target: Any) -> list[tuple[str, Contender]]:
    return [] if target else [(name, c) for name, c in row.contenders.items() if c.torch]


def _attempted(calls: Mapping[str, Callable[[], Any]], figure: Figure) -> dict[str, Any]:
    """Their results; what went wrong is noted."""
    results = {}
    for name, call in calls.items():
        try:
            results[name] = call()
        except UnsupportedCallError as error:
            figure.notes[name] = f"refused: {_in_one_line(error)}"
        except Exception as error:  # noqa: BLE001 - a contender that fails is a result
            figure.notes[name] = f"failed: {type(error).__name__}: {_in_one_line(error)}"
    return results


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _measure(row: Row, figure: Figure, programs: dict[str, Any], timer: timers.Timer, rounds: int) -> None:
    """Fills in the figure."""
    if DATA not in programs:
        return  # The note says why.
    draw, _ = programs.pop(DATA)
    arrays = jax.block_until_ready(draw())

    def ready(program: Program) -> Any:
        given = arrays if program.prepare is None else program.prepare(*arrays)
        call = partial(program.run, *given)
        return call, jax.block_until_ready(call())

    first = _attempted({name: partial(ready, program) for name, program in programs.items()}, figure)
    results = {name: out for name, (_, out) in first.items() if row.contenders[name].same}
    want = next(iter(results.values()), None)
    for name, got in _attempted({n: partial(_distance, out, want) for n, out in results.items()}, figure).items():
        if not got < 2e-2:
            figure.notes[name] = f"differs: {got:.1e} from {next(iter(results))}"
    del results, want
    calls = {name: call for name, (call, _) in first.items()}
    first.clear()
    figure.timer = timer.name
    samples = {name: [] for name in calls}
    names, rng = list(calls), random.Random(0)
    for _ in range(rounds):
        rng.shuffle(names)
        for name, seconds in zip(names, timer.measure([calls[name] for name in names]), strict=True):
            samples[name].append(1e3 * seconds)
    for name, times in samples.items():
        figure.ms[name] = statistics.median(times)
        low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
        figure.spread[name] = (high - low) / figure.ms[name]
        if programs[name].memory is not None:
            figure.memory[name] = programs[name].memory


def _distance(got: Any, want: Any) -> float:
    """Of two results, relative to the second."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(_relative(jax.dlpack.from_dlpack(a.detach()) if hasattr(a, "detach") else a, b)) for a, b in pairs)


@jax.jit
def _relative(got: Any, want: Any) -> Any:
    got, want = got.astype(jnp.float32).ravel(), want.astype(jnp.float32).ravel()
    return jnp.linalg.norm(got - want) / jnp.linalg.norm(want)


# --- Showing ---


def heading(rounds: int) -> str:
    """What figures were made with."""
    names = ("jax", "torch", "triton", "jax-cuda13-plugin")
    have = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions() if d.metadata["Name"]}
    versions = ", ".join(f"{name} {have[name]}" for name in names if name in have)
    device = jax.local_devices()[0].device_kind
    return (
        f"{datetime.date.today()}, {device} ({device_fingerprint()}), {versions}, Python {platform.python_version()}, "
        f"{rounds} interleaved rounds: medians in ms (rate, temporary memory)."
    )


def emit(figure: Figure) -> None:
    """Prints the line that another process reads."""
    print(f"{MARK}{json.dumps(asdict(figure))}", flush=True)


def tables(figures: Iterable[Figure]) -> str:
    """All figures in Markdown, one table for each name of a table."""
    found: dict[str, list[Figure]] = {}
    for figure in figures:
        found.setdefault(figure.table, []).append(figure)
    return "\n\n".join(_table(title, rows) for title, rows in found.items())


def _table(title: str, rows: list[Figure]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in (*row.ms, *row.memory, *row.notes) if name != DATA))
    clocks = ", ".join(f"by {name}" for name in dict.fromkeys(row.timer for row in rows) if name)
    lines = [
        f"### {title}, ms {clocks or 'not measured'} ({rows[0].unit})",
        "",
        f"| call | {' | '.join(names)} | goals |",
    ]
    lines.append("|---" * (len(names) + 2) + "|")
    for row in rows:
        goals = "; ".join(line.partition(" |")[0] for _, line in row.verdicts())
        lines.append(f"| {row.name} | {' | '.join(map(row.cell, names))} | {goals} |")
    notes = dict.fromkeys(f"- {row.name}, {name}: {note}" for row in rows for name, note in row.notes.items())
    return "\n".join([*lines, *([""] if notes else []), *notes])
