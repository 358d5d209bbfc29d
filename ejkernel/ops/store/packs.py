"""Packs: many entries in one JSON file that people can review, ship and keep in version control."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ejkernel.errors import EjkernelError
from ejkernel.ops.store import entry as entries
from ejkernel.ops.store import files
from ejkernel.ops.store.entry import EntryError, StoredEntry
from ejkernel.ops.utils import jsontext
from ejkernel.ops.utils.shapes import wrong

FORMAT = 1
MAX_BYTES = 256 << 20
ENTRY_POINTS = "ejkernel.packs"
VARIABLE = "EJKERNEL_CACHE_PACKS"
RESULT = "ejkernel tuning result"
"""What the file of an `AutotuningResult` says that it is."""

# The colon that separates packs may also be part of a URL: after its scheme, before its port, in its user or address.
_URL_OR_PATH = re.compile(
    r"[a-z][a-z0-9+.-]+://(?:[^/@]*@)?(?:\[[^]/]*]|[^/:]*)(?::\d+(?=[/:]|\Z))?(?:[/?#][^:]*)?|[^:]+"
)


class PackError(EjkernelError):
    """A pack cannot be read or written."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """What a pack file holds; `problems` says which of its entries are unreadable.

    The file of an `AutotuningResult` is a pack that also names its device and the calls that were not tuned.
    """

    name: str
    entries: list[StoredEntry]
    problems: list[str]
    device: str | None = None
    unmatched: tuple[str, ...] = ()


def is_remote(source: str) -> bool:
    """Whether `source` is a URL rather than a path."""
    return re.match(r"[a-z][a-z0-9+.-]+://", source) is not None


def name_of(source: str) -> str:
    """Name of a pack, from where it is."""
    return source.rstrip("/").rpartition("/")[2].removesuffix(".json") or source


def read(source: str | os.PathLike[str]) -> Pack:
    """Pack in a local file or behind a URL.

    Raises:
      PackError: It cannot be read as a whole.
    """
    text = os.fspath(source)
    try:
        data = jsontext.parse(_fetch(text), max_bytes=MAX_BYTES)
    except (jsontext.JsonTextError, OSError) as e:
        raise PackError(f"{text}: {str(e).rstrip('.')}.") from e
    is_result = isinstance(data, dict) and data.get("kind") == RESULT
    if not isinstance(data, dict) or data.get("schema" if is_result else "ejkernel_pack") != FORMAT:
        raise PackError(f"{text}: is not a pack of format {FORMAT}. `ejkernel cache export` writes one.")
    if (fault := wrong(data, _RESULT_SHAPE if is_result else _SHAPE)) is not None:
        raise PackError(f"{text}: {fault}.")
    name = str(data.get("name") or name_of(text))
    good, problems = [], []
    for i, item in enumerate(data["entries"]):
        try:
            good.append(entries.from_data(_whole(item, data) if is_result else item, name, "pack"))
        except EntryError as e:
            problems.append(f"entry {i}: {e}")
    return Pack(
        name=name,
        entries=good,
        problems=problems,
        device=data["device"] if is_result else None,
        unmatched=tuple(data.get("unmatched", ())) if is_result else (),
    )


_SHAPE = {"entries": list}
_RESULT_SHAPE = {"entries": list, "device": str, "unmatched?": [str]}


def _whole(item: Any, result: Mapping[str, Any]) -> Any:
    """An entry of a result; earlier versions wrote the fields that all entries share only once."""
    shared = {"schema": entries.SCHEMA, "device": result["device"], "signature": None, "complete": True}
    return {**shared, "provenance": {}, "statistics": {}, **item} if isinstance(item, dict) else item


def to_text(items: Iterable[StoredEntry], name: str) -> Iterator[str]:
    """Text of a pack, piece by piece: in order of place, without dates, so that equal packs are equal files."""
    yield f'{{\n"ejkernel_pack": {FORMAT},\n"name": {json.dumps(name)},\n"entries": ['
    for i, item in enumerate(sorted(items, key=lambda e: e.place)):
        yield ",\n" if i else "\n"
        yield json.dumps(entries.to_data(item), indent=1, ensure_ascii=True, allow_nan=False)
    yield "\n]\n}\n"


def write(target: str | os.PathLike[str], items: Iterable[StoredEntry], name: str | None = None) -> None:
    """Writes a pack in one step, to a path or a URL."""
    text = os.fspath(target)
    data = "".join(to_text(items, name or name_of(text))).encode()
    if len(data) > MAX_BYTES:
        raise PackError(f"{text}: {len(data)} bytes, at most {MAX_BYTES} would be read. Split it by device or op.")
    if is_remote(text):
        with _open_remote(text, "wb") as file:
            file.write(data)
    else:
        files.write(Path(text).expanduser().absolute(), data)


def without_trials(entry: StoredEntry) -> StoredEntry:
    """`entry` for version control: it keeps only the winner and the guess of the candidates."""
    candidates = entry.statistics.get("candidates")
    if not isinstance(candidates, list):
        return entry
    kept = [c for c in candidates if isinstance(c, Mapping) and (c.get("status") == "winner" or c.get("guess") is True)]
    return dataclasses.replace(entry, statistics={**entry.statistics, "candidates": kept})


def default() -> list[str]:
    """Packs under the default store, first one first."""
    return [*from_environment(), *from_packages()]


def from_environment() -> list[str]:
    """Packs named by the environment, first one first."""
    text = os.environ.get(VARIABLE, "")
    parts = _URL_OR_PATH.findall(text) if os.pathsep == ":" else text.split(os.pathsep)
    return [part for part in parts if part]


def from_packages() -> list[str]:
    """Packs of installed packages: an entry point's value is the dotted path of a pack file or directory.

    `h200 = "mypackage.packs"` is the directory `packs` in `mypackage`; `"mypackage.packs.h200"` is also `h200.json` in
    it. The package is located, not imported.
    """
    found = []
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        top, *rest = point.module.split(".")
        spec = importlib.util.find_spec(top)  # A top-level name: looking it up imports nothing.
        for folder in (spec.submodule_search_locations or []) if spec else []:
            path = Path(folder, *rest)
            found += [str(p) for p in (path, path.with_name(path.name + ".json")) if p.exists()]
    return found


def _fetch(source: str) -> bytes:
    if is_remote(source):
        with _open_remote(source, "rb") as file:
            return file.read(MAX_BYTES + 1)
    return files.read(Path(source).expanduser(), MAX_BYTES)


@contextlib.contextmanager
def _open_remote(source: str, mode: str) -> Iterator[Any]:
    try:
        fsspec = importlib.import_module("fsspec")
    except ImportError as e:
        raise PackError(f"{source}: remote packs need fsspec. Install it with `pip install 'ejkernel[remote]'`.") from e
    try:
        with fsspec.open(source, mode) as file:
            yield file
    except Exception as e:  # Other packages' filesystems may raise any exception.
        raise PackError(f"{source}: {type(e).__name__}: {e}") from e
