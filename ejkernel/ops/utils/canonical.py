"""Canonical forms of configs, which say whether two of them are equal, in memory and on disk.

`C(True)`, `C(1)` and `C(1.0)` are three configs, though Python says that they are equal; 0.0 and -0.0 are two, and nan
equals nan. All comparisons and lookups of configs use this module; `serialize.cfg_id` does the same in files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import numpy as np

from ejkernel.ops.utils import classes
from ejkernel.ops.utils.records import fields_of

T = TypeVar("T")


def canonical(cfg: Any) -> Hashable:
    """A value that is equal for equal configs: in all their fields, and in the types of these.

    Raises:
      TypeError: `cfg` holds something that is neither hashable nor has attributes.
    """
    if isinstance(cfg, Mapping):
        return type(cfg), frozenset((canonical(k), canonical(v)) for k, v in cfg.items())
    if isinstance(cfg, (list, tuple)):
        return type(cfg), *map(canonical, cfg)
    if isinstance(cfg, (set, frozenset)):
        return type(cfg), frozenset(map(canonical, cfg))
    if isinstance(cfg, np.ndarray):
        return np.ndarray, cfg.dtype.str, cfg.shape, cfg.tobytes()
    if classes.is_record(type(cfg)):
        return type(cfg), *((name, canonical(value)) for name, value in fields_of(cfg).items())
    if type(cfg).__eq__ is object.__eq__ and hasattr(cfg, "__dict__") and not _is_its_name(cfg):
        # An object that compares by address: its attributes decide.
        return type(cfg), canonical(vars(cfg))
    try:
        hash(cfg)
    except TypeError:
        return type(cfg), canonical(vars(cfg))
    return exact_key(cfg)


class Identity:
    """Equal only to an Identity of the same object, which it keeps alive, because an `id` alone can be reused."""

    def __init__(self, target: object) -> None:
        self.target = target

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.target is other.target

    def __hash__(self) -> int:
        return id(self.target)


def token(cfg: Any) -> Hashable:
    """The present value of a config, even if the object changes later; the object itself if it has no such value."""
    try:
        return canonical(cfg)
    except (TypeError, RecursionError):
        return Identity(cfg)


def same_cfg(a: Any, b: Any) -> bool:
    """Whether two configs are interchangeable."""
    return a is b or (type(a) is type(b) and token(a) == token(b))


def distinct(cfgs: Iterable[T]) -> list[T]:
    """Configs, or parts of them, each once, in the order given."""
    found: dict[Hashable, T] = {}
    for cfg in cfgs:
        found.setdefault(token(cfg), cfg)
    return list(found.values())


def _is_its_name(x: Any) -> bool:
    """Whether something is identified by its name, not by its contents: functions, classes, modules."""
    return callable(x) or isinstance(x, ModuleType)


# --- Parts ---


def scalar_key(x: Any) -> Any:
    """`x` as part of a key: floats are compared by their bits, so that nan equals nan and -0.0 is not 0.0."""
    kind = type(x)
    if kind is float:
        return x.hex()
    return (x.real.hex(), x.imag.hex()) if kind is complex else x


def exact_key(x: Any, depth: int = 4) -> Hashable:
    """A key that tells `x` from other values that are equal to it in Python, as `1`, `1.0` and `True` are.

    If an object is compared by its parts (a dataclass, a tuple, a class with an `__eq__`), the parts are included too,
    down to `depth`: objects may form a cycle.
    """
    kind = type(x)
    if isinstance(x, np.generic):
        return kind, x.tobytes()
    if isinstance(x, range):
        return kind, x.start, x.stop, x.step
    if isinstance(x, tuple):
        return kind, *(exact_key(part, depth) for part in x)
    if isinstance(x, frozenset):
        return kind, frozenset(exact_key(part, depth) for part in x)
    if depth and isinstance(kind.__eq__, FunctionType) and not isinstance(x, type):
        return kind, x, *(_part_key(part, depth - 1) for part in _parts(x))
    return kind, scalar_key(x)


def _parts(x: Any) -> Iterable[Any]:
    """What the `__eq__` of an object's class may compare."""
    if dataclasses.is_dataclass(x):
        return [getattr(x, f.name) for f in dataclasses.fields(x) if f.compare]
    slots = [name for base in type(x).__mro__ for name in getattr(base, "__slots__", ()) if not name.startswith("__")]
    return [getattr(x, name, None) for name in sorted({*getattr(x, "__dict__", ()), *slots})]


def _part_key(part: Any, depth: int) -> Hashable:
    """The key of a part; for an unhashable part, which its owner's `__hash__` ignores too, only the type."""
    key = exact_key(part, depth)
    try:
        hash(key)
    except TypeError:
        return type(part)
    return key
