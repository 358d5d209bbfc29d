"""Overlays, policy overrides and cache changes, as every jit cache sees them.

Both values live in JAX user contexts, which are part of the key of each jit cache: a function that was jitted before
is traced again when they change, and found again when they change back. JAX has a context per thread only, but tasks of
an event loop share a thread. So what a block adds is kept in a context variable, and JAX gets that of the running task.
"""

from __future__ import annotations

import contextvars
import threading
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from ejkernel import _compat
from ejkernel.ops.utils.canonical import Identity, canonical, token


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


class Override(NamedTuple):
    """Changes to the policy of one selector, or (None) of all."""

    selector: Identity | None
    changes: tuple[tuple[str, Hashable], ...]


class Scope(NamedTuple):
    """What the `with` blocks around a call have set, outermost first."""

    overlays: tuple[Overlay, ...] = ()
    overrides: tuple[Override, ...] = ()


_NOTHING = Scope()


class _Seen:
    """A scope as a key of jit caches: only code inside the scope finds it again.

    JAX looks a function up before our code runs, so a change of the running task is noticed here.
    """

    __slots__ = ("_hash", "scope", "wrong")

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self._hash = hash((scope.overlays, tuple(o for o in scope.overrides if o.selector is None)))
        self.wrong = False
        """Whether code of another scope has used it: cache entries under it are then never found."""

    def __eq__(self, other: object) -> bool:
        if type(other) is not _Seen or self._hash != other._hash:
            return False
        _local.thread.follow()
        if self.wrong or other.wrong:
            return False
        one, two = self.scope, other.scope
        return one is two or one == two or _visible(one) == _visible(two)

    def __hash__(self) -> int:
        thread = _local.thread
        thread.follow()
        if thread.seen is self:
            # A cache may now keep it as a key, and Python does not compare identical keys with `==`.
            thread.show(self.scope)
        return self._hash


class _Block:
    """What one `with` block adds to the scope of the code inside."""

    def __init__(self, thread: _Thread, overlay: Overlay | None, override: Override | None) -> None:
        self.outer = _not_left(_block.get())
        self.overlay = overlay
        self.override = override
        self.thread: _Thread | None = thread
        """The thread that entered it; None once it is left."""


def _not_left(block: _Block | None) -> _Block | None:
    while block is not None and block.thread is None:
        block = block.outer
    return block


class _Thread:
    """The context that JAX has in one thread."""

    def __init__(self) -> None:
        self.open: set[_Block] = set()
        self.seen: _Seen | None = None
        self.shown: Any = self
        """The innermost block, open or not, of the code whose scope JAX has."""
        self._unshow: Any = None

    def scope(self) -> Scope:
        """The scope of the running code: the blocks of this thread around it that have not been left."""
        blocks, block = [], _block.get()
        while block is not None:
            if block.thread is self:
                blocks.append(block)
            block = block.outer
        overlays = tuple(b.overlay for b in reversed(blocks) if b.overlay is not None)
        overrides = tuple(b.override for b in reversed(blocks) if b.override is not None)
        return Scope(overlays, overrides)

    def follow(self) -> None:
        """Gives JAX the scope of the running task if it has that of another task."""
        if self.seen is not None and _block.get() is not self.shown:
            self.seen.wrong = True
            self.show()

    def show(self, scope: Scope | None = None) -> None:
        """Gives JAX the scope of the running code, or none if no block is open."""
        self.shown = _block.get()
        if self.open:
            self.seen = _Seen(self.scope() if scope is None else scope)
            shown = _scope(self.seen)
            shown.__enter__()
            self._unshow = self._unshow or shown
        elif self._unshow is not None:
            self._unshow.__exit__(None, None, None)
            self._unshow = self.seen = None


class _Local(threading.local):
    def __init__(self) -> None:
        self.thread = _Thread()


_local = _Local()
_block: contextvars.ContextVar[_Block | None] = contextvars.ContextVar("ejkernel_block", default=None)
_asked: weakref.WeakSet[Any] = weakref.WeakSet()
"""Selectors that have answered inside a jitted function."""
_scope = jax.make_user_context(default_value=_Seen(_NOTHING))
_generation = jax.make_user_context(default_value=0)
_lock = threading.Lock()


def _visible(scope: Scope) -> Scope:
    """The part of a scope that functions jitted so far may depend on."""
    overrides = tuple(o for o in scope.overrides if o.selector is None or was_asked(o.selector.target))
    return Scope(scope.overlays, overrides)


def current_scope() -> Scope:
    """The scope of the running code."""
    thread = _local.thread
    thread.follow()
    return thread.scope() if thread.open else _NOTHING


def overrides_of(selector: Any) -> list[Override]:
    """The overrides of the policy of a selector that is about to answer, the innermost last."""
    if _compat.trace_state.value is not _compat.EAGER:
        _asked.add(selector)
    return [o for o in current_scope().overrides if o.selector is None or o.selector.target is selector]


def was_asked(selector: Any) -> bool:
    """Whether a function that was jitted so far may depend on a selector."""
    return selector in _asked


@contextmanager
def entered(*, overlay: Overlay | None = None, override: Override | None = None) -> Iterator[None]:
    """Adds to the scope of this thread, and of this task in it, for the duration of a `with` block."""
    with _entered([(overlay, override)]):
        yield


def same_scope() -> AbstractContextManager[None]:
    """A context that gives another thread the scope of this one."""
    scope = current_scope()
    return _entered([*((overlay, None) for overlay in scope.overlays), *((None, o) for o in scope.overrides)])


@contextmanager
def no_scope() -> Iterator[None]:
    """Nothing of the scope for the duration of a `with` block: for compiled programs, which no longer depend on it.

    JAX compares the scope at every call of a program. That is half a microsecond, and more for a program that was
    first called in another scope: a tenth of a small kernel's time.
    """
    thread = _local.thread
    thread.open, kept = set(), thread.open
    thread.show()
    try:
        yield
    finally:
        thread.open |= kept
        thread.show()


@contextmanager
def _entered(additions: Iterable[tuple[Overlay | None, Override | None]]) -> Iterator[None]:
    thread, blocks = _local.thread, []
    for overlay, override in additions:
        blocks.append(_Block(thread, overlay, override))
        _block.set(blocks[-1])
    thread.open.update(blocks)
    thread.show()
    try:
        yield
    finally:
        for block in blocks:
            block.thread = None
        thread.open.difference_update(blocks)
        _block.set(_not_left(_block.get()))
        thread.shown = thread  # Another thread has not noticed the change yet.
        _local.thread.show()


def invalidate() -> None:
    """Makes every jitted function, in every thread, look for its configs again."""
    with _lock:
        _generation.set_global(_generation.get_global() + 1)


MAX_SERVED = 65536
"""How many answered calls a cache remembers; bounded, because a process may live long."""


class Served:
    """The answers that depend on a cache, so that only a change to one of them invalidates anything."""

    def __init__(self) -> None:
        self._answers: dict[Hashable, list[Hashable]] = {}
        self._guessed: dict[Hashable, set[Hashable]] = {}
        self._held: dict[Hashable, Hashable] = {}  # The config that other calls may use.
        self._lock = threading.Lock()

    def ask(self, key: Hashable) -> None:
        """Notes that a call with this key is about to be answered, so that changes from now on are noticed."""
        with self._lock:
            full = len(self._answers) >= MAX_SERVED and key not in self._answers
            if full:
                self._answers.clear()
                self._guessed.clear()
                self._held.clear()
            self._answers.setdefault(key, []).append(_PENDING)
        if full:
            invalidate()  # A call that is still in use asks again, and is noted again.

    def note(self, key: Hashable, cfg: Any, *, guessed: bool = False) -> None:
        """Notes that the call was traced with `cfg`; if that was a guess, an entry of a near shape may replace it."""
        answer = token(cfg)
        with self._lock:
            answers = self._answers.setdefault(key, [])
            if _PENDING in answers:
                answers.remove(_PENDING)
            if answer not in answers:
                answers.append(answer)
            if guessed:
                self._guessed.setdefault(_group(key), set()).add(key)

    def forget(self, key: Hashable) -> None:
        """Forgets a call that another cache answered: changes here do not concern it."""
        with self._lock:
            answers = self._answers.get(key, [])
            if _PENDING in answers:
                answers.remove(_PENDING)

    def changed(self, key: Hashable, cfg: Any, *, transferable: bool = True) -> None:
        """Notes that the cache now holds `cfg` (or None) under `key`; other calls may use it if it is transferable."""
        held, group = token(cfg), _group(key)
        for_others = held if transferable else None
        with self._lock:
            answers = self._answers.get(key, [])
            guessed = self._guessed.get(group, set())
            # Near shapes are affected only by new configs: not by those that this cache held, or has given, before.
            new = self._held.get(key) != for_others and (key in guessed or not answers)
            if len(self._held) >= MAX_SERVED:
                self._held.clear()  # What was held counts as new, and is looked for once more than needed.
            self._held[key] = for_others
            if all(answer == held for answer in answers) and not (new and guessed - {key}):
                return
            self._answers.pop(key, None)
            self._guessed.pop(group, None)
        invalidate()


class _Pending:
    """An answer that is not known yet."""


_PENDING = _Pending()


def _group(key: Hashable) -> Hashable:
    """Device and operation, within which one call's config may be used for another."""
    return key[:2] if isinstance(key, tuple) and len(key) == 3 else key


def token_of(mapping: Mapping[Any, Any]) -> Hashable:
    """A value that is equal for mappings with equal contents."""
    return frozenset((key, canonical(cfg)) for key, cfg in mapping.items())


def is_frozen(cfg: Any) -> bool:
    """Whether a config surely cannot be changed in place."""
    if isinstance(cfg, tuple):
        return all(map(is_frozen, cfg))
    if is_dataclass(cfg) and not isinstance(cfg, type):
        return cfg.__dataclass_params__.frozen and all(is_frozen(getattr(cfg, f.name)) for f in fields(cfg))  # pyright: ignore[reportAttributeAccessIssue]
    return cfg is None or isinstance(cfg, (bool, int, float, complex, str, bytes, Enum, np.dtype)) or callable(cfg)
