"""What the Hopper kernels for grouped products may be tuned over, and what the chip allows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Literal, TypeVar

import jax.numpy as jnp

from ejkernel.kernels.grouped_matmul.dimensions import Dimensions
from ejkernel.kernels.hopper.chip import BARRIER_BYTES, SMS, WGMMA_ROWS, unfit_block
from ejkernel.ops.utils.devices import HOPPER

STEP = 64  # Elements of the contraction in one step: one swizzle of 16-bit elements.
ALIGNED_ROWS = 8  # Rows of a memory tile: tiles begin at multiples of it.
_SPARE_REGISTERS = 40  # For addresses, counters, and what an epilogue holds beside the accumulator.

Left = Literal["rows", "weights"]
Halves = Literal["no", "near"]
Order = Literal["as given", "large first", "wide first"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Tile:
    """Fields that all kernels share: a tile is `64 * consumers` of the left operand times `width` of the right one.

    Attributes:
      consumers: Warpgroups that compute, each 64 rows of the left operand.
      width: Columns of the right operand, at most.
      stages: Steps of 64 in flight.
      cluster: Blocks that load the right operand together.
      band: Tiles of rows that are computed before the next tile of columns, so that they stay in the L2 cache.
      store: How much of the width is stored at once through shared memory.
      slots: Such pieces of memory for each consumer.
      lag: Steps that the first consumer is ahead of the others, so that one computes while another stores.
      hold: Whether a tile stays in registers, and is stored while the next one is computed.
    """

    consumers: int = 2
    width: int = 256
    stages: int = 4
    cluster: int = 2
    band: int = 8
    store: int = 64
    slots: int = 2
    lag: int = 0
    hold: bool = False

    @property
    def height(self) -> int:
        """Rows of the left operand in a tile."""
        return self.consumers * WGMMA_ROWS

    def smem_bytes(self, out_bytes: int = 2) -> int:
        """Shared memory of one block: the rings of both operands, and what stores go through."""
        ring = self.stages * (self.height + self.width) * STEP * 2
        return ring + self.slots * self.store * self.height * out_bytes + BARRIER_BYTES

    def live_registers(self, out_bytes: int = 2) -> int:
        """Registers a consumer thread holds: its part of the result, that of the tile before, and the rest."""
        held = self.width // 2 * out_bytes // 4 if self.hold else 0
        return self.width // 2 + held + _SPARE_REGISTERS

    def unfit(self, out_bytes: int = 2) -> str | None:
        """Says why this config cannot run with results of `out_bytes` per element, or `None` if it can."""
        if self.consumers not in (2, 3):
            return f"consumers must be 2 or 3, got {self.consumers}"
        if self.stages < 2 or self.lag not in (0, 1) or self.lag > self.stages - 2:
            return f"stages must be at least 2, lag 0 or 1 and two less than stages, got {self.stages} and {self.lag}"
        if self.cluster not in (1, 2):
            return f"cluster must be 1 or 2, got {self.cluster}"
        if self.band < 1 or self.slots < 1:
            return f"band and slots must be at least 1, got {self.band} and {self.slots}"
        return self._unfit_width(out_bytes) or unfit_block(
            self.smem_bytes(out_bytes), self.live_registers(out_bytes), self.consumers
        )

    def _unfit_width(self, out_bytes: int) -> str | None:
        if self.width not in (64, 128, 192, 256):
            return f"width must be 64, 128, 192 or 256, got {self.width}"
        piece = 128 // out_bytes
        if self.store < piece or self.store % piece or self.width % self.store:
            return f"store must be a multiple of {piece} that divides {self.width}, got {self.store}"
        return None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MosaicConfig(_Tile):
    """One way to run the forward pass.

    Attributes:
      left: The left operand of the matrix units. With `weights`, the width of a tile is rows of lhs, and goes in steps
        of `grain`: a group's last tiles are as narrow as its rows allow. With `rows`, the width is columns of the
        result: better if groups have thousands of rows, but K and N must be multiples of 64.
      grain: By how many rows tiles differ if `left` is `weights`: small ones waste less; each width is code of its own.
      halves: If `left` is `rows`: `near` computes the last tile of a group by itself if at most half of it has rows, so
        that it costs half as much. `no` treats it like the others and reads the weights least often.
      order: Which groups come first. `large first` gives SMs equal work; `wide first`, if `left` is `weights`, even
        more so: tiles that cost the same run at the same time. In the order given, groups that wait for memory and
        groups that wait for products run side by side.
    """

    left: Left = "weights"
    grain: int = 16
    halves: Halves = "no"
    order: Order = "as given"

    @property
    def load_widths(self) -> tuple[int, ...]:
        """Rows of lhs that may be loaded at once if `left` is `weights`."""
        least = min(self.width, 64)
        return tuple(range(least, self.width + 1, least))

    def _unfit_width(self, out_bytes: int) -> str | None:
        if self.left == "rows":
            if self.order == "wide first":
                return 'order must be "as given" or "large first" if left is "rows", got "wide first"'
            return super(MosaicConfig, self)._unfit_width(out_bytes)
        if self.width not in (16, 32, 64, 128, 192, 256):
            return f"width must be 16, 32, 64, 128, 192 or 256, got {self.width}"
        if self.grain not in (16, 32, 64) or self.width % self.grain:
            return f"grain must be 16, 32 or 64 and divide {self.width}, got {self.grain}"
        if self.store not in (16, 32, 64, 128) or self.width % self.store:
            return f"store must be 16, 32, 64 or 128 and divide {self.width}, got {self.store}"
        return None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MosaicDrhsConfig(_Tile):
    """One way to run the kernel of drhs; the left operand is lhs, transposed, the right one dout.

    Attributes:
      order: Which groups come first, as in `MosaicConfig`.
    """

    order: Order = "large first"

    def unfit(self, out_bytes: int = 2) -> str | None:
        """Says why this config cannot run with results of `out_bytes` per element, or `None` if it can."""
        if self.order == "wide first":
            return 'order must be "as given" or "large first", got "wide first"'
        return super(MosaicDrhsConfig, self).unfit(out_bytes)


def unsupported(dims: Dimensions) -> str | None:
    """Why the Hopper kernels cannot serve a product or its gradients; `None` if they can."""
    return unaligned(dims, 8) or dims.unsupported(jnp.bfloat16, jnp.float16)


def unaligned(dims: Dimensions, by: int) -> str | None:
    """Says that K or N is no multiple of `by`; `None` if both are."""
    if dims.k % by or dims.n % by:
        return f"K and N must be multiples of {by}, got {dims.k} and {dims.n}"
    return None


def space(dims: Dimensions) -> list[MosaicConfig]:
    """Configs for a forward pass that fit the chip, the guess first."""
    rows, groups = dims.rows, dims.groups
    few, many = rows <= 32 * groups, rows >= 1024 * groups
    narrow = [
        MosaicConfig(width=width, store=width, slots=1, cluster=cluster, band=4)
        for cluster, width in itertools.product((2, 1), (32, 64))
    ]
    # A tile of rows is best read once for all columns, but then the weights of a group must stay in the L2 cache.
    weights = SMS * 2 * WGMMA_ROWS * dims.k * 2 // max(rows // (192 * groups), 1)
    bands = (1, 4) if weights <= HOPPER.cache_bytes else (4, 1)
    # Few steps for each tile: large ones.
    tiles = ((256, 2), (192, 1)) if dims.k < 1024 else ((192, 1), (256, 2))
    clusters = (2, 1) if dims.k < 1024 else (1, 2)
    wide = [
        MosaicConfig(width=width, slots=slots, cluster=cluster, band=band, order=order)
        for order, band, cluster, (width, slots) in itertools.product(
            ("as given", "large first"), bands, clusters, tiles
        )
    ]
    even_work = [
        MosaicConfig(width=256, slots=2, cluster=1, band=bands[0], order="wide first", hold=True),
        MosaicConfig(width=256, slots=2, cluster=1, band=bands[0], order="wide first"),
        MosaicConfig(width=192, store=32, slots=3, cluster=1, band=bands[0], order="wide first"),
    ]
    # Equal work matters where blocks wait for products. Where they wait for memory, the order given mixes groups.
    first = even_work if bands[0] == 1 and dims.k >= 1024 else []
    wide = [*first, *wide, *even_work]
    wide += [MosaicConfig(store=128, slots=1, order="large first"), MosaicConfig(grain=32), MosaicConfig(width=128)]
    wide += [MosaicConfig(width=192, store=32, cluster=1, band=bands[0], hold=True)]
    by_rows = []
    if unaligned(dims, STEP) is None:
        whole = MosaicConfig(left="rows", store=256, slots=1, lag=1, order="large first")
        pieces = dataclasses.replace(whole, store=128 // dims.out_bytes, slots=2, lag=0)
        by_rows = [
            dataclasses.replace(cfg, halves=halves, cluster=cluster)
            for cfg, (halves, cluster) in itertools.product((whole, pieces), (("near", 2), ("no", 2), ("no", 1)))
        ]
    order = (narrow, wide) if few else (by_rows, wide) if many else (wide, by_rows)
    return _fitting(itertools.chain(*order), dims.out_bytes)


def drhs_space(dims: Dimensions) -> list[MosaicDrhsConfig]:
    """Configs for a gradient of the weights that fit the chip, the guess first."""
    piece = 128 // dims.out_bytes
    stores = [(256, 1, 1), (2 * piece, 1, 0), (piece, 2, 0)]
    stores = stores if dims.rows < 256 * dims.groups else [*stores[1:], stores[0]]
    shapes = [(256, 1), (256, 2), (192, 1), (128, 2)]
    found = [
        MosaicDrhsConfig(width=width, cluster=cluster, store=min(store, width), slots=slots, lag=lag)
        for (store, slots, lag), (width, cluster) in itertools.product(stores, shapes)
    ]
    # With few rows for each group, most of the time goes into storing: small groups beside large ones.
    mixed = [dataclasses.replace(cfg, order="as given") for cfg in found[:2]]
    held = [dataclasses.replace(found[0], hold=True, lag=1), dataclasses.replace(found[0], hold=True)]
    if dims.rows >= 1024 * dims.groups:
        found = [*held, *found]
    first = mixed if 32 * dims.groups < dims.rows < 256 * dims.groups else []
    return _fitting([*first, *found, *mixed, *held], dims.out_bytes)


_Config = TypeVar("_Config", bound=_Tile)


def _fitting(cfgs: Iterable[_Config], out_bytes: int) -> list[_Config]:
    """Each with as many stages as there is memory for, those that fit."""
    deepest = [
        next(
            (deep for n in range(9, 2, -1) if (deep := dataclasses.replace(cfg, stages=n)).unfit(out_bytes) is None),
            None,
        )
        for cfg in cfgs
    ]
    return list(dict.fromkeys(cfg for cfg in deepest if cfg is not None))
