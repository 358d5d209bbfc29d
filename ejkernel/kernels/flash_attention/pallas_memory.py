"""How much fast memory (VMEM) the TPU kernels need: the blocks of a step, their sums, and what no register holds."""

from __future__ import annotations

from typing import Literal

import jax

from ejkernel.kernels.flash_attention.arguments import Attention
from ejkernel.kernels.flash_attention.pallas_cut import PART
from ejkernel.kernels.flash_attention.pallas_tile import LANES

Kernel = Literal["forward", "dq", "dkv", "dbias"]

_SCOPE_BYTES = 16 << 20
"""What a kernel may use if it does not ask for more: on v4, v5e and v5p this, on v6e and v7x twice as much."""

_TILES = {"forward": 1.4, "dq": 1.4, "dkv": 2.3, "dbias": 2.3}
"""Tiles of float32 that the compiler keeps in memory at the most, in each of the ways that a step can go."""
_TILES_PRECISE = {"forward": 2.8, "dq": 4.0, "dkv": 6.6, "dbias": 4.0}
"""The same if products of float32 are computed from several of bfloat16."""
_TILES_PER_RULE = 1.0
"""Tiles more with a soft cap, with dropout, with a bias and with a mask."""


def vmem_bytes(kernel: Kernel, rows: int, cols: int, call: Attention) -> int:
    """About the most that a kernel needs for blocks of `rows` queries and `cols` keys."""
    return _blocks(kernel, rows, cols, call) + _kept(kernel, rows, cols, call) + (1 << 19)


def vmem_limit(kernel: Kernel, rows: int, cols: int, call: Attention) -> int | None:
    """What to ask the compiler for, where what it gives by itself is not enough everywhere."""
    needed = vmem_bytes(kernel, rows, cols, call)
    return None if needed <= _SCOPE_BYTES else max(needed, 2 * _SCOPE_BYTES)


def _blocks(kernel: Kernel, rows: int, cols: int, call: Attention) -> int:
    """The blocks of arguments and results, twice, because the next step's are on their way; and the sums."""
    item = call.query.dtype.itemsize
    dim, value_dim = (-(-x.shape[3] // LANES) * LANES for x in (call.query, call.value))
    queries, keys = rows * dim, cols * (dim + value_dim)
    shared = rows * value_dim
    results = {"forward": shared, "dq": rows * dim + shared, "dkv": keys + shared, "dbias": shared}[kernel]
    columns = {"forward": 2, "dq": 2, "dkv": 0, "dbias": 2}[kernel] + _sides(call)
    own = cols if kernel == "dkv" else rows
    # Of a bias, the block itself comes on top, twice.
    sums = {"forward": shared, "dq": rows * dim, "dkv": keys, "dbias": 3 * rows * cols}[kernel]
    per_query = 4 * 8 * (rows + cols)  # Rows of one number each take eight, at the most, and there are up to four.
    return 2 * (item * (queries + keys + results) + 4 * per_query + _planes(rows, cols, call)) + 4 * (
        sums + columns * own * LANES
    )


def _sides(call: Attention) -> int:
    """Of how many arrays a block has a column of its own: segments, and positions in these."""
    extras = call.extras
    hidden = extras.mask is not None and extras.mask.shape[1] == 1 and 1 in extras.mask.shape[2:]
    return (extras.q_segment_ids is not None or hidden) + (extras.q_positions is not None)


def _planes(rows: int, cols: int, call: Attention) -> int:
    """Bytes of the blocks of bias and mask; a single row or column of either is of 32 bits and padded."""
    sizes = {(True, True): 8 * LANES, (True, False): 8 * cols, (False, True): rows * LANES}
    found = 0
    for x in (call.extras.bias, call.extras.mask):
        if x is not None:
            one = (x.shape[2] == 1, x.shape[3] == 1)
            found += 4 * sizes[one] if any(one) else rows * cols * x.dtype.itemsize
    return found


def _kept(kernel: Kernel, rows: int, cols: int, call: Attention) -> int:
    own, other = (cols, rows) if kernel == "dkv" else (rows, cols)
    rules, extras = call.rules, call.extras
    precision = rules.precision or jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    precise = call.query.dtype.itemsize == 4 and precision is not None
    tiles = (_TILES_PRECISE if precise else _TILES)[kernel]
    rare = rules.soft_cap, extras.dropout_seed, extras.bias, extras.mask
    tiles += _TILES_PER_RULE * sum(x is not None for x in rare)
    kept = int(_ways(cols, call) * tiles * min(PART, own) * other * 4)
    # Precise products are computed from parts of their factors, too.
    return kept + (4 * (rows + cols) * (call.query.shape[3] + call.value.shape[3]) if precise else 0)


def _ways(cols: int, call: Attention) -> int:
    """With the mask and without it: the compiler keeps the values of each in memory of their own."""
    given = call.rules.lower, call.rules.upper, call.extras.q_segment_ids, call.extras.mask
    return 1 if all(x is None for x in given) and call.key.shape[1] % cols == 0 else 2
