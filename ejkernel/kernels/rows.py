"""How operations on rows are cut into programs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RowParams:
    """Rows of one block, and the warps that work on it."""

    rows: int = 1
    num_warps: int = 4
