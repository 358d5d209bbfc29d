"""Python values as JSON with tags for what JSON does not have: `{"$tuple": [1, 2]}`, `{"$dtype": "bfloat16"}`.

Numbers, text, None, lists and dicts with text keys are written as they are; everything else is an object whose first
key is a tag. `decode` returns whatever `encode` accepted, equal and of the same classes.
"""

from __future__ import annotations

import base64
import enum
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import numpy as np

from ejkernel.errors import EjkernelError
from ejkernel.ops.utils import classes, records
from ejkernel.ops.utils.fingerprint import stable_json
from ejkernel.ops.utils.records import ConfigMismatchError, UnknownClassError

_BUILTIN_TYPES = {t.__name__: t for t in (bool, int, float, complex)}
_SPECIAL_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class ConfigEncodeError(EjkernelError, TypeError):
    """A config holds a value that cannot be written as data."""


def encode(value: Any, where: str = "value") -> Any:
    """JSON-able form of `value`; `where` names it in errors."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if kind is list:
        return [encode(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if kind is tuple:
        return {"$tuple": [encode(v, f"{where}[{i}]") for i, v in enumerate(value)]}
    if kind is dict:
        return _encode_dict(value, where)
    if classes.is_enum(kind):
        return {"$enum": classes.remember(kind), **_member(value)}
    if classes.is_record(kind):
        return {"$type": classes.remember(kind), "fields": encode_fields(value, where)}
    if kind in (set, frozenset):
        return {f"${kind.__name__}": sorted((encode(v, where) for v in value), key=stable_json)}
    if kind is complex:
        return {"$complex": [encode(value.real), encode(value.imag)]}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    return _encode_numeric(value, where)


def encode_fields(record: Any, where: str) -> dict[str, Any]:
    """JSON-able form of each field of a dataclass, NamedTuple or pydantic model."""
    return {name: encode(value, f"{where}.{name}") for name, value in records.fields_of(record).items()}


class Reading(NamedTuple):
    """How data is read: `check` compares fields with their hints, `named_only` allows only classes in hints."""

    check: bool = True
    named_only: bool = False


CHECKED = Reading()


def decode(data: Any, hint: Any = None, where: str = "value", how: Reading = CHECKED) -> Any:
    """Value that `encode` wrote. Classes that `hint` mentions are preferred."""
    if isinstance(data, list):
        return [decode(v, hint, f"{where}[{i}]", how) for i, v in enumerate(data)]
    if not isinstance(data, dict):
        return data
    tag = next((key for key in data if key.startswith("$")), None)
    if tag is None:
        return {key: decode(v, hint, f"{where}[{key!r}]", how) for key, v in data.items()}
    inner = lambda v: decode(v, hint, where, how)
    try:
        if tag == "$type":
            return decode_record(find_class(data["$type"], hint, where, how), data["fields"], where, how)
        if tag == "$enum":
            # Finding a member by its name runs nothing; by its value it may.
            asked = CHECKED if "name" in data else how
            return decode_member(find_class(data["$enum"], hint, where, asked), data, where)
        return _DECODERS[tag](data, inner)
    except ConfigMismatchError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as e:
        raise ConfigMismatchError(f"{where}: {repr(data)[:200]} is not a value that ejkernel wrote ({e!r}).") from e


def decode_record(cls: type, data: Mapping[str, Any], where: str, how: Reading) -> Any:
    """Record of class `cls` from what `encode_fields` wrote."""
    if not classes.is_record(cls):
        raise ConfigMismatchError(f"{where}: {classes.name_of(cls)} has no fields, but {sorted(data)} are stored.")
    hints = classes.hints(cls)
    values = {name: decode(v, hints.get(name), f"{where}.{name}", how) for name, v in data.items()}
    return records.build(cls, values, where, hints if how.check else {})


def decode_member(cls: Any, data: Mapping[str, Any], where: str) -> Any:
    """Member of the Enum `cls`."""
    if not classes.is_enum(cls):
        raise ConfigMismatchError(f"{where}: {classes.name_of(cls)} is no longer an Enum.")
    try:
        return cls[data["name"]] if "name" in data else cls(data["value"])
    except (KeyError, ValueError) as e:
        known = ", ".join(cls.__members__)
        raise ConfigMismatchError(f"{where}: {classes.name_of(cls)} has no member {e.args[0]!r}, only {known}.") from e


def find_class(name: str, hint: Any, where: str, how: Reading) -> type:
    """Class called `name`, preferably one that `hint` mentions."""
    cls = classes.find(name, classes.within(hint))
    if how.named_only and cls is not None and not classes.is_named(cls, hint):
        raise UnknownClassError(
            f"{where}: a pack may hold the kernel's config class and the classes that its fields name, and {name!r} is "
            "none of them. Name it in the type of the field."
        )
    if cls is None:
        raise UnknownClassError(
            f"{where}: no loaded class is called {name!r}. Import its module first, or pass cfg_type=."
        )
    return cls


def _encode_dict(value: dict[Any, Any], where: str) -> Any:
    if all(type(k) is str and not k.startswith("$") for k in value):
        return {k: encode(v, f"{where}[{k!r}]") for k, v in value.items()}
    return {"$dict": [[encode(k, where), encode(v, f"{where}[{k!r}]")] for k, v in value.items()]}


def _member(value: enum.Enum) -> dict[str, Any]:
    # A combination of flags has no name of its own.
    return {"value": value.value} if isinstance(value, enum.Flag) else {"name": value.name}


def _encode_numeric(value: Any, where: str) -> Any:
    """Dtypes, the types that stand for dtypes, and numpy scalars."""
    for data, make in _numeric_forms(value):
        try:
            back = make(data, decode)
        except (TypeError, ValueError, AttributeError, KeyError):
            continue
        if type(back) is type(value) and (back == value or back != back):
            return data
    raise ConfigEncodeError(
        f"{where}: a {classes.name_of(type(value))} cannot be stored, got {value!r}. "
        "Configs hold numbers, text, None, Enums, dtypes, and tuples, lists, dicts, dataclasses, NamedTuples or "
        "pydantic models of them."
    )


def _numeric_forms(value: Any) -> list[tuple[dict[str, Any], Callable[..., Any]]]:
    if isinstance(value, np.dtype):
        return [({"$dtype": value.name}, _dtype)]
    if isinstance(value, np.generic):
        return [({"$scalar": value.dtype.name, "value": encode(value.item())}, _scalar)]
    if isinstance(value, type):
        name = getattr(getattr(value, "dtype", None), "name", value.__name__)
        return [({"$jnp": name}, _jnp_type), ({"$np": value.__name__}, _np_type), ({"$builtin": name}, _builtin_type)]
    return []


def _dtype(data: Any, _: Any) -> Any:
    import ml_dtypes

    name = data["$dtype"]
    if not name.isidentifier():  # Otherwise a file could request numpy's structured dtypes.
        raise ValueError(f"{name!r} is not the name of a dtype")
    return np.dtype(getattr(ml_dtypes, name, name))


def _scalar(data: Any, inner: Any) -> Any:
    kind, value = _dtype({"$dtype": data["$scalar"]}, inner).type, inner(data["value"])
    # Others interpret a number as a size: `np.void(2 * 10**9)` is two gigabytes.
    is_numeric = issubclass(kind, np.number | np.bool_) or kind.__module__ == "ml_dtypes"
    if not is_numeric or not isinstance(value, bool | int | float | complex):
        raise ValueError(f"{value!r} is not a {data['$scalar']} number")
    return cast(Any, kind)(value)


def _np_type(data: Any, _: Any) -> Any:
    return _dtype({"$dtype": data["$np"]}, _).type


def _jnp_type(data: Any, _: Any) -> Any:
    import jax.numpy as jnp

    found = getattr(jnp, data["$jnp"])
    if not isinstance(found, type) or not hasattr(found, "dtype"):
        raise ValueError(f"jax.numpy has no dtype {data['$jnp']!r}")
    return found


def _builtin_type(data: Any, _: Any) -> Any:
    return _BUILTIN_TYPES[data["$builtin"]]


_DECODERS: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "$float": lambda data, _: _SPECIAL_FLOATS[data["$float"]],
    "$tuple": lambda data, inner: tuple(inner(v) for v in data["$tuple"]),
    "$set": lambda data, inner: {inner(v) for v in data["$set"]},
    "$frozenset": lambda data, inner: frozenset(inner(v) for v in data["$frozenset"]),
    "$dict": lambda data, inner: {inner(k): inner(v) for k, v in data["$dict"]},
    "$complex": lambda data, inner: complex(*(inner(v) for v in data["$complex"])),
    "$bytes": lambda data, _: base64.b64decode(data["$bytes"], validate=True),
    "$dtype": _dtype,
    "$scalar": _scalar,
    "$np": _np_type,
    "$jnp": _jnp_type,
    "$builtin": _builtin_type,
}
