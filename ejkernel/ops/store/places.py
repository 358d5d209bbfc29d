"""The names of entries and of their files."""

from __future__ import annotations

import functools
import json
import math
import re
from typing import Any, NamedTuple

from ejkernel.errors import EjkernelError
from ejkernel.ops.utils import tagged
from ejkernel.ops.utils.fingerprint import short_hash, stable_json

FREE = "_"  # Device and op of keys that are not (device, op_id, call_key).

_SAFE = re.compile(r"[a-z0-9_-][a-z0-9._-]*")
# Windows reserves these names for devices, with any extension, and drops a dot at the end.
_RESERVED = re.compile(r"(?:con|prn|aux|nul|com\d|lpt\d)(?:\..*)?|.*\.")
_MAX_NAME = 80


class StoreKeyError(EjkernelError, TypeError):
    """A key cannot name an entry."""


class Place(NamedTuple):
    """The name of an entry: three texts, whatever its key is."""

    device: str
    op_id: str
    call_key: str


def place_of(key: Any) -> Place:
    """Place of a key: the key itself if it is three texts, else one derived from it, equal for equal keys."""
    return places_of(key)[0]


def places_of(key: Any) -> tuple[Place, ...]:
    """Places where the entry of a key may be: its own, and where an earlier version put it."""
    if isinstance(key, tuple) and len(key) == 3 and all(isinstance(part, str) for part in key):
        return (Place(*key),)
    data = tagged.encode(_canonical(key, key))
    if isinstance(data, str) and _is_canonical_json(data):
        # Without this, "7" would have the same hash as 7, as it did in ejkernel 0.1.
        return Place(FREE, FREE, short_hash([data])), Place(FREE, FREE, short_hash(data))
    return (Place(FREE, FREE, short_hash(data)),)


def _is_canonical_json(text: str) -> bool:
    try:
        return stable_json(json.loads(text)) == text
    except (ValueError, RecursionError):
        return False


def split(args: tuple[Any, ...], what: str) -> Any:
    """The key in the arguments of `cache.get(key)` or `cache.get(device, op_id, call_key)`."""
    if len(args) == 1:
        return args[0]
    if len(args) == 3 and all(isinstance(part, str) for part in args):
        return args
    raise StoreKeyError(f"{what}: takes one key, or device, op_id and call_key as text, got {args!r}.")


def _is_plain(text: str) -> bool:
    return _SAFE.fullmatch(text) is not None and len(text) <= _MAX_NAME


@functools.lru_cache(maxsize=4096)
def directory_name(text: str) -> str:
    """`text` as the name of a directory: unchanged if it is safe on every filesystem, else cleaned with a hash."""
    if _is_plain(text) and not _RESERVED.fullmatch(text):
        return text
    # The hash also separates names that differ only in case, which some filesystems treat as equal.
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '_', text)[:_MAX_NAME]}~{short_hash([text])[:8]}"


@functools.lru_cache(maxsize=4096)
def former_name(text: str) -> str | None:
    """The name that stores of earlier versions have for `text`, if it differs."""
    return text if _is_plain(text) and _RESERVED.fullmatch(text) else None


def file_stem(text: str) -> str:
    """`text` as the name of a file before its first dot."""
    return directory_name(text if "." not in text else f"{text}~")


def _canonical(part: Any, key: Any) -> Any:
    """`part` with 1, 1.0 and True made equal, as they are in a dict."""
    if isinstance(part, tuple):
        return tuple(_canonical(p, key) for p in part)
    if isinstance(part, float) and math.isfinite(part):
        return int(part) if part.is_integer() else part
    if type(part) is bool or type(part) is int:
        return int(part)
    if part is None or type(part) is str:
        return part
    raise StoreKeyError(
        f"PersistentCache: a key is made of str, int, float, bool, None and tuples of them, got {key!r}. "
        "Use text that names the object instead of the object."
    )
