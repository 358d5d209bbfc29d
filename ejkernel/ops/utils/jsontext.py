"""Reading untrusted JSON: size and depth are checked before it is parsed."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from ejkernel.errors import EjkernelError

MAX_DEPTH = 64

# An unclosed string runs to the end of the text, so that the scan takes linear time for any text.
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_NOT_BRACKETS = bytes(c for c in range(256) if c not in b"[]{}")
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


class JsonTextError(EjkernelError, ValueError):
    """Text is not the expected JSON, or is too large."""


def parse(text: str | bytes, *, max_bytes: int, max_depth: int = MAX_DEPTH) -> Any:
    """Parses strict JSON of at most `max_bytes` bytes and `max_depth` levels."""
    data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    if len(data) > max_bytes:
        raise JsonTextError(f"JSON text: {len(data)} bytes, at most {max_bytes} are read.")
    # Most texts have too few brackets to be deep, and counting those is quick.
    if data.count(b"[") + data.count(b"{") > max_depth and (found := depth(data)) > max_depth:
        raise JsonTextError(f"JSON text: nested {found} levels deep, at most {max_depth} are read.")
    try:
        return json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as e:  # UnicodeDecodeError and overlong integers are ValueErrors too.
        raise JsonTextError(f"JSON text: {e}.") from e


def depth(data: bytes) -> int:
    """Greatest nesting of brackets outside strings."""
    level = deepest = 0
    for bracket in _STRING.sub(b"", data).translate(None, _NOT_BRACKETS):
        level += _STEP[bracket]
        deepest = max(deepest, level)
    return deepest


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
