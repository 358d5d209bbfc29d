"""Overlays, policy overrides and cache changes, as every jit cache sees them.

Both values live in JAX user contexts, which are part of the key of each jit cache: a function that was jitted before
is traced again when they change, and found again when they change back.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax


class Lookup(Protocol):
    """Something that may hold a config under a key."""

    def get(self, *key: Any) -> Any:
        """The config under a key, or None."""
        ...


@dataclass(frozen=True)
class Overlay:
    """A tier on top of all caches. Two overlays with equal tokens hold the same configs."""

    token: Hashable
    source: Lookup = field(compare=False)


class Identity:
    """Equal only to an Identity of the very same object, which it keeps alive: an `id` alone can come back."""

    def __init__(self, target: object) -> None:
        self.target = target

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.target is other.target

    def __hash__(self) -> int:
        return id(self.target)


@dataclass(frozen=True)
class Override:
    """Changes to the policy of one selector, or (None) of all."""

    selector: Identity | None
    changes: tuple[tuple[str, Hashable], ...]


@dataclass(frozen=True)
class Scope:
    """What the `with` blocks around a call have set, outermost first."""

    overlays: tuple[Overlay, ...] = ()
    overrides: tuple[Override, ...] = ()


_scope = jax.make_user_context(default_value=Scope())
_generation = jax.make_user_context(default_value=0)
_lock = threading.Lock()


def current_scope() -> Scope:
    """The scope of this thread."""
    return _scope.value


@contextmanager
def entered(*, overlay: Overlay | None = None, override: Override | None = None) -> Iterator[None]:
    """Adds to the scope of this thread for the duration of a `with` block."""
    scope = current_scope()
    if overlay is not None:
        scope = replace(scope, overlays=(*scope.overlays, overlay))
    if override is not None:
        scope = replace(scope, overrides=(*scope.overrides, override))
    with _scope(scope):
        yield


def same_scope() -> AbstractContextManager[None]:
    """A context that gives another thread the scope of this one."""
    return _scope(current_scope())


def invalidate() -> None:
    """Makes every jitted function, in every thread, ask for its configs again."""
    with _lock:
        _generation.set_global(_generation.get_global() + 1)


class Served:
    """The answers that a cache has had a part in, so that only a change to one of them invalidates anything."""

    def __init__(self) -> None:
        self._answers: dict[Hashable, Any] = {}
        self._lock = threading.Lock()

    def note(self, key: Hashable, cfg: Any) -> None:
        """A call with this key was traced with `cfg`."""
        with self._lock:
            self._answers[key] = cfg

    def changed(self, key: Hashable, cfg: Any) -> None:
        """The cache now holds `cfg` (None: nothing) under `key`."""
        with self._lock:
            if key not in self._answers or same_cfg(self._answers[key], cfg):
                return
            del self._answers[key]
        invalidate()


def same_cfg(a: Any, b: Any) -> bool:
    """Whether two configs are interchangeable."""
    return a is b or (type(a) is type(b) and bool(a == b))


def token_of(mapping: Mapping[Any, Any]) -> Hashable:
    """A value that is equal for mappings with equal contents."""
    return frozenset((key, type(cfg), hashable(cfg)) for key, cfg in mapping.items())


def hashable(cfg: Any) -> Hashable:
    """`cfg`, or a stand-in for it that is equal for equal configs, if it cannot be hashed."""
    try:
        hash(cfg)
    except TypeError:
        if isinstance(cfg, Mapping):
            return frozenset((k, hashable(v)) for k, v in cfg.items())
        if isinstance(cfg, (list, tuple)):
            return (type(cfg), *map(hashable, cfg))
        if isinstance(cfg, (set, frozenset)):
            return frozenset(cfg)
        state = getattr(cfg, "__dict__", None)
        if state is None:
            raise
        return (type(cfg), hashable(state))
    return cfg
