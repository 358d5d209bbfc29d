"""Queries that see no key: JAX and the libraries on it give them the mean of all values, our kernels zeros.

They replace hidden logits by one large negative number, so that a row in which all are hidden has equal weights. A
program that switches to ejkernel must not see other numbers, not even there.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

Array = jax.Array
HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)
"""What JAX puts in place of hidden logits, and so the log-sum-exp of a row of them."""


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What queries may see, as far as a whole row may be hidden by it.

    Attributes:
      mask: Boolean [batch or 1, heads or 1, q or 1, kv or 1], or None.
      left: How many keys before its own place a query sees; None is no bound.
      right: The same after its own place.
      q_lengths: [batch], or None. Queries after these have no output: zeros are right.
      kv_lengths: [batch], or None. Keys after these are hidden.
    """

    mask: Array | None = None
    left: int | None = None
    right: int | None = None
    q_lengths: Array | None = None
    kv_lengths: Array | None = None

    def hidden_rows(self, q_len: int, kv_len: int) -> Array | None:
        """Which rows see nothing, [batch or 1, q or 1, heads or 1]; None if none can be such a row."""
        out_of_reach = self.left is not None and q_len - 1 - self.left > kv_len - 1
        if kv_len == 0 or (self.mask is None and self.kv_lengths is None and not out_of_reach):
            return None
        seen = self._seen_by_place(q_len, kv_len) if self.mask is None else self._seen_by_mask(q_len, kv_len)
        if self.q_lengths is None:
            return ~seen
        return ~seen & (jnp.arange(q_len)[None, :, None] < self.q_lengths[:, None, None])

    def _seen_by_place(self, q_len: int, kv_len: int) -> Array:
        """[batch or 1, q, 1]: whether the first key that a row may see is before the last."""
        rows = jnp.arange(q_len)[None, :, None]
        first = 0 if self.left is None else jnp.maximum(rows - self.left, 0)
        last = kv_len - 1 if self.right is None else jnp.minimum(rows + self.right, kv_len - 1)
        if self.kv_lengths is not None:
            last = jnp.minimum(last, self.kv_lengths[:, None, None] - 1)
        return jnp.broadcast_to(first <= last, jnp.broadcast_shapes(jnp.shape(first <= last), (1, q_len, 1)))

    def _seen_by_mask(self, q_len: int, kv_len: int) -> Array:
        """[batch or 1, q or 1, heads or 1]: whether any key is left of a row."""
        rows, cols = jnp.arange(q_len)[:, None], jnp.arange(kv_len)[None, :]
        assert self.mask is not None
        left = self.mask
        if self.left is not None:
            left = left & (cols >= rows - self.left)
        if self.right is not None:
            left = left & (cols <= rows + self.right)
        if self.kv_lengths is not None:
            left = left & (cols < self.kv_lengths[:, None, None, None])
        return left.any(axis=-1).swapaxes(1, 2)


@jax.jit
def with_means(out: Array, value: Array, hidden: Array) -> Array:
    """`out` [batch, q, heads, dim] with the mean of the values in the rows that are `hidden`."""
    mean = value.mean(axis=1, dtype=jnp.promote_types(value.dtype, jnp.float32)).astype(out.dtype)
    batch, q_len, heads, dim = out.shape
    # Heads in their groups, not repeated means: that would need to know how heads are sharded.
    kv_heads = value.shape[2]
    group = heads // kv_heads
    hidden = hidden.reshape(*hidden.shape[:2], *((kv_heads, group) if hidden.shape[2] > 1 else (1, 1)), 1)
    found = jnp.where(hidden, mean[:, None, :, None, :], out.reshape(batch, q_len, kv_heads, group, dim))
    return found.reshape(out.shape)
