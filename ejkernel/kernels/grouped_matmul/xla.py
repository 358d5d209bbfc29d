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
from jax import lax

from ejkernel.kernels.grouped_matmul.dimensions import Dimensions
from ejkernel.kernels.grouped_matmul.groups import bounds
from ejkernel.kernels.manual_axes import axes_of, vary

Array = jax.Array


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

    def unfit(self) -> str | None:
        """Says why this config cannot run, or `None` if it can."""
        given = (self.rows, self.least_rows, self.steps)
        if any(x < 1 or x & (x - 1) for x in given) or self.least_rows > self.rows:
            return f"rows, least_rows and steps must be powers of two, the second no larger than the first, got {given}"
        return None

    def sizes(self, rows: Any) -> list[int]:
        """Sizes of pieces that fit into an array of `rows` rows, smallest first."""
        top = max(min(self.rows, rows), 1) if isinstance(rows, int) else self.rows
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
    sizes = [XlaConfig(), XlaConfig(rows=256), XlaConfig(rows=1024), XlaConfig(rows=128), XlaConfig(least_rows=64)]
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
    rows = lhs.shape[0]
    n = rhs.shape[1] if transpose_rhs else rhs.shape[2]
    out_dtype = jnp.dtype(jnp.result_type(lhs, rhs) if out_dtype is None else out_dtype)
    if rhs.shape[0] == 0 or _is_zero(rows):
        return jnp.zeros((rows, n), out_dtype)
    starts, ends = bounds(group_sizes, rows, first_row)
    lhs = _padded(lhs, cfg)
    out = vary(_bits(jnp.zeros((lhs.shape[0], n), out_dtype)), axes_of((lhs, rhs, starts)))
    contract = ((1,), (1 if transpose_rhs else 0,))
    lhs_bits, rhs_bits = _bits(lhs), _bits(rhs)

    def group(g, out):
        weights = _floats(lax.dynamic_index_in_dim(rhs_bits, g, keepdims=False), rhs.dtype)

        def product(part):
            dots = lax.dot_general(_floats(part, lhs.dtype), weights, (contract, ((), ())), precision, _wide(out_dtype))
            return _bits(dots.astype(out_dtype))

        def whole(row, size, out):
            part = lax.dynamic_slice_in_dim(lhs_bits, row, size)
            return lax.dynamic_update_slice_in_dim(out, product(part), row, 0)

        def rest(row, size, inside, out):
            part, old = (lax.dynamic_slice_in_dim(x, row, size) for x in (lhs_bits, out))
            new = product(jnp.where(inside[:, None], part, jnp.zeros_like(part)))
            return lax.dynamic_update_slice_in_dim(out, jnp.where(inside[:, None], new, old), row, 0)

        cut = _Cut.of(cfg, lhs.shape[0], starts[g], ends[g])
        return cut.over_whole(whole, cut.over_rest(rest, out))

    return _floats(lax.fori_loop(0, rhs.shape[0], group, out)[:rows], out_dtype)


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
    out_dtype = jnp.dtype(jnp.result_type(lhs, dout) if out_dtype is None else out_dtype)
    out = jnp.zeros((groups, k, n), out_dtype)
    if groups == 0 or _is_zero(rows):
        return out
    starts, ends = bounds(group_sizes, rows, first_row)
    operands = tuple(_padded(x, cfg) for x in (lhs, dout))
    axes = axes_of((*operands, starts))
    wide = _wide(out_dtype)
    bits = tuple(map(_bits, operands))

    def product(a, b):
        a, b = _floats(a, lhs.dtype), _floats(b, dout.dtype)
        return lax.dot_general(a, b, (((0,), (0,)), ((), ())), precision, wide)

    def whole(row, size, total):
        return total + product(*(lax.dynamic_slice_in_dim(x, row, size) for x in bits))

    def rest(row, size, inside, _):
        # Both operands: values outside the group need not be finite.
        parts = (lax.dynamic_slice_in_dim(x, row, size) for x in bits)
        return product(*(jnp.where(inside[:, None], x, jnp.zeros_like(x)) for x in parts))

    def group(g, out):
        cut = _Cut.of(cfg, bits[0].shape[0], starts[g], ends[g])
        # The rest first: it replaces the zeros, and a group without large pieces needs no sum.
        total = cut.over_whole(whole, cut.over_rest(rest, vary(jnp.zeros((k, n), wide), axes)))
        return lax.dynamic_update_index_in_dim(out, _bits(total.astype(out_dtype)), g, 0)

    return _floats(lax.fori_loop(0, groups, group, vary(_bits(out), axes)), out_dtype)


def _bits(x: Array) -> Array:
    """Floats of 16 bits as integers: for a slice of bfloat16, XLA's CPU compiler makes the whole array float32."""
    is_half = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 2
    return lax.bitcast_convert_type(x, jnp.uint16) if is_half else x


def _floats(x: Array, dtype: Any) -> Array:
    """What `_bits` was given."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def _is_zero(rows: Any) -> bool:
    return isinstance(rows, int) and rows == 0


def _padded(x: Array, cfg: XlaConfig | None) -> Array:
    """`x` with rows enough for the largest piece, if it is not known how many there are."""
    return x if isinstance(x.shape[0], int) else jnp.pad(x, ((0, (cfg or XlaConfig()).rows), (0, 0)))


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
    def of(cls, cfg: XlaConfig | None, rows: Any, start: Array, end: Array) -> _Cut:
        sizes = (cfg or XlaConfig()).sizes(rows)
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
        return lax.fori_loop(0, self.count, lambda i, carry: body(self.start + i * size, size, carry), carry)

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
            carry = lax.fori_loop(0, once, partial(piece, size=size), carry)
        return carry


def _wide(dtype: Any) -> Any:
    """The dtype in which products are summed."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
