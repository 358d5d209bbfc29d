"""Grouped products for every device, in work and memory proportional to the rows.

A loop over the groups, and inside it loops over pieces of a group's rows: as many large ones as fit, then at most one
of each smaller power of two, and one more piece for the rest, of which only the group's own rows count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
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
    """

    rows: int = 512
    least_rows: int = 32

    def unfit(self) -> str | None:
        """Says why this config cannot run, or `None` if it can."""
        if any(x < 1 or x & (x - 1) for x in (self.rows, self.least_rows)) or self.least_rows > self.rows:
            return (
                f"rows and least_rows must be powers of two, the second no larger, got {self.rows}, {self.least_rows}"
            )
        return None

    def pieces(self, rows: Any) -> list[int]:
        """Sizes of pieces that fit into an array of `rows` rows, largest first."""
        sizes = [self.rows >> i for i in range((self.rows // self.least_rows).bit_length())]
        if isinstance(rows, int):
            sizes = [size for size in sizes if size <= rows] or [max(rows, 1)]
        return sizes


def unsupported(dims: Dimensions) -> str | None:
    """Nothing: every product is served."""
    return None


def space(dims: Dimensions) -> list[XlaConfig]:
    """Configs for a product, the guess first."""
    sizes = [XlaConfig(), XlaConfig(rows=256), XlaConfig(rows=1024), XlaConfig(rows=128), XlaConfig(least_rows=64)]
    return [*sizes, XlaConfig(least_rows=8)]


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
    out = vary(jnp.zeros((lhs.shape[0], n), out_dtype), axes_of((lhs, rhs, starts)))
    contract = ((1,), (1 if transpose_rhs else 0,))

    def group(g, out):
        weights = lax.dynamic_index_in_dim(rhs, g, keepdims=False)

        def product(row, size):
            part = lax.dynamic_slice_in_dim(lhs, row, size)
            dots = lax.dot_general(part, weights, (contract, ((), ())), precision, _wide(out_dtype))
            return dots.astype(out_dtype)

        def whole(row, size, out):
            return lax.dynamic_update_slice_in_dim(out, product(row, size), row, 0)

        def partial(row, size, inside, out):
            old = lax.dynamic_slice_in_dim(out, row, size)
            return lax.dynamic_update_slice_in_dim(out, jnp.where(inside[:, None], product(row, size), old), row, 0)

        return _pieces(cfg, lhs.shape[0], starts[g], ends[g], whole, partial, out)

    return lax.fori_loop(0, rhs.shape[0], group, out)[:rows]


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
    lhs, dout = _padded(lhs, cfg), _padded(dout, cfg)
    axes = axes_of((lhs, dout, starts))
    out = vary(out, axes)
    wide = _wide(out_dtype)

    def product(a, b, total):
        return total + lax.dot_general(a, b, (((0,), (0,)), ((), ())), precision, wide)

    def whole(row, size, total):
        a, b = (lax.dynamic_slice_in_dim(x, row, size) for x in (lhs, dout))
        return product(a, b, total)

    def partial(row, size, inside, total):
        # Both operands: values outside the group need not be finite.
        parts = (lax.dynamic_slice_in_dim(x, row, size) for x in (lhs, dout))
        a, b = (jnp.where(inside[:, None], x, jnp.zeros_like(x)) for x in parts)
        return product(a, b, total)

    def group(g, out):
        total = _pieces(cfg, lhs.shape[0], starts[g], ends[g], whole, partial, vary(jnp.zeros((k, n), wide), axes))
        return lax.dynamic_update_index_in_dim(out, total.astype(out_dtype), g, 0)

    return lax.fori_loop(0, groups, group, out)


def _is_zero(rows: Any) -> bool:
    return isinstance(rows, int) and rows == 0


def _padded(x: Array, cfg: XlaConfig | None) -> Array:
    """`x` with rows enough for the largest piece, if it is not known how many there are."""
    return x if isinstance(x.shape[0], int) else jnp.pad(x, ((0, (cfg or XlaConfig()).rows), (0, 0)))


def _pieces(
    cfg: XlaConfig | None,
    rows: Any,
    start: Array,
    end: Array,
    whole: Callable[[Array, int, Any], Any],
    partial: Callable[[Array, int, Array, Any], Any],
    carry: Any,
) -> Any:
    """Loops over the rows from `start` to `end`; the last few are in a piece that may begin before them."""
    sizes = (cfg or XlaConfig()).pieces(rows)
    row = start
    for size in sizes:
        count = jnp.maximum(end - row, 0) // size
        carry = lax.fori_loop(0, count, lambda i, c, row=row, size=size: whole(row + i * size, size, c), carry)
        row = row + count * size
    size = sizes[-1]

    def rest(_, carry):
        begin = jnp.minimum(row, rows - size)
        index = begin + jnp.arange(size, dtype=begin.dtype)
        return partial(begin, size, (index >= row) & (index < end), carry)

    return lax.fori_loop(0, (end > row).astype(jnp.int32), rest, carry)


def _wide(dtype: Any) -> Any:
    """The dtype in which products are summed."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
