"""Maintenance of a store: what is wrong in it, and what can be removed."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import os
import re
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from ejkernel.ops.store import files, layers, locks, packs
from ejkernel.ops.store.entry import EntryError, StoredEntry
from ejkernel.ops.store.files import StoreFiles
from ejkernel.ops.utils import serialize
from ejkernel.ops.utils.fingerprint import short_hash

DAY_S = 86400.0
_TEMPORARY = re.compile(re.escape(files.TEMPORARY) + r"(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """An error in a file, or a note about it."""

    where: str
    level: Literal["error", "note"]
    text: str


def verify(source: str | os.PathLike[str]) -> Iterator[Finding]:
    """What is wrong with a store's directory, or with a pack."""
    path = Path(source).expanduser() if not packs.is_remote(os.fspath(source)) else None
    if path is not None and path.is_dir():
        yield from _verify_directory(StoreFiles(path))
        for pack in sorted(path.glob("*.json")):
            yield from _verify_pack(str(pack))
    else:
        yield from _verify_pack(os.fspath(source))


def prune(
    root: Path, *, older_than_days: float | None = None, broken: bool = False, dry_run: bool = False
) -> list[Path]:
    """Removes files that are not needed and returns them: temporary files of dead writers, and old locks.

    Entries are removed only on request: those measured more than `older_than_days` ago, and with `broken` those that
    cannot be read, or were renamed because of that. Trials of an unfinished tuning stay.
    """
    store = StoreFiles(root)
    gone = [path for path in store.all_files() if _is_litter(path) or (broken and _is_set_aside(path))]
    if older_than_days is not None or broken:
        for path in store.scan():
            try:
                if _age_days(layers.read_entry(path)) > (math.inf if older_than_days is None else older_than_days):
                    trials = path.with_name(path.name.partition(".")[0] + files.TRIALS)
                    gone += [p for p in (path, trials) if p.exists()]
            except (EntryError, OSError):
                gone += [path] if broken else []
    if not dry_run:
        for path in gone:
            path.unlink(missing_ok=True)
            _remove_empty(path.parent, root)
    return gone


def _verify_directory(store: StoreFiles) -> Iterator[Finding]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", files.StoreWarning)
        paths = list(store.scan())
    for warning in told:
        yield Finding(where=str(store.root), level="error", text=str(warning.message))
    for path in paths:
        try:
            entry = layers.read_entry(path)
        except (EntryError, OSError) as e:
            yield Finding(where=str(path), level="error", text=str(e))
        else:
            yield from _verify_entry(entry, str(path))
    for path in store.all_files():
        if _is_set_aside(path):
            yield Finding(where=str(path), level="note", text="was unreadable and has been renamed.")


def _verify_pack(source: str) -> Iterator[Finding]:
    try:
        pack = packs.read(source)
    except (packs.PackError, OSError) as e:
        yield Finding(where=source, level="error", text=str(e))
        return
    yield from (Finding(where=source, level="error", text=text) for text in pack.problems)
    seen: set[Any] = set()
    for entry in pack.entries:
        where = f"{source}: {'/'.join(entry.place)}"
        if entry.place in seen:
            yield Finding(where=where, level="error", text="is there twice.")
        seen.add(entry.place)
        yield from _verify_entry(entry, where)


def _verify_entry(entry: StoredEntry, where: str) -> Iterator[Finding]:
    if entry.signature is not None and short_hash(entry.signature) != entry.place.call_key:
        # Not an error: a kernel may build its own keys.
        yield Finding(where=where, level="note", text="its call key is not the hash of its signature.")
    try:
        serialize.decode_cfg(entry.cfg_data, named_only=True)
    except serialize.UnknownClassError:
        pass  # Only a program that has the class can check this.
    except serialize.ConfigMismatchError as e:
        yield Finding(where=where, level="error", text=str(e))


def _is_set_aside(path: Path) -> bool:
    return path.name.endswith(files.BROKEN)


def _is_litter(path: Path) -> bool:
    if match := _TEMPORARY.match(path.name):
        return _is_orphan(path, match["host"], int(match["pid"]))
    return path.parent.name == files.LOCKS and _is_old(path) and _is_free(path)


def _is_orphan(path: Path, host: str, pid: int) -> bool:
    if host != files.host() or os.name != "posix":  # On other systems os.kill(pid, 0) does more than ask.
        return _is_old(path)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # Alive, but another user's process.
    return _is_old(path)


def _is_old(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime > DAY_S
    return False


def _is_free(path: Path) -> bool:
    with locks.file_lock(path, timeout=0) as held:
        return held


def _age_days(entry: StoredEntry) -> float:
    text = str(entry.provenance.get("time", ""))
    try:
        measured = datetime.datetime.fromisoformat(text)
    except ValueError:
        return 0.0  # Its age is unknown: it stays.
    if measured.tzinfo is None:
        measured = measured.replace(tzinfo=datetime.UTC)
    return (datetime.datetime.now(datetime.UTC) - measured).total_seconds() / DAY_S


def _remove_empty(folder: Path, root: Path) -> None:
    """Removes folders that have become empty, up to the store's own."""
    while folder != root:
        try:
            folder.rmdir()
        except OSError:  # Not empty.
            return
        folder = folder.parent
