"""How operations on rows are cut into programs."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any

from ejkernel.errors import EjkernelError


class RowSizeError(EjkernelError, ValueError):
    """A block, or a ring of rows, cannot have so few."""


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

    def __post_init__(self) -> None:
        _check(self, rows=1, num_warps=1, programs=0)


@dataclass(frozen=True, kw_only=True)
class MosaicRows:
    """How rows are dealt out to blocks that stay, with a ring of rows in shared memory.

    Attributes:
      stages: Rows of a block that are on their way, worked on or being stored; two at least.
      blocks: Blocks of one multiprocessor.
    """

    stages: int = 4
    blocks: int = 4

    def __post_init__(self) -> None:
        _check(self, stages=2, blocks=1)


def _check(params: Any, **least: int) -> None:
    """Refuses sizes that are no integers, or below the least."""
    for name, number in least.items():
        if not isinstance(x := getattr(params, name), Integral) or x < number:
            raise RowSizeError(f"{type(params).__name__}: {name} must be an integer of at least {number}, got {x!r}.")
