"""`ejkernel cache`: inspecting, sharing and cleaning the store of tuned configs."""

from __future__ import annotations

import collections
import enum
from typing import Annotated, Any, NoReturn

import typer

from ejkernel.cli import documents, operations
from ejkernel.cli.options import AsJson, NoTrials, OnlyDevice, OnlyOp, Store
from ejkernel.cli.output import (
    check_file,
    counted,
    print_json,
    print_json_list,
    print_table,
    short_arguments,
    short_cfg,
    tell,
    working,
)
from ejkernel.cli.store import check_nothing_lost, open_store, why_nothing
from ejkernel.errors import EjkernelError
from ejkernel.ops.store import entry as entries
from ejkernel.ops.store import layers, merging, packs, upkeep
from ejkernel.ops.store.entry import StoredEntry
from ejkernel.ops.store.merging import Difference
from ejkernel.ops.tuning.standings import time_text
from ejkernel.report.summary import keywords_of, summarise

app = typer.Typer(no_args_is_help=True, help="Inspect, share and clean the store of tuned configs.")

Source = Annotated[str, typer.Argument(help="A pack (file or URL) or the directory of a store.")]
Sources = Annotated[list[str], typer.Argument(help="Packs (files or URLs) or directories of stores.")]


class Keep(enum.StrEnum):
    """Which entry stays if both sides have one."""

    better = "better"
    mine = "mine"
    theirs = "theirs"


@app.command()
def path(store: Store = None, as_json: AsJson = False) -> None:
    """Print where the store is."""
    cache = open_store(store)
    if as_json:
        used = packs.default() if store is None else []
        print_json({"path": str(cache.path), "exists": cache.path.is_dir(), "packs": used})
    else:
        print(cache.path)


@app.command()
def ls(
    store: Store = None,
    device: OnlyDevice = None,
    op: OnlyOp = None,
    in_packs: Annotated[bool, typer.Option("--packs", help="List each entry of packs, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the entries of the store; those of packs are counted, or listed: with --packs, --device, --op or --json."""
    found = open_store(store).entries(device, op)
    if as_json:
        print_json_list(_data(entry) for entry in found)
        return
    with working("reading"):
        rows: dict[bool, list[tuple[str, ...]]] = {True: [], False: []}
        for entry in found:
            rows[entry.origin != "pack"].append(_row(entry))
    own, shipped = rows[True], rows[False]
    if not own and not shipped and (device is not None or op is not None):
        tell(why_nothing(list(open_store(store).entries()), "the store with its packs", device, op), error=True)
    header = ["DEVICE", "OP", "CALL KEY", "ARRAYS", "CONFIG", "STATE", "LAYER"]
    print_table(header, own)
    if not shipped:
        return
    print(f"\nIn packs, which are only read: {counted(len(shipped), 'entry', 'entries')}.")
    if in_packs or device is not None or op is not None:
        print_table(header, shipped)
    else:
        counts = collections.Counter((row[0], row[1], row[-1]) for row in shipped)
        print_table(["DEVICE", "OP", "ENTRIES", "PACK"], [(*kind[:2], str(n), kind[2]) for kind, n in counts.items()])


@app.command()
def show(
    call_key: Annotated[str, typer.Argument(help="Call key of the entry, or how it begins.")],
    store: Store = None,
    device: OnlyDevice = None,
    op: OnlyOp = None,
    as_json: AsJson = False,
) -> None:
    """Show everything about one entry; exit code 1 if there is none, 2 if there are several."""
    cache = open_store(store)
    found = [entry for entry in cache.entries(device, op) if entry.place.call_key.startswith(call_key)]
    if len(found) != 1:
        tell(f"{len(found)} entries have a call key that begins with {call_key!r}.", error=True)
        for entry in found:
            tell("  " + " ".join(entry.place), error=True)
        if as_json:
            print_json([entry.place._asdict() for entry in found])
        raise typer.Exit(2 if found else 1)
    [entry] = found
    if as_json:
        print_json(_data(entry) | {"trials": cache.read_trials(entry.key)})
    else:
        _print_entry(entry, len(cache.read_trials(entry.key)))


@app.command()
def diff(
    left: Source,
    right: Annotated[str | None, typer.Argument(help="The other side; the store by default.")] = None,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Compare configs key by key; exit code 1 if they differ."""
    cache = open_store(store)
    other = layers.entries_of(right) if right is not None else cache.entries(packs=False)
    with working("reading"):
        found = merging.differences(layers.entries_of(left), other)
    if as_json:
        print_json_list(_difference(d) for d in found)
    else:
        for d in found:
            _print_difference(d)
        print(f"{counted(len(found), 'difference')}.")
    raise typer.Exit(1 if found else 0)


@app.command()
def export(
    target: Annotated[str, typer.Argument(help="The pack to write: a file, a URL, or - for the standard output.")],
    store: Store = None,
    device: OnlyDevice = None,
    op: OnlyOp = None,
    name: Annotated[str | None, typer.Option(help="Name of the pack, by default that of its file.")] = None,
    no_trials: NoTrials = False,
    as_json: AsJson = False,
) -> None:
    """Write the entries of the store into a pack; exit code 1, and nothing written, if there are none."""
    check_file("TARGET", target)
    cache = open_store(store)
    chosen = list(cache.entries(device, op, packs=False))
    if not chosen:
        _nothing(why_nothing(list(cache.entries(packs=False)), str(cache.path), device, op))
    found = map(packs.without_trials, chosen) if no_trials else chosen
    if target == "-":
        documents.stream().writelines(packs.to_text(found, name or "store"))
        return
    check_nothing_lost("TARGET", target, chosen)
    packs.write(target, found, name)
    _say_written(target, len(chosen), as_json)


@app.command("import")
def import_(
    sources: Sources,
    store: Store = None,
    keep: Annotated[Keep, typer.Option(help="Which entry stays if both have one.")] = Keep.better,
    as_json: AsJson = False,
) -> None:
    """Copy entries of packs into the store."""
    cache = open_store(store)
    with working("reading") as say:
        merged = merging.merge(layers.entries_of(source) for source in sources)
        say(f"writing {counted(len(merged), 'entry', 'entries')}")
        done = merging.add_all(cache, merged.values(), keep.value)
    if cache.in_memory:
        raise typer.Exit(2)  # The warning has said why.
    counts = {"added": done.added, "replaced": done.replaced, "kept": done.kept}
    _say(counts, ", ".join(f"{count} {what}" for what, count in counts.items()) + ".", as_json)


@app.command()
def merge(
    target: Annotated[str, typer.Argument(help="The pack to write.")],
    sources: Sources,
    name: Annotated[str | None, typer.Option(help="Name of the pack, by default that of its file.")] = None,
    no_trials: NoTrials = False,
    as_json: AsJson = False,
) -> None:
    """Merge several packs or stores into one pack, the best entry per key; exit code 1 if they have none."""
    check_file("TARGET", target)
    with working("reading"):
        merged = merging.merge(layers.entries_of(source) for source in sources)
        if merged:
            check_nothing_lost("TARGET", target, merged.values())
            packs.write(target, map(packs.without_trials, merged.values()) if no_trials else merged.values(), name)
    if not merged:
        _nothing(f"{', '.join(sources)}: no entries.")
    _say_written(target, len(merged), as_json)


@app.command()
def verify(
    source: Annotated[str | None, typer.Argument(help="A pack or a directory; the store by default.")] = None,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Check every entry; exit code 1 if one is wrong."""
    for name in operations.own():
        operations.make(name)  # So that the classes of its configs are known, and entries are compared with them.
    root = open_store(store).path
    nothing_yet = source is None and not root.exists()
    with working("reading"):
        found = [] if nothing_yet else list(upkeep.verify(root if source is None else source))
    if as_json:
        print_json_list({"where": p.where, "level": p.level, "text": p.text} for p in found)
    else:
        print_table(["LEVEL", "WHERE", "WHAT"], [(p.level, p.where, p.text) for p in found])
        print(f"{counted(sum(p.level == 'error' for p in found), 'error')}.")
    raise typer.Exit(1 if any(p.level == "error" for p in found) else 0)


@app.command()
def prune(
    store: Store = None,
    older_than: Annotated[
        float | None, typer.Option(min=0, help="Also entries measured more than this many days ago.")
    ] = None,
    broken: Annotated[
        bool, typer.Option("--broken", help="Also entries that cannot be read, or were renamed because of that.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be removed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove files that crashed writers left, and old locks."""
    gone = upkeep.prune(open_store(store).path, older_than_days=older_than, broken=broken, dry_run=dry_run)
    if as_json:
        print_json([str(p) for p in gone])
        return
    for p in gone:
        tell(str(p))
    print(f"{counted(len(gone), 'file')} {'would be removed' if dry_run else 'removed'}.")


@app.command()
def adopt(
    source: Annotated[str | None, typer.Argument(help="A pack or a directory; the store by default.")] = None,
    *,
    old: Annotated[
        str,
        typer.Option(help="Where the code is that the entries were measured with: a directory, a wheel, or a python."),
    ],
    out: Annotated[str | None, typer.Option(help="The pack to write, for a SOURCE.")] = None,
    store: Store = None,
    device: OnlyDevice = None,
    op: OnlyOp = None,
    kernel: Annotated[
        list[str] | None, typer.Option(help="module:Kernel of an op that is not installed; as often as needed.")
    ] = None,
    old_kernel: Annotated[
        list[str] | None, typer.Option(help="The same in the old code, where it has another name.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be taken over.")] = False,
    as_json: AsJson = False,
) -> None:
    """Take over entries of kernels that changed in their source and not in what runs; exit code 1 if some stay stale.

    Each entry's program is made by the old code and by today's, and compared. Where they are the same, the entry gets
    today's source and keeps its measurement. The others stay as they are.

    For example:

    ejkernel cache adopt --old ../ejkernel-0.1

    ejkernel cache adopt pack.json --old ejkernel-0.1.0-py3-none-any.whl --out pack.json
    """
    from ejkernel.ops.offline import adoption  # Loads JAX.

    if (out is not None) != (source is not None and not dry_run):
        raise EjkernelError(
            "--out: a pack is only read, so name the pack to write; the store needs none, nor a dry run."
        )
    for name in kernel or []:
        operations.make(name)
    cache = open_store(store)
    held = list(cache.entries(device, op, packs=False) if source is None else layers.entries_of(source))
    if out is not None:
        check_nothing_lost("--out", out, held)
    chosen = [e for e in held if device in (None, e.place.device) and op in (None, e.place.op_id)]
    names = [f"ejkernel.modules:{path.partition(':')[2]}" for path in operations.own().values()]
    names += [*operations.announced().values(), *(kernel or [])]
    elsewhere = bool(kernel or old_kernel)
    with (
        adoption.old_code(old, [*names, *(old_kernel or [])], elsewhere=elsewhere) as code,
        working("comparing programs"),
    ):
        verdicts = adoption.compare(chosen, code, names)
    if source is None and not dry_run:
        verdicts = adoption.take_over(cache, verdicts)
    taken = {v.entry.place: adoption.taken_over(v) for v in verdicts if v.result == "same"}
    if out is not None:
        packs.write(out, [taken.get(e.place, e) for e in held])
    rows = [{**v.entry.place._asdict(), "result": v.result, "reason": v.reason} for v in verdicts]
    if as_json:
        print_json({"entries": rows, "current": len(chosen) - len(verdicts)})
    else:
        print_table(["DEVICE", "OP", "CALL KEY", "PROGRAM", "HOW"], [tuple(row.values()) for row in rows])
        did = "would be taken over" if dry_run else "taken over"
        left = len(verdicts) - len(taken)
        tell(f"{counted(len(taken), 'entry', 'entries')} {did}, {left} left, {len(chosen) - len(verdicts)} current.")
    raise typer.Exit(0 if len(taken) == len(verdicts) else 1)


def _data(entry: StoredEntry) -> dict[str, Any]:
    return entries.to_data(entry) | {"layer": entry.layer, "in_pack": entry.origin == "pack"}


def _row(entry: StoredEntry) -> tuple[str, ...]:
    state = "complete" if entry.complete else "partial"
    call = "  ".join(filter(None, (short_arguments(entry.signature), keywords_of(entry))))
    return (*entry.place, call, short_cfg(entry.cfg_data), state, entry.layer)


_NAMES = {"kernel_source": "kernel source", "time": "measured at", "device": "device name"}


_TOLD = {"timer", "measurement", "speedup", "rounds", "seconds", "cost", "counts", "candidates", "keywords"}
"""Statistics that have a line in words, or are the table of candidates."""


def _print_entry(entry: StoredEntry, trials: int) -> None:
    (call,) = summarise([entry], "")["calls"]
    measured, gain, cost = call["measurement"], call["speedup"], call["cost"]
    rows = [
        ("device", entry.place.device),
        ("layer", entry.layer),
        ("arrays", call["arrays"]),
        ("keywords", call["statics"]),
        ("config", short_cfg(entry.cfg_data)),
        ("config class", str(entry.cfg_data.get("type", ""))),
        ("state", "complete" if entry.complete else "partial"),
        ("time", "" if measured is None else f"{_time(measured)}, {measured['samples']} samples"),
        ("clock", call["timer"]),
        ("speed-up", "" if gain is None else f"{gain['value']:.2f} [{gain['low']:.2f}, {gain['high']:.2f}]"),
        ("work", "" if cost is None else f"{cost['flops']:.3g} operations, {cost['bytes']:.3g} bytes"),
        ("tuning", "" if call["seconds"] is None else f"{call['seconds']:.1f} s, {call['rounds']} rounds"),
        *((name, str(value)) for name, value in entry.statistics.items() if name not in _TOLD),
        ("lines of trials", str(trials)),
        *((_NAMES.get(name, name), text) for name, text in call["provenance"].items() if name != "timer"),
    ]
    tell(f"{entry.place.op_id}  {entry.place.call_key}")
    print_table(["WHAT", "VALUE"], [row for row in rows if row[1]])
    if call["candidates"]:
        print()
        headers = [*(name.upper() or "CONFIG" for name in call["fields"]), "TIME", "SAMPLES", "RESULT"]
        print_table(headers, [_fate(c) for c in call["candidates"]])


def _fate(c: dict[str, Any]) -> tuple[str, ...]:
    """One candidate: what is special about its config, its time, and its result."""
    first = (c["reason"].splitlines() or [""])[0]
    fate = f"{c['status']}: {first}" if first else c["status"]
    samples = "-" if c["n"] is None else str(c["n"])
    time = "-" if c["median_ms"] is None else _time(c)
    return (*c["values"], time, samples, f"{fate} (the guess)" if c["guess"] else fate)


def _time(c: dict[str, Any]) -> str:
    return time_text(c["median_ms"], c["low_ms"], c["high_ms"])


def _difference(d: Difference) -> dict[str, Any]:
    sides = {"left": d.left and d.left.cfg_data, "right": d.right and d.right.cfg_data}
    return {**d.place._asdict(), **sides}


def _print_difference(d: Difference) -> None:
    place = " ".join(d.place)
    if d.left is None or d.right is None:
        side, entry = ("left", d.left) if d.right is None else ("right", d.right)
        tell(f"{place}: only on the {side}: {short_cfg(entry.cfg_data) if entry else ''}")
        return
    for name, left, right in d.fields():
        tell(f"{place}: {name}: {left!r} -> {right!r}")


def _nothing(reason: str) -> NoReturn:
    tell(f"nothing written: {reason}", error=True)
    raise typer.Exit(1)


def _say_written(target: str, entries: int, as_json: bool) -> None:
    _say({"path": target, "entries": entries}, f"{counted(entries, 'entry', 'entries')} in {target}.", as_json)


def _say(data: dict[str, Any], text: str, as_json: bool) -> None:
    if as_json:
        print_json(data)
    else:
        tell(text)
