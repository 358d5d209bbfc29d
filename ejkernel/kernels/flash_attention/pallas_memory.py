"""How much fast memory (VMEM) the TPU kernels need: the blocks of a step, their sums, and what no register holds."""

from __future__ import annotations

from typing import Literal

import jax

from ejkernel.kernels.flash_attention.arguments import Attention
from ejkernel.kernels.flash_attention.pallas_cut import PART
from ejkernel.kernels.flash_attention.pallas_tile import LANES

Kernel = Literal["forward", "dq", "dkv"]

_SCOPE_BYTES = 16 << 20
"""What a kernel may use if it does not ask for more: on v4, v5e and v5p this, on v6e and v7x twice as much."""

_TILES = {"forward": 1.4, "dq": 1.4, "dkv": 2.3}
"""Tiles of float32 that the compiler keeps in memory at the most, in each of the ways that a step can go."""
_TILES_PRECISE = {"forward": 2.8, "dq": 4.0, "dkv": 6.6}
"""The same if products of float32 are computed from several of bfloat16."""
_TILES_PER_RULE = 1.0
"""Tiles more with a soft cap, and with dropout."""


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
    results = {"forward": rows * value_dim, "dq": rows * (dim + value_dim), "dkv": keys + rows * value_dim}[kernel]
    columns = {"forward": 2, "dq": 2, "dkv": 0}[kernel] + (call.extras.q_segment_ids is not None)
    own = cols if kernel == "dkv" else rows
    sums = {"forward": rows * value_dim, "dq": rows * dim, "dkv": keys}[kernel]
    per_query = 4 * 8 * (rows + cols)  # Rows of one number each take eight, at the most, and there are up to four.
    return 2 * item * (queries + keys + results) + 4 * (sums + columns * own * LANES) + 2 * 4 * per_query


def _kept(kernel: Kernel, rows: int, cols: int, call: Attention) -> int:
    own, other = (cols, rows) if kernel == "dkv" else (rows, cols)
    rules, extras = call.rules, call.extras
    precision = rules.precision or jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    precise = call.query.dtype.itemsize == 4 and precision is not None
    tiles = (_TILES_PRECISE if precise else _TILES)[kernel]
    tiles += _TILES_PER_RULE * ((rules.soft_cap is not None) + (extras.dropout_seed is not None))
    kept = int(_ways(cols, call) * tiles * min(PART, own) * other * 4)
    # Precise products are computed from parts of their factors, too.
    return kept + (4 * (rows + cols) * (call.query.shape[3] + call.value.shape[3]) if precise else 0)


def _ways(cols: int, call: Attention) -> int:
    """With the mask and without it: the compiler keeps the values of each in memory of their own."""
    full = call.rules.lower is None and call.rules.upper is None and call.key.shape[1] % cols == 0
    return 1 if full or call.extras.q_segment_ids is not None else 2
