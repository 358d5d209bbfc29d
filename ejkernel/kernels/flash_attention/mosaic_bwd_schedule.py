"""Which block of the backward kernel runs which tiles of keys, or parts of them, decided before the launch.

A tile of keys is as long as all queries that see it, in all heads of its group: with few key heads there are few tiles,
and they are long. Two things keep the blocks equally busy: handing out the tiles of enough key heads together, longest
first, and cutting long tiles into parts, whose dK and dV are added up in float32. Parts cost a little, so both are
chosen by computing when the last block would end.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from ejkernel.kernels.flash_attention.mosaic_schedule import as_table, deal

_L2_BUDGET_BYTES = 32 << 20  # For Q, dO and the float32 dQ of the heads that are being computed.
# Tiles of one key head that run at the same time read the same queries, and add to the same dQ, while those are in the
# L2 cache; the others find them in memory. Measured: a step takes half as long again if no other tile does.
_ALONE = 0.5
_ITEM_STEPS = 2.0  # What loading a tile's keys and storing its gradients costs, in steps.
_PART_STEPS = 1.0  # What adding the gradients of a part up costs more than storing them.
_SUMS_STEPS = 4.0  # Launching what clears the sums, rounds them and brings them into order.
_SUMS_BYTES_PER_STEP = 4 << 20  # … and how much of them it clears, reads and writes in the time of a step.
_WORTH = 1.02  # Within this, fewer parts and smaller groups of heads are better.
_MANY_TILES = 8  # Tiles of a block, from which on cutting them gains less than it costs.
PARTS = (1, 2, 3, 4, 6, 8)
_PART_BITS = 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The tiles of one call: `steps[i]` steps for tile `i` of each of `heads` key heads, which share out to `blocks`.

    `head_bytes` is what a key head's queries occupy in the L2 cache, `sum_bytes` the float32 dK and dV of all heads.
    """

    heads: int
    steps: tuple[int, ...]
    blocks: int
    head_bytes: int
    sum_bytes: int

    def items(self, splits: int, head_group: int) -> list[tuple[int, float]]:
        """Returns the parts of all tiles, in the order in which they start, and what each costs in steps.

        No part is longer than a `splits`-th of the longest tile.
        """
        most = -(-max(self.steps) // splits)
        parts = [-(-n // most) for n in self.steps]
        rows = [(-(-n // parts[row]), row, part) for row, n in enumerate(self.steps) for part in range(parts[row])]
        overhead = _ITEM_STEPS + (_PART_STEPS if splits > 1 else 0.0)
        return [
            (item_number(head * len(self.steps) + row, part, parts[row], splits), n + overhead)
            for first in range(0, self.heads, head_group)
            for n, row, part in sorted(rows, key=lambda x: (-x[0], x[1], x[2]))
            for head in range(first, min(first + head_group, self.heads))
        ]

    def time(self, splits: int, head_group: int) -> float:
        """Returns when the last block ends, in steps."""
        sums = _SUMS_STEPS + self.sum_bytes / _SUMS_BYTES_PER_STEP if splits > 1 else 0.0
        together = min(self.blocks / head_group, len(self.steps))
        return deal(self.items(splits, head_group), self.blocks)[1] * (1.0 + _ALONE / together) + sums

    def least_time(self) -> float:
        """Returns when the last block ends if all are equally busy, and no tile is cut."""
        equal = self.heads * (sum(self.steps) + _ITEM_STEPS * len(self.steps)) / self.blocks
        return equal * (1.0 + _ALONE / len(self.steps))

    def useful_parts(self) -> tuple[int, ...]:
        """Returns the numbers of parts that are worth a try: none but 1 where every block has many tiles."""
        return PARTS[:1] if self.heads * len(self.steps) >= _MANY_TILES * self.blocks else PARTS

    def groups(self) -> list[int]:
        """Returns sizes of groups of heads: what the L2 cache holds, doubled four times, and all heads."""
        least = max(_L2_BUDGET_BYTES // self.head_bytes, 1)
        return [*(least << i for i in range(5) if least << i < self.heads), self.heads]


def item_number(tile: int, part: int, parts: int, splits: int) -> int:
    """Returns how the table writes part `part` of `parts` of a tile; where no tile is cut, as the tile's number."""
    return tile if splits == 1 else (tile << 2 * _PART_BITS) | (part << _PART_BITS) | parts


def decode_item(number: Any, splits: int) -> tuple[Any, Any, Any]:
    """Returns tile, part and parts of an item's number."""
    mask = (1 << _PART_BITS) - 1
    return (number, 0, 1) if splits == 1 else (number >> 2 * _PART_BITS, (number >> _PART_BITS) & mask, number & mask)


@functools.lru_cache(maxsize=256)
def plan(work: Work, splits: int = 0, head_group: int = 0) -> tuple[int, int]:
    """Returns into how many parts long tiles are cut, and how many key heads are handed out together; 0 chooses."""
    times: dict[tuple[int, int], float] = {}
    for parts in [splits] if splits else work.useful_parts():
        for group in [head_group] if head_group else work.groups():
            times[parts, group] = work.time(parts, group)
            if times[parts, group] <= _WORTH * work.least_time():
                return parts, group
    best = min(times.values())
    return next(choice for choice, time in times.items() if time <= _WORTH * best)


@functools.lru_cache(maxsize=256)
def item_table(work: Work, splits: int, head_group: int, *, persistent: bool) -> np.ndarray:
    """Returns an int32 table: row `i` holds the number of items of block `i`, then the items."""
    items = work.items(splits, head_group)
    if not persistent:
        return as_table([[item] for item, _ in items])
    return as_table(deal(items, work.blocks)[0])
