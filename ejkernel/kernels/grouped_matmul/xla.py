"""Grouped products for every device, in work and memory proportional to the rows.

A loop over the groups, and inside it one over pieces of a group's rows: as many of the largest size as fit, then one
for the rest, of the least size that holds it, of which only the group's own rows count. Each size is code of its own,
in a loop of no or one iteration: a conditional would copy the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels.grouped_matmul.dimensions import Dimensions, check_sizes, common_dtype
from ejkernel.kernels.grouped_matmul.groups import bounds
from ejkernel.kernels.manual_axes import axes_of, vary

Array = jax.Array
_LEAST_BYTES = 1 << 20  # Of temporary memory: small calls are not cut into smaller ones to save it.
_LEAST_ROWS, _ALIGNED = 4, 16  # Of a piece: its rows, and what its columns are a multiple of.


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class XlaConfig:
    """One way to cut rows into pieces.

    Attributes:
      rows: Rows of the largest piece, a power of two.
      least_rows: Rows of the smallest, a power of two no larger.
      steps: How many sizes there are from one power of two to the next; they differ by `least_rows` at least. Many
        waste few rows, and take longer to compile.
    """

    rows: int = 512
    least_rows: int = 32
    steps: int = 4

    def __post_init__(self) -> None:
        check_sizes(self)

    def unfit(self) -> str | None:
        """Says why this config cannot run, or `None` if it can."""
        given = (self.rows, self.least_rows, self.steps)
        if any(x < 1 or x & (x - 1) for x in given) or self.least_rows > self.rows:
            return f"rows, least_rows and steps must be powers of two, the second no larger than the first, got {given}"
        return None

    def sizes(self, most: int) -> list[int]:
        """Sizes of pieces, smallest first, if the largest may have `most` rows."""
        top = min(self.rows, most)
        sizes, size = [], self.least_rows
        while size < top:
            sizes.append(size)
            octave = 1 << (size.bit_length() - 1)
            size += max(octave // self.steps, self.least_rows)
        return [*sizes, top]


def unsupported(dims: Dimensions) -> str | None:
    """Nothing: every product is served."""
    return None


def space(dims: Dimensions) -> list[XlaConfig]:
    """Configs for a product, the guess first."""
    # Each size costs a group a microsecond or so, whether it has such a piece or not.
    small = XlaConfig(least_rows=8, steps=2 if dims.k * dims.n >= 1 << 15 else 1)
    few = [small] if isinstance(dims.rows, int) and dims.rows <= 16 * dims.groups else []
    sizes = [
        *few,
        XlaConfig(),
        XlaConfig(rows=256),
        XlaConfig(rows=1024),
        XlaConfig(rows=128),
        XlaConfig(least_rows=64),
    ]
    return [*sizes, XlaConfig(least_rows=16), XlaConfig(least_rows=8), XlaConfig(steps=2)]


def forward(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    *,
    transpose_rhs: bool = False,
    out_dtype: Any = None,
    first_row: Array | None = None,
    precision: Any = None,
    cfg: XlaConfig | None = None,
) -> Array:
    """Returns `[M, N]`: rows of a group times its weights, zeros in rows of no group."""
    (rows, k), n = lhs.shape, rhs.shape[1 if transpose_rhs else 2]
    out_dtype = jnp.dtype(common_dtype(lhs.dtype, rhs.dtype) if out_dtype is None else out_dtype)
    if rhs.shape[0] == 0 or 0 in (rows, n):
        return jnp.zeros((rows, n), out_dtype)
    starts, ends = bounds(group_sizes, rows, first_row)
    room = _Room.of(cfg, rows, k, n, jax.ShapeDtypeStruct((rows, n), out_dtype), (lhs.dtype, rhs.dtype))
    lhs = _padded(lhs, cfg)
    out = vary(_bits(jnp.zeros((lhs.shape[0], n), out_dtype)), axes_of((lhs, rhs, starts)))
    contract = ((1,), (1 if transpose_rhs else 0,))
    shape = (1, room.columns, k) if transpose_rhs else (1, k, room.columns)

    def weights_of(g, column):
        at = (g, column, 0) if transpose_rhs else (g, 0, column)
        return _operand(_slice(rhs, at, shape)[0], rhs.dtype)

    def product(part, weights):
        dots = lax.dot_general(_operand(part, lhs.dtype), weights, (contract, ((), ())), precision, _wide(out_dtype))
        return _bits(dots.astype(out_dtype))

    def group(g, out):
        cut = _Cut.of(cfg, lhs.shape[0], room.rows, starts[g], ends[g])

        def rest(row, size, inside, out, weights=None):
            part = _slice(lhs, (row, 0), (size, k))
            part = jnp.where(inside[:, None], part, jnp.zeros_like(part))

            def columns(g, column, out):
                old = _part(out, (row, column), (size, room.columns))
                new = product(part, weights_of(g, column) if weights is None else weights)
                return _updated(out, jnp.where(inside[:, None], new, old), (row, column))

            # With parts of the columns inside, the rows are sliced once.
            return columns(g, 0, out) if room.is_whole else room.over_columns(cut.start < cut.end, g, columns, out)

        def columns(g, column, out):
            weights = weights_of(g, column)

            def whole(row, size, out):
                part = _slice(lhs, (row, 0), (size, k))
                return _updated(out, product(part, weights), (row, column))

            out = cut.over_rest(partial(rest, weights=weights), out) if room.is_whole else out
            return cut.over_whole(whole, out)

        if room.is_whole:
            return room.over_columns(cut.start < cut.end, g, columns, out)
        return room.over_columns(cut.count > 0, g, columns, cut.over_rest(rest, out))

    return _floats(_loop(rhs.shape[0], group, out)[:rows], out_dtype)


def drhs(
    lhs: Array,
    dout: Array,
    group_sizes: Array,
    *,
    out_dtype: Any = None,
    first_row: Array | None = None,
    precision: Any = None,
    cfg: XlaConfig | None = None,
) -> Array:
    """Returns `[G, K, N]`: rows of lhs of each group, transposed, times its rows of dout."""
    (rows, k), n, groups = lhs.shape, dout.shape[1], group_sizes.shape[0]
    out_dtype = jnp.dtype(common_dtype(lhs.dtype, dout.dtype) if out_dtype is None else out_dtype)
    out = jnp.zeros((groups, k, n), out_dtype)
    if 0 in (groups, rows, n):
        return out
    starts, ends = bounds(group_sizes, rows, first_row)
    room = _Room.of(cfg, rows, k, n, out, (lhs.dtype, dout.dtype))
    lhs, dout = (_padded(x, cfg) for x in (lhs, dout))
    axes = axes_of((lhs, dout, starts))
    wide = _wide(out_dtype)

    def product(a, b):
        a, b = _operand(a, lhs.dtype), _operand(b, dout.dtype)
        return lax.dot_general(a, b, (((0,), (0,)), ((), ())), precision, wide)

    def columns(g, column, out):
        # Sums have a place of their own if they are wider than the result, or parts of columns overlap.
        own = out if room.is_whole and out_dtype == wide else vary(jnp.zeros((1, k, room.columns), wide), axes)
        at = (g, 0, column) if own is out else (0, 0, 0)

        def parts(row, size):
            return _slice(lhs, (row, 0), (size, k)), _slice(dout, (row, column), (size, room.columns))

        def whole(row, size, sums):
            new = _part(sums, at, (1, k, room.columns)) + product(*parts(row, size))[None]
            return _updated(sums, new, at)

        def rest(row, size, inside, sums):
            # Both operands: values outside the group need not be finite.
            new = product(*(jnp.where(inside[:, None], x, jnp.zeros_like(x)) for x in parts(row, size)))
            return _updated(sums, new[None], at)

        cut = _Cut.of(cfg, lhs.shape[0], room.rows, starts[g], ends[g])
        # The rest first: it replaces the zeros, and a group without large pieces needs no sum.
        sums = cut.over_whole(whole, cut.over_rest(rest, own))
        if own is out:
            return sums
        return _updated(out, _bits(sums.astype(out_dtype)), (g, 0, column))

    def group(g, out):
        return room.over_columns(starts[g] < ends[g], g, columns, out)

    return _floats(_loop(groups, group, vary(_bits(out), axes)), out_dtype)


def _loop(count: Any, body: Callable[[Array, Any], Any], carry: Any) -> Any:
    """`lax.fori_loop` from 0 on, in 32 bits: with 64 bits enabled, indices of both kinds would meet."""
    return lax.fori_loop(
        np.int32(0), np.int32(count) if isinstance(count, int) else count.astype(jnp.int32), body, carry
    )


def _part(x: Array, start: tuple[Any, ...], sizes: tuple[Any, ...]) -> Array:
    return lax.dynamic_slice(x, _indices(start), sizes)


def _updated(x: Array, part: Array, start: tuple[Any, ...]) -> Array:
    return lax.dynamic_update_slice(x, part, _indices(start))


def _indices(start: tuple[Any, ...]) -> tuple[Array, ...]:
    return tuple(jnp.asarray(i, jnp.int32) for i in start)


def _slice(x: Array, start: tuple[Any, ...], sizes: tuple[Any, ...]) -> Array:
    """The `_bits` of a slice of `x`."""
    start = _indices(start)
    if _bits_of(x.dtype) is not None or _of_bytes(x.dtype) is not None:
        # Otherwise XLA would convert all of `x`, ahead of the loop that the slice is in.
        x, start = lax.optimization_barrier((x, start))
    return lax.dynamic_slice(_bits(x), start, sizes)


def _bits_of(dtype: Any) -> Any:
    """Integers in which values of `dtype` are sliced: else XLA's CPU compiler makes the whole array float32."""
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bfloat16:
        return jnp.uint16
    return jnp.uint8 if dtype.name.startswith("float8") else None


def _bits(x: Array) -> Array:
    """A value as integers, if there are some for its dtype."""
    bits = _bits_of(x.dtype)
    return x if bits is None else lax.bitcast_convert_type(x, bits)


def _floats(x: Array, dtype: Any) -> Array:
    """What `_bits` was given."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def _operand(bits: Array, dtype: Any) -> Array:
    """What `_bits` was given, for a product; XLA's CPU compiler refuses products of less than 8 bits in wider ones."""
    x = _floats(bits, dtype)
    return x.astype(wider) if (wider := _of_bytes(x.dtype)) else x


def _of_bytes(dtype: Any) -> Any:
    """The dtype that holds all values of a `dtype` of less than 8 bits; None of other dtypes."""
    if jnp.issubdtype(dtype, jnp.integer):
        signed = jnp.issubdtype(dtype, jnp.signedinteger)
        return (jnp.int8 if signed else jnp.uint8) if jnp.iinfo(dtype).bits < 8 else None
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8 else None


def _padded(x: Array, cfg: XlaConfig | None) -> Array:
    """`x` with rows enough for the largest piece, if it is not known how many there are."""
    return x if isinstance(x.shape[0], int) else jnp.pad(x, ((0, (cfg or XlaConfig()).rows), (0, 0)))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Room:
    """How much of a group is computed at once: temporary memory is at most four times the result, or 1 MiB.

    Attributes:
      rows: Of the largest piece.
      columns: Columns of the weights, of `n`.
      n: All columns.
    """

    rows: int
    columns: Any
    n: Any

    @classmethod
    def of(cls, cfg: XlaConfig | None, rows: Any, k: Any, n: Any, out: Any, dtypes: Any) -> _Room:
        """For operands of these dtypes; `out` is the result, of two axes or three."""
        most = min(x for x in ((cfg or XlaConfig()).rows, rows) if isinstance(x, int))
        if not all(isinstance(x, int) for x in (rows, k, n, *out.shape)):
            return cls(rows=most, columns=n, n=n)
        wide = max(4, *(d.itemsize for d in dtypes))
        narrow = lambda d: d.itemsize if d.itemsize < 4 else 0  # Beside what it is converted to.
        # Bytes for each element of [k, columns] and of [rows, columns]; a part of lhs is there with and without a mask.
        by_k, by_rows = (wide, wide + narrow(out.dtype)) if out.ndim == 2 else (2 * wide + narrow(out.dtype), 2 * wide)
        by_part = 2 * wide + narrow(dtypes[0])
        copies = 4 if _bits_of(out.dtype) is None else 3  # One is its bits.
        room = max(copies * out.size * out.dtype.itemsize, _LEAST_BYTES) * 15 // 16
        most = min(most, max(room // (4 * max(k, 1) * by_part), _LEAST_ROWS))
        fit = max((room - most * k * by_part) // max(k * by_k + most * by_rows, 1) // _ALIGNED, 1) * _ALIGNED
        each = -(-n // -(-n // fit))  # As equal as can be.
        return cls(rows=most, columns=min(-(-each // _ALIGNED) * _ALIGNED, n), n=n)

    @property
    def is_whole(self) -> bool:
        """Whether all columns fit."""
        return self.columns is self.n or self.columns == self.n

    def over_columns(self, some: Array, g: Array, body: Callable[[Array, Array, Any], Any], carry: Any) -> Any:
        """Loops over parts of a group's columns if it has `some` rows; `body` gets the group and the first column."""
        count = 1 if self.is_whole else -(-self.n // self.columns)

        def part(i, carry):
            # The last part may overlap the one before it. That `i // count` is zero is not known to XLA, which would
            # otherwise copy the weights of a group that has no rows.
            return body(g + i // count, jnp.minimum(i * self.columns, self.n - self.columns), carry)

        return _loop(jnp.where(some, count, 0), part, carry)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Cut:
    """A group's rows in pieces.

    Attributes:
      sizes: Those that pieces may have, smallest first.
      rows: Of the array; no piece reaches past its end.
      start: The group's first row.
      end: Where the group ends.
      count: How many pieces have the largest size; 0 if that is all rows.
    """

    sizes: list[int]
    rows: Any
    start: Array
    end: Array
    count: Array

    @classmethod
    def of(cls, cfg: XlaConfig | None, rows: Any, most: int, start: Array, end: Array) -> _Cut:
        sizes = (cfg or XlaConfig()).sizes(most)
        count = jnp.maximum(end - start, 0) // sizes[-1]
        count = jnp.zeros_like(count) if cls._one_piece(sizes, rows) else count
        return cls(sizes=sizes, rows=rows, start=start, end=end, count=count)

    @staticmethod
    def _one_piece(sizes: list[int], rows: Any) -> bool:
        return isinstance(rows, int) and sizes[-1] == rows

    def over_whole(self, body: Callable[[Array, int, Any], Any], carry: Any) -> Any:
        """Loops over the pieces of the largest size; `body` gets the first row, the size, and what is carried."""
        if self._one_piece(self.sizes, self.rows):
            return carry
        size = self.sizes[-1]
        return _loop(self.count, lambda i, carry: body(self.start + i * size, size, carry), carry)

    def over_rest(self, body: Callable[[Array, int, Array, Any], Any], carry: Any) -> Any:
        """Runs `body` for the rest, if there is one; the piece may reach past it, so it also gets which rows count."""
        row = self.start + self.count * self.sizes[-1]
        left = self.end - row

        def piece(i, carry, size):
            # That `i` is zero is not known to XLA, which would otherwise compute all pieces ahead of these loops.
            first = row + i * size
            begin = jnp.minimum(first, self.rows - size)
            index = begin + jnp.arange(size, dtype=begin.dtype)
            return body(begin, size, (index >= first) & (index < self.end), carry)

        for below, size in zip([0, *self.sizes], self.sizes, strict=False):
            once = ((left > below) & (left <= size)).astype(jnp.int32)
            carry = _loop(once, partial(piece, size=size), carry)
        return carry


def _wide(dtype: Any) -> Any:
    """The dtype in which products are summed."""
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        return jnp.float32
    return _of_bytes(dtype) or dtype
