"""Which parts of a call are arrays and which are static, and how to take the two apart."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from ejkernel.errors import EjkernelError

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, jax.Ref)


class StaticArgumentError(EjkernelError, TypeError):
    """An argument is neither an array nor hashable, so no compiled program can be found by it."""


class Statics(NamedTuple):
    """A pytree less its arrays."""

    treedef: Any
    is_array: tuple[bool, ...]
    values: tuple[Any, ...]
    """The leaves that are not arrays."""


def is_array(x: Any) -> bool:
    """Whether `x` is traced as an array; any other leaf is a static value."""
    return isinstance(x, _ARRAYS) or hasattr(x, "__jax_array__")


def has_no_data(x: Any) -> bool:
    """Whether `x` is an array whose values this process does not have: a shape, a tracer, or spread over processes."""
    if isinstance(x, (jax.ShapeDtypeStruct, Tracer)):
        return True
    return isinstance(x, jax.Array) and not x.is_fully_addressable


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


def scalar_key(x: Any) -> Any:
    """`x` as part of a key: floats count by their bits, so that nan finds itself again and -0.0 is not 0.0."""
    return x.hex() if type(x) is float else x


def static_key(owner: str, statics: Statics) -> Hashable:
    """What two calls must share to share a compiled program; `owner` names the kernel in errors.

    Types are part of it because `1`, `1.0` and `True` are equal in Python.
    """
    key = (*statics[:2], *((type(x), scalar_key(x)) for x in statics.values))
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
