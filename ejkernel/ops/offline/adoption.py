"""Adoption: entries that were measured with older code of a kernel, taken over where today's makes the same program.

A kernel that was moved or rewritten has another source hash, and its entries count as stale. Whether the change touches
what runs is a question about programs: each entry's call is made again and lowered with its config, by the old code, in
a process of its own, and by today's. Where the texts are equal, what was measured then holds now.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from ejkernel import _compat
from ejkernel.errors import EjkernelError
from ejkernel.ops.offline import lowered_entries
from ejkernel.ops.store import merging
from ejkernel.ops.store.entry import StoredEntry
from ejkernel.ops.store.persistent import PersistentCache

Result = Literal["same", "differs", "not compared", "busy"]
_LOWERED, _COMPILED = "lowered", "compiled"


class OldCodeError(EjkernelError):
    """There is no older code to compare with, or it cannot be run."""


class OldCode(NamedTuple):
    """Older code, and how a process finds it."""

    python: str
    path: str | None
    kernels: Sequence[str]
    """`module:Kernel`, for the entries of their op ids."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of one entry whose kernel has another source today.

    Attributes:
      entry: As it is stored.
      result: Whether the programs are the same.
      reason: Which programs were compared, or why none were.
      source: Today's hash of the kernel's source; None if nothing was compared.
    """

    entry: StoredEntry
    result: Result
    reason: str
    source: str | None = None


@contextlib.contextmanager
def old_code(
    old: str | os.PathLike[str], kernels: Sequence[str], *, elsewhere: bool | None = None
) -> Iterator[OldCode]:
    """The code in a directory, in a wheel, or of the environment that a Python interpreter belongs to.

    A directory has a folder `ejkernel`, unless the kernels may come from `elsewhere`: by default if some are named.

    Raises:
      OldCodeError: There is no such thing.
    """
    path = Path(old).expanduser().absolute()
    with tempfile.TemporaryDirectory() as folder:
        if path.suffix == ".whl" and path.is_file():
            try:
                zipfile.ZipFile(path).extractall(folder)
            except zipfile.BadZipFile as error:
                raise OldCodeError(f"--old: {path} is not a wheel ({error}).") from error
            path = Path(folder)
        if path.is_dir():
            if not (path / "ejkernel").is_dir() and not (bool(kernels) if elsewhere is None else elsewhere):
                raise OldCodeError(f"--old: {path} has no folder ejkernel; name the folder that `import` looks into.")
            yield OldCode(sys.executable, os.pathsep.join([str(path), *sys.path]), kernels)
        elif path.is_file() and os.access(path, os.X_OK):
            # Not resolved: the interpreter of a virtual environment is a link, and knows its packages by that.
            yield OldCode(str(path), None, kernels)
        else:
            raise OldCodeError(f"--old: {path} is neither a directory, nor a wheel, nor a Python interpreter.")


def compare(entries: Iterable[StoredEntry], old: OldCode, kernels: Sequence[str]) -> list[Verdict]:
    """A verdict for each entry whose kernel has another source today; the others need none.

    Args:
      entries: Of a store or a pack.
      old: The code that they were measured with.
      kernels: `module:Kernel`, for the entries of their op ids, today.
    """
    today, stale, found = lowered_entries.known(kernels), [], []
    for entry in entries:
        if entry.provenance.get("kernel_source") is None:
            continue
        try:
            if _source(entry) not in lowered_entries.sources(_job(entry, _LOWERED), today):
                stale.append(entry)
        except lowered_entries.NotRebuiltError as error:
            found.append(Verdict(entry=entry, result="not compared", reason=f"today's code: {error}."))
    lowered = _verdicts(stale, old, today, _LOWERED)
    # Another text may be the same program in the end, which only a compiler for the device can tell.
    again = [v.entry for v in lowered if v.result == "differs" and v.reason == _LOWERED]
    compiled = {v.entry.place: v for v in _verdicts(again, old, today, _COMPILED)}
    found += [compiled.get(v.entry.place, v) for v in lowered]
    return [replace(v, reason=_WORDS.get(v.reason, v.reason)) for v in found]


_WORDS = {
    _LOWERED: "by the program as it is lowered",
    _COMPILED: "by the compiled program",
    f"{_LOWERED}, away": "by the program as it is lowered for that device, which is not here",
}


def _verdicts(entries: list[StoredEntry], old: OldCode, today: lowered_entries.Kernels, wanted: str) -> list[Verdict]:
    jobs = [_job(entry, wanted) for entry in entries]
    then = _ask(old, jobs) if jobs else []
    return [_verdict(e, a, job, today) for e, a, job in zip(entries, then, jobs, strict=True)]


def _verdict(entry: StoredEntry, a: dict[str, Any], job: dict[str, Any], today: lowered_entries.Kernels) -> Verdict:
    if "sources" in a and _source(entry) not in a["sources"]:
        have = " or ".join(filter(None, a["sources"]))
        reason = f"it was measured with source {_source(entry)}, and the old code is {have}."
        return Verdict(entry=entry, result="not compared", reason=reason)
    b = {} if "error" in a else lowered_entries.answer({**job, "source": None}, today)
    for code, side in (("the old code", a), ("today's code", b)):
        if "error" in side:
            return Verdict(entry=entry, result="not compared", reason=f"{code}: {side['error']}.")
    same = [program_text(text) for text in a["texts"]] == [program_text(text) for text in b["texts"]]
    away = job["wanted"] == _LOWERED and not b["here"]
    reason = f"{_LOWERED}, away" if away else job["wanted"]
    return Verdict(entry=entry, result="same" if same else "differs", reason=reason, source=b["sources"][0])


def _source(entry: StoredEntry) -> str:
    return str(entry.provenance["kernel_source"])


def _ask(old: OldCode, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a process that runs the old code answers."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"EJKERNEL_AUTOTUNE": "off"}
    env |= {} if old.path is None else {"PYTHONPATH": old.path}
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder, name)) for name in ("request.json", "answers.json")]
        Path(files[0]).write_text(json.dumps({"kernels": list(old.kernels), "jobs": jobs}))
        # Without the folder of the script on its path: its neighbours have common names.
        command = [old.python, "-P", str(lowered_entries.__file__), *files]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise OldCodeError(f"--old: the old code cannot be run (exit code {done.returncode}): {last}")
        found = json.loads(Path(files[1]).read_text())
    if found["jax"] != jax.__version__:
        raise OldCodeError(
            f"--old: the old code runs with JAX {found['jax']} and this is JAX {jax.__version__}, which makes other "
            "programs. Use the same JAX for both."
        )
    return found["answers"]


def _job(entry: StoredEntry, wanted: str) -> dict[str, Any]:
    return {
        **entry.place._asdict(),
        "device_name": str(entry.provenance.get("device", entry.place.device)),
        "signature": entry.signature,
        "keywords": entry.statistics.get("keywords") or {},
        "cfg": entry.cfg_data,
        "source": _source(entry),
        "wanted": wanted,
    }


# --- Texts ---

_TEXT = r'"(?:[^"\\]|\\.)*"'
_BYTECODE = re.compile(r'"(ML\\EFR(?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(rb'\\(\\|"|[0-9A-F]{2})')
_TABLES = re.compile(r"^(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:.+\n)*", re.MULTILINE)
_NOTES = re.compile(
    rf',? *(?:metadata=\{{(?:[^{{}}"]|{_TEXT})*\}}|jax\.result_info = {_TEXT}|\b(?:name|kernel_hash) = {_TEXT})'
)
"""A kernel's hash is that of its module, which stands beside it, with the places in files."""
_HEAD = re.compile(r"^((?:ENTRY )?%\S+) \(.*\) -> .* \{$", re.MULTILINE)
_NAMES = re.compile(rf"(custom_call )?(?:@(?:{_TEXT}|[\w.$-]+)|%[\w.-]+|^HloModule [^,\n]+)", re.MULTILINE)


def program_text(text: str) -> str:
    """A program, lowered or compiled, without what only people read: names, places in files, notes."""
    text = _BYTECODE.sub(_printed, text)
    text = _HEAD.sub(r"\1 {", _NOTES.sub("", _TABLES.sub("", text)))
    numbers: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        # What a custom call calls is no name of ours.
        return match[0] if match[1] else numbers.setdefault(match[0], f"{match[0][0]}{len(numbers)}")

    return _NAMES.sub(number, text)


def _printed(match: re.Match[str]) -> str:
    code = _ESCAPE.sub(lambda m: m[1] if len(m[1]) == 1 else bytes([int(m[1], 16)]), match[1].encode())
    return _compat.module_text(code) or match[0]


# --- Taking over ---


def taken_over(verdict: Verdict) -> StoredEntry:
    """The entry with today's source, and a note of where that comes from."""
    entry, now = verdict.entry, datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    note = f"from source {_source(entry)} on {now}, {verdict.reason}"
    notes = "; ".join(filter(None, [entry.provenance.get("taken_over"), note]))
    return replace(entry, provenance={**entry.provenance, "kernel_source": verdict.source, "taken_over": notes})


def take_over(cache: PersistentCache, verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Restamps those entries of a store whose programs are the same; what has changed since it was read stays."""
    return [_kept(cache, v) if v.result == "same" else v for v in verdicts]


def _kept(cache: PersistentCache, verdict: Verdict) -> Verdict:
    entry = verdict.entry
    with cache.tuning_lock(entry.key, timeout=0) as held:
        mine = cache.own(entry.key)
        if not held or mine is None or not merging.same(mine, entry):
            return replace(verdict, result="busy", reason="it was changed by another process meanwhile, and stays.")
        cache.add(taken_over(verdict))
    return verdict
