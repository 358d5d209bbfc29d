"""Which block runs which tiles where only the device knows how long each takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def deal(steps: Array, *, heads: int, blocks: int, head_group: int) -> tuple[Array, Array]:
    """Returns how many tiles each block has, `[blocks]`, and which, `[blocks, most]`.

    `steps` `[batch, rows]` says how long a tile takes in each of `heads` heads; tiles are numbered
    `(batch * heads + head) * rows + row`. They are dealt like cards, sorted by length within a group of heads (whose
    keys stay in the L2 cache), in alternating directions: from left to right, then from right to left, and every other
    group from short to long. So all blocks have about the same work, and tiles of one length are dealt together.
    """
    batch, rows = steps.shape
    # Groups without a remainder: there are no gaps in the list.
    group = _divisor(heads, head_group)
    batches = _divisor(batch, head_group // heads) if group == heads else 1
    entries = batches * rows
    order = jnp.argsort(-steps.reshape(-1, entries), axis=1).astype(jnp.int32)
    count = batch * heads * rows
    blocks = min(blocks, count)
    turn = jnp.arange(-(-count // blocks), dtype=jnp.int32)[None, :]
    block = jnp.arange(blocks, dtype=jnp.int32)[:, None]
    place = turn * blocks + jnp.where(turn % 2 == 0, block, blocks - 1 - block)
    counts = jnp.sum(place < count, axis=1, dtype=jnp.int32)
    place = jnp.minimum(place, count - 1)
    number, inside = place // (entries * group), place % (entries * group)
    entry, head = inside // group, inside % group
    groups = count // (entries * group)
    entry = jnp.where((groups - 1 - number) % 2 == 0, entry, entries - 1 - entry)
    first_batch, head = number // (heads // group) * batches, number % (heads // group) * group + head
    entry = order[first_batch // batches, entry]
    flat = (first_batch + entry // rows) * heads + head
    return counts, flat * rows + entry % rows


def _divisor(count: int, most: int) -> int:
    """The largest divisor of `count` that is at most `most`, at least 1."""
    return max(n for n in range(1, max(min(most, count), 1) + 1) if count % n == 0)
