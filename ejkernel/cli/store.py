"""Which store a command works on."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from ejkernel.cli.output import check_file, counted
from ejkernel.errors import EjkernelError
from ejkernel.ops.store import packs
from ejkernel.ops.store.entry import StoredEntry
from ejkernel.ops.store.persistent import PersistentCache, Stale, StoreSettingError


def open_store(path: str | None, *, stale: Stale | None = None) -> PersistentCache:
    """The store in a directory, which need not exist yet, or the default one."""
    cache = PersistentCache(path, stale=stale)
    if cache.path.exists() and not cache.path.is_dir():
        raise StoreSettingError(f"--store: {cache.path} is a file; a store is a directory. Packs go as arguments.")
    return cache


def held_by(option: str, target: str | os.PathLike[str]) -> list[StoredEntry]:
    """The entries of a pack that is to be written again; none if there is no file yet, or an empty one.

    Raises an error if the file cannot be written, is no pack, or has entries that cannot be read: they would be lost.
    """
    if packs.is_remote(os.fspath(target)):
        return []
    check_file(option, target)
    file = Path(target).expanduser()
    if not file.exists() or file.stat().st_size == 0:
        return []
    try:
        pack = packs.read(target)
    except packs.PackError as e:
        raise EjkernelError(f"{option}: {e} Name another file, or remove this one.") from e
    if pack.problems:
        unread = counted(len(pack.problems), "entry", "entries")
        raise EjkernelError(
            f"{option}: {target} has {unread} that cannot be read and would be lost ({pack.problems[0]}). Name another "
            "file, or remove this one."
        )
    return pack.entries


def check_nothing_lost(option: str, target: str, written: Iterable[StoredEntry]) -> None:
    """Refuses to write a pack over one that has entries of other calls."""
    places = {entry.place for entry in written}
    lost = sum(entry.place not in places for entry in held_by(option, target))
    if lost:
        raise EjkernelError(
            f"{option}: {target} is a pack with {counted(lost, 'entry', 'entries')} of other calls, which would be "
            "lost. `ejkernel cache merge` adds to a pack that is named among its sources, too; else name another file, "
            "or remove this one."
        )


def stored_names(part: str) -> Callable[[str], list[str]]:
    """Completes the devices or ops of the default store and its packs, for the shell."""

    def complete(incomplete: str) -> list[str]:
        names = {getattr(entry.place, part) for entry in PersistentCache().entries()}
        return sorted(name for name in names if name.startswith(incomplete))

    return complete


def why_nothing(found: Collection[StoredEntry], where: str, device: str | None, op: str | None) -> str:
    """The message if none of the entries that were `found` has the given device and op."""
    if not found:
        return f"{where} has no entries."
    for option, asked, known in (
        ("--device", device, {entry.place.device for entry in found}),
        ("--op", op, {entry.place.op_id for entry in found}),
    ):
        if asked is not None and asked not in known:
            close = difflib.get_close_matches(asked, known, 1)
            hint = f"Did you mean {close[0]!r}?" if close else f"It has {', '.join(sorted(known))}."
            return f"{option}: {where} has no entries of {asked!r}. {hint}"
    return f"{where} has no entries of {op!r} on {device!r}."
