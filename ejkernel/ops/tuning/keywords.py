"""The static keywords of a call as text, so that an entry says for which call it is, and the call can be made again."""

from __future__ import annotations

import enum
import re
from typing import Any

from ejkernel.ops.core.kernel import Invocation, Kernel
from ejkernel.ops.utils.fingerprint import qualified_name

_LONGEST = 60


def written_keywords(inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> dict[str, str]:
    """The keywords of a call as its caller writes them."""
    return {name: _as_text(value) for name, value in kernel.describe_keywords(inv).items()}


def _as_text(value: Any) -> str:
    """A keyword's value as its caller writes it: without addresses, and at most one line."""
    if hasattr(value, "__qualname__"):
        return qualified_name(value)
    text = re.sub(r" at 0x[0-9a-f]+", "", str(value) if isinstance(value, enum.Enum) else repr(value))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
