"""The page: a template with the data in it."""

from __future__ import annotations

import html
import importlib.resources
import json
from typing import Any

# Characters that could end a script element or a line of JavaScript, with equivalent JSON escapes.
_ESCAPED = str.maketrans({c: f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"})


def render(data: dict[str, Any], title: str) -> str:
    """The whole page as text; the data is escaped."""
    template = importlib.resources.files("ejkernel.report").joinpath("page.html").read_text(encoding="utf-8")
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":")).translate(_ESCAPED)
    head, data_mark, tail = template.partition("__DATA__")
    assert data_mark, "the template has a place for the data"
    return head.replace("__TITLE__", html.escape(title)) + text + tail
