"""Tables of work for the Hopper kernels; made on the device, because group sizes are data.

XLA makes a kernel of each sum: a table is one sum over all pairs of groups, and one over items and groups.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels.grouped_matmul.config import Order

Array = jax.Array
ZEROS = -1  # The group of rows that belong to none.


def sums(values: list[Array], axes: tuple[int, ...]) -> list[Array]:
    """Sums of each of `values`, int32, over `axes`; one kernel."""
    add = lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True))
    return list(lax.reduce(tuple(values), (np.int32(0),) * len(values), add, axes))


def divided(x: Any, by: int) -> Any:
    """`x // by` for `x >= 0`: a shift if possible, because XLA (seen with JAX 0.11.2) does not fuse divisions."""
    return x >> (by.bit_length() - 1) if by & (by - 1) == 0 else lax.div(x, jnp.int32(by))


def first_of(first_row: Array | None) -> Array:
    """The row at which the first group begins."""
    return jnp.int32(0) if first_row is None else jnp.asarray(first_row, jnp.int32)


def extent(total_ref: Any, ends_ref: Any, first_ref: Any, rows: int) -> tuple[Any, Any, Any]:
    """The number of items, the first group's first row and the last one's end."""
    first = first_ref[0]
    return total_ref[0], jnp.minimum(first, rows), jnp.minimum(ends_ref[ends_ref.shape[0] - 1] + first, rows)


def ordered(group_sizes: Array, rows: int, first_row: Array | None, order: Order) -> tuple[Array, ...]:
    """Groups, their first rows and ends, as given or by decreasing size."""
    sizes = jnp.asarray(group_sizes, jnp.int32)
    index = jnp.arange(sizes.shape[0], dtype=jnp.int32)
    mine, other = sizes[:, None], jnp.broadcast_to(sizes[None], (sizes.shape[0],) * 2)
    earlier = index[None] < index[:, None]
    larger = (other > mine) | ((other == mine) & earlier)
    starts, rank = sums([jnp.where(earlier, other, 0), larger.astype(jnp.int32)], (1,))
    starts = starts + first_of(first_row)
    starts, ends = jnp.minimum(starts, rows), jnp.minimum(starts + sizes, rows)
    if order == "as given":
        return index, starts, ends
    chosen = rank[None] == index[:, None]
    return tuple(sums([jnp.where(chosen, x[None], 0) for x in (index, starts, ends)], (1,)))
