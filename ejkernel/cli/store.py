"""Which store a command works on."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection

from ejkernel.ops.store.entry import StoredEntry
from ejkernel.ops.store.persistent import PersistentCache, StoreSettingError


def open_store(path: str | None) -> PersistentCache:
    """The store in a directory, which need not exist yet, or the default one."""
    cache = PersistentCache(path)
    if cache.path.exists() and not cache.path.is_dir():
        raise StoreSettingError(f"--store: {cache.path} is a file; a store is a directory. Packs go as arguments.")
    return cache


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
