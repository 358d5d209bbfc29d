"""`ejkernel tune` and `ejkernel labels`: measuring calls from files, and finding them in programs."""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ejkernel.cli import ahead, calls, interrupts, operations, suites
from ejkernel.cli.options import AsJson, Grad, NoTrials, Settings, Store
from ejkernel.cli.output import counted, print_json, print_table, short_arguments, short_repr, tell
from ejkernel.cli.store import held_by, open_store
from ejkernel.errors import EjkernelError
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.offline import fleet, lowered, specs
from ejkernel.ops.offline.result import TunedCall
from ejkernel.ops.store import packs, places
from ejkernel.ops.store.entry import StoredEntry
from ejkernel.ops.store.persistent import PersistentCache
from ejkernel.ops.tuning.autotuner import Autotuner
from ejkernel.ops.tuning.standings import time_text
from ejkernel.ops.utils import meta

Row = dict[str, Any]


class Isolation(enum.StrEnum):
    """Where candidates run."""

    process = "process"
    thread = "thread"


def tune(
    target: Annotated[
        str | None,
        typer.Argument(
            help="record.json, a file with the text of a program (StableHLO or HLO), the name of an operation, or "
            "module:Kernel. By default the record file of EJKERNEL_OPS_RECORD=1.",
            autocompletion=operations.complete,
        ),
    ] = None,
    specs_file: Annotated[Path | None, typer.Option("--specs", help="Record file for the calls of a program.")] = None,
    args: Annotated[str, typer.Option(help="Arrays of the call: f32[1024,64],s32[16].")] = "",
    settings: Settings = None,
    grad: Grad = False,
    budget: Annotated[float | None, typer.Option(help="Seconds a call may take to tune.")] = None,
    max_candidates: Annotated[int | None, typer.Option(min=1, help="Try at most this many configs of a call.")] = None,
    cases: Annotated[
        str, typer.Option(help="Rank by the geometric mean over these data sets of the kernel: even,uneven.")
    ] = "",
    compile_s: Annotated[float, typer.Option(help="Seconds that compiling one candidate may take.")] = 120.0,
    isolation: Annotated[Isolation, typer.Option(help="Where candidates run.")] = Isolation.process,
    out: Annotated[Path | None, typer.Option(help="Write the results as a pack, too.")] = None,
    no_trials: NoTrials = False,
    store: Store = None,
    executor: Annotated[
        str | None, typer.Option(help="Spread the calls: dask://host:port, or module:factory of an Executor.")
    ] = None,
    suite: Annotated[bool, typer.Option("--suite", help="The operation's named workloads for this device.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="Of a suite: workloads with this in their name, or that match it with *.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Of a suite: also what is decided already.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="Of a suite: only say which calls there are.")] = False,
    for_target: Annotated[
        str | None,
        typer.Option(
            "--for",
            help="Rank configs for a device that is not here by what its compiler says: v5e, v6e, sm_100a, ...",
            autocompletion=ahead.complete,
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="With --for: how many compilers run at a time.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Tune calls and store the results; exit code 1 if some could not be tuned or stored.

    Ctrl-C ends it with what was measured by then, and exit code 130.

    For example:

    ejkernel tune record.json --out tuned.json

    ejkernel tune step.hlo --specs record.json --budget 60

    ejkernel tune flash_attention --args "f32[1,512,4,64],f32[1,512,4,64],f32[1,512,4,64]" --set causal=true --grad

    ejkernel tune my_pkg.kernels:MyKernel --args "f32[1024,1024],f32[1024,1024]" --set causal=true

    ejkernel tune rms_norm --suite --out packs/here.json

    ejkernel tune flash_attention --suite --for v6e --out packs/tpu-v6e.json
    """
    _check({"--budget": budget, "--compile-s": compile_s})
    held = [] if out is None else held_by("--out", out)
    cache = open_store(store)
    if for_target is not None:
        if cases or executor is not None or budget is not None or listed:
            raise EjkernelError("--for goes without --budget, --cases, --executor and --list: nothing is measured.")
        wanted = ahead.Wanted(target, specs_file, args, settings or [], grad, suite, only or (), again)
        limits: Row = {"jobs": jobs, "compile_s": compile_s, "most": max_candidates}
        limits |= {"no_trials": no_trials, "as_json": as_json}
        raise typer.Exit(ahead.tune(cache, for_target, wanted, out, held, **limits))
    if suite or listed:
        if target is None or specs_file is not None or args or settings or grad:
            raise EjkernelError(
                "--suite goes with the name of an operation, without --specs, --args, --set and --grad."
            )
        plan = _Plan(cache, suites.find(target, only or ()), held, again)
        if listed:
            plan.show(as_json)
            return
        found, missing = plan.open, list[str]()
    elif only or again:
        raise EjkernelError("--only and --again go with --suite.")
    else:
        plan = None
        found, missing = calls.find(target, specs_file, args, settings or [], grad)
    limits = {"budget_s": budget, "max_candidates": max_candidates, "compile_s": compile_s}
    if cases:
        limits["cases"] = tuple(name.strip() for name in cases.split(","))
    tuner = {**limits, "isolation": str(isolation)}
    with interrupts.noted() as stop:
        outcomes = _tune_here(cache, found, tuner) if executor is None else _tune_there(cache, found, tuner, executor)
        rows = _gather(outcomes if plan is None else plan.watched(outcomes), stop)
    tuned = [row for row in rows if not row["error"]]
    failed = [*missing, *(f"{row['op_id']} {row['call_key']}: {row['error']}" for row in rows if row["error"])]
    if as_json:
        print_json({"tuned": tuned, "failed": failed} | ({} if plan is None else {"decided": plan.decided_rows()}))
    else:
        _show(rows)
    decided = [] if plan is None else plan.decided
    problems = [*(f"not tuned: {line}" for line in failed), *_keep(cache, tuned, out, no_trials, decided)]
    if stop.is_set():
        problems.append(_stopped(len(found), rows))
    for line in problems:
        tell(line, error=True)
    raise typer.Exit(interrupts.EXIT_CODE if stop.is_set() else 1 if problems else 0)


def labels(
    program: Annotated[Path, typer.Argument(help="File with the text of a program (StableHLO or HLO).")],
    specs_file: Annotated[
        Path | None, typer.Option("--specs", help="Record file, to show the calls' arguments.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the ejkernel calls in a program; exit code 1 if there are none."""
    found = [meta.parse_label(text) for text in lowered.labels_of(program)]
    known = {(s["op_id"], s["call_key"]): s["signature"] for s in (specs.read(specs_file) if specs_file else [])}
    if as_json:
        print_json([{"op_id": p.op_id, "call_key": p.call_key, "prefix": p.prefix} for p in found])
    elif not found:
        tell(calls.no_labels(program), error=True)
    else:
        signature = lambda p: p.signature or known.get((p.op_id, p.call_key))
        print_table(["OP", "CALL KEY", "ARRAYS"], [[p.op_id, p.call_key, short_arguments(signature(p))] for p in found])
    raise typer.Exit(0 if found else 1)


def _check(limits: dict[str, float | None]) -> None:
    """Checks early what would otherwise fail after everything was measured."""
    for option, seconds in limits.items():
        if seconds is not None and not seconds >= 0:  # NaN is not less than 0 either.
            raise EjkernelError(f"{option}: {seconds} is not a number of seconds from 0 on.")


class _Plan:
    """What of a suite is decided, and what is open."""

    def __init__(
        self, cache: PersistentCache, named: list[suites.NamedCall], held: list[StoredEntry], again: bool
    ) -> None:
        in_pack = {entry.place: entry for entry in held}
        self._decided: list[tuple[suites.NamedCall, StoredEntry]] = []
        self._open: list[suites.NamedCall] = []
        for call in named:
            known = [cache.own(*call.inv.key), in_pack.get(places.place_of(call.inv.key))]
            entry = next((e for e in known if e is not None and call.is_decided_by(e)), None)
            if entry is None or again:
                self._open.append(call)
            else:
                self._decided.append((call, entry))

    @property
    def open(self) -> list[Invocation[Any, Any]]:
        """The calls to tune."""
        return [call.inv for call in self._open]

    def watched(self, outcomes: Generator[Row, None, None]) -> Generator[Row, None, None]:
        """`outcomes`, each with the name of its workload; says how far the suite is."""
        names = {(call.inv.op_id, call.inv.call_key): call.workload for call in self._open}
        total = len(self._open) + len(self._decided)
        if self._decided:
            tell(
                f"{len(self._decided)} of {counted(total, 'call')} decided already; --again measures them.", error=True
            )
        with contextlib.closing(outcomes):
            for number, row in enumerate(outcomes, len(self._decided) + 1):
                name = names[row["op_id"], row["call_key"]]
                tell(f"{number} of {total}: {row['op_id']}, {name}: {row['error'] or 'measured'}", error=True)
                yield {**row, "workload": name}

    @property
    def decided(self) -> list[StoredEntry]:
        """What is known of the calls that need no tuning, which a pack is to hold, too."""
        return [entry for _, entry in self._decided]

    def decided_rows(self) -> list[dict[str, str]]:
        """The calls that need no tuning."""
        return [{"workload": call.workload, **entry.place._asdict()} for call, entry in self._decided]

    def show(self, as_json: bool) -> None:
        """Lists the calls."""
        rows = [(call, "decided") for call, _ in self._decided] + [(call, "open") for call in self._open]
        data = [
            {"workload": call.workload, "op_id": call.inv.op_id, "call_key": call.inv.call_key, "state": state}
            for call, state in rows
        ]
        if as_json:
            print_json(data)
        else:
            print_table(["WORKLOAD", "OP", "CALL KEY", "STATE"], [tuple(row.values()) for row in data])


def _stopped(calls: int, rows: list[Row]) -> str:
    """The calls that were not tuned because of Ctrl-C."""
    if len(rows) < calls:
        return f"stopped: {calls - len(rows)} of {counted(calls, 'call')} not reached."
    done = all(row["complete"] for row in rows)
    return "stopped after the last call." if done else "stopped in the last call; the same command resumes it."


def _gather(outcomes: Generator[Row, None, None], stop: threading.Event) -> list[Row]:
    """The rows of all calls, or after Ctrl-C of those that were tuned."""
    rows: list[Row] = []
    with contextlib.closing(outcomes):
        try:
            for row in outcomes:
                rows.append(row)
                if stop.is_set():
                    break
        except KeyboardInterrupt:  # The second one, or one that came between two calls.
            stop.set()
    return rows


def _keep(
    cache: PersistentCache, tuned: list[Row], out: Path | None, no_trials: bool, others: list[StoredEntry]
) -> Iterator[str]:
    """Writes the pack, if one is wanted, with what was measured, `others` and what it holds; gives what was lost.

    What was cut short takes the place of nothing that was not.
    """
    stored = [cache.own(row["device"], row["op_id"], row["call_key"]) for row in tuned]
    entries = [entry for entry in stored if entry is not None]
    if cache.in_memory or len(entries) < len(tuned):
        yield f"not kept: results could not be stored in {cache.path}."
    entries = [packs.without_trials(entry) for entry in entries] if no_trials else entries
    if out is None:
        return
    if not entries and not others:
        yield f"not written: {out}: there is no result to write."
        return
    # Read again: another process may have written to it meanwhile.
    known = {entry.place: entry for entry in [*held_by("--out", out), *others]}
    for entry in entries:
        if entry.complete or entry.place not in known or not known[entry.place].complete:
            known[entry.place] = entry
    packs.write(out, known.values())


def _tune_here(
    cache: PersistentCache, found: list[Invocation[Any, Any]], settings: dict[str, Any]
) -> Generator[Row, None, None]:
    selector, tuner = ConfigSelectorChain(persistent=cache), Autotuner(**settings)
    yield from map(_row, lowered.tune_each(selector, found, tuner))


def _tune_there(
    cache: PersistentCache, found: list[Invocation[Any, Any]], settings: dict[str, Any], address: str
) -> Generator[Row, None, None]:
    with fleet.executor_at(address) as executor:
        for call in fleet.tune_specs([specs.to_spec(inv) for inv in found], executor, settings):
            if isinstance(call.entry, StoredEntry):
                # Stored as it comes in: whatever happens to the rest, this one is safe.
                kept = fleet.keep(cache, call.entry)
                yield _row(TunedCall(kept.place, kept))
            else:
                yield _row(call)


def _row(call: TunedCall) -> Row:
    (device, op_id, call_key), entry = call.key, call.entry
    statistics = {} if entry is None else entry.statistics
    return {
        "device": device,
        "op_id": op_id,
        "call_key": call_key,
        "cfg": None if entry is None else short_repr(entry.cfg),
        "measurement": statistics.get("measurement"),
        "speedup": statistics.get("speedup"),
        "complete": entry is not None and entry.complete,
        "error": call.error,
    }


def _show(rows: list[Row]) -> None:
    print_table(
        ["OP", "CALL KEY", "CONFIG", "TIME", "SPEED-UP"],
        [[r["op_id"], r["call_key"], r["cfg"] or "-", _time(r), _speedup(r)] for r in rows],
    )


def _time(row: Row) -> str:
    found = row["measurement"]
    if found is None:
        return "-"
    mark = "" if row["complete"] else " (incomplete)"
    return time_text(found["median_ms"], found["low_ms"], found["high_ms"]) + mark


def _speedup(row: Row) -> str:
    found = row["speedup"]
    return "-" if found is None else f"{found['value']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"
