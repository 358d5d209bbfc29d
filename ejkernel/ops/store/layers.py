"""Where entries are read from: the store's directory, then packs, in order."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from ejkernel.ops.store import entry as entries
from ejkernel.ops.store import files, packs, places
from ejkernel.ops.store.entry import EntryError, Origin, StoredEntry
from ejkernel.ops.store.files import Stamp, StoreFiles
from ejkernel.ops.store.files import StoreWarning as StoreWarning
from ejkernel.ops.store.places import Place


class Layer(Protocol):
    """Anything that entries can be read from."""

    @property
    def name(self) -> str:
        """The `layer` of entries of this layer."""
        ...

    def find(self, place: Place) -> StoredEntry | None:
        """Entry at `place`."""
        ...

    def entries(self, device: str | None = None, op_id: str | None = None) -> Iterator[StoredEntry]:
        """All entries, or those of one device or op."""
        ...


class MemoryLayer:
    """Entries that could not be written."""

    name = "store"

    def __init__(self, memory: dict[Place, StoredEntry]) -> None:
        self._memory = memory

    def find(self, place: Place) -> StoredEntry | None:
        """Entry at `place`."""
        return self._memory.get(place)

    def entries(self, device: str | None = None, op_id: str | None = None) -> Iterator[StoredEntry]:
        """Entries in order of place."""
        yield from _narrowed(self._memory, device, op_id)


MAX_KNOWN = 4096
"""How many entries of a directory are kept in memory, the latest ones; the others are read again."""


class DirectoryLayer:
    """Entries in a directory. Files are cached until they are replaced, broken ones too."""

    def __init__(self, root: Path, name: str, origin: Origin = "tuned") -> None:
        self.name = name
        self.origin: Origin = origin
        self.files = StoreFiles(root)
        self._known: dict[Place, tuple[Stamp, StoredEntry | None]] = {}
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def find(self, place: Place) -> StoredEntry | None:
        """Entry at `place`; the second lookup costs one stat."""
        path, known = self.files.path(place), self._known.get(place)
        try:
            stamp = files.stamp(path)
        except OSError as e:
            self._tell_once(
                f"{self.files.root}: cannot be read ({e.strerror}). What was not read yet counts as absent."
            )
            return None if known is None else known[1]
        if stamp is None:
            return None
        if known is not None and known[0] == stamp:
            return known[1]
        entry = self._read(path, place)
        self.remember(place, stamp, entry)
        return entry

    def remember(self, place: Place, stamp: Stamp, entry: StoredEntry | None) -> None:
        """Caches `entry` as the contents of the file with `stamp`."""
        with self._lock:
            self._known.pop(place, None)  # The latest come last.
            self._known[place] = (stamp, entry)
            if len(self._known) > MAX_KNOWN:
                del self._known[next(iter(self._known))]

    def entries(self, device: str | None = None, op_id: str | None = None) -> Iterator[StoredEntry]:
        """Entries in order of file name; broken files are skipped with a warning."""
        for path in self.files.scan(device, op_id):
            if (entry := self._read(path)) is not None:
                yield entry

    def _read(self, path: Path, place: Place | None = None) -> StoredEntry | None:
        try:
            return read_entry(path, place, self.name, self.origin)
        except FileNotFoundError:  # Deleted since it was listed.
            return None
        except (EntryError, OSError) as e:
            self._tell_once(f"{path}: {e} It counts as absent; `ejkernel cache verify` lists such files.")
            return None

    def _tell_once(self, text: str) -> None:
        with self._lock:
            if text in self._told:
                return
            self._told.add(text)
        warnings.warn(text, StoreWarning, stacklevel=4)


def read_entry(path: Path, place: Place | None = None, layer: str = "store", origin: Origin = "tuned") -> StoredEntry:
    """Entry in the file `path`, which must be where an entry of its key belongs."""
    entry = entries.from_bytes(files.read(path, entries.MAX_BYTES), layer, origin)
    where = places.places_of(entry.key)
    if place is not None and place not in where:
        raise EntryError(f"holds the entry of another key, {tuple(entry.place)}.")
    if place is None and path not in map(StoreFiles(path.parents[2]).path, where):
        raise EntryError(f"is not where the entry of {tuple(entry.place)} belongs.")
    return entry


class PackLayer:
    """Entries of a pack file, read on first use."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.name = packs.name_of(source)
        self._lock = threading.Lock()
        self._entries: dict[Place, StoredEntry] | None = None
        self._error: packs.PackError | None = None

    def require(self) -> None:
        """Checks that the pack can be read.

        Raises:
          PackError: It cannot.
        """
        if self._entries is None and self._error is None:
            try:
                self.load()
            except packs.PackError as e:
                self._error = e
        if self._error is not None:
            raise self._error

    def find(self, place: Place) -> StoredEntry | None:
        """Entry at `place`."""
        return self._load().get(place)

    def entries(self, device: str | None = None, op_id: str | None = None) -> Iterator[StoredEntry]:
        """Entries in order of place."""
        yield from _narrowed(self._load(), device, op_id)

    def _load(self) -> dict[Place, StoredEntry]:
        with self._lock:
            if self._entries is None:
                self._entries = self._read()
            return self._entries

    def _read(self) -> dict[Place, StoredEntry]:
        try:
            # Reversed, so that of two entries for a key the first in the pack counts.
            return {entry.place: entry for entry in reversed(self.load())}
        except packs.PackError as e:
            self._error = e
            warnings.warn(f"pack {e} It is left out.", StoreWarning, stacklevel=5)
            return {}

    def load(self) -> list[StoredEntry]:
        """Entries that can be read; the others with a warning.

        Raises:
          PackError: The whole pack cannot be read.
        """
        pack = packs.read(self.source)
        self.name = pack.name
        for problem in pack.problems:
            warnings.warn(f"pack {self.source}: {problem} It is left out.", StoreWarning, stacklevel=6)
        return pack.entries


def _narrowed(found: dict[Place, StoredEntry], device: str | None, op_id: str | None) -> Iterator[StoredEntry]:
    for place in sorted(found):
        if device in (None, place.device) and op_id in (None, place.op_id):
            yield found[place]


def layers_of(source: str | os.PathLike[str]) -> list[Layer]:
    """Layers of a pack file, of a URL, or of a directory (a store, pack files, or both)."""
    text = os.fspath(source)
    if packs.is_remote(text):
        return [PackLayer(text)]
    path = Path(text).expanduser()
    if path.is_dir():
        return [DirectoryLayer(path, path.name, "pack"), *(PackLayer(str(p)) for p in sorted(path.glob("*.json")))]
    return [PackLayer(str(path))]


def entries_of(source: str | os.PathLike[str]) -> Iterator[StoredEntry]:
    """Entries of a pack or directory that a user named, each key once.

    Raises:
      PackError: It does not exist, or cannot be read at all.
    """
    text = os.fspath(source)
    if not packs.is_remote(text) and not Path(text).expanduser().exists():
        raise packs.PackError(f"{text}: there is no such file or directory.")
    seen: set[Place] = set()
    for layer in layers_of(source):
        for entry in layer.load() if isinstance(layer, PackLayer) else layer.entries():
            if entry.place not in seen:
                seen.add(entry.place)
                yield entry
