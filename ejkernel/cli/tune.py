"""`ejkernel tune` and `ejkernel labels`: measuring calls from files, and finding them in programs."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ejkernel.cli import calls
from ejkernel.cli.options import AsJson, Grad, Settings, Store
from ejkernel.cli.output import print_json, print_table, short_arguments, short_repr
from ejkernel.cli.store import open_store
from ejkernel.ops import specs
from ejkernel.ops.config import packs
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.execution import fleet, offline
from ejkernel.ops.execution.tuner import Autotuner
from ejkernel.ops.utils import meta


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
        ),
    ] = None,
    specs_file: Annotated[Path | None, typer.Option("--specs", help="Record file for the calls of a program.")] = None,
    args: Annotated[str, typer.Option(help="Arrays of the call: f32[1024,64],s32[16].")] = "",
    settings: Settings = None,
    grad: Grad = False,
    budget: Annotated[float | None, typer.Option(help="Seconds a call may take to tune.")] = None,
    isolation: Annotated[Isolation, typer.Option(help="Where candidates run.")] = Isolation.process,
    out: Annotated[Path | None, typer.Option(help="Write the results as a pack, too.")] = None,
    store: Store = None,
    executor: Annotated[
        str | None, typer.Option(help="Spread the calls: dask://host:port, or module:factory of an Executor.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tune calls and keep the results; exit code 1 if some could not be tuned.

    For example:

    ejkernel tune record.json --out tuned.json

    ejkernel tune step.hlo --specs record.json --budget 60

    ejkernel tune flash_attention --args "f32[1,512,4,64],f32[1,512,4,64],f32[1,512,4,64]" --set causal=true --grad

    ejkernel tune my_pkg.kernels:MyKernel --args "f32[1024,1024],f32[1024,1024]" --set causal=true
    """
    found, missing = calls.find(target, specs_file, args, settings or [], grad)
    if not found and not missing:
        missing = ["the program has no labels; the text of a Lowered has them only with as_text(debug_info=True)."]
    cache = open_store(store)
    tuner = {"budget_s": budget, "isolation": str(isolation)}
    outcomes = _tune_here(cache, found, tuner) if executor is None else _tune_there(cache, found, tuner, executor)
    rows, failed = _show(outcomes, as_json), list(missing)
    failed += [f"{row['op_id']} {row['call_key']}: {row['error']}" for row in rows if row["error"]]
    if out is not None:
        done = [cache.own(row["device"], row["op_id"], row["call_key"]) for row in rows if not row["error"]]
        packs.write(out, [entry for entry in done if entry is not None])
    if as_json:
        print_json({"tuned": [row for row in rows if not row["error"]], "failed": failed})
    for line in failed:
        print(f"not tuned: {line}", file=sys.stderr)
    raise typer.Exit(1 if failed else 0)


def labels(
    program: Annotated[Path, typer.Argument(help="File with the text of a program (StableHLO or HLO).")],
    specs_file: Annotated[
        Path | None, typer.Option("--specs", help="Record file, to show the calls' arguments.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the ejkernel calls in a program; exit code 1 if there are none."""
    found = [meta.parse_label(text) for text in offline.labels_of(program)]
    known = {(s["op_id"], s["call_key"]): s["signature"] for s in (specs.read(specs_file) if specs_file else [])}
    if as_json:
        print_json([{"op_id": p.op_id, "call_key": p.call_key, "prefix": p.prefix} for p in found])
    else:
        signature = lambda p: p.signature or known.get((p.op_id, p.call_key))
        print_table(["OP", "CALL KEY", "ARRAYS"], [[p.op_id, p.call_key, short_arguments(signature(p))] for p in found])
    raise typer.Exit(0 if found else 1)


def _tune_here(
    cache: PersistentCache, found: list[Invocation[Any, Any]], settings: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    selector, tuner = ConfigSelectorChain(persistent=cache), Autotuner(**settings)
    for outcome in offline.tune_each(selector, found, tuner):
        tuning = outcome.tuning
        if tuning is None:
            yield _row(outcome.inv.key, None, None, outcome.error)
        else:
            yield _row(outcome.inv.key, tuning.cfg, tuning.statistics(), None)


def _tune_there(
    cache: PersistentCache, found: list[Invocation[Any, Any]], settings: dict[str, Any], address: str
) -> Iterator[dict[str, Any]]:
    with fleet.executor_at(address) as executor:
        for finished in fleet.tune_specs([specs.to_spec(inv) for inv in found], executor, settings):
            spec, entry = finished.spec, finished.entry
            if entry is None:
                yield _row((spec["device"], spec["op_id"], spec["call_key"]), None, None, finished.error)
            else:
                # Stored as it comes in: whatever happens to the rest, this one is safe.
                cache.add(entry)
                yield _row(entry.place, entry.cfg, entry.statistics, None)


def _row(key: Iterable[str], cfg: Any, statistics: Any, error: str | None) -> dict[str, Any]:
    device, op_id, call_key = key
    return {
        "device": device,
        "op_id": op_id,
        "call_key": call_key,
        "cfg": None if cfg is None else short_repr(cfg),
        "measurement": (statistics or {}).get("measurement"),
        "speedup": (statistics or {}).get("speedup"),
        "error": error,
    }


def _show(outcomes: Iterator[dict[str, Any]], as_json: bool) -> list[dict[str, Any]]:
    rows = list(outcomes)
    if not as_json:
        print_table(
            ["OP", "CALL KEY", "CONFIG", "TIME", "SPEED-UP"],
            [[r["op_id"], r["call_key"], r["cfg"] or "-", _time(r), _speedup(r)] for r in rows],
        )
    return rows


def _time(row: dict[str, Any]) -> str:
    found = row["measurement"]
    return "-" if found is None else f"{found['median_ms']:.4g} ms [{found['low_ms']:.4g}, {found['high_ms']:.4g}]"


def _speedup(row: dict[str, Any]) -> str:
    found = row["speedup"]
    return "-" if found is None else f"{found['value']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"
