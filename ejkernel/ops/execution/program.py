"""From an eager call to its compiled program: JAX's own dispatch does the work if all arguments are arrays.

Three ways to call, each tried only when the one before it cannot serve the arguments: let JAX flatten everything;
take top-level Python scalars out first; flatten everything here and take every static leaf out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, MutableMapping
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import jax

from ejkernel import _compat
from ejkernel.ops.core.kernel import Kernel, runs_as_operation
from ejkernel.ops.utils import arguments

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Trace = Callable[[Args, Kwargs], Any]

MAX_VARIANTS = 4096
"""A static value that changes at every call must not fill the memory; JAX's own caches have this size too."""

_SCALARS = frozenset({bool, int, float, complex, str, type, FunctionType, BuiltinFunctionType})


class StaticFound(Exception):
    """Raised while tracing: an argument is a Python scalar, which is static here but an array for `jax.jit`."""


REFUSED = (StaticFound, TypeError, OverflowError)
"""Errors for arguments that are not arrays: the first is ours, the others come from `jax.jit`, also for large
integers."""


class Program:
    """Every compiled variant of one kernel with one fixed config, or with none.

    `call` raises one of `REFUSED` for arguments that are not all arrays; then `recover` serves them, and changes `call`
    to do so from then on. `before`, if given, sees the arguments of every call. Callers compare their config with
    `cfg`: if it is the same object, no further comparison is needed.
    """

    __slots__ = ("_before", "_bound", "_jit", "_name", "_optimistic", "_split", "_trace", "call", "cfg")

    def __init__(
        self, kernel: Kernel[Any, Any], trace: Trace, *, cfg: Any = None, before: Callable[..., None] | None = None
    ) -> None:
        # Not the kernel itself: `trace` decides whether a program keeps it alive.
        self._name, self._jit = kernel.op_id, runs_as_operation(kernel)
        self.cfg = cfg
        self._trace = trace
        self._before = before
        self._bound: dict[Hashable, Callable[..., Any] | None] = {}
        self._split: dict[Hashable, Callable[..., Any]] = {}
        self._optimistic: Any = self._new_optimistic((), ()) if self._jit else lambda *a, **k: trace(a, k)
        self.call: Callable[..., Any] = self._observed(self._optimistic)

    def recover(self, error: Exception, args: Args, kwargs: Kwargs) -> Any:
        """Serves a call that `call` could not, or raises `error` if it was not about static arguments."""
        if not self._jit or not _has_static(error, args, kwargs):
            raise error
        self.call = self._observed(self._call_bound)
        return self._call_bound(*args, **kwargs)

    def _observed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        if self._before is None:
            return call

        def observed(*args: Any, **kwargs: Any) -> Any:
            assert self._before is not None
            self._before(args, kwargs)
            return call(*args, **kwargs)

        return observed

    def staged(self, args: Args, kwargs: Kwargs) -> jax.stages.Traced:
        """The traced program for these arguments, which may be abstract; calls with such arguments will find it."""
        if self._jit:
            try:
                return self._optimistic.trace(*args, **kwargs)
            except REFUSED as error:
                if not _has_static(error, args, kwargs):
                    raise
            self.call = self._observed(self._call_bound)
            key, args_left, kwargs_left = self._bind(args, kwargs)
            if (variant := self._variant(key, args, kwargs)) is not None:
                try:
                    return variant.trace(*args_left, **kwargs_left)
                except REFUSED as error:
                    if not _has_static(error, args_left, kwargs_left):
                        raise
                    self._bound[key] = None
        arrays, statics = arguments.split((args, kwargs))
        return self._split_variant(statics).trace(arrays)

    def compile(self, args: Args, kwargs: Kwargs) -> None:
        """Compiles the variant for these arguments, which may be abstract, so that the first call need not."""
        if self._jit:
            self.staged(args, kwargs).lower().compile()

    def _new_optimistic(self, static_args: Any, static_kwargs: Any) -> Callable[..., Any]:
        # `jax.jit` (seen with JAX 0.10.2 and 0.12.0) fails if a keyword has the name of `*args`, so these names are
        # unusual.
        def call(*ejkernel_args: Any, **ejkernel_kwargs: Any) -> Any:
            if any(_looks_static(x) for x in jax.tree.leaves((ejkernel_args, ejkernel_kwargs))):
                raise StaticFound
            merged = list(ejkernel_args)
            for index, value in static_args:
                merged[index] = value
            return self._trace(tuple(merged), {**ejkernel_kwargs, **dict(static_kwargs)})

        # Inlined into other programs: there, the call is already one operation.
        return jax.jit(_named(call, self._name), inline=_compat.INLINE)

    def _call_bound(self, /, *args: Any, **kwargs: Any) -> Any:
        key, args_left, kwargs_left = self._bind(args, kwargs)
        variant = self._variant(key, args, kwargs)
        if variant is not None:
            try:
                return variant(*args_left, **kwargs_left)
            except REFUSED as error:
                if not _has_static(error, args_left, kwargs_left):
                    raise
                self._bound[key] = None
        arrays, statics = arguments.split((args, kwargs))
        return self._split_variant(statics)(arrays)

    def _bind(self, args: Args, kwargs: Kwargs) -> tuple[Hashable, list[Any], Kwargs]:
        """Top-level scalars as a key, and the arguments without them."""
        key: list[Hashable] = []
        args_left, kwargs_left = list(args), {}
        for index, value in enumerate(args):
            if type(value) in _SCALARS:
                key.append((index, type(value), arguments.scalar_key(value)))
                args_left[index] = None
        for name, value in kwargs.items():
            if type(value) in _SCALARS:
                key.append((name, type(value), arguments.scalar_key(value)))
            else:
                kwargs_left[name] = value
        return tuple(key), args_left, kwargs_left

    def _variant(self, key: Hashable, args: Args, kwargs: Kwargs) -> Any:
        try:
            return self._bound[key]
        except KeyError:
            static_args = [(i, x) for i, x in enumerate(args) if type(x) in _SCALARS]
            static_kwargs = [(k, x) for k, x in kwargs.items() if type(x) in _SCALARS]
            return bounded(self._bound, key, self._new_optimistic(static_args, static_kwargs))

    def _split_variant(self, statics: arguments.Statics) -> Any:
        key = arguments.static_key(self._name, statics)
        found = self._split.get(key)
        if found is None:
            call = partial(self._call_merged, statics)
            found = bounded(self._split, key, jax.jit(_named(call, self._name), inline=_compat.INLINE))
        return found

    def _call_merged(self, statics: arguments.Statics, arrays: list[Any]) -> Any:
        return self._trace(*arguments.merge(arrays, statics))


def bounded(table: MutableMapping[Any, Any], key: Hashable, value: Any) -> Any:
    """Puts `value` into a table that is emptied when it is full, and returns what is there."""
    if len(table) >= MAX_VARIANTS:
        table.clear()
    return table.setdefault(key, value)


def _has_static(error: Exception, args: Any, kwargs: Kwargs) -> bool:
    """Whether an error may come from static arguments, rather than from the kernel itself."""
    return isinstance(error, StaticFound) or not all(map(arguments.is_array, jax.tree.leaves((args, kwargs))))


def _looks_static(x: Any) -> bool:
    """Whether a traced leaf may have been a Python scalar: weakly typed, or a bool, which never is."""
    if not arguments.is_array(x):
        return True
    aval = jax.typeof(x)
    return aval.shape == () and (getattr(aval, "weak_type", False) or aval.dtype == bool)


def _named(fn: Any, name: str) -> Any:
    """`fn` under the kernel's name, which profiles and compiled programs show."""
    fn.__name__ = fn.__qualname__ = re.sub(r"\W", "_", name)
    return fn
