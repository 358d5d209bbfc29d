"""What the Hopper kernels for grouped products may be tuned over, and what the chip allows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Literal, TypeVar

import jax.numpy as jnp

from ejkernel.kernels.grouped_matmul.problem import Problem
from ejkernel.kernels.hopper.chip import (
    BARRIER_BYTES,
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    WGMMA_ROWS,
    unfit_block,
)

STEP = 64  # Elements of the contraction in one step: one swizzle of 16-bit elements.
ALIGNED_ROWS = 8  # Rows of a memory tile: tiles begin at multiples of it.
_SPARE_REGISTERS = 40  # For addresses, counters, and what an epilogue holds beside the accumulator.

Split = Literal["rows", "columns"]
Halves = Literal["no", "near", "late"]
Order = Literal["as given", "large first"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Tile:
    """Fields that the forward kernel and the drhs kernel share.

    Attributes:
      consumers: Warpgroups that compute.
      rows: Rows of the result that a consumer owns: 64, or 128 in two products.
      block_n: Columns of a block's tile.
      split: How consumers divide a tile: by `rows` or by `columns`.
      stages: Steps of 64 in flight.
      cluster: Blocks that load together.
      band: Tiles of rows that are computed before the next tile of columns, so that they stay in the L2 cache.
      store_columns: Columns that are stored at once through shared memory.
      store_slots: Such pieces of memory for each consumer.
      lag: Steps that the first consumer is ahead of the others, so that one computes while another stores.
    """

    consumers: int = 2
    rows: int = 64
    block_n: int = 256
    split: Split = "rows"
    stages: int = 4
    cluster: int = 2
    band: int = 8
    store_columns: int = 64
    store_slots: int = 2
    lag: int = 0

    @property
    def block_m(self) -> int:
        return self.rows * (self.consumers if self.split == "rows" else 1)

    @property
    def columns(self) -> int:
        """Columns that a consumer owns."""
        return self.block_n // (self.consumers if self.split == "columns" else 1)

    @property
    def consumer_registers(self) -> int:
        return CONSUMER_REGISTERS[self.consumers]

    @property
    def producer_registers(self) -> int:
        return PRODUCER_REGISTERS[self.consumers]

    def smem_bytes(self, out_bytes: int = 2) -> int:
        """Shared memory of one block: the rings of both operands, and what stores go through."""
        ring = self.stages * (self.block_m + self.block_n) * STEP * 2
        store = self.consumers * self.store_slots * WGMMA_ROWS * self.store_columns * out_bytes
        return ring + store + BARRIER_BYTES

    def live_registers(self) -> int:
        """Registers a consumer thread holds: its part of the result, and the rest."""
        return self.rows // WGMMA_ROWS * self.columns // 2 + _SPARE_REGISTERS

    def unfit(self, out_bytes: int = 2) -> str | None:
        """Says why this config cannot run with results of `out_bytes` per element, or `None` if it can."""
        piece = 128 // out_bytes
        if self.consumers not in (1, 2, 3):
            return f"consumers must be 1, 2 or 3, got {self.consumers}"
        if self.rows not in (64, 128):
            return f"rows must be 64 or 128, got {self.rows}"
        if self.columns % 64 or not 64 <= self.columns <= 256 or self.columns * self.consumers < self.block_n:
            return f"a consumer's columns must be 64, 128, 192 or 256, got {self.columns} of {self.block_n}"
        if self.stages < 2 or self.lag not in (0, 1) or self.lag > self.stages - 2:
            return f"stages must be at least 2, lag 0 or 1 and two less than stages, got {self.stages} and {self.lag}"
        if self.cluster not in (1, 2):
            return f"cluster must be 1 or 2, got {self.cluster}"
        if self.band < 1 or self.store_slots < 1:
            return f"band and store_slots must be at least 1, got {self.band} and {self.store_slots}"
        if self.store_columns % piece or self.columns % self.store_columns:
            return f"store_columns must be a multiple of {piece} that divides {self.columns}, got {self.store_columns}"
        return unfit_block(self.smem_bytes(out_bytes), self.live_registers(), self.consumers)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MosaicConfig(_Tile):
    """One way to run the forward kernel; rows are those of lhs, columns those of the result.

    Attributes:
      halves: When to compute the last tile of a group if at most half of it has rows, so that it costs half as much:
        right after the group's other tiles (`near`), or after all other groups (`late`), which balances the work of the
        SMs best, but reads the weights again. `no` treats it like the others and reads the weights least often.
      order: Which groups come first. `large first` gives SMs equal work; in the order given, groups that wait for
        memory and groups that wait for products run side by side.
    """

    halves: Halves = "no"
    order: Order = "as given"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MosaicDrhsConfig(_Tile):
    """One way to run the kernel of drhs; rows are the columns of lhs, columns those of dout."""


def unsupported(problem: Problem) -> str | None:
    """Why the Hopper kernels cannot serve a product; `None` if they can."""
    if problem.k % STEP or problem.n % STEP:
        return f"K and N must be multiples of {STEP} (columns of a memory tile), got {problem.k} and {problem.n}"
    return problem.unsupported(jnp.bfloat16, jnp.float16)


def space(problem: Problem) -> list[MosaicConfig]:
    """Configs for a forward pass that fit the chip, the guess first."""
    ways: list[tuple[Halves, Order]] = [("no", "as given"), ("no", "large first"), ("near", "large first")]
    rows, groups, out_bytes = problem.rows, problem.groups, problem.out_bytes
    few, many = rows <= 32 * groups, rows >= 512 * groups
    ways = [*(ways[::-1] if rows >= 1024 * groups else [ways[1], ways[0], ways[2]] if many else ways)]
    tiles = [MosaicConfig(split="columns", cluster=1, block_n=128)] if few else []
    tiles += [
        dataclasses.replace(cfg, halves=halves, order=order) for halves, order in ways for cfg in _shapes(MosaicConfig)
    ]
    # Many stages are better than large stores if a tile has few steps that could hide its loads.
    stores = (True, False) if problem.k >= 4096 else (False, True)
    fits = [_deepest(cfg, out_bytes, whole) for whole in stores for cfg in tiles]
    return list(dict.fromkeys(cfg for cfg in fits if cfg is not None))


def drhs_space(problem: Problem) -> list[MosaicDrhsConfig]:
    """Configs for a gradient of the weights that fit the chip, the guess first."""
    shapes = list(_shapes(MosaicDrhsConfig))
    fits = [_deepest(cfg, problem.out_bytes, whole) for whole in (True, False) for cfg in shapes]
    return list(dict.fromkeys(cfg for cfg in fits if cfg is not None))


_Config = TypeVar("_Config", bound=_Tile)


def _shapes(kind: type[_Config]) -> Iterator[_Config]:
    shapes: tuple[tuple[int, int, Split], ...] = (
        (64, 256, "rows"),
        (64, 192, "rows"),
        (64, 128, "rows"),
        (64, 256, "columns"),
    )
    for (rows, block_n, split), cluster in itertools.product(shapes, (2, 1)):
        yield kind(rows=rows, block_n=block_n, split=split, cluster=cluster)


def _deepest(cfg: _Config, out_bytes: int, whole: bool) -> _Config | None:
    """The same with as many stages as there is memory for, storing all columns at once or 128 bytes of a row."""
    columns, slots, lag = (cfg.columns, 1, 1) if whole else (128 // out_bytes, 2, 0)
    for stages in range(7, 2, -1):
        deep = dataclasses.replace(cfg, stages=stages, store_columns=columns, store_slots=slots, lag=lag)
        if deep.unfit(out_bytes) is None:
            return deep
    return None
