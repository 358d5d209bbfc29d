"""The nearest tuned shape: which config to try for a call that was not tuned."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ejkernel.ops.store.entry import StoredEntry
from ejkernel.ops.store.persistent import PersistentCache, Stale
from ejkernel.ops.store.places import Place
from ejkernel.ops.utils.fingerprint import short_hash


class Tuned(NamedTuple):
    """A tuned call, as far as it can be compared with another: its kind, and the sizes of its arrays."""

    kind: str
    sizes: tuple[int, ...]
    complete: bool
    place: Place


MAX_RATIO = 4
"""How much larger or smaller a size may be: a config of another kind of call is hardly better than the guess, and
checking it takes longer than compiling the call."""

_Index = dict[tuple[str, str], tuple[Any, list[Tuned]]]
_indexes: weakref.WeakKeyDictionary[PersistentCache, _Index] = weakref.WeakKeyDictionary()


def nearest(
    cache: PersistentCache,
    device: str,
    op_id: str,
    signature: Mapping[str, Any],
    *,
    cfg_type: Any = None,
    accept: Callable[[StoredEntry], bool] = lambda entry: True,
    kernel: Any = None,
    stale: Stale | None = None,
) -> StoredEntry | None:
    """The accepted entry of the same op, structure, dtypes and statics whose shapes are closest.

    Closest is the smallest distance in log space: 1000 is nearer to 1100 than to 500. No size may differ by more than
    `MAX_RATIO`. With `kernel` and a policy other than "use", stale entries are skipped. Nothing is stored.
    """
    kind, sizes = describe(signature)
    if not all(isinstance(size, int) for size in sizes):
        return None  # A symbolic size has no distance.
    same = [t for t in _tuned(cache, device, op_id) if t.kind == kind and t.sizes != sizes and is_near(t.sizes, sizes)]
    # Ties go to the lower call key, so that every host gives the same answer.
    for tuned in sorted(same, key=lambda t: (distance(t.sizes, sizes), not t.complete, t.place)):
        entry = cache.lookup(*tuned.place, cfg_type=cfg_type, kernel=kernel, stale=stale)
        if entry is None or (entry.stale and (stale or cache.stale) != "use"):
            continue
        if accept(entry):
            return entry
    return None


def is_near(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether two lists of sizes are as long, and no size is too much larger than the other one."""
    return len(a) == len(b) and all(abs(_log(x) - _log(y)) <= math.log2(MAX_RATIO) for x, y in zip(a, b, strict=True))


def distance(a: tuple[int, ...], b: tuple[int, ...]) -> float:
    """Euclidean distance of the logarithms of two lists of sizes."""
    return math.dist([_log(x) for x in a], [_log(x) for x in b])


def describe(signature: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    """Hash of everything in a signature except the sizes of its arrays, and those sizes in order."""
    sizes: list[int] = []
    return short_hash(_without_sizes(signature, sizes)), tuple(sizes)


def _without_sizes(node: Any, sizes: list[int]) -> Any:
    if isinstance(node, Mapping):
        if "static" in node:
            return dict(node)
        if isinstance(shape := node.get("shape"), list | tuple) and "dtype" in node:
            sizes.extend(shape)
            return {"dtype": node["dtype"], "rank": len(shape)}
        return {key: _without_sizes(node[key], sizes) for key in sorted(node)}
    if isinstance(node, list | tuple):
        return [_without_sizes(child, sizes) for child in node]
    return node


def _log(size: int) -> float:
    return math.log2(size) if size > 0 else -1.0


def _tuned(cache: PersistentCache, device: str, op_id: str) -> list[Tuned]:
    """Tuned calls of an op; read again only when its directory has changed."""
    index = _indexes.setdefault(cache, {})
    generation = cache.generation(device, op_id)
    known = index.get((device, op_id))
    if known is None or known[0] != generation:
        found = [_summary(entry) for entry in cache.entries(device, op_id) if entry.signature is not None]
        known = index[device, op_id] = (generation, found)
    return known[1]


def _summary(entry: StoredEntry) -> Tuned:
    kind, sizes = describe(entry.signature or {})
    if not all(isinstance(size, int) for size in sizes):
        sizes = ()  # Symbolic or damaged: it has no distance.
    return Tuned(kind, sizes, entry.complete, entry.place)
