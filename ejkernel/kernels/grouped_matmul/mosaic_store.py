"""Stores of some rows of a tile, straight from registers: the copy engine stores whole tiles only."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from ejkernel.kernels.flash_attention.mosaic_wgmma import inline_mgpu


def put(ref: Any, value: jax.Array, *, interpret: bool) -> None:
    """Stores `value` to a tile in shared memory; an assignment would load what was there, too."""
    if interpret:
        ref[...] = value
        return
    transforms = (plgpu.TilingTransform((8, 128 // jnp.dtype(value.dtype).itemsize)), plgpu.SwizzleTransform(128))

    @inline_mgpu(arg_types=(plgpu.RefType(transforms), plgpu.Layout.WGMMA))
    def store(_, ref, array):
        array.store_tiled(ref, swizzle=128)

    store(ref, value)


def store_rows(ref: Any, value: jax.Array, row: Any, column: Any, start: Any, end: Any, *, interpret: bool) -> None:
    """Stores `value` `[64, n]` at `row` and `column` of `ref`, but only its rows from `start` to `end`, rows of `ref`.

    Columns past the last of `ref`, a multiple of 64, are left out.
    """
    if interpret:
        _store_one_by_one(ref, value, row, column, start, end)
        return
    columns, width = value.shape[1], ref.shape[1]
    item_bytes = jnp.dtype(value.dtype).itemsize
    splat = plgpu.Layout.WG_SPLAT

    @inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, splat, splat, splat, splat))
    def store(_, ref, array, row, column, start, end):
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        row, column, start, end = (x.registers.item() for x in (row, column, start, end))

        def const(x: int) -> Any:
            return arith.constant(i32, x)

        def bits(x: Any, first: int, count: int) -> Any:
            return arith.andi(arith.shrui(x, const(first)), const((1 << count) - 1))

        def less(a: Any, b: Any) -> Any:
            return arith.cmpi(arith.CmpIPredicate.slt, a, b)

        thread: Any = llvm.inline_asm(i32, [], "mov.u32 $0, %tid.x;", "=r", asm_dialect=0)
        warp, line, pair = bits(thread, 5, 2), bits(thread, 2, 3), bits(thread, 0, 2)
        upper = arith.addi(row, arith.addi(arith.muli(warp, const(16)), line))
        first = arith.addi(column, arith.muli(pair, const(2)))
        base = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref))
        rows = []
        for below in (0, 8):
            at = arith.addi(upper, const(below))
            inside = arith.andi(arith.cmpi(arith.CmpIPredicate.sge, at, start), less(at, end))
            element = arith.addi(
                arith.muli(arith.extsi(i64, at), arith.constant(i64, width)), arith.extsi(i64, first)
            )
            rows.append((inside, arith.addi(base, arith.muli(element, arith.constant(i64, item_bytes)))))
        registers = array.registers.reshape(columns // 8, 2)  # Of 8 columns each: the upper 8 rows, the lower.
        for i in range(columns // 8):
            fits = less(arith.addi(column, const(8 * i)), const(width))
            for register, (inside, address) in zip(registers[i], rows, strict=True):
                chosen = arith.extui(i32, arith.andi(inside, fits))
                offset = 8 * i * item_bytes
                if item_bytes == 2:
                    words, text, kinds = [mgpu.utils.bitcast(register, i32)], "b32 [$1 + {}], $2;", "r"
                else:
                    words = [llvm.extractelement(register, const(j)) for j in range(2)]
                    text, kinds = "v2.f32 [$1 + {}], {{$2, $3}};", "f,f"
                llvm.inline_asm(
                    ir.Type.parse("!llvm.void"),
                    [chosen, address, *words],
                    "{ .reg .pred p; setp.ne.b32 p, $0, 0; @p st.global." + text.format(offset) + " }",
                    "r,l," + kinds,
                    has_side_effects=True,
                    asm_dialect=0,
                )

    store(ref, value, *(jnp.asarray(x, jnp.int32) for x in (row, column, start, end)))


def _store_one_by_one(ref: Any, value: jax.Array, row: Any, column: Any, start: Any, end: Any) -> None:
    """The same in JAX's interpreter; row by row, since other blocks may be storing the rows next to these."""
    width = 64

    def one(i, _):
        for c in range(0, value.shape[1], width):

            @pl.when((row + i >= start) & (row + i < end) & (column + c < ref.shape[1]))
            def _(c=c):
                line = lax.dynamic_slice(value, (i, jnp.int32(c)), (1, width))
                ref.at[pl.ds(row + i, 1), pl.ds(column + c, width)][...] = line

    lax.fori_loop(0, value.shape[0], one, None)
