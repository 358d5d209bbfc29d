"""How operations on rows are cut into programs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RowParams:
    """Rows of one block, the warps that work on it, and how many programs a multiprocessor has.

    The last matters to kernels whose programs work on several blocks each, such as sums over rows. On a TPU only the
    rows matter.
    """

    rows: int = 1
    num_warps: int = 4
    programs: int = 4
