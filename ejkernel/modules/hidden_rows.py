"""Queries that see no key: JAX and the libraries on it give them the mean of all values, our kernels zeros.

They replace hidden logits by one large negative number, so that a row in which all are hidden has equal weights. A
program that switches to ejkernel must not see other numbers, not even there.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ejkernel.ops.utils.promotion import usual_promotion

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

    @usual_promotion()
    def hidden_rows(self, q_len: int, kv_len: int) -> Array | None:
        """Which rows see nothing, [batch or 1, q or 1, heads or 1]; None if none can be such a row."""
        out_of_reach = self.left is not None and q_len - 1 - self.left > kv_len - 1
        if kv_len == 0 or (self.mask is None and self.kv_lengths is None and not out_of_reach):
            return None
        seen = self._seen_by_place(q_len, kv_len) if self.mask is None else self._seen_by_mask(q_len, kv_len)
        if self.q_lengths is None:
            return ~seen
        return ~seen & (jnp.arange(q_len)[None, :, None] < self.q_lengths[:, None, None])

    def _reach(self, q_len: int, kv_len: int) -> tuple[Array, Array]:
        """The first and the last key that a row may see by its place, each [batch or 1, q, 1]."""
        rows = jnp.arange(q_len)[None, :, None]
        # Bounds may be as large as an int32 can be, so their sums with places may be too large for one.
        left, right = (n if x is None else min(x, n) for x, n in ((self.left, q_len), (self.right, kv_len - 1)))
        first, last = jnp.maximum(rows - left, 0), jnp.minimum(rows + right, kv_len - 1)
        if self.kv_lengths is not None:
            last = jnp.minimum(last, self.kv_lengths[:, None, None] - 1)
        return first, last

    def _seen_by_place(self, q_len: int, kv_len: int) -> Array:
        """[batch or 1, q, 1]: whether the first key that a row may see is before the last."""
        first, last = self._reach(q_len, kv_len)
        return first <= last

    def _seen_by_mask(self, q_len: int, kv_len: int) -> Array:
        """[batch or 1, q or 1, heads or 1]: whether any key is left of a row.

        Of a mask that is the same for all rows, or for all keys, nothing as large as rows times keys is made.
        """
        assert self.mask is not None
        if self.mask.shape[3] == 1:
            return self.mask[..., 0].swapaxes(1, 2) & self._seen_by_place(q_len, kv_len)
        first, last = self._reach(q_len, kv_len)
        if self.mask.shape[2] == 1:
            # How many keys are left before each place, of which two say how many are between them.
            before = jnp.cumsum(self.mask[:, :, 0], axis=2, dtype=jnp.int32)
            before = jnp.pad(before, ((0, 0), (0, 0), (1, 0))).swapaxes(1, 2)
            at = lambda place: jnp.take_along_axis(before, jnp.clip(place, 0, kv_len), axis=1)
            return (first <= last) & (at(last + 1) > at(first))
        if self.left is None and self.right is None and self.kv_lengths is None:
            return self.mask.any(axis=-1).swapaxes(1, 2)
        cols = jnp.arange(kv_len)
        inside = (cols >= first) & (cols <= last)
        return (self.mask & inside[:, None]).any(axis=-1).swapaxes(1, 2)


@jax.jit
@usual_promotion()
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
