"""Files of the store: one per entry, written under another name and renamed: a reader sees a whole file or none.

<root>/<device>/<op>/<call key>.json            the entry
<root>/<device>/<op>/<call key>.trials.jsonl    the candidates that were tried
<root>/<device>/<op>/.tmp-<host>-<pid>-<..>     an entry being written
<root>/.locks/<hash>.lock                       who is tuning
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import secrets
import socket
import stat
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ejkernel.ops.store import entry as entries
from ejkernel.ops.store.places import Place, directory_name, file_stem, former_name
from ejkernel.ops.utils import jsontext
from ejkernel.ops.utils.fingerprint import short_hash

TEMPORARY = ".tmp-"
BROKEN = ".broken"
LOCKS = ".locks"


class StoreWarning(UserWarning):
    """Something in the store could not be read or written; the program continues without it."""


TRIALS = ".trials.jsonl"
MAX_TRIALS_BYTES = 64 << 20

Stamp = tuple[int, int, int]
_BINARY = getattr(os, "O_BINARY", 0)  # Windows would translate line ends.


@functools.cache
def host() -> str:
    """Short name of this host that is safe in a file name."""
    return short_hash(socket.gethostname())[:8]


class StoreFiles:
    """The directory tree under `root`; nothing is read or written before the first use."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def directory(self, device: str, op_id: str) -> Path:
        """Directory of one op on one device."""
        return _folder(_folder(self.root, device), op_id)

    def path(self, place: Place, suffix: str | None = None) -> Path:
        """File of an entry, or another file beside it."""
        folder, former = self.directory(place.device, place.op_id), former_name(place.call_key)
        if former is not None and any(os.path.isfile(folder / f"{former}{end}") for end in (_suffix(), TRIALS)):
            return folder / f"{former}{suffix or _suffix()}"
        return folder / (file_stem(place.call_key) + (suffix or _suffix()))

    def scan(self, device: str | None = None, op_id: str | None = None) -> Iterator[Path]:
        """Entry files, in order of name."""
        for folder in _folders(self.root, device):
            for op in _folders(folder, op_id):
                yield from (op / name for name in _names(op) if _is_entry(name))

    def all_files(self) -> Iterator[Path]:
        """Every file in the store's directories for ops and locks, hidden ones too."""
        folders = [op for device in _folders(self.root, None) for op in _folders(device, None)]
        for folder in [*folders, self.root / LOCKS]:
            yield from (folder / name for name in _names(folder) if not os.path.isdir(folder / name))

    def append_trial(self, place: Place, record: Any) -> None:
        """Adds one line to the trials of an entry."""
        path = self.path(place, TRIALS)
        path.parent.mkdir(parents=True, exist_ok=True)
        append_line(path, record)

    def read_trials(self, place: Place) -> list[dict[str, Any]]:
        """Trials of an entry; an incomplete line is skipped."""
        try:
            data = read(self.path(place, TRIALS), MAX_TRIALS_BYTES)
        except FileNotFoundError:
            return []
        trials = []
        for line in data.splitlines():
            with contextlib.suppress(jsontext.JsonTextError):
                trials.append(jsontext.parse(line, max_bytes=entries.MAX_BYTES))
        return [trial for trial in trials if isinstance(trial, dict)]


def stamp(path: Path) -> Stamp | None:
    """A value that changes when a file is replaced; None without a file. Only for comparison: clocks differ."""
    try:
        return _stamp(os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def read(path: Path, max_bytes: int) -> bytes:
    """Contents of a file, at most `max_bytes` and one byte more."""
    if stat.S_ISFIFO(os.stat(path).st_mode):
        raise OSError(f"{path} is a pipe")  # Opening it would wait until some process writes.
    with open(path, "rb") as file:
        return file.read(max_bytes + 1)


def write(path: Path, data: bytes) -> Stamp:
    """Puts `data` at `path` in one step, durably."""
    for attempt in itertools.count():
        try:
            return _write(path, data)
        except FileNotFoundError:
            # Another process pruned the directory, or took this one for dead and removed its temporary file.
            if attempt == 3:
                raise
    raise AssertionError("unreachable")


def _write(path: Path, data: bytes) -> Stamp:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f"{TEMPORARY}{host()}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)
        try:
            _write_all(fd, data)
            _set_time(fd)
            os.fsync(fd)
            written = _stamp(os.fstat(fd))
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # A full disk does not say of which file.
        raise
    _sync_directory(path.parent)
    return written


def append_line(path: Path, record: Any) -> None:
    """Adds one line of JSON to a file."""
    line = json.dumps(record, ensure_ascii=True, allow_nan=False).encode() + b"\n"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | _BINARY, 0o666)
    try:
        size = os.fstat(fd).st_size
        # An incomplete line of a writer that died must not damage the next line.
        torn = size and os.lseek(fd, size - 1, os.SEEK_SET) >= 0 and os.read(fd, 1) != b"\n"
        _write_all(fd, b"\n" + line if torn else line)
    finally:
        os.close(fd)


def _set_time(fd: int) -> None:
    # File times have a resolution of milliseconds, and inodes are reused: two files could look like one.
    if os.utime in os.supports_fd:
        now = time.time_ns()
        os.utime(fd, ns=(now, now))


def _sync_directory(path: Path) -> None:
    # Not every system can open or sync a directory; the entry is whole either way, only its durability differs.
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_mtime_ns, status.st_size, status.st_ino


def _suffix() -> str:
    # From schema 2 on, the name contains it: two versions share a directory but never change each other's files.
    return ".json" if entries.SCHEMA == 1 else f".v{entries.SCHEMA}.json"


def _is_entry(name: str) -> bool:
    return name.partition(".")[2] == _suffix()[1:] and not name.startswith(".")


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except PermissionError as error:
        text = f"{folder}: cannot be listed ({error.strerror}). What it holds counts as absent."
        warnings.warn(text, StoreWarning, stacklevel=2)
        return []


def _folder(parent: Path, text: str) -> Path:
    former = former_name(text)
    return parent / (former if former is not None and os.path.isdir(parent / former) else directory_name(text))


def _folders(parent: Path, wanted: str | None) -> list[Path]:
    names = _names(parent) if wanted is None else [_folder(parent, wanted).name]
    return [parent / name for name in names if not name.startswith(".") and os.path.isdir(parent / name)]
