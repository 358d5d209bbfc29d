"""Identity of devices, calls and objects: text that is equal in every process and on every host."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def stable_json(value: Any) -> str:
    """Canonical JSON text: sorted keys, no spaces, ASCII only."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def short_hash(value: Any) -> str:
    """16 hex digits that identify `value`, given as text or as JSON-able data."""
    text = value if isinstance(value, str) else stable_json(value)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
