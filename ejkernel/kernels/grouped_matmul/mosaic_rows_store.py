"""Stores of tiles whose rows are rows of the result; also of some of their rows, which the copy engine cannot."""

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

from ejkernel.kernels.hopper.chip import WGMMA_ROWS
from ejkernel.kernels.hopper.wgmma import inline_mgpu


def staging(cfg: Any, dtype: Any) -> Any:
    """Returns the shared memory for stores."""
    columns = 128 // jnp.dtype(dtype).itemsize
    shape = (cfg.consumers, cfg.slots, WGMMA_ROWS, cfg.store)
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128)))


def store(
    out_ref: Any, value: jax.Array, o_smem: Any, row: Any, column: Any, cfg: Any, *, keep: Any = None, interpret: bool
) -> None:
    """Stores a consumer's part of a tile through its shared memory, piece by piece.

    Skips what lies past the end of `out_ref`, and rows outside `keep`, a first row and an end.
    """
    pieces = [(r, c) for r in range(0, value.shape[0], WGMMA_ROWS) for c in range(0, value.shape[1], cfg.store)]
    width = out_ref.shape[-1]

    def each(copy, in_flight):
        for i, (r, c) in enumerate(pieces):
            plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
            tile = o_smem.at[i % cfg.slots]
            put(tile, value[r : r + WGMMA_ROWS, c : c + cfg.store], interpret=interpret)
            plgpu.commit_smem()
            copy(tile, row + r, column + c)
        if in_flight and len(pieces) % cfg.slots:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def copy_whole(tile, row, column):
        at = out_ref.at[pl.ds(row, WGMMA_ROWS), pl.ds(column, cfg.store)]
        if width > cfg.store:
            plgpu.copy_smem_to_gmem(tile, at)
        else:
            # If an array is one tile of memory wide, Mosaic GPU (seen with JAX 0.11.2) ignores the column index.
            pl.when(column < width)(lambda: plgpu.copy_smem_to_gmem(tile, at))

    def copy_kept(tile, row, column):
        copy_rows(tile, out_ref, row, column, *keep, interpret=interpret)

    # Pieces that the copy engine does not store do not count as in flight, so this waits for all others.
    in_flight = cfg.slots - 1 if width > cfg.store else 0
    if keep is None:
        each(copy_whole, in_flight)
    else:
        whole = (row >= keep[0]) & (row + value.shape[0] <= keep[1])
        pl.when(whole)(lambda: each(copy_whole, in_flight))
        pl.when(~whole)(lambda: each(copy_kept, 0))


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
    """Makes rows of `ref`, `[64, n]` in shared memory and 16 bits, zeros: those before `first` and from `last` on.

    One warp calls it. Matrix products that are issued after a barrier on which it arrives see the zeros.
    """
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

        row_stride, tile_stride = _tile_strides(ref)
        start = llvm.ptrtoint(i32, mgpu.utils.memref_ptr(ref))
        lane = bits(_thread(), 0, 5)
        # A lane has two rows; adjacent rows begin at different pieces of 16 bytes, and so at different banks.
        for half in range(2):
            row = arith.addi(lane, const(32 * half))
            place = arith.addi(arith.muli(bits(row, 3, 3), const(row_stride)), arith.muli(bits(row, 0, 3), const(128)))
            outside = arith.ori(
                arith.cmpi(arith.CmpIPredicate.slt, row, first), arith.cmpi(arith.CmpIPredicate.sge, row, last)
            )
            lines = ["{ .reg .pred p; .reg .b32 z, a; setp.ne.b32 p, $0, 0; mov.b32 z, 0;"]
            for piece in range(8):
                lines.append(f"xor.b32 a, $2, {16 * piece}; add.s32 a, a, $1;")
                lines += [f"@p st.shared.v4.b32 [a + {c * tile_stride}], {{z, z, z, z}};" for c in range(column_tiles)]
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [arith.extui(i32, outside), arith.addi(start, place), arith.muli(bits(row, 0, 3), const(16))],
                " ".join([*lines, "}"]),
                "r,r,r,~{memory}",
                has_side_effects=True,
                asm_dialect=0,
            )
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [],
            "fence.proxy.async.shared::cta; bar.warp.sync 0xffffffff;",
            "~{memory}",
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
