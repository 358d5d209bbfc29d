"""From an eager call to its compiled program: JAX's own dispatch does the work if all arguments are arrays.

Four ways to call, each tried only when the one before it cannot take the arguments: let JAX flatten everything; name
the static keywords to JAX; take top-level Python scalars out first; flatten everything here and take every static leaf
out.
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
from ejkernel.ops.core.refusals import REFUSED, StaticFound
from ejkernel.ops.utils import arguments

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Trace = Callable[[Args, Kwargs], Any]
Use = Callable[[Any, Any, Kwargs], Any]
"""What is done with a jitted function and its arguments: it is run, or only traced."""

MAX_VARIANTS = 4096
"""A static value that changes at every call must not fill the memory; JAX's own caches have this size too."""

MAX_TRACES = 4096
"""How many traces of a program are kept: JAX keeps those of a jitted function for as long as there is the function."""

_SCALARS = frozenset({bool, int, float, complex, str, type, FunctionType, BuiltinFunctionType})
_BY_NAME = _SCALARS - {complex}
"""Equal values of one of these types are the same, except for zeros and nan among floats."""


class Program:
    """Every compiled variant of one kernel with one fixed config, or with none.

    `call` runs calls by position, and `ways` those with keywords of these names; `way` finds either. It raises one of
    `REFUSED` for static arguments that it does not know; then `recover` runs the call, and such calls find their way
    from then on. `repeat` is a set of static keywords, and what takes the positional arguments of calls with these very
    objects. `before`, if given, sees the arguments of every call. `owner` and `cfg` are what callers compare theirs
    with: the very objects make looking closer unnecessary.
    """

    __slots__ = (
        *("__weakref__", "_before", "_bound", "_jit", "_name", "_named", "_scalars", "_split", "_static_names"),
        *("_trace", "_traces", "call", "cfg", "owner", "repeat", "ways"),
    )

    def __init__(
        self,
        kernel: Kernel[Any, Any],
        trace: Trace,
        *,
        cfg: Any = None,
        owner: object = None,
        before: Callable[..., None] | None = None,
    ) -> None:
        # Not the kernel itself: `trace` decides whether a program keeps it alive.
        self._name, self._jit = kernel.op_id, runs_as_operation(kernel)
        self.cfg, self.owner = cfg, owner
        self._trace = trace
        self._traces = 0
        self._before = before
        self._static_names: dict[tuple[str, ...], frozenset[str]] = {}
        self._named: dict[frozenset[str], Any] = {}
        self._scalars: dict[Hashable, Any] = {}
        self._bound: dict[Hashable, Any] = {}
        self._split: dict[Hashable, Any] = {}
        self.ways: dict[tuple[str, ...], Callable[..., Any]] = {}
        self.call = self._new_way({})
        self.repeat: tuple[Kwargs, Callable[..., Any]] = ({}, self.call)

    def __call__(self, args: Args, kwargs: Kwargs) -> Any:
        """Runs a call."""
        try:
            return self.way(kwargs)(*args, **kwargs)
        except REFUSED as error:
            return self.recover(error, args, kwargs)

    def way(self, kwargs: Kwargs) -> Callable[..., Any]:
        """What runs calls with keywords of these names, if the same ones are static and nothing else is."""
        if not kwargs:
            return self.call
        return self.ways.get(names := tuple(kwargs)) or bounded(self.ways, names, self._new_way(kwargs))

    def _new_way(self, kwargs: Kwargs) -> Callable[..., Any]:
        if not self._jit:
            return self._observed(lambda *a, **k: self._trace(a, k))
        if kwargs and _all_by_name(kwargs):
            return self._call_scalars if self._before is None else self._observed(self._call_bound)
        return self._observed(self._named_variant(kwargs))

    def recover(self, error: Exception, args: Args, kwargs: Kwargs) -> Any:
        """Runs a call that its way could not, or raises `error` if it was not about static arguments."""
        if not self._jit or not self._is_about_statics(error, args, kwargs):
            raise error
        self._leave_way(kwargs)
        return self._call_bound(*args, **kwargs)

    def _is_about_statics(self, error: Exception, args: Args, kwargs: Kwargs) -> bool:
        static = self._static_names.get(tuple(kwargs))
        if static is None:
            static = {name for name, x in kwargs.items() if type(x) in _BY_NAME}
        if isinstance(error, ValueError) and not isinstance(error, StaticFound):
            # What JAX says of an array that is given where a static value was.
            return any(arguments.is_array(x) for name in static for x in jax.tree.leaves(kwargs[name]))
        return _has_static(error, args, {name: x for name, x in kwargs.items() if name not in static})

    def _leave_way(self, kwargs: Kwargs) -> None:
        self.repeat = ({}, self.call)
        slow = self._observed(self._call_bound)
        if kwargs:
            self.ways[tuple(kwargs)] = slow
        else:
            self.call = slow

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
        trace = lambda variant, args, kwargs: variant.trace(*args, **kwargs)
        if not self._jit:
            return self._serve_split(trace, args, kwargs)
        if not kwargs or not _all_by_name(kwargs):
            try:
                return trace(self._named_variant(kwargs), args, kwargs)
            except REFUSED as error:
                if not self._is_about_statics(error, args, kwargs):
                    raise
            self._leave_way(kwargs)
        return self._serve(trace, args, kwargs)

    def compile(self, args: Args, kwargs: Kwargs) -> None:
        """Compiles the variant for these arguments, which may be abstract, so that the first call need not."""
        if self._jit:
            self.staged(args, kwargs).lower().compile()

    def _new_optimistic(self, static_args: Any, static_kwargs: Any, named: frozenset[str] = frozenset()) -> Any:
        """A jitted call with static values of its own, and with keywords that are static by name."""

        # JAX confuses a keyword argument with a parameter of its name: nobody calls theirs like these.
        def call(*ejkernel_args: Any, **ejkernel_kwargs: Any) -> Any:
            traced = {name: x for name, x in ejkernel_kwargs.items() if name not in named}
            if any(_looks_static(x) for x in jax.tree.leaves((ejkernel_args, traced))):
                raise StaticFound
            if not all(_is_known_by_value(x) for name, x in ejkernel_kwargs.items() if name in named):
                raise StaticFound
            self._count_trace()
            merged = list(ejkernel_args)
            for index, value in static_args:
                merged[index] = value
            return self._trace(tuple(merged), {**ejkernel_kwargs, **dict(static_kwargs)})

        # Inlined where it is part of another program: there, the call is one operation already.
        return jax.jit(_named(call, self._name), inline=_compat.INLINE, static_argnames=sorted(named))

    def _named_variant(self, kwargs: Kwargs) -> Any:
        """A jitted call to which the keywords that are scalars now are static by name."""
        names = frozenset(name for name, x in kwargs.items() if type(x) in _BY_NAME)
        names = bounded(self._static_names, tuple(kwargs), names)
        return self._named.get(names) or bounded(self._named, names, self._new_optimistic((), (), names))

    def _call_scalars(self, /, *args: Any, **kwargs: Any) -> Any:
        """Runs calls all of whose keywords are static."""
        try:
            variant = self._scalars[*kwargs, *kwargs.values(), *map(type, kwargs.values())]
        except (KeyError, TypeError):
            return self._call_bound(*args, **kwargs)
        self.repeat = (kwargs, variant)
        return variant(*args)

    def _call_bound(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._serve(lambda variant, args, kwargs: variant(*args, **kwargs), args, kwargs)

    def _serve(self, use: Use, args: Args, kwargs: Kwargs) -> Any:
        key, args_left, kwargs_left = self._bind(args, kwargs)
        if (variant := self._variant(key, args, kwargs)) is not None:
            try:
                out = use(variant, args_left, kwargs_left)
            except REFUSED as error:
                if not _has_static(error, args_left, kwargs_left):
                    raise
                self._bound[key] = None
            else:
                if kwargs and len(key) == len(kwargs) and all(map(_is_known_by_value, kwargs.values())):
                    kinds = map(type, kwargs.values())
                    bounded(self._scalars, (*kwargs, *kwargs.values(), *kinds), variant)
                return out
        return self._serve_split(use, args, kwargs)

    def _serve_split(self, use: Use, args: Args, kwargs: Kwargs) -> Any:
        arrays, statics = arguments.split((args, kwargs))
        return use(self._split_variant(statics), (arrays,), {})

    def _bind(self, args: Args, kwargs: Kwargs) -> tuple[tuple[Hashable, ...], list[Any], Kwargs]:
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
        self._count_trace()
        return self._trace(*arguments.merge(arrays, statics))

    def _count_trace(self) -> None:
        """Starts anew when there are too many traces: what is still in use is traced again."""
        self._traces += 1
        if self._traces > MAX_TRACES:
            self._traces = 0
            for table in (self._static_names, self._named, self._scalars, self._bound, self._split, self.ways):
                table.clear()
            self.call = self._new_way({})
            self.repeat = ({}, self.call)


def _all_by_name(kwargs: Kwargs) -> bool:
    return all(type(x) in _BY_NAME for x in kwargs.values())


def _is_known_by_value(x: Any) -> bool:
    """Whether a static value and its type find it again, and nothing else: nan is not found, and -0.0 equals 0.0."""
    return type(x) in _BY_NAME and (type(x) is not float or x < 0 or x > 0)


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
