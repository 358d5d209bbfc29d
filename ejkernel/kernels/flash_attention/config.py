"""What the Hopper flash-attention kernels may be tuned over, and what the chip allows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Literal

from ejkernel.kernels.hopper.chip import BARRIER_BYTES, SMS, WGMMA_ROWS, unfit_block

Schedule = Literal["persistent", "grid"]
DqWay = Literal["bulk", "registers", "kernel"]
Split = Literal["keys", "columns", "gradients"]
MAX_SPLITS = 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MosaicFwdConfig:
    """One way to run the forward kernel.

    Attributes:
      consumers: Warpgroups that compute; each owns 64 query rows of a tile.
      block_kv: Keys in one step; a multiple of 64.
      stages: K/V tiles in flight.
      schedule: `persistent` runs one block per SM over a precomputed list of tiles, so that loads of the next
        tile overlap the epilogue of this one; `grid` launches one block per tile.
      head_group: Heads whose tiles are handed out together, longest first. 0 picks as many as keep their K and V
        in half of the L2 cache.
      ping_pong: Whether warpgroups take turns at the matrix units, so that one's softmax overlaps another's products.
      share_qo: Whether the output is stored through the memory of Q, which makes room for larger tiles but delays the
        next tile's Q until the store has read it.
      cluster: Blocks, of neighbouring tiles, that load K and V together.
      q_stages: Tiles of Q in flight; two load the next tile's Q while this one is computed, which short tiles need.
      hold: Whether an output tile stays in registers, and is stored under the first product of the next one.
    """

    consumers: int = 2
    block_kv: int = 128
    stages: int = 2
    schedule: Schedule = "persistent"
    head_group: int = 0
    ping_pong: bool = True
    share_qo: bool = False
    cluster: int = 1
    q_stages: int = 1
    hold: bool = False

    @property
    def block_q(self) -> int:
        return self.consumers * WGMMA_ROWS

    def smem_bytes(self, head_dim: int, value_dim: int | None = None) -> int:
        """Shared memory of one block: Q and O tiles, the K and V rings, the rows of log-sum-exp and its error."""
        qk, v = in_memory(head_dim), in_memory(head_dim if value_dim is None else value_dim)
        q_and_o = self.block_q * (self.q_stages * qk + (0 if self.share_qo else v)) * 2
        rings = self.stages * self.block_kv * (qk + v) * 2
        return q_and_o + rings + 2 * self.block_q * 4 + BARRIER_BYTES

    def live_registers(self, value_dim: int) -> int:
        """The most registers of a consumer thread: scores, weights, output, one that is held, and 24 for the rest."""
        scores, weights, output = self.block_kv // 2, self.block_kv // 4, in_memory(value_dim) // 2
        return scores + weights + output + (output // 2 if self.hold else 0) + 24

    def unfit(self, head_dim: int, value_dim: int | None = None) -> str | None:
        """Says why this config cannot run at these dims, or `None` if it can."""
        value_dim = head_dim if value_dim is None else value_dim
        if self.consumers not in (1, 2, 3):
            return f"consumers must be 1, 2 or 3, got {self.consumers}"
        if self.block_kv % 64 or not 64 <= self.block_kv <= 256:
            return f"block_kv must be 64, 128, 192 or 256, got {self.block_kv}"
        if self.stages < 2:
            return f"stages must be at least 2, got {self.stages}"
        if self.cluster not in (1, 2):
            return f"cluster must be 1 or 2, got {self.cluster}"
        if self.q_stages not in (1, 2):
            return f"q_stages must be 1 or 2, got {self.q_stages}"
        if self.share_qo and self.hold:
            return "an output that is held cannot lie in the memory of Q: share_qo goes without hold"
        if self.share_qo and head_dim != value_dim and (value_dim % 64 or value_dim > head_dim):
            return f"an output of {value_dim} columns cannot lie in the memory of {head_dim} columns of Q"
        smem = self.smem_bytes(head_dim, value_dim)
        return unfit_block(smem, self.live_registers(value_dim), self.consumers)


def in_memory(dim: int) -> int:
    """How many columns `dim` columns take in shared memory: whole groups of 16."""
    return -(-dim // 16) * 16


def is_full(q_len: int, kv_len: int, lower: int | None, upper: int | None) -> bool:
    """Whether every query sees every key and all blocks of a cluster have whole tiles."""
    return lower is None and upper is None and q_len % 256 == 0 and kv_len % 256 == 0


def is_long(q_len: int, kv_len: int, lower: int | None) -> bool:
    """Whether most tiles of queries see so many keys that a tile's start and end hardly count."""
    return lower is None and min(q_len, kv_len) >= 8192


def forward_space(head_dim: int, value_dim: int | None = None) -> Iterator[MosaicFwdConfig]:
    """Yields the forward configs that fit the chip at these dims.

    A plain grid was slower wherever it was measured, and clusters wherever a mask makes their blocks unequal. Where
    clusters were faster, `default_forward` uses them.
    """
    axes = itertools.product((2, 3), (64, 128, 192), (2, 3), (False, True), (True, False), (1, 2), (False, True))
    for consumers, block_kv, stages, share_qo, ping_pong, q_stages, hold in axes:
        cfg = MosaicFwdConfig(
            consumers=consumers,
            block_kv=block_kv,
            stages=stages,
            share_qo=share_qo,
            ping_pong=ping_pong,
            q_stages=q_stages,
            hold=hold,
        )
        # Sharing the memory of Q only costs time, unless the tiles do not fit otherwise; a second Q tile, and an output
        # that is held, help where tiles are short, and those of 128 keys are the fastest of them.
        needless = share_qo and dataclasses.replace(cfg, share_qo=False).unfit(head_dim, value_dim) is None
        needless |= (q_stages > 1 or hold) and (share_qo or block_kv != 128)
        needless |= hold and consumers > 2
        if not needless and cfg.unfit(head_dim, value_dim) is None:
            yield cfg


def guessed_forward(
    q_shape: tuple[int, ...],
    kv_shape: tuple[int, ...],
    value_dim: int,
    lower: int | None,
    upper: int | None,
    *,
    packed: bool,
    biased: bool = False,
) -> MosaicFwdConfig:
    """Returns the config of an untuned call; `packed` is whether it has segments or a mask, `biased` a bias."""
    q_len, kv_len = q_shape[1], kv_shape[1]
    cfg = default_forward(
        q_shape[3],
        value_dim,
        full=is_full(q_len, kv_len, lower, upper),
        packed=packed,
        banded=(lower, upper) != (None, None),
        long=is_long(q_len, kv_len, lower),
        q_len=q_len,
    )
    # A bias that has no whole blocks of queries is copied, and few lengths are multiples of 192.
    return dataclasses.replace(cfg, consumers=2) if biased else cfg


def default_forward(
    head_dim: int,
    value_dim: int | None = None,
    *,
    full: bool = False,
    packed: bool = False,
    banded: bool = True,
    long: bool = False,
    q_len: int | None = None,
) -> MosaicFwdConfig:
    """Returns the config of an untuned call.

    `full` is what `is_full` says of the call, `long` what `is_long` says, `packed` whether it has segments or a mask,
    `banded` whether it is causal or has a window, `q_len` how many queries.
    """
    value_dim = head_dim if value_dim is None else value_dim
    dim = max(head_dim, value_dim)
    short = q_len is not None and q_len <= 1024
    # A tile of two steps leaves nothing to take turns for. Of one step, not even a tile to load ahead.
    tiny = q_len is not None and q_len <= 256 and not banded and not packed
    if q_len is not None and tiny and dim <= 128:
        return MosaicFwdConfig(ping_pong=False, q_stages=1 if q_len <= 128 else 2)
    if dim <= 64:
        if packed or short:
            return MosaicFwdConfig(stages=3, q_stages=2, hold=packed)
        # Tiles of three warpgroups leave up to 191 rows empty, which few tiles do not make up for.
        return MosaicFwdConfig() if q_len is not None and q_len <= 2048 else MosaicFwdConfig(consumers=3, stages=3)
    if dim <= 128:
        ahead = MosaicFwdConfig(q_stages=2, hold=True)
        if full and not packed and dim > 96:
            return dataclasses.replace(ahead if short else MosaicFwdConfig(), ping_pong=False, cluster=2)
        if long and not packed and dim > 96:
            return MosaicFwdConfig(ping_pong=False, hold=True)
        fits = (dataclasses.replace(ahead, stages=stages) for stages in (3, 2))
        return next((cfg for cfg in fits if cfg.unfit(head_dim, value_dim) is None), MosaicFwdConfig())
    for block_kv, share_qo in ((128, False), (128, True), (64, False), (64, True)):
        cfg = MosaicFwdConfig(block_kv=block_kv, share_qo=share_qo, ping_pong=False)
        if cfg.unfit(head_dim, value_dim) is None:
            return cfg
    return MosaicFwdConfig(consumers=1, block_kv=64, ping_pong=False)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MosaicBwdConfig:
    """One way to run the backward kernel.

    Attributes:
      consumers: Warpgroups that compute.
      split: How the consumers divide a tile: `keys`, 64 each, or `columns` of dK and dV of 64 keys, or those two
        `gradients`.
      block_q: Queries in one step: 64, or 64 per consumer.
      stages: Tiles of Q and dO in flight.
      kv_stages: Tiles of keys in flight; two load the next one while this one is finished, which short tiles need.
      schedule: As in the forward config.
      head_group: Key heads whose tiles are handed out together, longest first; 0 picks by the size of the L2 cache and
        by how busy that keeps all blocks.
      splits: Parts into which the longest tile of keys is cut, and shorter ones into as many as make their parts no
        longer. dK and dV of parts are added up in float32 in memory, in any order: from three parts on they differ in
        their last bits from run to run. 0 picks by how busy it keeps all blocks.
      dq: How dQ is added up in memory: by the copy engine from shared memory (`bulk`), or from `registers`; or by a
        second `kernel`, which computes two more products but adds nothing up in memory, so that the result is always
        the same.
      dq_block_kv: Keys in one step of that second kernel, which has 64 queries per consumer.
      dq_k_stages: Tiles of K it has in flight.
      dq_v_stages: Tiles of V it has in flight; one is enough, V is done with early in a step.
      dq_cluster: Blocks of it that load K and V together.
      cluster: Blocks, of neighbouring tiles, that load Q and dO together.
    """

    consumers: int = 2
    split: Split = "keys"
    block_q: int = 64
    stages: int = 2
    dq: DqWay = "bulk"
    dq_block_kv: int = 64
    dq_k_stages: int = 2
    dq_v_stages: int = 1
    dq_cluster: int = 1
    cluster: int = 1
    schedule: Schedule = "persistent"
    head_group: int = 0
    splits: int = 0
    kv_stages: int = 1

    @property
    def dq_block_q(self) -> int:
        return self.consumers * WGMMA_ROWS

    @property
    def block_kv(self) -> int:
        return self.consumers * WGMMA_ROWS if self.split == "keys" else WGMMA_ROWS

    @property
    def divides_columns(self) -> bool:
        """Whether a consumer reads some columns of Q or K alone: of dK, or of a dQ that has too few rows to divide."""
        return self.split == "columns" or (self.split == "keys" and self.block_q == WGMMA_ROWS)

    def dq_columns(self, head_dim: int) -> int:
        """Columns of dQ that a consumer adds up: all, if there are enough rows to divide, else its part of them."""
        width = key_width(head_dim, self)
        return width if self.block_q > WGMMA_ROWS else width // self.consumers

    def smem_bytes(self, head_dim: int, value_dim: int | None = None) -> int:
        """Shared memory of one block: K and V, the rings of Q and dO, two tiles of dS (and P), dQ, the row vectors."""
        width = key_width(head_dim, self)
        both = width + in_memory(head_dim if value_dim is None else value_dim)
        keys = self.kv_stages * self.block_kv * both * 2
        rings = self.stages * self.block_q * both * 2
        scores = (2 if self.split == "keys" else 4) * self.block_kv * self.block_q * 2
        dq = self.block_q * width * 4 if self.dq == "bulk" else 0
        return keys + rings + scores + dq + 2 * self.stages * self.block_q * 4 + BARRIER_BYTES

    @property
    def id_bytes(self) -> int:
        """What ids of segments add to the shared memory of a block, of the second kernel if there is one."""
        if self.split == "keys":
            return (self.stages * self.block_q + self.kv_stages * self.block_kv) * 4
        return (self.dq_block_q + self.dq_k_stages * self.dq_block_kv) * 4

    def dq_smem_bytes(self, head_dim: int, value_dim: int | None = None) -> int:
        """Shared memory of one block of the second kernel: Q and dO, the rings of K and V."""
        values = in_memory(head_dim if value_dim is None else value_dim)
        of_keys = (self.dq_block_q + self.dq_k_stages * self.dq_block_kv) * key_width(head_dim, self)
        of_values = (self.dq_block_q + self.dq_v_stages * self.dq_block_kv) * values
        return (of_keys + of_values) * 2 + BARRIER_BYTES

    def live_registers(self, head_dim: int, value_dim: int | None = None) -> int:
        """The most registers that a consumer thread holds: dK, dV, scores and their gradient or dQ, the rest."""
        width, values = key_width(head_dim, self), in_memory(head_dim if value_dim is None else value_dim)
        if self.split == "columns":
            return ((width + values) // 2 + self.block_q) // self.consumers + 24
        if self.split == "gradients":
            return max(width, values) // 2 + self.block_q + self.block_q // 4 + 24
        return (width + values) // 2 + self.block_q + 24

    def dq_live_registers(self, head_dim: int) -> int:
        """The same in the second kernel: dQ, scores and their gradient, the gradient before, and the rest."""
        return in_memory(head_dim) // 2 + self.dq_block_kv + self.dq_block_kv // 4 + 24

    def unfit(self, head_dim: int, value_dim: int | None = None, *, ids: bool = False) -> str | None:
        """Says why this config cannot run at these dims, with or without ids of segments, or `None` if it can."""
        value_dim = head_dim if value_dim is None else value_dim
        if self.consumers not in (1, 2, 3):
            return f"consumers must be 1, 2 or 3, got {self.consumers}"
        if self.block_q not in (WGMMA_ROWS, self.consumers * WGMMA_ROWS):
            return f"block_q must be 64 or {self.consumers * WGMMA_ROWS}, got {self.block_q}"
        if self.split == "keys" and self.block_q == WGMMA_ROWS and head_dim <= 64:
            return f"{self.consumers} consumers are not to divide a dQ of 64 rows and {head_dim} columns"
        if self.split != "keys" and (self.block_q != WGMMA_ROWS or self.consumers != 2):
            return f"a split by {self.split} needs 64 queries per step and two consumers"
        if self.split == "columns" and (head_dim % 128 or value_dim % 128):
            return f"a split by columns needs multiples of 128 of them, got {head_dim} and {value_dim}"
        if (self.split == "keys") == (self.dq == "kernel"):
            return f"a split by {self.split} cannot have its dQ from {self.dq}"
        if self.dq == "bulk" and (columns := self.dq_columns(head_dim)) % 32:
            return f"the copy engine adds up 32 columns of dQ, which do not divide the {columns} of a consumer"
        if self.stages < 2:
            return f"stages must be at least 2, got {self.stages}"
        if self.cluster not in (1, 2):
            return f"cluster must be 1 or 2, got {self.cluster}"
        if self.kv_stages not in ((1, 2) if self.split == "keys" else (1,)):
            return f"kv_stages must be 1, or 2 with a split by keys, got {self.kv_stages}"
        if not 0 <= self.splits <= MAX_SPLITS:
            return f"splits must be 0 to {MAX_SPLITS}, got {self.splits}"
        dims, more = (head_dim, value_dim), self.id_bytes if ids else 0
        smem = self.smem_bytes(*dims) + (more if self.split == "keys" else 0)
        reason = unfit_block(smem, self.live_registers(*dims), self.consumers)
        return self._dq_unfit(*dims, more) if reason is None and self.dq == "kernel" else reason

    def _dq_unfit(self, head_dim: int, value_dim: int, more: int) -> str | None:
        if self.dq_k_stages < 2 or self.dq_v_stages < 1 or self.dq_block_kv % 64 or self.dq_cluster not in (1, 2):
            return "the kernel for dQ needs two tiles of K, one of V, a multiple of 64 keys, and clusters of 1 or 2"
        smem = self.dq_smem_bytes(head_dim, value_dim) + more
        return unfit_block(smem, self.dq_live_registers(head_dim), self.consumers, " for dQ")


def key_width(head_dim: int, cfg: MosaicBwdConfig) -> int:
    """As `in_memory`, for Q and K of the backward kernel, whose consumers may divide them."""
    parts = cfg.consumers if cfg.divides_columns else 1
    return -(-head_dim // (16 * parts)) * 16 * parts


def backward_space(head_dim: int, value_dim: int | None = None) -> Iterator[MosaicBwdConfig]:
    """Yields the backward configs that fit the chip at these dims."""
    ways: tuple[tuple[Split, DqWay], ...] = (
        ("keys", "bulk"),
        ("keys", "registers"),
        ("columns", "kernel"),
        ("gradients", "kernel"),
    )
    axes = itertools.product((2, 3), ways, (False, True), (2, 3))
    for consumers, (split, dq), per_consumer, stages in axes:
        block_q = consumers * WGMMA_ROWS if per_consumer else WGMMA_ROWS
        cfg = MosaicBwdConfig(consumers=consumers, split=split, block_q=block_q, stages=stages, dq=dq)
        if cfg.unfit(head_dim, value_dim) is None:
            yield cfg


def clusters_pay(
    q_shape: tuple[int, ...], kv_shape: tuple[int, ...], lower: int | None, upper: int | None, *, packed: bool
) -> bool:
    """Whether the backward is faster if two blocks load queries together.

    It is where every query sees every key. In a causal call the two wait for each other at the edge of the mask: once
    for each tile of keys, which many query heads make up for, if there are tiles for all blocks.
    """
    (_, q_len, heads, _), (batch, kv_len, kv_heads, _) = q_shape, kv_shape
    if is_full(q_len, kv_len, lower, upper):
        return True
    tiles = batch * kv_heads * kv_len // 256
    return lower is None and not packed and heads >= 7 * kv_heads and tiles >= SMS // 2


def default_backward(head_dim: int, value_dim: int | None = None, *, clusters: bool = False) -> MosaicBwdConfig:
    """Returns the config of an untuned call; `clusters` is what `clusters_pay` says of it."""
    value_dim = head_dim if value_dim is None else value_dim
    if max(head_dim, value_dim) <= 64:
        return MosaicBwdConfig(block_q=128, dq="registers")
    keys = MosaicBwdConfig(block_q=64, dq="registers", cluster=2 if clusters else 1)
    if max(head_dim, value_dim) <= 128 and keys.unfit(head_dim, value_dim) is None:
        return keys
    if head_dim == value_dim == 256:
        return MosaicBwdConfig(split="columns", block_q=64, dq="kernel")
    guess = MosaicBwdConfig(split="gradients", block_q=64, dq="kernel", stages=3, dq_v_stages=2)
    fewer = (guess, dataclasses.replace(guess, stages=2), dataclasses.replace(guess, stages=2, dq_v_stages=1))
    return next((cfg for cfg in fewer if cfg.unfit(head_dim, value_dim) is None), fewer[-1])
