"""Overlays, policy overrides and cache changes, as every jit cache sees them.

Both values live in JAX user contexts, which are part of the key of each jit cache: a function that was jitted before
is traced again when they change, and found again when they change back.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from ejkernel.ops.utils.arguments import scalar_key


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


class Override(NamedTuple):
    """Changes to the policy of one selector, or (None) of all."""

    selector: Identity | None
    changes: tuple[tuple[str, Hashable], ...]


class Scope(NamedTuple):
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
        scope = scope._replace(overlays=(*scope.overlays, overlay))
    if override is not None:
        scope = scope._replace(overrides=(*scope.overrides, override))
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
        self._answers: dict[Hashable, list[Hashable]] = {}
        self._guessed: dict[Hashable, set[Hashable]] = {}
        self._held: dict[Hashable, Hashable] = {}
        self._lock = threading.Lock()

    def ask(self, key: Hashable) -> None:
        """A call with this key is about to be answered: a change from now on must not go unnoticed."""
        with self._lock:
            self._answers.setdefault(key, []).append(_PENDING)

    def note(self, key: Hashable, cfg: Any, *, guessed: bool = False) -> None:
        """The call that asked was traced with `cfg`; if that was a guess, a neighbour's entry may better it."""
        token = _token(cfg)
        with self._lock:
            answers = self._answers.setdefault(key, [])
            if _PENDING in answers:
                answers.remove(_PENDING)
            if token not in answers:
                answers.append(token)
            if guessed:
                self._guessed.setdefault(_group(key), set()).add(key)

    def forget(self, key: Hashable) -> None:
        """The call that asked was answered by somebody else, whom a change here does not concern."""
        with self._lock:
            answers = self._answers.get(key, [])
            if _PENDING in answers:
                answers.remove(_PENDING)

    def changed(self, key: Hashable, cfg: Any) -> None:
        """The cache now holds `cfg` (None: nothing) under `key`."""
        token, group = _token(cfg), _group(key)
        with self._lock:
            answers = self._answers.get(key, [])
            guessed = self._guessed.get(group, set())
            # Neighbours notice only what is new: not what this cache held, or has served, before.
            new = self._held.get(key) != token and (key in guessed or not answers)
            self._held[key] = token
            if all(answer == token for answer in answers) and not (new and guessed - {key}):
                return
            self._answers.pop(key, None)
            self._guessed.pop(group, None)
        invalidate()


class _Pending:
    """An answer that is not known yet."""


_PENDING = _Pending()


def _group(key: Hashable) -> Hashable:
    """Device and operation, within which one call's config may serve another."""
    return key[:2] if isinstance(key, tuple) and len(key) == 3 else key


def same_cfg(a: Any, b: Any) -> bool:
    """Whether two configs are interchangeable."""
    return a is b or (type(a) is type(b) and identity(a) == identity(b))


def _token(cfg: Any) -> Hashable:
    """What a config is now, whatever becomes of the object; where that cannot be said, the object itself."""
    try:
        return identity(cfg)
    except (TypeError, RecursionError):
        return Identity(cfg)


def token_of(mapping: Mapping[Any, Any]) -> Hashable:
    """A value that is equal for mappings with equal contents."""
    return frozenset((key, identity(cfg)) for key, cfg in mapping.items())


def identity(cfg: Any) -> Hashable:
    """A value that is equal for configs that are: in all their fields, and in the types of these."""
    if isinstance(cfg, Mapping):
        return type(cfg), frozenset((k, identity(v)) for k, v in cfg.items())
    if isinstance(cfg, (list, tuple)):
        return type(cfg), *map(identity, cfg)
    if isinstance(cfg, (set, frozenset)):
        return type(cfg), frozenset(map(identity, cfg))
    if isinstance(cfg, np.ndarray):
        return np.ndarray, cfg.dtype.str, cfg.shape, cfg.tobytes()
    if is_dataclass(cfg) and not isinstance(cfg, type):
        return type(cfg), *(identity(getattr(cfg, f.name)) for f in fields(cfg))
    if type(cfg).__eq__ is object.__eq__ and hasattr(cfg, "__dict__") and not _is_its_name(cfg):
        # A class of its own making that compares by address: its attributes tell.
        return type(cfg), identity(vars(cfg))
    try:
        hash(cfg)
    except TypeError:
        return type(cfg), identity(vars(cfg))
    return type(cfg), scalar_key(cfg)


def _is_its_name(x: Any) -> bool:
    """Whether something is what it is by its place, not by its contents: functions, classes, modules."""
    return callable(x) or isinstance(x, ModuleType)


def is_frozen(cfg: Any) -> bool:
    """Whether a config surely cannot change under whoever holds it."""
    if isinstance(cfg, tuple):
        return all(map(is_frozen, cfg))
    if is_dataclass(cfg) and not isinstance(cfg, type):
        return cfg.__dataclass_params__.frozen and all(is_frozen(getattr(cfg, f.name)) for f in fields(cfg))  # pyright: ignore[reportAttributeAccessIssue]
    return cfg is None or isinstance(cfg, (bool, int, float, complex, str, bytes, Enum, np.dtype)) or callable(cfg)
