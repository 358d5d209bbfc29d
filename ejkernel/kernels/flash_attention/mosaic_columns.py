"""How the columns of Q, K, V and O lie in shared memory, and how they get there and back.

Usually all columns of a tile are one piece, which the matrix units read in one product and the copy engine loads at
once. Its layout has whole groups of 8 rows and 16, 32 or 64 columns, so that must divide the array. Everything else is
cut into pieces of 64 columns or fewer, each a plain matrix for the copy engine, which fills what lies past the end of
the array with zeros and does not write there.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.flash_attention.config import in_memory
from ejkernel.kernels.hopper.cluster import shared_load
from ejkernel.kernels.hopper.launch import swizzle_of


class Piece(NamedTuple):
    """Columns `first` to `first + width` of an operand."""

    first: int
    width: int


def whole(dim: int) -> tuple[Piece, ...]:
    return (Piece(0, dim),)


def split(dim: int) -> tuple[Piece, ...]:
    """Pieces of 64, 32 and 16 columns; the last one may reach past the last column."""
    pieces, first = [], 0
    while first < dim:
        width = next(width for width in (64, 32, 16) if first + width <= in_memory(dim))
        pieces.append(Piece(first, width))
        first += width
    return tuple(pieces)


@dataclasses.dataclass(frozen=True, slots=True)
class Columns:
    """The pieces of Q and K, of V and the output while it is summed up, and of the output as it is stored.

    `plain` says that the copy engine must see plain matrices; the interpreter has one view for both uses.
    """

    qk: tuple[Piece, ...]
    v: tuple[Piece, ...]
    o: tuple[Piece, ...]
    plain: bool
    interpret: bool

    def memory(self, pieces: tuple[Piece, ...], shape: tuple[int, ...], dtype: Any) -> tuple[Any, ...]:
        """Shared memory of `shape` for each of the pieces."""
        return tuple(self._one((*shape, piece.width), dtype) for piece in pieces)

    def _one(self, shape: tuple[int, ...], dtype: Any) -> Any:
        tiling, swizzle = swizzle_of(shape[-1])
        tiles = plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))
        if not self.plain or self.interpret:
            return tiles
        return plgpu.RefUnion(plgpu.SMEM(shape, dtype, transforms=(swizzle,)), tiles)

    def _views(self, memory: Any) -> tuple[Any, Any]:
        return memory if self.plain and not self.interpret else (memory, memory)

    def operand(self, memory: Any, index: Any) -> Any:
        """A piece as the matrix units, and stores from registers, see it."""
        return self._views(memory)[1].at[index]

    def load(self, source: Any, memory: Any, index: Any, piece: Piece, barrier: Any, cluster: int = 1) -> None:
        """Loads a piece of the rows `source`."""
        shared_load(cluster, self._part(source, piece), self._views(memory)[0].at[index], barrier)

    def store(self, memory: Any, index: Any, piece: Piece, target: Any) -> None:
        plgpu.copy_smem_to_gmem(self._views(memory)[0].at[index], self._part(target, piece))

    def _part(self, rows: Any, piece: Piece) -> Any:
        if piece == Piece(0, rows.shape[-1]):
            return rows
        # Pallas would not let a slice that it can see end past the last column.
        hidden = lax.axis_index("warpgroup") * 0
        return rows.at[:, pl.ds(piece.first + hidden, piece.width)]

    def stored(self, values: tuple[jax.Array, ...]) -> list[jax.Array]:
        """The output in the pieces that are stored, from those that were summed up."""
        if len(self.o) == len(self.v):
            return list(values)
        (value,) = values
        return [value[:, piece.first : piece.first + piece.width] for piece in self.o]


def columns(head_dim: int, value_dim: int, *, lengths: tuple[int, ...], share_qo: bool, interpret: bool) -> Columns:
    """The layout for arrays with these dims and lengths; with `share_qo` the output lies in the memory of Q."""
    apart = share_qo and head_dim != value_dim  # Q is cut into the pieces of the output, of 64 columns.
    if any(x % 8 for x in lengths) or any(_narrow(dim) for dim in (head_dim, value_dim)) or (apart and head_dim % 64):
        return Columns(split(head_dim), split(value_dim), split(value_dim), True, interpret)
    if apart:
        return Columns(split(head_dim), whole(value_dim), split(value_dim), False, interpret)
    return Columns(whole(head_dim), whole(value_dim), whole(value_dim), False, interpret)


def _narrow(dim: int) -> bool:
    """Whether whole tiles of this dim are impossible, or so narrow that loading them takes longer than the products.

    The copy engine moves one row of a tile at a time: at 112 columns, seven of 32 bytes for each row.
    """
    return dim % 16 != 0 or (dim > 96 and dim % 32 != 0)
