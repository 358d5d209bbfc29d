"""Shapes: schemas for data from files, with errors that say what is wrong and where.

    {"op_id": str, "signature": (dict, None), "limit?": [str], ...: float}

A shape is a type, a tuple of shapes of which one must fit, a `Literal`, a list of one shape for its items, a dataclass
for its fields and no others, a function that returns a bool, or a dict for the fields of an object: `name?` may be
absent, `...` stands for all values, and fields that are not listed may be there. Written by hand, because a store is
read while a program starts and pydantic is slow to load: docs/design.md has the figures.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from ejkernel.ops.utils import classes


class ShapeFault(Exception):
    """What is wrong, and where it is, from the inside out."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.path: list[str] = []


def wrong(data: Any, shape: Any, where: str = "") -> str | None:
    """How `data` differs from `shape`: `cfg: must be a dict, got 3`; None if it fits."""
    try:
        _check(data, shape)
    except ShapeFault as fault:
        path = (where + "".join(reversed(fault.path))).removeprefix(".")
        return f"{path}: {fault.text}" if path else fault.text
    return None


def _check(data: Any, shape: Any) -> None:
    if isinstance(shape, tuple):
        if not any(wrong(data, each) is None for each in shape):
            raise _unlike(data, shape)
    elif isinstance(shape, type) and not dataclasses.is_dataclass(shape):
        # A bool is an int to Python; JSON writes some floats as integers.
        kind = type(data)
        if not ((isinstance(data, shape) and (kind is not bool or shape is bool)) or (shape is float and kind is int)):
            raise _unlike(data, shape)
    elif isinstance(shape, dict):
        _check_fields(data, shape)
    elif isinstance(shape, list):
        if not isinstance(data, list):
            raise _unlike(data, shape)
        for index, item in enumerate(data):
            _check_part(item, shape[0], f"[{index}]")
    elif dataclasses.is_dataclass(shape):
        _check_fields(data, _fields(shape), only=True)
    elif not _is(data, shape):
        raise _unlike(data, shape)


def _check_fields(data: Any, shape: dict[Any, Any], *, only: bool = False) -> None:
    if not isinstance(data, dict):
        raise _unlike(data, shape)
    for name, inner in shape.items():
        if name is ...:
            for key, value in data.items():
                _check_part(value, inner, f".{key}")
        elif (key := name.removesuffix("?")) in data:
            _check_part(data[key], inner, f".{key}")
        elif key == name:
            raise ShapeFault(f"{name!r} is missing")
    unknown = [name for name in data if name not in shape and f"{name}?" not in shape] if only else []
    if unknown:
        raise ShapeFault(f"{unknown[0]!r} is unknown")


def _check_part(data: Any, shape: Any, place: str) -> None:
    try:
        _check(data, shape)
    except ShapeFault as fault:
        fault.path.append(place)
        raise


def _is(data: Any, shape: Any) -> bool:
    if isinstance(shape, types.FunctionType):
        return shape(data)
    if typing.get_origin(shape) is typing.Literal:
        return data in typing.get_args(shape)
    return data is None


def _unlike(data: Any, shape: Any) -> ShapeFault:
    names = " or ".join(map(_name, shape if isinstance(shape, tuple) else (shape,)))
    return ShapeFault(f"must be {names}, got {data!r:.100}")


def _fields(cls: Any) -> dict[str, Any]:
    """The shape of a dataclass; fields with a default may be absent."""
    hints, unset = classes.hints(cls), dataclasses.MISSING
    optional = lambda f: f.default is not unset or f.default_factory is not unset
    return {f"{f.name}?" if optional(f) else f.name: _of_hint(hints[f.name]) for f in dataclasses.fields(cls)}


def _of_hint(hint: Any) -> Any:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return tuple(map(_of_hint, inner))
    if hint in (Any, types.NoneType):
        return object if hint is Any else None
    return {...: _of_hint(inner[1])} if origin is not None and issubclass(dict, origin) else hint


def _name(shape: Any) -> str:
    if isinstance(shape, types.FunctionType):
        return (shape.__doc__ or shape.__name__).strip(".")
    if typing.get_origin(shape) is typing.Literal:
        return f"one of {', '.join(map(repr, typing.get_args(shape)))}"
    if isinstance(shape, (dict, list)) or dataclasses.is_dataclass(shape):
        return "a list" if isinstance(shape, list) else "a dict"
    return "None" if shape is None else f"a {shape.__name__}"
