"""One tuned config with everything that is known about it, and its form as JSON."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from typing import Any, Literal

from ejkernel.errors import EjkernelError
from ejkernel.ops.store import places
from ejkernel.ops.store.places import Place
from ejkernel.ops.utils import jsontext, serialize, tagged
from ejkernel.ops.utils.shapes import wrong

SCHEMA = 1
SOURCE_CHANGED = "kernel source changed"
"""The first reason for an entry to be stale."""
MAX_BYTES = 1 << 20

Origin = Literal["tuned", "imported", "pack"]
"""Where the measurement comes from: the store itself, a copy into it, or a pack."""


class EntryError(EjkernelError, ValueError):
    """A file or a part of a pack is not an entry that this version reads."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StoredEntry:
    """A config that was measured. `cfg` is typed on first use; everything else is plain JSON."""

    key: Any
    cfg_data: Mapping[str, Any]
    signature: Mapping[str, Any] | None = None
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    statistics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    complete: bool = True
    layer: str = "store"
    origin: Origin = "tuned"
    stale: str | None = None
    cfg_type: Any = None
    _typed: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)

    @functools.cached_property
    def place(self) -> Place:
        """Device, op id and call key."""
        return places.place_of(self.key)

    @property
    def cfg(self) -> Any:
        """The config itself.

        Raises:
          ConfigMismatchError: It no longer fits its class, or its class is not loaded.
        """
        if _is_hashable(self.cfg_type) and self.cfg_type in self._typed:
            return self._typed[self.cfg_type]
        # An entry from elsewhere must not choose which of this program's classes are created.
        cfg = serialize.decode_cfg(self.cfg_data, self.cfg_type, named_only=self.origin != "tuned")
        self._remember(cfg)
        return cfg

    @property
    def clock(self) -> str | None:
        """What ranked the candidates if they were not run: a compiler's `schedule`, or its `order`."""
        named = self.provenance.get("clock")
        return None if named is None else str(named)

    @property
    def kept_guess(self) -> bool:
        """Whether tuning found nothing faster than the kernel's own guess."""
        candidates = self.statistics.get("candidates")
        known = [c for c in candidates if isinstance(c, Mapping)] if isinstance(candidates, list) else []
        return any(c.get("status") == "winner" and c.get("guess") is True for c in known)

    @property
    def has_other_source(self) -> bool:
        """Whether the kernel has changed since; known only of an entry that was looked up with its kernel."""
        return self.stale is not None and self.stale.startswith(SOURCE_CHANGED)

    def typed(self, cfg_type: Any) -> StoredEntry:
        """This entry with its config read as `cfg_type`."""
        return dataclasses.replace(self, cfg_type=cfg_type)

    def _remember(self, cfg: Any) -> None:
        # A config that the caller may change must be read again each time.
        if _is_hashable(cfg) and type(cfg).__hash__ is not object.__hash__ and _is_hashable(self.cfg_type):
            self._typed[self.cfg_type] = cfg


def make(
    key: Any,
    cfg: Any,
    *,
    signature: Any = None,
    provenance: Any = None,
    statistics: Any = None,
    complete: bool = True,
) -> StoredEntry:
    """Entry of a config that was just measured."""
    entry = StoredEntry(
        key=key,
        cfg_data=serialize.encode_cfg(cfg),
        signature=plain(signature),
        provenance=plain(provenance or {}),
        statistics=plain(statistics or {}),
        complete=complete,
    )
    entry._remember(cfg)
    return entry


def to_data(entry: StoredEntry) -> dict[str, Any]:
    """JSON-able form of `entry`."""
    data: dict[str, Any] = {"schema": SCHEMA, **entry.place._asdict()}
    if entry.place != entry.key:
        data["key"] = tagged.encode(entry.key, "key")
    return data | {
        "signature": entry.signature,
        "cfg": entry.cfg_data,
        "complete": entry.complete,
        "statistics": entry.statistics,
        "provenance": entry.provenance,
    }


def to_bytes(entry: StoredEntry) -> bytes:
    """Text of an entry's file."""
    data = to_data(entry) | ({"origin": "imported"} if entry.origin != "tuned" else {})
    return json.dumps(data, indent=1, ensure_ascii=True, allow_nan=False).encode() + b"\n"


def from_bytes(data: bytes, layer: str = "store", origin: Origin = "tuned") -> StoredEntry:
    """Entry of a file's text."""
    try:
        return from_data(jsontext.parse(data, max_bytes=MAX_BYTES), layer, origin)
    except jsontext.JsonTextError as e:
        raise EntryError(str(e)) from e


def from_data(data: Any, layer: str = "store", origin: Origin = "tuned") -> StoredEntry:
    """Entry that `to_data` wrote, with each part checked."""
    if not isinstance(data, dict) or "schema" not in data:
        raise EntryError("not an entry of the store (no schema).")
    if data["schema"] != SCHEMA:
        raise EntryError(f"written with schema {data['schema']!r}, this version reads {SCHEMA}. Upgrade ejkernel.")
    if (fault := wrong(data, _SHAPE)) is not None:
        raise EntryError(f"{fault}.")
    return StoredEntry(
        key=_key(data),
        cfg_data=data["cfg"],
        signature=data["signature"],
        provenance=data["provenance"],
        statistics=data["statistics"],
        complete=data["complete"],
        layer=layer,
        origin="imported" if origin == "tuned" and data.get("origin", "tuned") != "tuned" else origin,
    )


_SHAPE = {
    "device": str,
    "op_id": str,
    "call_key": str,
    "signature": (dict, None),
    "cfg": dict,
    "provenance": dict,
    "statistics": dict,
    "complete": bool,
}


def _key(data: dict[str, Any]) -> Any:
    place = Place(data["device"], data["op_id"], data["call_key"])
    if "key" not in data:
        return tuple(place)
    try:
        key = tagged.decode(data["key"], where="key", how=tagged.Reading(named_only=True))
        if place in places.places_of(key):
            return key
    except EjkernelError as e:
        raise EntryError(str(e)) from e
    raise EntryError(f"its key {key!r} does not belong to call key {place.call_key!r}.")


def plain(value: Any) -> Any:
    """`value` as JSON; anything else becomes text, so that a measurement is never lost because of its description."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if getattr(value, "ndim", None) == 0:
        return plain(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return str(value)


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
