"""Which parts of a call are arrays and which are static, and how to separate the two."""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Callable, Hashable, Iterable
from types import CellType, FunctionType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from ejkernel.errors import EjkernelError
from ejkernel.ops.utils.canonical import exact_key
from ejkernel.ops.utils.canonical import scalar_key as scalar_key

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, jax.Ref)


class StaticArgumentError(EjkernelError, TypeError):
    """An argument is neither an array nor hashable, so no compiled program can be found by it."""


class Statics(NamedTuple):
    """A pytree without its arrays."""

    treedef: Any
    is_array: tuple[bool, ...]
    values: tuple[Any, ...]
    """The leaves that are not arrays."""


def is_array(x: Any) -> bool:
    """Whether `x` is traced as an array; any other leaf is a static value."""
    return isinstance(x, _ARRAYS) or hasattr(x, "__jax_array__")


def readable(x: Any) -> np.ndarray | None:
    """The values of an array, if they are known and on the host: no call waits for an accelerator to check them."""
    if isinstance(x, np.ndarray):
        return x
    if isinstance(x, Tracer) or not isinstance(x, jax.Array):
        return None
    here = x.is_fully_addressable and all(device.platform == "cpu" for device in x.devices())
    return np.asarray(x) if here else None


def has_no_data(x: Any) -> bool:
    """Whether `x` is an array whose values this process does not have: a shape, a tracer, or spread over processes."""
    if isinstance(x, (jax.ShapeDtypeStruct, Tracer)):
        return True
    return isinstance(x, jax.Array) and not x.is_fully_addressable


def shown(x: Any) -> str:
    """What an error says of an argument that had to be static."""
    if isinstance(x, Tracer):
        return "an array that is traced (under jax.jit, name the argument in static_argnames)"
    return f"{x!r:.200}"


def split(tree: Any) -> tuple[list[Any], Statics]:
    """The arrays of `tree`, and the rest of it."""
    leaves, treedef = jax.tree.flatten(tree)
    mask = tuple(map(is_array, leaves))
    pairs = list(zip(leaves, mask, strict=True))
    return [x for x, array in pairs if array], Statics(treedef, mask, tuple(x for x, array in pairs if not array))


def merge(arrays: Iterable[Any], statics: Statics) -> Any:
    """Inverse of `split`."""
    rest, values = iter(arrays), iter(statics.values)
    return statics.treedef.unflatten([next(rest) if array else next(values) for array in statics.is_array])


def on_arrays(fn: Callable[..., Any], tree: tuple[Any, ...]) -> tuple[Callable[..., Any], list[Any]]:
    """`fn(*tree)` as a function of only the arrays of `tree`, which JAX can transform, and these arrays."""
    arrays, statics = split(tree)
    return (lambda *arrays: fn(*merge(arrays, statics))), arrays


def is_data(x: Any, depth: int = 4) -> bool:
    """Whether `x` is surely plain data, or a function of plain data, which costs nothing to keep."""
    if x is None or isinstance(x, (bool, int, float, complex, str, bytes, enum.Enum, np.dtype, type)):
        return True
    if not depth:
        return False
    if isinstance(x, (tuple, list, set, frozenset)):
        return all(is_data(part, depth - 1) for part in x)
    if isinstance(x, dict):
        return all(is_data(part, depth - 1) for part in (*x.keys(), *x.values()))
    if isinstance(x, FunctionType):
        cells = [cell.cell_contents for cell in x.__closure__ or () if cell != CellType()]
        return all(is_data(part, depth - 1) for part in (cells, x.__defaults__, x.__kwdefaults__))
    if dataclasses.is_dataclass(x):
        return all(is_data(getattr(x, f.name), depth - 1) for f in dataclasses.fields(x))
    # A module keeps its functions alive anyway.
    return getattr(sys.modules.get(getattr(x, "__module__", "")), getattr(x, "__qualname__", ""), None) is x


def static_key(owner: str, statics: Statics) -> Hashable:
    """What two calls must share to share a compiled program; `owner` names the kernel in errors."""
    key = (*statics[:2], *map(exact_key, statics.values))
    try:
        hash(key)
    except TypeError as error:
        raise StaticArgumentError(_unhashable(owner, statics)) from error
    return key


def _unhashable(owner: str, statics: Statics) -> str:
    for path, value in jax.tree_util.tree_flatten_with_path(merge([None] * sum(statics.is_array), statics))[0]:
        try:
            hash(value)
        except TypeError:
            return (
                f"{owner}: {_argument_name(path)} is a {type(value).__name__}, which is neither an array nor hashable. "
                "Pass arrays, pytrees of arrays, or hashable static values (numbers, strings, enums, callables)."
            )
    return f"{owner}: the static part of its arguments is not hashable: {statics.treedef}."


def _argument_name(path: tuple[Any, ...]) -> str:
    """Names a leaf of `(args, kwargs)` to a user."""
    group, first, *rest = path
    name = first.idx if group.idx == 0 else repr(first.key)
    return f"argument {name}{jax.tree_util.keystr(tuple(rest))}"
