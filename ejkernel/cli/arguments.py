"""Arguments of kernels as people type them: `f32[1024,64],s32[16]` and `causal=true`."""

from __future__ import annotations

import json
import re
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.errors import EjkernelError

_SHORT = {"pred": "bool", "c64": "complex64", "c128": "complex128", "bf16": "bfloat16"}
_PYTHON = {"True": True, "False": False, "None": None}
_ARRAY = re.compile(r"\s*([a-z][a-z0-9_]*)\[([\d,\s]*)\]\s*")


class ArgumentTextError(EjkernelError, ValueError):
    """An argument cannot be understood."""


def parse_arrays(text: str) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Abstract arrays, separated by commas: `f32[1024,64], bf16[8], int32[]`."""
    found, end = [], 0
    while end < len(text):
        match = _ARRAY.match(text, end)
        if match is None or (match.end() < len(text) and text[match.end()] != ","):
            raise ArgumentTextError(
                f"--args: {text[end:]!r} is not of the form f32[1024,64],s32[16]: a dtype, then its sizes in brackets."
            )
        sizes = tuple(int(size) for size in match[2].split(",") if size.strip())
        found.append(jax.ShapeDtypeStruct(sizes, _dtype(match[1])))
        end = match.end() + 1
    return tuple(found)


def _dtype(name: str) -> Any:
    if (short := re.fullmatch(r"([fsui])(\d+)", name)) is not None:
        kind = {"f": "float", "s": "int", "i": "int", "u": "uint"}[short[1]]
        name = f"{kind}{short[2]}"
    try:
        dtype = jnp.dtype(_SHORT.get(name, name))
    except TypeError as error:
        raise ArgumentTextError(
            f"--args: {name!r} is not a dtype. Write f32, bf16, s32, pred or a NumPy name."
        ) from error
    if (given := jax.dtypes.canonicalize_dtype(dtype)) != dtype:
        raise ArgumentTextError(
            f"--args: {dtype} would be {given}: set JAX_ENABLE_X64=1 for 64 bits, or write {given}."
        )
    return dtype


def parse_settings(settings: list[str]) -> dict[str, Any]:
    """Keyword arguments, each `name=value` with a JSON value or an array like `s32[2,64]`; anything else is text.

    True, False and None may be written as in Python, too.
    """
    found = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name.isidentifier():
            raise ArgumentTextError(f"--set: {setting!r} is not of the form name=value.")
        if _ARRAY.fullmatch(value) is not None:
            (found[name],) = parse_arrays(value)
            continue
        try:
            found[name] = _PYTHON[value] if value in _PYTHON else json.loads(value)
        except (ValueError, RecursionError):  # No JSON; or thousands of digits or brackets.
            found[name] = value
    return found
