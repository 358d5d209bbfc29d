"""Which store a command works on."""

from __future__ import annotations

from ejkernel.ops.config.persistent import PersistentCache, StoreSettingError


def open_store(path: str | None) -> PersistentCache:
    """The store in a directory, which need not exist yet, or the default one."""
    cache = PersistentCache(path)
    if cache.path.exists() and not cache.path.is_dir():
        raise StoreSettingError(f"--store: {cache.path} is a file; a store is a directory. Packs go as arguments.")
    return cache
