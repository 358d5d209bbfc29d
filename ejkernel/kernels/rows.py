"""How operations on rows are cut into programs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RowParams:
    """How rows are shared out; on a TPU only the first matters.

    Attributes:
      rows: Rows of one block.
      num_warps: The warps that work on it.
      programs: How many programs a multiprocessor has, each of which works on many blocks; 0 is a program per block, or
        a guess where programs keep a sum.
    """

    rows: int = 1
    num_warps: int = 4
    programs: int = 0
