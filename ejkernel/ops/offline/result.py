"""The result of tuning many calls: a file to review and ship, and an overlay to run under."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ejkernel.errors import EjkernelError
from ejkernel.ops.config.asking import source_of
from ejkernel.ops.config.cache import overlay_cache
from ejkernel.ops.core.kernel import Invocation, Kernel
from ejkernel.ops.store import entry as entries
from ejkernel.ops.store import files, packs
from ejkernel.ops.store.entry import StoredEntry
from ejkernel.ops.store.provenance import collect
from ejkernel.ops.utils.fingerprint import current_device, device_fingerprint
from ejkernel.ops.utils.serialize import decode_cfg


class ResultFileError(EjkernelError, ValueError):
    """A file does not hold a tuning result."""


@dataclass(frozen=True)
class Entry:
    """The config of one call, and how it was found."""

    op_id: str
    call_key: str
    cfg: Any
    statistics: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    signature: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    provenance: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    complete: bool = field(default=True, compare=False)

    @classmethod
    def of(cls, inv: Invocation[Any, Any], kernel: Kernel[Any, Any], tuning: Any) -> Entry:
        """The entry of a finished tuning of a call."""
        measured = {"timer": tuning.timer, "device": current_device().device_kind}
        provenance = collect(source_of(kernel)) | measured
        statistics = tuning.statistics()
        return cls(inv.op_id, inv.call_key, tuning.cfg, statistics, inv.signature, provenance, tuning.complete)

    @classmethod
    def read(cls, entry: StoredEntry, cfg: Any) -> Entry:
        """The store's entry for a call, with its config."""
        _, op_id, call_key = entry.place
        return cls(op_id, call_key, cfg, entry.statistics, entry.signature, entry.provenance, entry.complete)

    def stored(self, device: str) -> StoredEntry:
        """The same for the store."""
        return entries.make(
            (device, self.op_id, self.call_key),
            self.cfg,
            signature=self.signature,
            provenance=self.provenance,
            statistics=self.statistics,
            complete=self.complete,
        )


@dataclass(frozen=True)
class TunedCall:
    """The result of tuning one call: an entry, or the reason why there is none."""

    key: tuple[str, str, str]
    entry: Entry | StoredEntry | None
    error: str | None = None


@dataclass(frozen=True)
class AutotuningResult:
    """Configs of calls on one kind of device.

    As a context manager it is an overlay: functions that were jitted before use it inside the block. It may be entered
    again while it is entered, and by several threads at once.
    """

    device: str = field(default_factory=device_fingerprint)
    entries: tuple[Entry, ...] = ()
    unmatched: tuple[str, ...] = field(default=(), compare=False)
    """Calls that could not be tuned, with reasons."""
    _entered: threading.local = field(default_factory=threading.local, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "entries", tuple(self.entries))

    def __reduce__(self) -> tuple[Any, ...]:
        """Whether it is entered concerns only this process, so it is not pickled."""
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
        """Entries of both; if both have one for a key, that of `other`."""
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
        """Writes a JSON file that `load` reads back, and that is a pack: `EJKERNEL_CACHE_PACKS` may name it."""
        data = {
            "ejkernel_pack": packs.FORMAT,
            "schema": packs.FORMAT,
            "kind": packs.RESULT,
            "device": self.device,
            "entries": [entries.to_data(e.stored(self.device)) for e in self.entries],
            "unmatched": list(self.unmatched),
        }
        files.write(Path(path).absolute(), json.dumps(data, indent=1, allow_nan=False).encode() + b"\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> AutotuningResult:
        """Reads what `dump` wrote, or any pack of one device; the configs' classes must be imported already."""
        try:
            pack = packs.read(path)
        except packs.PackError as error:
            raise ResultFileError(str(error)) from error
        if pack.problems:
            raise ResultFileError(f"{path}: {pack.problems[0]}")
        named = [] if pack.device is None else [pack.device]
        devices = sorted({*named, *(entry.place.device for entry in pack.entries)})
        if len(devices) != 1:
            raise ResultFileError(f"{path}: a result is of one device, this has {', '.join(devices) or 'none'}.")
        found = [Entry.read(entry, decode_cfg(entry.cfg_data)) for entry in pack.entries]
        return cls(devices[0], tuple(found), pack.unmatched)


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
