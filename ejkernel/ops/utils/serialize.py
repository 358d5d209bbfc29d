"""Configs to text and back: same class, tuples stay tuples, dtypes stay dtypes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from ejkernel.errors import EjkernelError
from ejkernel.ops.utils import classes, jsontext, tagged
from ejkernel.ops.utils.fingerprint import short_hash, stable_json
from ejkernel.ops.utils.records import ConfigMismatchError as ConfigMismatchError
from ejkernel.ops.utils.records import UnknownClassError as UnknownClassError
from ejkernel.ops.utils.tagged import ConfigEncodeError as ConfigEncodeError

MAX_BYTES = 1 << 20


def to_json(cfg: Any) -> str:
    """Text of `cfg` that `from_json` reads back as the same object."""
    return json.dumps(encode_cfg(cfg), ensure_ascii=True, allow_nan=False)


def from_json(text: str | bytes, cfg_type: Any = None) -> Any:
    """Config that `to_json` wrote, as `cfg_type` or as the class it had.

    With `cfg_type`, only that class and those that its fields name are made.

    Raises:
      JsonTextError: `text` is not JSON.
      ConfigMismatchError: The config no longer fits its class, or its class is not loaded: reading never imports.
    """
    return decode_cfg(jsontext.parse(text, max_bytes=MAX_BYTES), cfg_type, named_only=cfg_type is not None)


def cfg_id(cfg: Any) -> str:
    """A config's name in files: 16 hex digits, different where `canonical` is, the same in every process.

    Computed from its text if it holds more than data.
    """
    try:
        return short_hash(encode_cfg(cfg))
    except EjkernelError:
        return short_hash(repr(cfg))


def encode_cfg(cfg: Any) -> dict[str, Any]:
    """`{"type": "module:QualName", "value": ...}`.

    Raises:
      ConfigEncodeError: `cfg` holds something that is not data.
    """
    data = {"type": classes.remember(type(cfg)), "value": _encode_value(cfg)}
    if not _reads_back(data, cfg):
        # The object contradicts its own annotations (a str in an int field). It must still be read back as it is.
        data["exact"] = True
        if not _reads_back(data, cfg):
            raise ConfigEncodeError(
                f"{type(cfg).__name__}: {cfg!r} would not be read back as it is. "
                "Keep every field that matters as a dataclass field that the constructor accepts."
            )
    return data


def decode_cfg(data: Any, cfg_type: Any = None, *, named_only: bool = False) -> Any:
    """Config that `encode_cfg` wrote; see `from_json`.

    With `named_only`, for untrusted data, only the config's class and those that its fields name are created.
    """
    if not isinstance(data, Mapping) or not isinstance(data.get("type"), str) or "value" not in data:
        raise ConfigMismatchError('config: must be {"type": "module:QualName", "value": ...}, got ' + repr(data)[:200])
    cfg_type = None if cfg_type is Any or isinstance(cfg_type, TypeVar) else cfg_type
    name, how = data["type"], tagged.Reading(check=not data.get("exact", False), named_only=named_only)
    where = name.rpartition(".")[2].rpartition(":")[2]
    cfg = _decode_value(name, data["value"], cfg_type, where, how)
    if isinstance(cfg_type, type) and classes.within(cfg_type) and not isinstance(cfg, cfg_type):
        raise ConfigMismatchError(f"{where}: stored as {name}, which is not a {classes.name_of(cfg_type)}.")
    return cfg


def _encode_value(cfg: Any) -> Any:
    if classes.is_record(type(cfg)):
        return tagged.encode_fields(cfg, type(cfg).__name__)
    return tagged.encode(cfg, type(cfg).__name__)


def _decode_value(name: str, value: Any, cfg_type: Any, where: str, how: tagged.Reading) -> Any:
    is_fields = isinstance(value, dict) and not any(key.startswith("$") for key in value)
    if not is_fields or name == "builtins:dict":
        return tagged.decode(value, cfg_type, where, how)
    # Without a requested class it is the stored one; its fields decide which others are allowed.
    asked = how if cfg_type is not None else tagged.CHECKED
    return tagged.decode_record(tagged.find_class(name, cfg_type, where, asked), value, where, how)


def _reads_back(data: dict[str, Any], cfg: Any) -> bool:
    try:
        back = decode_cfg(data, type(cfg))
    except ConfigMismatchError:
        return False
    # As text: 1, 1.0 and True are equal in Python and different in a config.
    return type(back) is type(cfg) and stable_json(_encode_value(back)) == stable_json(data["value"])
