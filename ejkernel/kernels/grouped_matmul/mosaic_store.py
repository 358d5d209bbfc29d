"""Stores of some rows of a tile: the copy engine stores whole tiles only."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from ejkernel.kernels.hopper.wgmma import inline_mgpu


def put(ref: Any, value: jax.Array, *, interpret: bool) -> None:
    """Stores `value` to a tile in shared memory; a plain assignment (JAX 0.11.2) would also load the old value."""
    if interpret:
        ref[...] = value
        return
    transforms = (plgpu.TilingTransform((8, 128 // jnp.dtype(value.dtype).itemsize)), plgpu.SwizzleTransform(128))

    @inline_mgpu(arg_types=(plgpu.RefType(transforms), plgpu.Layout.WGMMA))
    def store(_, ref, array):
        array.store_tiled(ref, swizzle=128)

    store(ref, value)


def zero_rows(ref: Any, first: Any, last: Any, *, interpret: bool) -> None:
    """Makes rows of `ref`, `[64, n]` in shared memory and 16 bits, zeros: those before `first` and from `last` on."""
    if interpret:
        row = lax.broadcasted_iota(jnp.int32, ref.shape, 0)
        value = ref[...]
        ref[...] = jnp.where((row >= first) & (row < last), value, jnp.zeros_like(value))
        return
    column_tiles = ref.shape[1] // 64
    splat = plgpu.Layout.WG_SPLAT
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    @inline_mgpu(arg_types=(plgpu.RefType(transforms), splat, splat))
    def zero(_, ref, first, last):
        i32 = ir.IntegerType.get_signless(32)
        first, last = first.registers.item(), last.registers.item()

        def const(x: int) -> Any:
            return arith.constant(i32, x)

        def bits(x: Any, first: int, count: int) -> Any:
            return arith.andi(arith.shrui(x, const(first)), const((1 << count) - 1))

        # Two threads per row; each has four of its eight 16-byte pieces in each memory tile, in any order.
        thread = _thread()
        row, half = bits(thread, 0, 6), bits(thread, 6, 1)
        row_stride, tile_stride = _tile_strides(ref)
        place = arith.addi(arith.muli(bits(row, 3, 3), const(row_stride)), arith.muli(bits(row, 0, 3), const(128)))
        outside = arith.ori(
            arith.cmpi(arith.CmpIPredicate.slt, row, first), arith.cmpi(arith.CmpIPredicate.sge, row, last)
        )
        base = arith.addi(llvm.ptrtoint(i32, mgpu.utils.memref_ptr(ref)), place)
        for piece in range(4):
            # Adjacent rows begin at different pieces, and so at different banks.
            turned = arith.xori(arith.addi(arith.muli(half, const(4)), const(piece)), bits(row, 0, 3))
            address = arith.addi(base, arith.muli(turned, const(16)))
            for c in range(column_tiles):
                llvm.inline_asm(
                    ir.Type.parse("!llvm.void"),
                    [arith.extui(i32, outside), address],
                    "{ .reg .pred p; .reg .b32 z; setp.ne.b32 p, $0, 0; mov.b32 z, 0;"
                    f" @p st.shared.v4.b32 [$1 + {c * tile_stride}], {{z, z, z, z}}; }}",
                    "r,r,~{memory}",
                    has_side_effects=True,
                    asm_dialect=0,
                )

    zero(ref, jnp.asarray(first, jnp.int32), jnp.asarray(last, jnp.int32))


def _thread() -> Any:
    """The number of the thread, read again: otherwise values that depend on it stay in registers all the time."""
    i32 = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(i32, [], "mov.u32 $0, %tid.x;", "=r", has_side_effects=True, asm_dialect=0)


def _tile_strides(ref: Any) -> tuple[int, int]:
    """Bytes from a memory tile of 16-bit elements to the one below and to the one beside it."""
    below, beside, *_ = ir.MemRefType(ref.type).get_strides_and_offset()[0]
    return below * 2, beside * 2


def copy_rows(tile: Any, ref: Any, row: Any, column: Any, start: Any, end: Any, *, interpret: bool) -> None:
    """Copies `tile` `[64, n]` of shared memory to `row` and `column` of `ref`: only rows from `start` to `end` of it.

    All threads of the warpgroup must see all earlier stores to `tile`. Columns past the last of `ref`,
    which come in whole memory tiles, are left out.
    """
    if interpret:
        _copy_one_by_one(tile, ref, row, column, start, end)
        return
    width, item_bytes = ref.shape[1], jnp.dtype(ref.dtype).itemsize
    across = 128 // item_bytes  # Columns of a memory tile: a row of it is 128 bytes, in pieces of 16 that are permuted.
    column_tiles = tile.shape[1] // across
    splat = plgpu.Layout.WG_SPLAT
    transforms = (plgpu.TilingTransform((8, across)), plgpu.SwizzleTransform(128))

    @inline_mgpu(arg_types=(plgpu.RefType(transforms), plgpu.RefType(), splat, splat, splat, splat))
    def copy(_, tile, ref, row, column, start, end):
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        row, column, start, end = (x.registers.item() for x in (row, column, start, end))

        def const(x: int) -> Any:
            return arith.constant(i32, x)

        def bits(x: Any, first: int, count: int) -> Any:
            return arith.andi(arith.shrui(x, const(first)), const((1 << count) - 1))

        thread = _thread()
        piece, line, sixteenth = bits(thread, 0, 3), bits(thread, 3, 3), bits(thread, 6, 1)
        # A thread copies a piece of every 16th row: its place within a memory tile is always the same.
        source = arith.addi(
            llvm.ptrtoint(i32, mgpu.utils.memref_ptr(tile)),
            arith.addi(
                arith.muli(sixteenth, const(1024 * column_tiles)),
                arith.addi(arith.muli(line, const(128)), arith.muli(arith.xori(piece, line), const(16))),
            ),
        )
        first = arith.addi(row, arith.addi(arith.muli(sixteenth, const(8)), line))
        offset = arith.addi(
            arith.muli(arith.extsi(i64, first), arith.constant(i64, width * item_bytes)),
            arith.extsi(i64, arith.addi(arith.muli(column, const(item_bytes)), arith.muli(piece, const(16)))),
        )
        target = arith.addi(llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref)), offset)
        # One piece of PTX for all rows: separate values would hold the predicates and addresses of all rows at once.
        lines = ["{ .reg .pred p; .reg .b32 a, b, c, d, r;"]
        for i, c in itertools.product(range(4), range(column_tiles)):
            near, far = (2 * i * column_tiles + c) * 1024, 16 * i * width * item_bytes + c * 128
            lines += [
                f"add.s32 r, $0, {16 * i}; setp.lt.u32 p, r, $1; setp.lt.and.s32 p, $2, {width - c * across}, p;",
                f"@p ld.shared.v4.b32 {{a, b, c, d}}, [$3 + {near}];",
                f"@p st.global.v4.b32 [$4 + {far}], {{a, b, c, d}};",
            ]
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [arith.subi(first, start), arith.subi(end, start), column, source, target],
            " ".join([*lines, "}"]),
            "r,r,r,r,l,~{memory}",
            has_side_effects=True,
            asm_dialect=0,
        )

    copy(tile, ref, *(jnp.asarray(x, jnp.int32) for x in (row, column, start, end)))


def _copy_one_by_one(tile: Any, ref: Any, row: Any, column: Any, start: Any, end: Any) -> None:
    """The same in JAX's interpreter; row by row, because other blocks may store adjacent rows at the same time."""
    across = 128 // jnp.dtype(ref.dtype).itemsize

    def one(i, _):
        for c in range(0, tile.shape[1], across):

            @pl.when((row + i >= start) & (row + i < end) & (column + c < ref.shape[1]))
            def _(c=c):
                line = tile.at[pl.ds(i, 1), pl.ds(c, across)][...]
                ref.at[pl.ds(row + i, 1), pl.ds(column + c, across)][...] = line

    lax.fori_loop(0, tile.shape[0], one, None)
