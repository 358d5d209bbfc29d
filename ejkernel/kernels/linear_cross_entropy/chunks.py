"""Chunks of rows, and of columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


class Chunks:
    """Rows `0 .. count` in chunks of one size.

    Rows are dealt to the chunks in turn where that comes out even: then rows that lie on several devices do so in each
    chunk. Otherwise the last chunk begins early enough to be whole, and `fresh` says which of its rows are new.
    """

    def __init__(self, count: int, rows: int) -> None:
        self.rows = min(rows, count)
        self.count = count
        self.steps = -(-count // self.rows)
        self.even = count % self.rows == 0

    def take(self, x: Array, step: Array) -> Array:
        """The rows of a chunk."""
        if self.even:
            return lax.dynamic_index_in_dim(self._dealt(x), step, axis=1, keepdims=False)
        return lax.dynamic_slice_in_dim(x, self._first(step), self.rows)

    def put(self, x: Array, step: Array, value: Array) -> Array:
        """`x` with a chunk's new rows replaced."""
        if self.even:
            return lax.dynamic_update_index_in_dim(self._dealt(x), value, step, axis=1).reshape(x.shape)
        fresh = self.fresh(step).reshape(-1, *(1,) * (value.ndim - 1))
        value = jnp.where(fresh, value, self.take(x, step))
        return lax.dynamic_update_slice_in_dim(x, value, self._first(step), 0)

    def fresh(self, step: Array) -> Array:
        """Which rows no earlier chunk had."""
        if self.even:
            return jnp.ones(self.rows, bool)
        return jnp.arange(self.rows) + self._first(step) >= step * self.rows

    def _dealt(self, x: Array) -> Array:
        return x.reshape(self.rows, self.steps, *x.shape[1:])

    def _first(self, step: Array) -> Array:
        return jnp.minimum(step * self.rows, self.count - self.rows)


def over_columns(body: Callable[[Any, int, Array], Array], width: int, columns: int | None, carry: Array) -> Array:
    """Runs `body(first, columns, carry)` for chunks of columns; the last one is what is left."""
    columns = width if columns is None else min(columns, width)
    carry = lax.fori_loop(0, width // columns, lambda i, c: body(i * columns, columns, c), carry)
    left = width % columns
    return body(width - left, left, carry) if left else carry
