"""What the Triton and the TPU kernels for grouped products may be tuned over, and what they serve."""

from __future__ import annotations

import dataclasses
import itertools

import jax.numpy as jnp

from ejkernel.kernels.grouped_matmul.dimensions import Dimensions, check_sizes
from ejkernel.kernels.grouped_matmul.workloads import draw_group_sizes
from ejkernel.ops.utils.devices import LEAST_BLOCK_BYTES

_REGISTERS = 255
VMEM_BYTES = 31 << 19  # Of the 16 MiB that a kernel may use on the older TPUs: half a MiB is the compiler's own.


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TritonConfig:
    """One way to run the Triton kernels: the tile of the result, the length of a step, how Triton pipelines it.

    Attributes:
      block_m: Rows of the result's tile.
      block_n: Its columns.
      block_k: Elements of the contraction in a step.
      num_warps: Warps of a program.
      num_stages: Steps in flight.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 32
    num_warps: int = 8
    num_stages: int = 3

    def __post_init__(self) -> None:
        check_sizes(self)

    def unfit(self, item_bytes: int = 2) -> str | None:
        """Says why this config cannot run with elements of `item_bytes`, or `None` if it can."""
        blocks = (self.block_m, self.block_n, self.block_k)
        if any(x < 16 or x & (x - 1) for x in blocks):
            return f"blocks must be powers of two of at least 16, got {blocks}"
        # Triton computes one step while the others are loaded, from the registers that it was copied to.
        smem = (self.num_stages - 1) * (self.block_m + self.block_n) * self.block_k * item_bytes
        if smem > LEAST_BLOCK_BYTES:
            return f"needs {smem} bytes of shared memory, a block has {LEAST_BLOCK_BYTES}"
        live = self.block_m * self.block_n // (32 * self.num_warps) + 48
        return f"needs about {live} registers per thread, there are {_REGISTERS}" if live > _REGISTERS else None


def triton_space(dims: Dimensions) -> list[TritonConfig]:
    """Configs that fit, the guess first."""
    few = dims.rows <= 32 * dims.groups
    guess = TritonConfig(block_m=32 if few else 128, block_k=64 if few else 32, num_warps=4 if few else 8)
    others = [
        TritonConfig(block_m=m, block_n=columns, block_k=depth, num_warps=warps, num_stages=stages)
        for m, columns, depth, warps, stages in itertools.product(
            (32, 64, 128), (64, 128, 256), (32, 64), (4, 8), (3, 4)
        )
    ]
    return [cfg for cfg in dict.fromkeys([guess, *others]) if cfg.unfit(dims.item_bytes) is None]


def triton_unsupported(dims: Dimensions) -> str | None:
    """Why the Triton kernels cannot serve a product; `None` if they can."""
    return dims.unsupported(jnp.bfloat16, jnp.float16, jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TpuConfig:
    """One way to run the TPU kernels.

    Attributes:
      block_m: Rows of lhs at a time.
      block_k: Its columns at a time.
      block_n: Columns of the result at a time.
    """

    block_m: int = 512
    block_k: int = 512
    block_n: int = 512

    def __post_init__(self) -> None:
        check_sizes(self)

    def vmem_bytes(self, item_bytes: int, out_bytes: int, *, contraction: bool = False) -> int:
        """Fast memory of a step: both operands and the result twice, the sum once, and values for want of registers.

        The latter are as libtpu 0.0.50 has them, to about half a MiB: the operands that are masked, and for float32 the
        left one in parts of 16 bits.
        """
        m, k, n = self.block_m, self.block_k, self.block_n
        operands, result = (m * (k + n), k * n) if contraction else (k * (m + n), m * n)
        values = (m * (k + n) if contraction else m * k) * item_bytes
        values += m * k * 12 if item_bytes == 4 else 0
        return 2 * operands * item_bytes + result * (2 * out_bytes + 4) + values

    def unfit(self, item_bytes: int = 2, out_bytes: int = 2, *, contraction: bool = False) -> str | None:
        """Says why this config cannot run with elements of these sizes, or `None` if it can."""
        if self.block_m % 16 or self.block_k % 128 or self.block_n % 128:
            return f"block_m must be a multiple of 16, the others of 128, got {dataclasses.astuple(self)}"
        if (vmem := self.vmem_bytes(item_bytes, out_bytes, contraction=contraction)) > VMEM_BYTES:
            return f"needs {vmem} bytes of fast memory, a kernel has {VMEM_BYTES}"
        return None


def tpu_space(dims: Dimensions, *, contraction: bool = False) -> list[TpuConfig]:
    """Configs that fit, the guess first; of the gradient of the weights if it is a `contraction`."""
    k, n, each = dims.k, dims.n, dims.rows // dims.groups
    sizes = (dims.item_bytes, dims.out_bytes)
    # By the schedules for v6e: the largest tiles that fit, of as many rows as half a group.
    rows = 128 if each <= 128 else 256 if each <= 1024 else 512
    guesses = [
        TpuConfig(block_m=rows, block_k=min(depth, _ceil(k)), block_n=min(columns, _ceil(n)))
        for depth, columns in ((1024, 1024), (512, 1024), (512, 512))
    ]
    others = [
        TpuConfig(block_m=m, block_k=min(depth, _ceil(k)), block_n=min(columns, _ceil(n)))
        for m, depth, columns in itertools.product((128, 256, 512), (256, 512, 1024), (256, 512, 1024))
    ]
    return [cfg for cfg in dict.fromkeys([*guesses, *others]) if cfg.unfit(*sizes, contraction=contraction) is None]


def tpu_steps(dims: Dimensions, cfg: TpuConfig) -> int:
    """Steps of the TPU kernels' grids that compute something, if rows fall on groups unevenly."""
    sizes = draw_group_sizes(dims.rows, dims.groups, "uneven")
    ends = sizes.cumsum()
    tiles = -(-ends // cfg.block_m) - (ends - sizes) // cfg.block_m
    return int(tiles[sizes > 0].sum()) * -(-dims.k // cfg.block_k) * -(-dims.n // cfg.block_n)


def _ceil(x: int) -> int:
    return -(-x // 128) * 128


def tpu_unsupported(dims: Dimensions) -> str | None:
    """Why the TPU kernels cannot serve a product; `None` if they can."""
    return dims.unsupported(jnp.bfloat16, jnp.float32)
