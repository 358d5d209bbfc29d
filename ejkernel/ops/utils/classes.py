"""Classes by name, without importing anything: names come from files, which must not run code."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import sys
import types
import typing
import weakref
from collections.abc import Iterator
from typing import Any

# Modules whose classes say nothing about what a field holds: `object`, `tuple`, `Enum`, `BaseModel`.
_ANYBODYS = ("builtins", "typing", "collections.abc", "abc", "enum", "pydantic.main")

# Classes that this process wrote may be read back, also those made inside functions, which cannot be imported.
_written: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()


def is_model(cls: Any) -> bool:
    """Whether `cls` is a pydantic model, without importing pydantic."""
    return isinstance(cls, type) and hasattr(cls, "__pydantic_validator__") and hasattr(cls, "model_fields")


def is_namedtuple(cls: Any) -> bool:
    """Whether `cls` is a NamedTuple class."""
    return isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields")


def is_record(cls: Any) -> bool:
    """Whether instances of `cls` are named fields: a dataclass, a NamedTuple or a pydantic model."""
    return isinstance(cls, type) and (dataclasses.is_dataclass(cls) or is_namedtuple(cls) or is_model(cls))


def is_enum(cls: Any) -> bool:
    """Whether `cls` is an Enum class."""
    return isinstance(cls, type) and issubclass(cls, enum.Enum)


def name_of(cls: type) -> str:
    """`module:QualName`."""
    return f"{cls.__module__}:{cls.__qualname__}"


def is_redefined(cls: type, wanted: Any) -> bool:
    """Whether `cls` is another version of `wanted`, from a notebook's cell or a reloaded module."""
    return isinstance(wanted, type) and cls is not wanted and name_of(cls) == name_of(wanted)


def of_hint(hint: Any) -> tuple[type, ...]:
    """The classes to check a config with `isinstance`; empty if a type hint names none."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        members = [of_hint(member) for member in typing.get_args(hint)]
        return tuple(itertools.chain(*members)) if all(members) else ()
    if origin is typing.Annotated:
        return of_hint(typing.get_args(hint)[0])
    found = origin or hint
    if typing.is_typeddict(found):
        return (dict,)
    if not isinstance(found, type) or found in (Any, object) or getattr(found, "_is_protocol", False):
        return ()
    return (float, int) if found is float else (found,)


def remember(cls: type) -> str:
    """Name of `cls`; from now on `find` finds it even if the class is local to a function."""
    name = name_of(cls)
    _written[name] = cls
    return name


def find(name: str, candidates: tuple[type, ...] = ()) -> type | None:
    """Record or Enum class called `name`: among `candidates`, in loaded modules, or the only candidate.

    Of several candidates, the only one that has this name in another module.
    """
    named = [c for c in candidates if name_of(c) == name]
    found = named[0] if named else _loaded(name) or _written.get(name)
    if found is not None and (not candidates or issubclass(found, candidates)):
        return found
    # The class was renamed or moved; whether it is still the same is checked by its fields.
    own = lambda written: written.partition(":")[2]
    moved = candidates if len(candidates) == 1 else [c for c in candidates if own(name_of(c)) == own(name)]
    return moved[0] if len(moved) == 1 else found


def within(hint: Any) -> tuple[type, ...]:
    """Record and Enum classes that a type hint mentions: `tuple[A, ...] | B` gives `(A, B)`."""
    return tuple(dict.fromkeys(cls for cls in _mentioned(hint) if is_record(cls) or is_enum(cls)))


def is_named(cls: type, hint: Any) -> bool:
    """Whether a type hint mentions `cls` or a base of it, or this process has written a `cls` itself."""
    bases = [base for base in _mentioned(hint) if base.__module__ not in _ANYBODYS]
    return _written.get(name_of(cls)) is cls or any(base in cls.__mro__ for base in bases)


def hints(cls: type) -> dict[str, Any]:
    """Declared type of each field of a record; empty if annotations cannot be resolved."""
    try:
        return typing.get_type_hints(cls, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}


def _mentioned(hint: Any, within: tuple[Any, ...] = ()) -> Iterator[type]:
    """Classes in a type hint; `within` holds the enclosing hints, because aliases may be recursive."""
    origin = typing.get_origin(hint)
    if isinstance(origin or hint, type):
        yield origin or hint
    if origin is typing.Literal:
        yield from (type(value) for value in typing.get_args(hint))
    elif not is_record(origin or hint) and hint not in within:
        for part in (*typing.get_args(hint), *_stands_for(hint)):
            yield from _mentioned(part, (*within, hint))


def _stands_for(hint: Any) -> tuple[Any, ...]:
    """What a type variable, a NewType or an alias stands for."""
    if isinstance(hint, typing.TypeVar):
        return (*hint.__constraints__, hint.__bound__)
    return tuple(getattr(hint, name) for name in ("__supertype__", "__value__") if hasattr(hint, name))


def _loaded(name: str) -> type | None:
    module_name, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module_name)
    for part in qualname.split("."):
        # vars() rather than getattr(): a module's or class's __getattr__ may import.
        found = getattr(found, "__dict__", {}).get(part)
    return found if is_record(found) or is_enum(found) else None
