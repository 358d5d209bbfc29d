"""How much shared memory the Triton kernels need, and the tiles of an untuned call, which fit.

As Triton has it (seen with JAX 0.12): what a program owns is there as a whole, what it walks over once less than there
are stages, and the weights where they change hands between products. `tests/targets/test_fits.py` compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from jax.experimental import pallas as pl

from ejkernel.kernels.flash_attention.arguments import Attention
from ejkernel.ops.utils.params import BwdParams, FwdParams

_SIDES = ("q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions")
_Params = TypeVar("_Params", FwdParams, BwdParams)

_WIDE = tuple(FwdParams(q_blocksize=rows, kv_blocksize=cols, num_warps=4, num_stages=2) for rows, cols in (
    (64, 32), (32, 32), (32, 16), (16, 16),
))  # fmt: skip
"""Forward tiles for wide heads, and for those whose usual tile does not fit."""
_BACKWARD = tuple(BwdParams(q_blocksize=rows, kv_blocksize=cols, num_warps=4, num_stages=2) for rows, cols in (
    (64, 64), (32, 32), (16, 32), (16, 16),
))  # fmt: skip


def forward_bytes(params: FwdParams, call: Attention) -> int:
    """Shared memory of a forward with these tiles."""
    rows, cols, stages = params.q_blocksize or 128, params.kv_blocksize or 64, params.num_stages or 2
    dim, value_dim, item = _widths(call)
    walked = cols * (dim + value_dim) * item + rows * cols * _plane_bytes(call) + 4 * cols * _sides(call)
    # A tile of that shape has its weights where the next product wants them.
    handed = 0 if rows >= 128 and value_dim <= 128 else rows * cols * item
    return rows * dim * item + (stages - 1) * walked + max(handed, _copied(cols, call))


def backward_bytes(params: BwdParams, call: Attention) -> int:
    """About the most shared memory that a kernel of a backward needs with these tiles."""
    rows, cols, stages = params.q_blocksize or 64, params.kv_blocksize or 64, params.num_stages or 2
    dim, value_dim, item = _widths(call)
    queries, keys = rows * (dim + value_dim) * item, cols * (dim + value_dim) * item
    planes, handed = rows * cols * _plane_bytes(call), max(rows * cols * item, _copied(rows, call))
    vectors = 4 * (rows + cols) * (2 + _sides(call))  # Log-sum-exp, delta, and what belongs to each side.
    walks = max(queries + (stages - 1) * keys, keys + (stages - 1) * queries)
    return walks + (stages - 1) * (planes + vectors) + handed


def default_forward(call: Attention, room: int) -> FwdParams:
    """The tile of an untuned call on a GPU whose blocks have so much shared memory."""
    head_dim = call.query.shape[3]
    usual = []
    if head_dim <= 64:
        usual = [FwdParams(q_blocksize=128, kv_blocksize=64, num_warps=4, num_stages=stages) for stages in (3, 2)]
    elif head_dim <= 128:
        usual = [FwdParams(q_blocksize=128, kv_blocksize=cols, num_warps=8, num_stages=2) for cols in (64, 32)]
    return _first([*usual, *_WIDE], lambda params: forward_bytes(params, call) <= room)


def default_backward(call: Attention, room: int) -> BwdParams:
    """The tile of an untuned call."""
    tiles = _BACKWARD if call.query.shape[3] <= 128 else _BACKWARD[1:]
    return _first(tiles, lambda params: backward_bytes(params, call) <= room)


def _first(tiles: Iterable[_Params], fits: Callable[[_Params], bool]) -> _Params:
    """The first that fits, or the smallest."""
    *others, last = tiles
    return next(filter(fits, others), last)


def _widths(call: Attention) -> tuple[int, int, int]:
    """The head dims as the kernels pad them, and the bytes of an element."""
    dim, value_dim = (max(16, pl.next_power_of_2(x.shape[3])) for x in (call.query, call.value))
    return dim, value_dim, call.query.dtype.itemsize


def _copied(count: int, call: Attention) -> int:
    """Bytes of a tile of values, or of the output's gradient, that is there twice if it is wide and of 32 bits."""
    dim, value_dim, item = _widths(call)
    return count * value_dim * item if item == 4 and value_dim > dim else 0


def _plane_bytes(call: Attention) -> int:
    """Bytes of bias and mask for each score."""
    return sum(x.dtype.itemsize for x in _planes(call) if 1 not in x.shape[2:])


def _sides(call: Attention) -> int:
    """How many arrays have a number for each query, or each key, of a tile."""
    return sum(getattr(call.extras, name) is not None for name in _SIDES) + sum(1 in x.shape[2:] for x in _planes(call))


def _planes(call: Attention) -> list[Any]:
    return [x for x in (call.extras.bias, call.extras.mask) if x is not None]
