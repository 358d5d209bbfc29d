"""Boolean masks as bits, and which of their tiles are empty or full, computed by XLA before a kernel starts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array
BITS = 32


def packed_bits(mask: Array, *, rows: int, cols: int) -> Array:
    """Returns a mask `[batch, q, kv]` as int32 words `[batch, words, q]`: bit `i` of word `w` is key `32 * w + i`.

    There are whole blocks of `rows` queries, the last one repeated, and of `cols` keys, which are not seen.
    """
    batch, q_len, kv_len = mask.shape
    mask = jnp.pad(mask, ((0, 0), (0, 0), (0, -kv_len % cols)))
    mask = jnp.pad(mask, ((0, 0), (0, -q_len % rows), (0, 0)), mode="edge")
    bits = mask.reshape(batch, mask.shape[1], -1, BITS).astype(jnp.uint32) << jnp.arange(BITS, dtype=jnp.uint32)
    words = jax.lax.bitcast_convert_type(bits.sum(axis=3, dtype=jnp.uint32), jnp.int32)
    return words.swapaxes(1, 2)


def bit_pairs(words: Array, *, rows: int, cols: int) -> tuple[Array, Array]:
    """Returns which tiles of `rows` queries and `cols` keys have a pair that is seen, and which have no other."""
    batch, count, q_len = words.shape
    tiles = words.reshape(batch, count // (cols // BITS), cols // BITS, q_len // rows, rows)
    some, every = (tiles != 0).any(axis=(2, 4)), (tiles == -1).all(axis=(2, 4))
    return some.swapaxes(1, 2), every.swapaxes(1, 2)
