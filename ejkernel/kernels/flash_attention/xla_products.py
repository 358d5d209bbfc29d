"""The three products of a tile in XLA's backend: by head, or of all heads at once where queries are few.

By head, a CPU first moves the heads of keys and values to the front, which takes several times as long as reading them.
With few queries all heads are multiplied at once instead: keys are [keys, heads x dim] as they lie in memory, and
queries a matrix with a block for each head and zeros around it. That is more arithmetic, on values that are read once.
A value that is not finite then makes all heads of its key not finite, not only its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Products:
    """Queries are [batch, kv heads, group, queries, dim], keys [batch, kv heads, keys, dim], weights like the scores.

    Attributes:
      narrow: The dtype of operands.
      dtype: The dtype of results.
      precision: As for `lax.dot_general`.
      folded: Whether all heads are multiplied at once.
    """

    narrow: Any
    dtype: Any
    precision: Any
    folded: bool

    def scores(self, q: Array, k: Array) -> Array:
        """Of each query with each key of its head."""
        if not self.folded:
            return self._by_head("bkgqd,bksd->bkgqs", q, k)
        found = self._dot(_flat(k), _blocks(q), ((2,), (1,)))
        # Without the barrier XLA computes the transposed product, which takes three times as long.
        return lax.optimization_barrier(found).swapaxes(1, 2).reshape(*q.shape[:-1], k.shape[2])

    def weighted(self, p: Array, v: Array) -> Array:
        """Sums of values (or keys) for each query."""
        if not self.folded:
            return self._by_head("bkgqs,bksd->bkgqd", p, v)
        batch, kv_heads, group, rows, _ = p.shape
        found = self._dot(_by_query(p), _flat(v), ((2,), (1,)))
        return jnp.einsum("bkgqkd->bkgqd", found.reshape(batch, kv_heads, group, rows, kv_heads, v.shape[-1]))

    def onto_keys(self, p: Array, q: Array) -> Array:
        """Sums of queries (or of their gradients) for each key."""
        if not self.folded:
            return self._by_head("bkgqs,bkgqd->bksd", p, q)
        batch, kv_heads, *_, dim = q.shape
        turned = lax.optimization_barrier(_by_query(p).swapaxes(1, 2))
        found = self._dot(turned, _blocks(q), ((2,), (2,)))
        return found.reshape(batch, p.shape[-1], kv_heads, dim).swapaxes(1, 2)

    def _by_head(self, equation: str, a: Array, b: Array) -> Array:
        a, b = a.astype(self.narrow), b.astype(self.narrow)
        return jnp.einsum(equation, a, b, precision=self.precision, preferred_element_type=self.dtype)

    def _dot(self, a: Array, b: Array, contract: Any) -> Array:
        a, b = a.astype(self.narrow), b.astype(self.narrow)
        dims = (contract, ((0,), (0,)))
        return lax.dot_general(a, b, dims, precision=self.precision, preferred_element_type=self.dtype)


def _by_query(p: Array) -> Array:
    """[batch, kv heads, group, queries, keys] as [batch, all queries, keys]."""
    batch, kv_heads, group, rows, length = p.shape
    return p.reshape(batch, kv_heads * group * rows, length)


def _flat(x: Array) -> Array:
    """[batch, heads, keys, dim] as [batch, keys, heads x dim], which undoes the move of the heads."""
    batch, heads, length, dim = x.shape
    return x.swapaxes(1, 2).reshape(batch, length, heads * dim)


def _blocks(x: Array) -> Array:
    """[batch, kv heads, group, queries, dim] as a matrix [kv heads x dim, all queries]: a block for each kv head."""
    batch, kv_heads, group, rows, dim = x.shape
    of_head = jnp.eye(kv_heads, dtype=x.dtype)[:, None, :, None, None]
    blocks = x.transpose(0, 4, 1, 2, 3)[:, None] * of_head
    return lax.optimization_barrier(blocks.reshape(batch, kv_heads * dim, kv_heads * group * rows))
