"""Stores of a tile whose columns are rows of the result."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from ejkernel.kernels.hopper.wgmma import inline_mgpu

_PLAIN = (plgpu.SwizzleTransform(128),)
_LINE = 128  # Bytes of a row of shared memory: eight pieces of 16 bytes, permuted by the row's number.


def put(ref: Any, value: jax.Array, *, interpret: bool) -> None:
    """Stores `value` `[64, rows]` transposed to the first rows of `ref`, `[parts, rows or more, 128 bytes]`."""
    if interpret:
        across = ref.shape[2]
        for part in range(ref.shape[0]):
            ref[part, : value.shape[1]] = value[part * across : (part + 1) * across].T
        return
    wide = jnp.dtype(value.dtype).itemsize == 4

    @inline_mgpu(arg_types=(plgpu.RefType(_PLAIN), plgpu.Layout.WGMMA))
    def store(_, ref, array):
        (_put_wide if wide else _put_narrow)(ref, [array.registers.flat[i] for i in range(array.registers.size)])

    store(ref, value)


def widen(value: jax.Array, columns: int, *, interpret: bool) -> jax.Array:
    """Returns `value` `[64, n]` with more columns, whatever they hold."""
    if interpret:
        return jnp.pad(value, ((0, 0), (0, columns - value.shape[1])))
    shape = (value.shape[0], columns)
    result = plgpu.ShapeDtypeStruct(shape, value.dtype, plgpu.Layout.WGMMA)

    @inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=result)
    def extend(_, array):
        registers = list(array.registers.flat)
        empty = llvm.mlir_undef(registers[0].type)
        wide = np.full(array.layout.registers_shape(shape), empty, dtype=object)
        wide.flat[: len(registers)] = registers
        return mgpu.FragmentedArray(_registers=wide, _layout=array.layout, _is_signed=array.is_signed)

    return extend(value)


def _put_narrow(ref: Any, registers: list[Any]) -> None:
    """Of 16-bit elements: one instruction transposes and stores four blocks of 8 x 8."""
    i32 = ir.IntegerType.get_signless(32)
    thread = _thread()
    # A lane gives the address of a row of one block: eight rows, and the columns' first or second eight, and again.
    line, second, below, warp = (_bits(thread, *bits) for bits in ((0, 3), (3, 1), (4, 1), (5, 2)))
    piece = arith.xori(arith.addi(arith.muli(warp, _const(2)), second), line)
    address = _sum(
        llvm.ptrtoint(i32, mgpu.utils.memref_ptr(ref)),
        arith.muli(arith.addi(arith.muli(below, _const(8)), line), _const(_LINE)),
        arith.muli(piece, _const(16)),
    )
    words = [mgpu.utils.bitcast(r, i32) for r in registers]
    for i in range(0, len(words), 4):
        four = words[i : i + 4]
        count, names = len(four), ", ".join(f"${1 + j}" for j in range(len(four)))
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [address, *four],
            f"stmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16 [$0 + {i // 4 * 16 * _LINE}], {{{names}}};",
            ",".join(["r"] * (1 + count)) + ",~{memory}",
            has_side_effects=True,
            asm_dialect=0,
        )


def _put_wide(ref: Any, registers: list[Any]) -> None:
    """Of 32-bit elements, one by one: lanes write to different banks."""
    i32 = ir.IntegerType.get_signless(32)
    _, rows, _ = ir.MemRefType(ref.type).shape
    thread = _thread()
    pair, line, warp = (_bits(thread, *bits) for bits in ((0, 2), (2, 3), (5, 2)))
    base = llvm.ptrtoint(i32, mgpu.utils.memref_ptr(ref))
    # Two warps have a part of 32 columns; a thread has columns `16 * warp + line` and eight more, and two rows.
    base = arith.addi(base, arith.muli(_bits(warp, 1, 1), _const(rows * _LINE)))
    for half, odd in itertools.product(range(2), range(2)):
        row = arith.addi(arith.muli(pair, _const(2)), _const(odd))
        piece = _sum(arith.muli(_bits(warp, 0, 1), _const(4)), _const(2 * half), _bits(line, 2, 1))
        address = _sum(
            base,
            arith.muli(row, _const(_LINE)),
            arith.muli(arith.xori(piece, row), _const(16)),
            arith.muli(_bits(line, 0, 2), _const(4)),
        )
        for block in range(len(registers) // 2):
            value = llvm.extractelement(registers[2 * block + half], _const(odd))
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [address, value],
                f"st.shared.f32 [$0 + {block * 8 * _LINE}], $1;",
                "r,f,~{memory}",
                has_side_effects=True,
                asm_dialect=0,
            )


def copy_rows(tile: Any, ref: Any, row: Any, column: Any, end: Any, *, interpret: bool) -> None:
    """Copies `tile`, `[rows, 128 bytes]` of shared memory, to `row` and `column` of `ref`: only rows before `end`.

    All threads of the warpgroup must see all earlier stores to `tile`. Columns past the last of `ref` are left out.
    """
    if interpret:
        _copy_one_by_one(tile, ref, row, column, end)
        return
    width, item_bytes = ref.shape[1], jnp.dtype(ref.dtype).itemsize
    splat = plgpu.Layout.WG_SPLAT

    @inline_mgpu(arg_types=(plgpu.RefType(_PLAIN), plgpu.RefType(), splat, splat, splat))
    def copy(_, tile, ref, row, column, end):
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        row, column, end = (x.registers.item() for x in (row, column, end))
        # A thread copies a piece of every 16th row: its place within the row is always the same.
        thread = _thread()
        piece, line = _bits(thread, 0, 3), _bits(thread, 3, 4)
        source = _sum(
            llvm.ptrtoint(i32, mgpu.utils.memref_ptr(tile)),
            arith.muli(line, _const(_LINE)),
            arith.muli(arith.xori(piece, _bits(line, 0, 3)), _const(16)),
        )
        first = arith.addi(row, line)
        at = arith.addi(column, arith.muli(piece, _const(16 // item_bytes)))
        offset = arith.addi(
            arith.muli(arith.extsi(i64, first), arith.constant(i64, width * item_bytes)),
            arith.muli(arith.extsi(i64, at), arith.constant(i64, item_bytes)),
        )
        target = arith.addi(llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref)), offset)
        # One piece of PTX for all rows: separate values would hold the predicates and addresses of all rows at once.
        lines = ["{ .reg .pred p; .reg .b32 a, b, c, d;"]
        for i in range(ir.MemRefType(tile.type).shape[0] // 16):
            lines += [
                f"setp.gt.s32 p, $0, {16 * i}; setp.lt.and.s32 p, $1, {width}, p;",
                f"@p ld.shared.v4.b32 {{a, b, c, d}}, [$2 + {16 * i * _LINE}];",
                f"@p st.global.v4.b32 [$3 + {16 * i * width * item_bytes}], {{a, b, c, d}};",
            ]
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [arith.subi(end, first), at, source, target],
            " ".join([*lines, "}"]),
            "r,r,r,l,~{memory}",
            has_side_effects=True,
            asm_dialect=0,
        )

    copy(tile, ref, *(jnp.asarray(x, jnp.int32) for x in (row, column, end)))


def _copy_one_by_one(tile: Any, ref: Any, row: Any, column: Any, end: Any) -> None:
    """The same in JAX's interpreter; row by row, because other blocks may store adjacent rows at the same time."""
    rows, across = tile.shape
    step = 16 // jnp.dtype(ref.dtype).itemsize

    def one(i, _):
        for c in range(0, across, step):

            @pl.when((row + i < end) & (column + c < ref.shape[1]))
            def _(c=c):
                line = tile.at[pl.ds(i, 1), pl.ds(c, step)][...]
                ref.at[pl.ds(row + i, 1), pl.ds(column + c, step)][...] = line

    lax.fori_loop(0, rows, one, None)


def _thread() -> Any:
    """The number of the thread, read again: otherwise values that depend on it stay in registers all the time."""
    i32 = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(i32, [], "mov.u32 $0, %tid.x;", "=r", has_side_effects=True, asm_dialect=0)


def _const(x: int) -> Any:
    return arith.constant(ir.IntegerType.get_signless(32), x)


def _bits(x: Any, first: int, count: int) -> Any:
    return arith.andi(arith.shrui(x, _const(first)), _const((1 << count) - 1))


def _sum(first: Any, *others: Any) -> Any:
    for other in others:
        first = arith.addi(first, other)
    return first
