"""How two calls differ, field by field, as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ejkernel.ops.utils.fingerprint import stable_json

if TYPE_CHECKING:
    from ejkernel.ops.store.entry import StoredEntry


def compare_signatures(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    """`field: one -> two` for every field in which two signatures differ."""
    a, b = dict(_fields(one)), dict(_fields(two))
    absent = "absent"
    return [
        f"{name}: {a.get(name, absent)} -> {b.get(name, absent)}" for name in {**a, **b} if a.get(name) != b.get(name)
    ]


def closest(entries: Iterable[StoredEntry], signature: Mapping[str, Any]) -> tuple[StoredEntry, list[str]] | None:
    """The stored call that differs from `signature` in the fewest fields, and those fields."""
    found = [(compare_signatures(e.signature, signature), e) for e in entries if e.signature is not None]
    if not found:
        return None
    fields, entry = min(found, key=lambda pair: (len(pair[0]), pair[1].place))
    return entry, fields


def _fields(node: Any, name: str = "") -> Iterable[tuple[str, str]]:
    if isinstance(node, Mapping) and set(node) == {"dtype", "shape"}:
        yield f"{name}.dtype", str(node["dtype"])
        yield f"{name}.shape", str(tuple(node["shape"]))
    elif isinstance(node, Mapping) and set(node) == {"node", "aux", "children"}:
        yield f"{name} (kind)", f"{node['node']}{'' if node['aux'] is None else stable_json(node['aux'])}"
        for key, child in node["children"]:
            yield from _fields(child, f"{name}{key}")
    elif isinstance(node, Mapping) and set(node) == {"static"}:
        yield from _static(node["static"], name)
    elif isinstance(node, Mapping) and set(node) == {"float"}:
        yield name, "a float"
    elif isinstance(node, Mapping):
        for key, child in node.items():
            yield from _fields(child, f"{name}.{key}" if name else str(key))
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from _fields(child, f"{name}[{index}]")
    else:
        yield name, stable_json(node)


def _static(value: Any, name: str) -> Iterable[tuple[str, str]]:
    """A static value; an object field by field."""
    if isinstance(value, Mapping) and set(value) == {"object", "fields"}:
        yield f"{name} (kind)", str(value["object"])
        for field, inner in value["fields"].items():
            yield from _static(inner, f"{name}.{field}")
    else:
        yield name, "a float" if value == {"float": None} else stable_json(value)
