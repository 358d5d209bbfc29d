"""Operations on rows, in Pallas' Triton dialect: what norms, softmaxes and gates share.

An array is a table whose rows are its last axis. A program works on blocks of whole rows, one or a few at a time.
Columns are filled up to a power of two, and what lies outside the array is masked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ejkernel.kernels.pallas_call import pallas_call
from ejkernel.kernels.rows import RowParams
from ejkernel.ops.utils.fingerprint import multiprocessors

Array = jax.Array
MOST_COLUMNS = 32768
REGISTERS = 65536
"""Of a multiprocessor."""


def unsupported(x: Any) -> str | None:
    """Why there is no kernel for the rows of x; None if there is one."""
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"x must be bfloat16, float16 or float32, got {x.dtype}"
    if x.size == 0 or x.shape[-1] > MOST_COLUMNS:
        return f"x must have some rows, of at most {MOST_COLUMNS} columns, got shape {x.shape}"
    return None


def space(columns: int, sums: int = 1) -> list[RowParams]:
    """For a program per block: the guess as measured on an H200, then fewer and more elements per thread.

    With three `sums` over a row instead of one, long rows take fewer warps.
    """
    width = pl.next_power_of_2(columns)
    rows, warps = (
        (max(8192 // width, 1), min(width // 512, 32)) if width > 2048 else (2048 // width, max(width // 1024, 1))
    )
    warps = min(warps, 8) if sums > 1 and width <= 8192 else warps
    sizes = [(rows, warps), *((r, w) for r in (1, 2, 4, rows) for w in (warps // 2, warps, 2 * warps))]
    found = [RowParams(rows=r, num_warps=w) for r, w in sizes if 0 < w <= 32 and (r == rows or r * width <= 16384)]
    return [*found, *staying_space(columns)[:2]]


def staying_space(columns: int, more: int = 0) -> list[RowParams]:
    """For programs that work on several blocks, and may keep a sum.

    The guess as measured on an H200: 8 elements per thread; with one `more` array, or sum over rows, 16; with two all
    registers of a multiprocessor for one program.
    """
    width = pl.next_power_of_2(columns)
    rows = max(2048 // width, 1)
    warps = min(max(rows * width // 256, 1), 32)
    programs = max(32 // warps, 1)
    plain, half, alone = (rows, warps, programs), (rows, max(warps // 2, 1), programs), (max(4096 // width, 1), 16, 1)
    fits = lambda r, w, p: 1 <= w <= 32 and 16 <= w * p <= 64 and _loads_ahead(r * width, w)
    first = (plain, half, alone)[more]
    # Where registers do not allow to load ahead: half the warps spill least, of more than 16384 columns all of them.
    near = [first if fits(*first) else half if width <= 16384 else plain, plain, half]
    others = [(r, w, p) for r in (rows, 2 * rows) for w in (warps // 2, warps, 2 * warps) for p in (1, 2, 4)]
    sizes = dict.fromkeys([*near, *(s for s in [*others, alone] if fits(*s))])
    return [RowParams(rows=r, num_warps=w, programs=p) for r, w, p in sizes]


def programs_of(steps: int, params: RowParams) -> int:
    """How many programs share so many blocks, each staying for several."""
    return min(steps, (params.programs or max(32 // params.num_warps, 1)) * multiprocessors())


def _loads_ahead(elements: int, warps: int) -> bool:
    """Whether there are registers for a block: two arrays, the next two, a sum and what is computed."""
    return 5 * elements + 20 * 32 * warps <= REGISTERS


def walk(
    columns: int,
    steps: int,
    programs: int,
    params: RowParams,
    fetch: Callable[[Any], Any],
    work: Callable[[Any, Any, Any], Any],
    carry: Any,
) -> Any:
    """Runs `carry = work(step, fetch(step), carry)` for each of a program's blocks; loads ahead if registers allow."""
    first = pl.program_id(0)
    if programs == steps:
        return work(first, fetch(first), carry)
    count, at = pl.cdiv(steps - first, programs), lambda i: first + i * programs
    if not _loads_ahead(params.rows * pl.next_power_of_2(columns), params.num_warps):
        return jax.lax.fori_loop(0, count, lambda i, c: work(at(i), fetch(at(i)), c), carry)

    def step(i: Any, both: Any) -> Any:
        following = fetch(at(i + 1))
        return following, work(at(i), both[0], both[1])

    return jax.lax.fori_loop(0, count, step, (fetch(at(0)), carry))[1]


def flat(x: Any) -> Any:
    """An array as a table; None stays None."""
    return None if x is None else x.reshape(table(x))


def wide(x: Array) -> Array:
    """In float32; one number per row as a column."""
    x = x.astype(jnp.float32)
    return x[:, None] if x.ndim == 1 else x


def table(x: Any) -> tuple[int, int]:
    """Rows and columns of an array."""
    return x.size // x.shape[-1], x.shape[-1]


class Block:
    """The rows of one step of a program; what lies outside the array is masked."""

    def __init__(self, step: Any, rows: int, shape: tuple[int, int]) -> None:
        row, column = step * rows + jnp.arange(rows), jnp.arange(pl.next_power_of_2(shape[1]))
        inside = row < shape[0], column < shape[1]
        self._places = {
            "whole": ((row[:, None], column[None, :]), inside[0][:, None] & inside[1][None, :]),
            "rows": (row, inside[0]),
            "columns": (column, inside[1]),
            "step": ((step, column), inside[1]),
        }

    def raw(self, ref: Any, what: str = "whole") -> Array:
        """The block, or its part of an array of one number per row or column."""
        at, mask = self._places[what]
        return plgpu.load(ref.at[at], mask=mask, other=0.0)

    def load(self, ref: Any, what: str = "whole") -> Array:
        """The same in float32."""
        found = self.raw(ref, what).astype(jnp.float32)
        return found[:, None] if what == "rows" else found

    def inside(self, value: Array) -> Array:
        """`value`, with zeros in place of what lies outside the array."""
        return jnp.where(self._places["whole"][1], value, 0.0)

    def store(self, ref: Any, value: Array, what: str = "whole") -> None:
        """As `load`; "step" is the step's own row."""
        at, mask = self._places[what]
        plgpu.store(ref.at[at], value.astype(ref.dtype), mask=mask)


def call(
    kernel: Callable[[dict[str, Any]], None],
    arrays: Mapping[str, Any],
    types: Mapping[str, Any],
    programs: int,
    params: RowParams,
    interpret: bool,
) -> dict[str, Array]:
    """Runs a kernel on the arrays that there are; it gets all references by name, and outputs go by theirs.

    Arrays are tables, or have one number per row or column.
    """
    given = {name: x for name, x in arrays.items() if x is not None}
    options = plgpu.CompilerParams(num_warps=params.num_warps, num_stages=1)
    body = lambda *refs: kernel(dict(zip([*given, *types], refs, strict=True)))
    run = pallas_call(body, list(types.values()), grid=(programs,), interpret=interpret, compiler_params=options)
    outs = run(*given.values())
    return dict(zip(types, outs, strict=True))
