"""Stores of a part of a swizzled tile, which Mosaic GPU stores only as a whole."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from ejkernel.kernels.hopper.launch import SWIZZLED
from ejkernel.kernels.hopper.wgmma import inline_mgpu


def store_columns(ref: Any, wg: Any, value: jax.Array, *, interpret: bool) -> None:
    """Stores a 16-bit `value` `[64, n]` to columns `wg * n` on of `ref` `[64, 64]`, in a 128-byte swizzle.

    Eight rows of a tile are 1024 bytes; the 16-byte pieces of a row are permuted by the row's number. One instruction
    stores four 8 x 8 matrices, of whose 32 rows every lane gives the address of one.
    """
    columns = value.shape[1]
    if interpret:
        ref.at[:, pl.ds(wg * columns, columns)][...] = value
        return

    @inline_mgpu(arg_types=(plgpu.RefType(SWIZZLED), plgpu.Layout.WGMMA))
    def store(_, ref, array):
        i32 = ir.IntegerType.get_signless(32)

        def const(x: int) -> Any:
            return arith.constant(i32, x)

        def bits(x: Any, first: int, count: int) -> Any:
            return arith.andi(arith.shrui(x, const(first)), const((1 << count) - 1))

        thread: Any = llvm.inline_asm(i32, [], "mov.u32 $0, %tid.x;", "=r", asm_dialect=0)
        warp, warpgroup = bits(thread, 5, 2), bits(thread, 7, 3)
        line, lower, right = bits(thread, 0, 3), bits(thread, 3, 1), bits(thread, 4, 1)
        # Lanes 0 to 7 address the upper left matrix, then lower left, upper right, lower right.
        tile = arith.addi(arith.muli(warp, const(2)), lower)
        first = arith.addi(arith.muli(warpgroup, const(columns // 8)), right)
        base = llvm.ptrtoint(i32, mgpu.utils.memref_ptr(ref))
        row = arith.addi(base, arith.addi(arith.muli(tile, const(1024)), arith.muli(line, const(128))))
        registers = array.registers.reshape(columns // 8, 2)  # Of 8 columns each: the upper 8 rows, the lower.
        for i in range(0, columns // 8, 2):
            piece = arith.xori(arith.addi(first, const(i)), line)
            words = [mgpu.utils.bitcast(r, i32) for r in registers[i : i + 2].flat]
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [arith.addi(row, arith.muli(piece, const(16))), *words],
                "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
                "r,r,r,r,r",
                has_side_effects=True,
                asm_dialect=0,
            )

    store(ref, value)
