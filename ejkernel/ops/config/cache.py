"""The in-memory tier, and temporary tiers on top of everything."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Generic

from ejkernel.errors import EjkernelError
from ejkernel.ops.core import context
from ejkernel.ops.core.types import Cfg
from ejkernel.ops.utils.canonical import Identity


class CacheKeyError(EjkernelError, TypeError):
    """A cache was called with something that is not a key."""


def as_key(method: str, parts: tuple[Any, ...]) -> Hashable:
    """One key from either call form: `(key,)` or `(device, op_id, call_key)`."""
    if len(parts) == 3:
        key = parts
    elif len(parts) == 1:
        key = parts[0]
    else:
        raise CacheKeyError(f"{method}: give one key or device, op_id, call_key; got {len(parts)} values: {parts!r}.")
    try:
        hash(key)
    except TypeError as error:
        raise CacheKeyError(f"{method}: a key must be hashable, got {parts!r}.") from error
    return key


class ConfigCache(Generic[Cfg]):
    """Configs by key, in memory, safe to share between threads."""

    def __init__(self, entries: Mapping[Any, Cfg] | None = None) -> None:
        self._entries: dict[Hashable, Cfg] = {}
        self._lock = threading.RLock()
        self.served = context.Served()
        for key, cfg in (entries or {}).items():
            self.put(key, cfg)

    def put(self, *key_and_cfg: Any) -> None:
        """`put(key, cfg)` or `put(device, op_id, call_key, cfg)`: jitted calls that it concerns are traced again."""
        if len(key_and_cfg) not in (2, 4):
            raise CacheKeyError(
                f"ConfigCache.put: give (key, cfg) or (device, op_id, call_key, cfg), got {len(key_and_cfg)} values."
            )
        *parts, cfg = key_and_cfg
        key = as_key("ConfigCache.put", tuple(parts))
        with self._lock:
            self._entries[key] = cfg
        self.served.changed(key, cfg)

    def get(self, *key: Any) -> Cfg | None:
        """`get(key)` or `get(device, op_id, call_key)`: the config, or None."""
        return self._entries.get(as_key("ConfigCache.get", key))

    def delete(self, *key: Any) -> None:
        """Removes an entry, if it is there."""
        found = as_key("ConfigCache.delete", key)
        with self._lock:
            present = self._entries.pop(found, None) is not None
        if present:
            self.served.changed(found, None)

    def clear(self) -> None:
        """Removes every entry."""
        for key in list(self._entries):
            self.delete(key)

    def items(self) -> list[tuple[Hashable, Cfg]]:
        """A snapshot of the entries."""
        with self._lock:
            return list(self._entries.items())

    def __contains__(self, key: Hashable) -> bool:
        return as_key("ConfigCache", (key,)) in self._entries

    def __iter__(self) -> Iterator[Hashable]:
        return iter([key for key, _ in self.items()])

    def __len__(self) -> int:
        return len(self._entries)


def _as_call_key(key: Any) -> tuple[str, str, str]:
    """A key of an overlay, checked: calls look for device, op id and call key, so another key is never found."""
    if isinstance(key, tuple) and len(key) == 3 and all(isinstance(part, str) for part in key):
        return key
    raise CacheKeyError(
        f"overlay_cache: a key must be (device, op_id, call_key), got {key!r:.200}. Take `executor.explain(kernel, "
        "*args).key`, or an AutotuningResult."
    )


class _FrozenTier:
    """A copy of a mapping, made when the overlay was entered."""

    def __init__(self, mapping: Mapping[Any, Any]) -> None:
        self._entries: dict[Hashable, Any] = {_as_call_key(key): cfg for key, cfg in mapping.items()}
        self.token = context.token_of(self._entries)

    def get(self, *key: Any) -> Any:
        return self._entries.get(as_key("overlay_cache", key))


def overlay_cache(source: ConfigCache[Any] | Mapping[Any, Any]) -> AbstractContextManager[None]:
    """Puts `source` on top of all caches inside the `with` block; the innermost overlay wins.

    A ConfigCache stays live: what is put into it inside the block counts. A mapping counts as it is on entry.
    """
    if isinstance(source, Mapping):
        tier = _FrozenTier(source)
        return context.entered(overlay=context.Overlay(tier.token, tier))
    if not callable(getattr(source, "get", None)):
        raise CacheKeyError(f"overlay_cache: expected a cache or a mapping, got {type(source).__name__}.")
    return context.entered(overlay=context.Overlay(Identity(source), source))
