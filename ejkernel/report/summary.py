"""What a report says about stored entries, as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ejkernel.ops.store.entry import StoredEntry
from ejkernel.ops.tuning import robust
from ejkernel.ops.tuning.standings import rank
from ejkernel.ops.utils import devices as hardware
from ejkernel.report.naming import columns, compact

Data = dict[str, Any]


def summarise(entries: Iterable[StoredEntry], source: str, *, packs_are_others: bool = False) -> Data:
    """Everything that the page shows; with `packs_are_others`, entries of packs are marked and not in totals."""
    calls: list[Data] = [_call(entry) | {"own": not (packs_are_others and entry.origin == "pack")} for entry in entries]
    devices = sorted({call["device"] for call in calls})
    return {"source": source, "calls": calls, "peaks": {device: _peaks(device) for device in devices}}


def _peaks(device: str) -> Data | None:
    found = hardware.find(device)
    return {"flops": found.flops, "bytes": found.bytes_per_s} if found.flops else None


def _call(entry: StoredEntry) -> Data:
    statistics = entry.statistics
    fields, candidates = _candidates(statistics.get("candidates"))
    return {
        "device": entry.place.device,
        "op": entry.place.op_id,
        "key": entry.place.call_key,
        "arrays": arrays_of(entry.signature),
        "statics": keywords_of(entry),
        "complete": entry.complete,
        "layer": entry.layer,
        "timer": _text(statistics.get("timer")),
        "rounds": _number(statistics.get("rounds")),
        "seconds": _number(statistics.get("seconds")),
        "measurement": _measurement(statistics.get("measurement")),
        "speedup": _numbers(statistics.get("speedup"), ("value", "low", "high")),
        "cost": _numbers(statistics.get("cost"), ("flops", "bytes")),
        "provenance": {str(k): _text(v) for k, v in entry.provenance.items()},
        "fields": fields,
        "candidates": candidates,
    }


def _candidates(found: Any) -> tuple[list[str], list[Data]]:
    """Names of the fields in which candidates differ, and the candidates, the winner first."""
    listed = [c for c in found if isinstance(c, Mapping)] if isinstance(found, list) else []
    listed.sort(key=lambda c: (rank(_text(c.get("status"))), _number(c.get("median_ms")) or math.inf))
    fields, values = columns([_text(c.get("cfg")) for c in listed])
    return fields, [
        {
            "cfg": compact(_text(c.get("cfg"))),
            "values": row,
            "status": _text(c.get("status")),
            "reason": "; ".join(filter(None, (_text(c.get("reason")), _cases(c.get("cases"))))),
            "guess": c.get("guess") is True,
            "median_ms": _number(c.get("median_ms")),
            "n": _number(c.get("n")),
            **_interval(c, _number(c.get("n"))),
        }
        for c, row in zip(listed, values, strict=True)
    ]


def _cases(found: Any) -> str:
    """The times behind a geometric mean: `even 1.2 ms, uneven 1.9 ms`."""
    known = found.items() if isinstance(found, Mapping) else ()
    return ", ".join(f"{name} {ms:.4g} ms" for name, ms in known if isinstance(ms, (int, float)))


def _measurement(found: Any) -> Data | None:
    known = _numbers(found, ("median_ms", "samples"))
    return None if known is None else {**known, **_interval(found, known["samples"])}


def _interval(found: Mapping[str, Any], samples: float | None) -> Data:
    """The interval's ends, None if there are too few samples; entries of earlier versions have ends even then."""
    few = samples is not None and samples < robust.FOR_AN_INTERVAL
    return {end: None if few else _number(found.get(end)) for end in ("low_ms", "high_ms")}


# --- Signatures ---


def keywords_of(entry: StoredEntry) -> str:
    """Static keywords in one line, as the caller wrote them: `causal=True, sliding_window=64`.

    An entry of an earlier version did not keep them: then the keywords after `prepare`.
    """
    written = entry.statistics.get("keywords")
    if isinstance(written, Mapping):
        return ", ".join(f"{name}={value}" for name, value in written.items())
    return statics_of(entry.signature)


def arrays_of(signature: Mapping[str, Any] | None) -> str:
    """Arrays in one line, equal ones once: `3 x float32[128,64], int32[]`."""
    found: list[tuple[str, int]] = []
    for text in arrays(signature or {}):
        if found and found[-1][0] == text:
            found[-1] = (text, found[-1][1] + 1)
        else:
            found.append((text, 1))
    return ", ".join(text if n == 1 else f"{n} x {text}" for text, n in found)


def arrays(node: Any) -> Iterator[str]:
    """Every array of a signature, in order: `float32[128,64]`."""
    if isinstance(node, Mapping):
        if "dtype" in node and isinstance(node.get("shape"), list):
            yield f"{node['dtype']}[{','.join(map(str, node['shape']))}]"
            return
        node = list(node.values()) if "static" not in node else []
    if isinstance(node, list):
        for child in node:
            yield from arrays(child)


def statics_of(signature: Mapping[str, Any] | None) -> str:
    """Static arguments in one line: `causal=True, window=64`."""
    kwargs = (signature or {}).get("kwargs")
    if not isinstance(kwargs, Mapping):
        return ""
    found = [(name, node["static"]) for name, node in kwargs.items() if isinstance(node, Mapping) and "static" in node]
    return ", ".join(text for name, value in found for text in _static(str(name), value))


def _static(name: str, value: Any) -> list[str]:
    if isinstance(value, Mapping) and isinstance(value.get("fields"), Mapping):
        return [text for field, inner in value["fields"].items() for text in _static(str(field), inner)]
    return [] if value is None or isinstance(value, Mapping) else [f"{name}={value}"]


# --- Files may hold anything ---


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _numbers(value: Any, names: tuple[str, ...]) -> Data | None:
    found = {name: _number(value.get(name)) for name in names} if isinstance(value, Mapping) else {}
    return None if not found or any(number is None for number in found.values()) else found
