"""Where a gradient is summed up: float32 in global memory, to which several blocks add their parts.

dQ always is, dK and dV where the queries of a tile of keys are divided among blocks.

There are two ways. `bulk`: the part goes to shared memory and the copy engine adds it. `registers`: vector reductions
straight from registers, which need no shared memory and no barriers, but need 16 adjacent bytes per thread; so the
buffer keeps the register order of the matrix units, and a small second kernel brings the sum into its real layout,
scales and rounds it. Which is faster for dQ depends on the head dim: `docs/hopper.md`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from ejkernel.kernels.flash_attention.mosaic_bwd_operand import Operand
from ejkernel.kernels.hopper.chip import WARPGROUP, WGMMA_ROWS
from ejkernel.kernels.hopper.wgmma import inline_mgpu

_BYTES = 16  # What a thread reduces at a time: two adjacent elements of a row, and the two that are 8 rows below.
SWIZZLED_F32 = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))


@dataclasses.dataclass(frozen=True, slots=True)
class GradientSum:
    """The float32 sum of a gradient, in pieces of 64 rows and `cols` columns, and in whole blocks of `block` rows."""

    batch: int
    length: int
    heads: int
    operand: Operand
    cols: int
    block: int
    bulk: bool
    interpret: bool

    def zeros(self) -> jax.Array:
        if self.bulk and not self.interpret:
            return jnp.zeros((self.batch, self.heads, self.length, self.operand.width), jnp.float32)
        # Rows past the end are added too, as zeros.
        blocks = -(-self.length // self.block) * self.block // WGMMA_ROWS
        piece = (WGMMA_ROWS, self.cols) if self.interpret else (WGMMA_ROWS * self.cols,)
        return jnp.zeros((self.batch, self.heads, blocks, self.operand.width // self.cols, *piece), jnp.float32)

    def staging(self, consumers: int) -> Any:
        """Returns the shared memory that `add` needs, if any."""
        if not self.bulk or self.interpret:
            return None
        return plgpu.SMEM((consumers, WGMMA_ROWS, self.cols), jnp.float32, transforms=SWIZZLED_F32)

    def piece(self, ref: Any, batch: Any, head: Any, row: Any, wg: Any) -> Any:
        """Returns the part of `ref` that warpgroup `wg` adds to in a block of rows that starts at `row`."""
        by_rows = self.cols == self.operand.width
        if not self.bulk or self.interpret:
            block = lax.div(row, jnp.int32(WGMMA_ROWS))
            return ref.at[batch, head, block + wg, 0] if by_rows else ref.at[batch, head, block, wg]
        if by_rows:
            return ref.at[batch, head, pl.ds(row + wg * WGMMA_ROWS, WGMMA_ROWS)]
        return ref.at[batch, head, pl.ds(row, WGMMA_ROWS), pl.ds(wg * self.cols, self.cols)]

    def add(self, piece: Any, value: jax.Array, staging: Any) -> None:
        """Adds `value` to a piece of the sum. The interpreter has no reductions: only one block may run at a time."""
        if self.interpret:
            piece[...] = piece[...] + value
            return
        if self.bulk:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            staging[...] = value
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staging, piece, reduction_op="add")
            return

        @inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
        def reduce(_, ref, array):
            address = _thread_address(ref)
            for i, four in enumerate(_fours(array)):
                llvm.inline_asm(
                    ir.Type.parse("!llvm.void"),
                    [address, *four],
                    f"red.relaxed.gpu.global.add.v4.f32 [$0 + {i * WARPGROUP * _BYTES}], {{$1, $2, $3, $4}};",
                    "l,f,f,f,f",
                    has_side_effects=True,
                    asm_dialect=0,
                )

        reduce(piece, value)

    def finish(self, total: jax.Array, scale: float, dtype: Any) -> jax.Array:
        """Returns `[B, T, H, D]` in `dtype`, with the operand's `dim` columns."""
        if self.interpret:
            rows = total.swapaxes(3, 4).reshape(self.batch, self.heads, -1, self.operand.width)
            rows = rows[:, :, : self.length]
            return (rows * scale).astype(dtype).swapaxes(1, 2)
        if self.bulk:
            return (total[..., : self.operand.dim] * scale).astype(dtype).swapaxes(1, 2)
        return plgpu.kernel(
            functools.partial(_finish, operand=self.operand, cols=self.cols, scale=scale),
            out_type=jax.ShapeDtypeStruct((self.batch, self.length, self.heads, self.operand.dim), dtype),
            grid=(-(-self.length // WGMMA_ROWS), self.heads, self.batch),
            grid_names=("block", "head", "batch"),
            num_threads=1,
            thread_name="warpgroup",
            scratch_types={"smem": self.operand.memory(WGMMA_ROWS, dtype=dtype)},
            compiler_params=plgpu.CompilerParams(
                unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
            ),
        )(total)


def _finish(total_ref, out_ref, *, smem, operand: Operand, cols: int, scale: float):
    block, head, batch = lax.axis_index("block"), lax.axis_index("head"), lax.axis_index("batch")
    for part in range(operand.width // cols):

        @inline_mgpu(
            arg_types=(plgpu.RefType(),),
            return_type=plgpu.ShapeDtypeStruct((WGMMA_ROWS, cols), jnp.float32, layout=plgpu.Layout.WGMMA),
        )
        def load(_, ref):
            address = _thread_address(ref)
            f32 = ir.F32Type.get()
            pairs = []
            for i in range(cols // 8):
                four: Any = llvm.inline_asm(
                    llvm.StructType.get_literal([f32] * 4),
                    [address],
                    f"ld.global.v4.f32 {{$0, $1, $2, $3}}, [$4 + {i * WARPGROUP * _BYTES}];",
                    "=f,=f,=f,=f,l",
                    has_side_effects=True,
                    asm_dialect=0,
                )
                values = [llvm.extractvalue(f32, four, [j]) for j in range(4)]
                pairs += [_pair(*values[:2]), _pair(*values[2:])]
            registers = np.array(pairs, dtype=object).reshape(1, cols // 8, 1, 1, 2, 1, 1, 1, 1)
            return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

        value = load(total_ref.at[batch, head, block, part])
        smem.at[:, pl.ds(part * cols, cols)][...] = (value * scale).astype(out_ref.dtype)
    plgpu.commit_smem()
    rows = out_ref.at[batch, pl.ds(block * WGMMA_ROWS, WGMMA_ROWS), head]
    plgpu.copy_smem_to_gmem(smem, operand.columns(rows))
    plgpu.wait_smem_to_gmem(0)


def _constant(type_: Any, value: int) -> Any:
    return llvm.ConstantOp(type_, ir.IntegerAttr.get(type_, value)).result


def _thread_address(ref: Any) -> Any:
    """Returns where this thread's first 16 bytes of `ref` are."""
    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    plain = llvm.IntegerOverflowFlags.none
    thread: Any = llvm.inline_asm(i32, [], "mov.u32 $0, %tid.x;", "=r", asm_dialect=0)
    thread = llvm.and_(thread, _constant(i32, WARPGROUP - 1))
    offset = llvm.zext(i64, llvm.mul(thread, _constant(i32, _BYTES), overflow_flags=plain))
    return llvm.add(llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref)), offset, overflow_flags=plain)


def _pair(a: Any, b: Any) -> Any:
    i32, vector = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.F32Type.get())
    pair = llvm.mlir_undef(vector)
    pair = llvm.insertelement(pair, a, _constant(i32, 0))
    return llvm.insertelement(pair, b, _constant(i32, 1))


def _fours(array: Any) -> list[list[Any]]:
    """Splits an accumulator's registers into groups of four floats: a pair of columns in each of two rows."""
    i32 = ir.IntegerType.get_signless(32)
    floats = [llvm.extractelement(pair, _constant(i32, i)) for pair in array.registers.flat for i in range(2)]
    return [floats[i : i + 4] for i in range(0, len(floats), 4)]
