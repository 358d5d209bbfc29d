"""The persistent tier: tuned configs on disk, then read-only packs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from ejkernel.errors import EjkernelError
from ejkernel.ops.store import entry as entries
from ejkernel.ops.store import files, layers, locks, packs, places, provenance
from ejkernel.ops.store.entry import EntryError, StoredEntry
from ejkernel.ops.store.layers import DirectoryLayer, Layer, MemoryLayer
from ejkernel.ops.store.layers import StoreWarning as StoreWarning
from ejkernel.ops.store.places import Place
from ejkernel.ops.utils import env
from ejkernel.ops.utils.fingerprint import short_hash
from ejkernel.ops.utils.records import ConfigMismatchError

if TYPE_CHECKING:
    from ejkernel.ops.core.context import Served

Stale = Literal["use", "retune", "ignore"]

_log = logging.getLogger("ejkernel.store")


class StoreSettingError(EjkernelError, ValueError):
    """A setting of the store has an invalid value."""


def default_root() -> Path:
    """Directory of the default store."""
    if directory := os.environ.get("EJKERNEL_CACHE_DIR"):
        return _local(directory) / "configs"
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute()
    except RuntimeError:  # No home directory: a path that cannot exist, so that the store is in memory.
        base = Path(os.devnull)
    return base / "ejkernel" / "configs"


class PersistentCache:
    """Configs by key, in files that every process and every host can share.

    A key is `(device, op_id, call_key)`, given as three arguments or as one tuple, or any other key made of text,
    numbers, None and tuples. Nothing is read or written before the first use. Safe to use from many threads.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        packs: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
        stale: Stale | None = None,
    ) -> None:
        """Opens the store in the directory `path`, or the default one over the packs of the environment.

        Args:
          path: Directory; by default `configs` under `EJKERNEL_CACHE_DIR`, or under `ejkernel` in the XDG cache.
          packs: Read-only packs under it, first one first: files, directories or URLs. By default none with a `path`,
            and those of `EJKERNEL_CACHE_PACKS` and of installed packages without.
          stale: What to do with entries that were measured with another kernel source or another JAX; by default what
            `EJKERNEL_STALE` says, or "use".
        """
        self.path = default_root() if path is None else _local(os.fspath(path))
        self.stale = _stale(env.read("EJKERNEL_STALE", "use") if stale is None else stale)
        self._packs = _sources(packs, default=None if path is None else [])
        self._pack_layers: list[Layer] | None = None
        self._store = DirectoryLayer(self.path, "store")
        self._memory: dict[Place, StoredEntry] = {}
        self._told: set[tuple[str, Any]] = set()
        self._puts = 0
        self._lock = threading.RLock()

    @functools.cached_property
    def served(self) -> Served:
        """The configs that calls were traced with, so that a put or delete that changes one has it traced again."""
        from ejkernel.ops.core.context import Served  # This loads JAX, which the command line does not need.

        return Served()

    def get(self, *key: Any, cfg_type: Any = None) -> Any:
        """Config of a key, or None."""
        entry = self.lookup(*key, cfg_type=cfg_type)
        return None if entry is None else entry.cfg

    def lookup(
        self, *key: Any, cfg_type: Any = None, kernel: Any = None, stale: Stale | None = None
    ) -> StoredEntry | None:
        """Entry of a key with its config typed, from the first layer that has one that fits.

        One that was measured comes before those that only a compiler has ranked, whichever layer has it. With `kernel`,
        an entry that was measured with another source of it or another JAX has the reason in `stale`; the policy
        "ignore" skips it.
        """
        where = places.places_of(places.split(key, "PersistentCache.lookup"))
        policy = self.stale if stale is None else _stale(stale)
        ranked: list[tuple[StoredEntry, str | None]] = []
        for layer in self._layers():
            found = _found(layer, where)
            entry = None if found is None else self._fitting(found, cfg_type)
            if entry is None:
                continue
            reason = None if kernel is None else provenance.changes(entry.provenance, kernel)
            if reason is None or policy != "ignore":
                ranked.append((entry, reason))
                if entry.clock is None:
                    break
        if not ranked:
            return None
        entry, reason = next((found for found in ranked if found[0].clock is None), ranked[0])
        self._note_stale(entry, reason, policy)
        return dataclasses.replace(entry, stale=reason)

    def put(
        self,
        *key_and_cfg: Any,
        signature: Mapping[str, Any] | None = None,
        provenance: Mapping[str, Any] | None = None,
        statistics: Mapping[str, Any] | None = None,
        complete: bool = True,
        kernel: Any = None,
    ) -> None:
        """Stores the config of a key: `put(key, cfg)` or `put(device, op_id, call_key, cfg)`.

        Versions, host and time are added to `provenance`, and the hash of the source of `kernel` if it is given.

        Raises:
          StoreKeyError: The key is not made of text, numbers, None and tuples.
          ConfigEncodeError: The config holds something that is not data.
        """
        key = places.split(key_and_cfg[:-1], "PersistentCache.put")
        self.add(
            entries.make(
                key,
                key_and_cfg[-1],
                signature=signature,
                provenance=_provenance(kernel) | dict(provenance or {}),
                statistics=statistics,
                complete=complete,
            )
        )

    def add(self, entry: StoredEntry) -> None:
        """Stores an entry as it is, replacing the existing one."""
        place = entry.place
        origin = "imported" if entry.origin == "pack" else entry.origin
        entry = dataclasses.replace(entry, layer="store", origin=origin, stale=None)
        data = entries.to_bytes(entry)
        if len(data) > entries.MAX_BYTES:
            raise EntryError(f"{tuple(place)}: {len(data)} bytes, an entry has at most {entries.MAX_BYTES}.")
        with self._lock:
            self._puts += 1
            try:
                path = self._store.files.path(place)
                self._settle(entry.key)
                self._set_aside(path, place)
                self._store.remember(place, files.write(path, data), entry)
                self._memory.pop(place, None)
            except OSError as e:
                self._memory[place] = entry
                self._warn_unwritable(e)
        self._changed(entry)

    def own(self, *key: Any) -> StoredEntry | None:
        """Entry of a key in the user's store only, whether or not its config still fits."""
        where = places.places_of(places.split(key, "PersistentCache.own"))
        return self._memory.get(where[0]) or _found(self._store, where)

    def delete(self, *key: Any) -> bool:
        """Removes an entry and its trials from the store (not from packs); False if there was none."""
        name = places.split(key, "PersistentCache.delete")
        place = places.place_of(name)
        with self._lock:
            self._puts += 1
            found = self._memory.pop(place, None) is not None
            self._settle(name)
            for suffix in (None, files.TRIALS):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    self._store.files.path(place, suffix).unlink()
                    found = found or suffix is None
        if "served" in vars(self):
            self.served.changed(name, None)
        return found

    def entries(
        self, device: str | None = None, op_id: str | None = None, *, packs: bool = True
    ) -> Iterator[StoredEntry]:
        """Entries of the store, then those of its packs if wanted, each key once; configs are read on first use."""
        seen: set[Place] = set()
        ranked: dict[Place, StoredEntry] = {}
        for layer in self._layers() if packs else self._own_layers():
            for entry in layer.entries(device, op_id):
                if entry.clock is not None:  # A later layer may have measured it.
                    ranked.setdefault(entry.place, entry)
                elif entry.place not in seen:
                    seen.add(entry.place)
                    yield entry
        yield from (entry for place, entry in ranked.items() if place not in seen)

    def __contains__(self, key: object) -> bool:
        return self.lookup(key) is not None

    def __iter__(self) -> Iterator[Any]:
        return (entry.key for entry in self.entries())

    def __len__(self) -> int:
        return sum(1 for _ in self.entries())

    def __bool__(self) -> bool:
        return True  # An empty store is still true, and counting would be slow.

    def __repr__(self) -> str:
        return f"PersistentCache({str(self.path)!r})"

    @property
    def in_memory(self) -> bool:
        """Whether an entry could not be written and will not survive this process."""
        return bool(self._memory)

    def generation(self, device: str, op_id: str) -> Any:
        """Changes when an entry of an op was added or removed, here or by another process."""
        with contextlib.suppress(OSError):
            return self._puts, files.stamp(self._store.files.directory(device, op_id))
        return self._puts, None

    @contextlib.contextmanager
    def tuning_lock(self, key: Any, timeout: float | None = None) -> Iterator[bool]:
        """Holds the right to measure `key`, among all processes that share the directory.

        Gives True when it is held, False if `timeout` seconds passed first. Look the key up again inside: another
        process may have measured it while this one waited. The lock is released if its holder dies.
        """
        place = places.place_of(key)
        path = self.path / files.LOCKS / f"{short_hash(list(place))}.lock"
        with contextlib.ExitStack() as stack:
            try:
                held = stack.enter_context(locks.file_lock(path, timeout))
            except OSError as e:
                self._warn_unwritable(e)
                held = stack.enter_context(locks.thread_lock(path, timeout))
            yield held

    def append_trial(self, key: Any, record: Mapping[str, Any], *, quiet: bool = False) -> None:
        """Adds one line to the trials of a key, so that an interrupted tuning can resume; `quiet` if it may be lost."""
        place = places.place_of(key)
        with self._lock:
            try:
                self._store.files.append_trial(place, entries.plain(record))
            except OSError as e:
                if not quiet:
                    self._warn_unwritable(e)

    def read_trials(self, key: Any) -> list[dict[str, Any]]:
        """Trials of a key, oldest first."""
        try:
            return self._store.files.read_trials(places.place_of(key))
        except OSError as e:
            self._warn_unwritable(e)
            return []

    def require_packs(self) -> None:
        """Reads all packs now, and fails if one cannot be read.

        Raises:
          PackError: One of them cannot be read.
        """
        for layer in self._layers():
            if isinstance(layer, layers.PackLayer):
                layer.require()

    def _layers(self) -> list[Layer]:
        with self._lock:
            if self._pack_layers is None:
                sources = packs.default() if self._packs is None else self._packs
                self._pack_layers = [layer for source in sources for layer in layers.layers_of(source)]
            return [*self._own_layers(), *self._pack_layers]

    def _own_layers(self) -> list[Layer]:
        return [MemoryLayer(self._memory), self._store]

    def _fitting(self, entry: StoredEntry, cfg_type: Any) -> StoredEntry | None:
        entry = entry.typed(cfg_type)
        try:
            _ = entry.cfg
        except ConfigMismatchError as e:
            self._tell_once(
                ("mismatch", entry.place), f"{tuple(entry.place)} in {entry.layer}: {e} It counts as absent."
            )
            return None
        return entry

    def _changed(self, entry: StoredEntry) -> None:
        if "served" in vars(self):
            fitting = self._fitting(entry, None)
            cfg = None if fitting is None else fitting.cfg
            self.served.changed(entry.key, cfg, transferable=entry.signature is not None)

    def _note_stale(self, entry: StoredEntry, reason: str | None, policy: Stale) -> None:
        if reason is None or policy != "use" or ("stale", entry.place.op_id) in self._told:
            return
        if entry.origin == "pack":
            _note_stale_pack(entry.layer)
            return
        self._told.add(("stale", entry.place.op_id))
        _log.warning(
            "%s: using a config that was tuned before a change (%s). "
            'EJKERNEL_STALE=retune, or stale="retune", measures again.',
            entry.place.op_id,
            reason,
        )

    def _settle(self, key: Any) -> None:
        """Moves an entry from the place of an earlier version to its present place."""
        where = places.places_of(key)
        for place in where if where[0].device == places.FREE else ():
            path = self._store.files.path(place)
            with contextlib.suppress(EntryError, FileNotFoundError, NotADirectoryError, IsADirectoryError):
                own = self._store.files.path(layers.read_entry(path, place).place)
                if own != path and own.exists():
                    path.unlink()  # There is a newer entry at the present place.
                elif own != path:
                    os.replace(path, own)

    def _set_aside(self, path: Path, place: Place) -> None:
        """Renames an unreadable file instead of replacing it: somebody may have edited it by hand."""
        if files.stamp(path) is None:
            return
        try:
            layers.read_entry(path, place)
        except (EntryError, IsADirectoryError):
            os.replace(path, path.with_name(path.name + files.BROKEN))

    def _warn_unwritable(self, error: OSError) -> None:
        self._tell_once(
            ("unwritable", None),
            f"{self.path}: the store cannot be used there ({error.strerror or error}). This process continues in "
            "memory. Free space, fix its permissions, or point EJKERNEL_CACHE_DIR at a writable directory.",
        )

    def _tell_once(self, what: tuple[str, Any], text: str) -> None:
        with self._lock:
            if what in self._told:
                return
            self._told.add(what)
        warnings.warn(text, StoreWarning, stacklevel=4)


@functools.cache
def _note_stale_pack(name: str) -> None:
    """Logs once per process that a pack is stale; at level INFO, because its user can do little about it."""
    _log.info(
        "pack %s: its configs were tuned with another JAX or an earlier kernel. They are used; EJKERNEL_STALE=ignore "
        "refuses them, and tuning puts entries of the store before them.",
        name,
    )


def _found(layer: Layer, where: tuple[Place, ...]) -> StoredEntry | None:
    """The entry that belongs to the key of these places: an earlier version used some places for two keys."""
    entries = (layer.find(place) for place in where)
    return next((entry for entry in entries if entry is not None and entry.place == where[0]), None)


def _provenance(kernel: Any) -> dict[str, Any]:
    return provenance.collect(kernel)


def _sources(given: Any, default: list[Any] | None) -> list[Any] | None:
    if given is None:
        return default
    return [given] if isinstance(given, str | os.PathLike) else list(given)


def _local(path: str) -> Path:
    if packs.is_remote(path):
        raise StoreSettingError(
            f"PersistentCache: path must be a local directory, got {path!r}. Pass packs=[{path!r}]."
        )
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise StoreSettingError(f"PersistentCache: {path!r} has no meaning here: {error}") from error


def _stale(value: str) -> Any:
    if value not in get_args(Stale):
        allowed = ", ".join(map(repr, get_args(Stale)))
        raise StoreSettingError(f"PersistentCache: stale must be one of {allowed}, got {value!r}.")
    return value
