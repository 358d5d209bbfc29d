"""`ejkernel tune --for`: ranking configs for a device that is not here."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ejkernel.cli import calls, suites
from ejkernel.cli.output import print_json, print_table, short_repr, tell
from ejkernel.errors import EjkernelError
from ejkernel.ops.config.asking import source_of
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.store import entry as entries
from ejkernel.ops.store import packs, places, provenance
from ejkernel.ops.store.entry import StoredEntry
from ejkernel.ops.store.persistent import PersistentCache
from ejkernel.ops.tuning.clock import Compilers, Ranking, RankingError
from ejkernel.ops.utils import targets
from ejkernel.ops.utils.targets import TARGETS, Target

Call = Invocation[Any, Any]


class Wanted(NamedTuple):
    """The calls that the command line names."""

    target: str | None
    specs_file: Path | None
    args: str
    settings: list[str]
    grad: bool
    suite: bool
    only: Sequence[str]
    again: bool


def complete(incomplete: str) -> list[str]:
    """Names of targets that begin with what was typed, for the shell."""
    return [name for name in TARGETS if name.startswith(incomplete)]


def tune(
    cache: PersistentCache,
    name: str,
    wanted: Wanted,
    out: Path | None,
    held: list[StoredEntry],
    *,
    jobs: int,
    compile_s: float,
    most: int | None,
    no_trials: bool,
    as_json: bool,
) -> int:
    """Ranks the configs of the calls, stores the best, and returns the exit code."""
    target = targets.find(name)
    if not jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]
        # Whatever is installed for the target must not be taken for a device of this machine.
        jax.config.update("jax_platforms", "cpu")
    with targets.compiling_for(target):
        named, missing = _calls(wanted)
        for call in named:
            assert call.inv.key  # Known from now on: a key names the device that was asked for first.
    old = {entry.place: entry for entry in held}
    found, failed = dict[Any, StoredEntry](), list(missing)
    rows: list[dict[str, Any]] = []
    with Compilers(target, jobs=jobs, compile_s=compile_s) as compilers:
        for number, call in enumerate(named, 1):
            place = places.place_of(call.inv.key)
            if not wanted.again and _is_decided(old.get(place), call, target):
                continue
            try:
                ranking = _rank(compilers, call, most)
            except RankingError as error:
                failed.append(f"{call.inv.op_id} {call.inv.call_key}: {error}")
                continue
            tell(f"{number} of {len(named)}: {call.inv.op_id}, {call.workload}: {_told(ranking)}", error=True)
            found[place] = _entry(call.inv, ranking, target)
            rows.append(_row(call, ranking, target))
            _keep(cache, found, old, out, no_trials)  # After each one: the same command goes on where it was stopped.
    if as_json:
        print_json({"ranked": rows, "failed": failed})
    else:
        columns = ["OP", "CALL KEY", "CONFIG", "CLOCK", "BUNDLES", "OF THE GUESS'S"]
        print_table(columns, [[str(row[name] or "-") for name in _SHOWN] for row in rows])
    for line in failed:
        tell(f"not tuned: {line}", error=True)
    return 1 if failed else 0


_SHOWN = ("op_id", "call_key", "cfg", "clock", "bundles", "ratio")


def _calls(wanted: Wanted) -> tuple[list[suites.NamedCall], list[str]]:
    if wanted.suite:
        if wanted.target is None or wanted.specs_file or wanted.args or wanted.settings or wanted.grad:
            raise EjkernelError(
                "--suite goes with the name of an operation, without --specs, --args, --set and --grad."
            )
        return suites.find(wanted.target, wanted.only, with_data=False), []
    if wanted.only or wanted.again:
        raise EjkernelError("--only and --again go with --suite.")
    found, missing = calls.find(wanted.target, wanted.specs_file, wanted.args, wanted.settings, wanted.grad)
    return [suites.NamedCall(inv.call_key, inv) for inv in found], missing


def _is_decided(entry: StoredEntry | None, call: suites.NamedCall, target: Target) -> bool:
    """Whether a pack holds a measured config, or one that today's compiler ranked for today's kernel."""
    assert call.inv.kernel is not None
    if entry is None or entry.clock is None:
        return entry is not None
    same = entry.provenance.get("compiler") == _compiler(target)
    return same and provenance.changes(entry.provenance, source_of(call.inv.kernel)) is None


def _rank(compilers: Compilers, call: suites.NamedCall, most: int | None) -> Ranking:
    assert call.inv.kernel is not None
    return compilers.rank(call.inv, call.inv.kernel, most=most)


def _entry(inv: Call, ranking: Ranking, target: Target) -> StoredEntry:
    assert inv.kernel is not None
    origin = {"clock": ranking.clock, "device": target.kind, "compiler": _compiler(target)}
    facts = provenance.collect(source_of(inv.kernel)) | origin
    facts.pop("driver", None)  # That of the device at hand.
    return entries.make(
        inv.key, ranking.cfg, signature=inv.signature, provenance=facts, statistics=ranking.statistics()
    )


def _compiler(target: Target) -> str:
    package = "libtpu" if target.platform == "tpu" else "jax-cuda13-plugin"
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return package


def _keep(
    cache: PersistentCache, found: dict[Any, StoredEntry], old: dict[Any, StoredEntry], out: Path | None, small: bool
) -> None:
    """Writes the pack, or the store if there is none: never over what was measured."""
    if out is not None:
        kept = {place: packs.without_trials(e) if small else e for place, e in found.items()}
        packs.write(out, (old | kept).values())
        return
    for entry in found.values():
        if (mine := cache.own(*entry.place)) is None or mine.clock is not None:
            cache.add(entry)


def _told(ranking: Ranking) -> str:
    dropped = sum(each.reason is not None for each in ranking.candidates)
    return f"{len(ranking.candidates) - dropped} compile, {dropped} do not or spill"


def _row(call: suites.NamedCall, ranking: Ranking, target: Target) -> dict[str, Any]:
    best = ranking.candidates[0]
    guess = next(each for each in ranking.candidates if each.is_guess)
    device, op_id, call_key = call.inv.key
    ratio = None if best.bundles is None or guess.bundles is None else round(best.bundles / guess.bundles, 3)
    return {
        "device": device,
        "op_id": op_id,
        "call_key": call_key,
        "workload": call.workload,
        "cfg": short_repr(best.cfg),
        "clock": ranking.clock,
        "bundles": None if best.bundles is None else round(best.bundles),
        "ratio": ratio,
        "dropped": [
            {"cfg": short_repr(each.cfg), "reason": each.reason}
            for each in ranking.candidates
            if each.reason is not None
        ],
    }
