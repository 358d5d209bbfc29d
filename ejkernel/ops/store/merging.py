"""Comparing and merging entries of several stores and packs."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from ejkernel.ops.store.entry import StoredEntry
from ejkernel.ops.store.persistent import PersistentCache
from ejkernel.ops.store.places import Place
from ejkernel.ops.utils.fingerprint import stable_json

Keep = Literal["better", "mine", "theirs"]


def better(a: StoredEntry, b: StoredEntry) -> StoredEntry:
    """The better of two entries: measured, complete, newer toolchain, tighter interval, later; `a` if equal."""
    return b if foundation(b) > foundation(a) else a


def foundation(entry: StoredEntry) -> tuple[Any, ...]:
    """The rank of an entry in `better`; greater is better."""
    toolchain = tuple(_release(entry.provenance.get(name)) for name in ("jax", "jaxlib", "ejkernel"))
    # The time decides last, because a host's clock may be wrong.
    return (
        entry.clock is None,
        entry.complete,
        toolchain,
        -interval(entry.statistics),
        str(entry.provenance.get("time", "")),
    )


def interval(statistics: Mapping[str, Any]) -> float:
    """Width of the confidence interval relative to the median; infinite if there is none."""
    for unit in ("s", "ms", "us"):
        low, high, median = (statistics.get(f"{name}_{unit}") for name in ("low", "high", "median"))
        if all(isinstance(x, int | float) for x in (low, high, median)) and median:
            return (high - low) / median  # pyright: ignore[reportOptionalOperand]
    inner = [interval(value) for value in statistics.values() if isinstance(value, Mapping)]
    return min(inner, default=math.inf)


def merge(sources: Iterable[Iterable[StoredEntry]]) -> dict[Place, StoredEntry]:
    """All entries of `sources`; for each key the better one."""
    merged: dict[Place, StoredEntry] = {}
    for source in sources:
        for entry in source:
            merged[entry.place] = better(merged[entry.place], entry) if entry.place in merged else entry
    return merged


@dataclasses.dataclass(kw_only=True, slots=True)
class Imported:
    """How many entries an import added, replaced and kept."""

    added: int = 0
    replaced: int = 0
    kept: int = 0


def add_all(cache: PersistentCache, found: Iterable[StoredEntry], keep: Keep = "better") -> Imported:
    """Copies entries into the user's store; `keep` says which entry stays if both have one."""
    count = Imported()
    for entry in found:
        mine = cache.own(*entry.place)  # Entries that a pack of the store already has must be copied too.
        if mine is None:
            cache.add(entry)
            count.added += 1
        elif same(mine, entry) or keep == "mine" or (keep == "better" and better(mine, entry) is mine):
            count.kept += 1
        else:
            cache.add(entry)
            count.replaced += 1
    return count


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A key whose config is not the same on both sides; None if it is missing."""

    place: Place
    left: StoredEntry | None
    right: StoredEntry | None

    def fields(self) -> Iterator[tuple[str, Any, Any]]:
        """Parts of the config that differ, with their values on the left and on the right."""
        left, right = (_flat(e.cfg_data) if e else {} for e in (self.left, self.right))
        for name in dict.fromkeys([*left, *right]):
            if stable_json(left.get(name)) != stable_json(right.get(name)):
                yield name, left.get(name), right.get(name)


def differences(left: Iterable[StoredEntry], right: Iterable[StoredEntry]) -> list[Difference]:
    """Keys that only one side has, or whose configs differ, in order."""
    a, b = merge([left]), merge([right])
    found = (Difference(place=place, left=a.get(place), right=b.get(place)) for place in sorted(a.keys() | b.keys()))
    return [d for d in found if d.left is None or d.right is None or any(d.fields())]


def same(a: StoredEntry, b: StoredEntry) -> bool:
    """Whether two entries are equal, measurements included."""
    # As text: 1, 1.0 and True are equal in Python and different in a config.
    parts = lambda e: stable_json([e.key, e.signature, e.cfg_data, e.complete, e.statistics, e.provenance])
    return parts(a) == parts(b)


def _release(version: Any) -> tuple[Any, ...]:
    text = str(version or "")
    numbers = re.match(r"\d+(\.\d+)*", text)
    release = tuple(map(int, numbers[0].split("."))) if numbers else ()
    return release, not re.search(r"dev|rc|a\d|b\d", text)


def _flat(data: Any, name: str = "") -> dict[str, Any]:
    """Leaves of a config's JSON by dotted name."""
    if isinstance(data, Mapping) and data:
        flat: dict[str, Any] = {}
        for key, value in data.items():
            flat |= _flat(value, f"{name}.{key}".lstrip("."))
        return flat
    return {name.removeprefix("value."): data}
