"""Which rows belong to which group, for all implementations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


@dataclasses.dataclass(frozen=True, slots=True)
class Local:
    """The groups that the weights at hand are for.

    Attributes:
      sizes: Rows of each of them.
      first_row: Row at which the first of them begins; `None` is row 0.
    """

    sizes: Array
    first_row: Array | None


def local_groups(group_sizes: Array, group_offset: Array | int | None, count: int) -> Local:
    """The `count` groups from `group_offset` on; `group_sizes` covers all of them."""
    sizes = jnp.asarray(group_sizes, jnp.int32)
    if group_offset is None:
        return Local(sizes, None)
    offset = jnp.asarray(group_offset, jnp.int32).reshape(())
    before = jnp.where(jnp.arange(sizes.shape[0]) < offset, sizes, 0).sum(dtype=jnp.int32)
    # Padded, so that a slice never begins earlier than it should; groups that are not there have no rows.
    padded = jnp.pad(sizes, (0, count))
    return Local(lax.dynamic_slice(padded, (offset,), (count,)), before)


def bounds(group_sizes: Array, rows: int, first_row: Array | None = None) -> tuple[Array, Array]:
    """First row of each group and the row after its last; none lies past `rows`."""
    sizes = jnp.asarray(group_sizes, jnp.int32)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    first = jnp.int32(0) if first_row is None else jnp.asarray(first_row, jnp.int32)
    starts = jnp.minimum(ends - sizes + first, rows)
    return starts, jnp.minimum(ends + first, rows)


def covered(group_sizes: Array, rows: int, first_row: Array | None = None) -> Array:
    """Whether a row belongs to any of the groups, `[rows]`."""
    first = jnp.int32(0) if first_row is None else jnp.asarray(first_row, jnp.int32)
    row = jnp.arange(rows, dtype=jnp.int32)
    return (row >= first) & (row < first + jnp.asarray(group_sizes, jnp.int32).sum(dtype=jnp.int32))


def with_existing(
    forward: Callable[[Local], Array], local: Local, rows: int, existing_out: Array | None
) -> Array:
    """What `forward` gives for the groups, and `existing_out` (else zeros) in all other rows."""
    out = forward(local)
    if existing_out is None:
        return out
    inside = covered(local.sizes, rows, local.first_row)
    return jnp.where(inside[:, None], out, existing_out.astype(out.dtype))
