"""Which block runs which tiles, decided before the launch."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence

import numpy as np

_TILE_OVERHEAD_STEPS = 1.0  # What starting and finishing a tile costs, in key steps.


@functools.lru_cache(maxsize=256)
def tile_table(*, heads: int, steps: tuple[int, ...], blocks: int, head_group: int, persistent: bool) -> np.ndarray:
    """Returns an int32 table: row `i` holds the number of tiles of block `i`, then the tiles.

    A tile is numbered `head * len(steps) + row`, where `steps[row]` is how many key steps it takes. Tiles are assigned
    in groups of heads (so that their keys stay in the L2 cache) and longest first inside a group. The next tile goes to
    the block that would be free first. This is computed here, not by a counter in memory, so the result does not depend
    on timing.
    """
    rows = sorted(range(len(steps)), key=lambda row: -steps[row])
    order = [
        head * len(steps) + row
        for first in range(0, heads, head_group)
        for row in rows
        for head in range(first, min(first + head_group, heads))
    ]
    if not persistent:
        return np.array([[1, tile] for tile in order], np.int32)
    lists, _ = deal([(tile, steps[tile % len(steps)] + _TILE_OVERHEAD_STEPS) for tile in order], blocks)
    return as_table(lists)


def deal(items: Sequence[tuple[int, float]], blocks: int) -> tuple[list[list[int]], float]:
    """Returns the items of each block, and when the last block ends; an item is its number and what it costs.

    The next item goes to the block that is free first.
    """
    blocks = min(blocks, len(items))
    lists: list[list[int]] = [[] for _ in range(blocks)]
    free_at = [(0.0, block) for block in range(blocks)]
    for item, cost in items:
        time, block = free_at[0]
        lists[block].append(item)
        heapq.heapreplace(free_at, (time + cost, block))
    return lists, max(time for time, _ in free_at)


def as_table(lists: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns one row for each list: how many items it has, then the items."""
    table = np.zeros((len(lists), 1 + max(map(len, lists))), np.int32)
    for block, items in enumerate(lists):
        table[block, : 1 + len(items)] = (len(items), *items)
    return table
