"""The outcome of tuning many calls: a file to review and ship, and an overlay to run under."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ejkernel.errors import EjkernelError
from ejkernel.ops.config.cache import overlay_cache
from ejkernel.ops.store.entry import plain
from ejkernel.ops.utils import jsontext
from ejkernel.ops.utils.fingerprint import device_fingerprint
from ejkernel.ops.utils.serialize import decode_cfg, encode_cfg

SCHEMA = 1
MAX_BYTES = 256 << 20


class ResultFileError(EjkernelError, ValueError):
    """A file does not hold a tuning result."""


@dataclass(frozen=True)
class Entry:
    """The config of one call, and how it was found."""

    op_id: str
    call_key: str
    cfg: Any
    statistics: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class AutotuningResult:
    """Configs of calls on one kind of device.

    As a context manager it is an overlay: functions that were jitted before use it inside the block. It may be entered
    again while it is entered, and by several threads at once.
    """

    device: str = field(default_factory=device_fingerprint)
    entries: tuple[Entry, ...] = ()
    unmatched: tuple[str, ...] = field(default=(), compare=False)
    """What was asked for and could not be tuned, with reasons."""
    _entered: threading.local = field(default_factory=threading.local, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "entries", tuple(self.entries))

    def __reduce__(self) -> tuple[Any, ...]:
        """Where it is entered is a matter of this process alone."""
        return type(self), (self.device, self.entries, self.unmatched)

    def as_mapping(self) -> dict[tuple[str, str, str], Any]:
        """Configs by key, as caches hold them."""
        return {(self.device, entry.op_id, entry.call_key): entry.cfg for entry in self.entries}

    def as_overlay(self) -> ResultOverlay:
        """The configs by key: a mapping, and a context manager under which calls get them."""
        return ResultOverlay(self)

    def __enter__(self) -> AutotuningResult:
        stack = self._entered.__dict__.setdefault("stack", [])
        overlay = overlay_cache(self.as_mapping())
        overlay.__enter__()
        stack.append(overlay)
        return self

    def __exit__(self, *exc: Any) -> None:
        self._entered.stack.pop().__exit__(*exc)

    def __or__(self, other: AutotuningResult) -> AutotuningResult:
        """Entries of both; where both have one, that of `other`."""
        if not isinstance(other, AutotuningResult):
            return NotImplemented
        if self.device != other.device:
            raise EjkernelError(
                f"AutotuningResult: results of different devices cannot be joined: {self.device!r}, {other.device!r}."
            )
        merged = {(e.op_id, e.call_key): e for e in (*self.entries, *other.entries)}
        return AutotuningResult(self.device, tuple(merged.values()), (*self.unmatched, *other.unmatched))

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def dump(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON file that `load` reads back."""
        entries = [
            {"op_id": e.op_id, "call_key": e.call_key, "cfg": encode_cfg(e.cfg), "statistics": plain(e.statistics)}
            for e in self.entries
        ]
        data = {
            "schema": SCHEMA,
            "kind": "ejkernel tuning result",
            "device": self.device,
            "entries": entries,
            "unmatched": list(self.unmatched),
        }
        Path(path).write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> AutotuningResult:
        """Reads what `dump` wrote; the configs' classes must be imported already."""
        try:
            data = jsontext.parse(Path(path).read_bytes(), max_bytes=MAX_BYTES)
            if data["schema"] != SCHEMA:
                raise ResultFileError(f"{path}: written with schema {data['schema']!r}, this version reads {SCHEMA}.")
            entries = [
                Entry(e["op_id"], e["call_key"], decode_cfg(e["cfg"]), e.get("statistics", {})) for e in data["entries"]
            ]
            return cls(data["device"], tuple(entries), tuple(data.get("unmatched", ())))
        except (jsontext.JsonTextError, KeyError, TypeError) as error:
            raise ResultFileError(f"{path}: not a tuning result of ejkernel ({error!r}).") from error


class ResultOverlay(Mapping[tuple[str, str, str], Any]):
    """The configs of a result by key, for `overlay_cache`; or a context manager, like the result itself."""

    def __init__(self, result: AutotuningResult) -> None:
        self._result = result
        self._configs = result.as_mapping()

    def __getitem__(self, key: tuple[str, str, str]) -> Any:
        return self._configs[key]

    def __iter__(self) -> Iterator[tuple[str, str, str]]:
        return iter(self._configs)

    def __len__(self) -> int:
        return len(self._configs)

    def __enter__(self) -> ResultOverlay:
        self._result.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._result.__exit__(*exc)
