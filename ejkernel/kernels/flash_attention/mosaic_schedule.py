"""Which block runs which tiles, decided before the launch."""

from __future__ import annotations

import functools
import heapq

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
    blocks = min(blocks, len(order))
    lists: list[list[int]] = [[] for _ in range(blocks)]
    free_at = [(0.0, block) for block in range(blocks)]
    for tile in order:
        time, block = heapq.heappop(free_at)
        lists[block].append(tile)
        heapq.heappush(free_at, (time + steps[tile % len(steps)] + _TILE_OVERHEAD_STEPS, block))
    table = np.zeros((blocks, 1 + max(map(len, lists))), np.int32)
    for block, tiles in enumerate(lists):
        table[block, 0] = len(tiles)
        table[block, 1 : 1 + len(tiles)] = tiles
    return table
