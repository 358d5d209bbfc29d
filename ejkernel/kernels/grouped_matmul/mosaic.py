"""Grouped products for Hopper: the forward pass, which also computes dlhs.

Persistent blocks go through a list of tiles that is made on the device. One producer warpgroup loads tiles of both
operands into a ring of shared memory, consumers own a part of the tile each; loads of the next tile overlap the store
of this one. There are two kernels, by which operand is the left one of the matrix units.
`docs/hopper_grouped_matmul.md` has the measured effect of each choice.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.grouped_matmul import mosaic_rows, mosaic_weights
from ejkernel.kernels.grouped_matmul.config import STEP, MosaicConfig, space, unaligned
from ejkernel.kernels.grouped_matmul.dimensions import product
from ejkernel.kernels.hopper.chip import SMS
from ejkernel.ops.core.operation import OperationArgumentError

Array = jax.Array


def forward(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    *,
    transpose_rhs: bool = False,
    out_dtype: Any = None,
    first_row: Array | None = None,
    cfg: MosaicConfig | None = None,
    interpret: Any = None,
    blocks: int = SMS,
) -> Array:
    """Returns `[M, N]`: rows of a group times its weights, zeros in rows of no group.

    `rhs` is `[G, K, N]`, with `transpose_rhs` `[G, N, K]`. The first group begins at `first_row`.
    """
    out_dtype = jnp.dtype(lhs.dtype if out_dtype is None else out_dtype)
    sizes = product(lhs, rhs, transpose_rhs=transpose_rhs, out_dtype=out_dtype)
    cfg = cfg or space(sizes)[0]
    if cfg.left == "rows" and (reason := unaligned(sizes, STEP)):
        raise OperationArgumentError(f'grouped_matmul: cfg has left="rows", for which {reason}. Take left="weights".')
    kernel = mosaic_rows if cfg.left == "rows" else mosaic_weights
    return kernel.forward(
        lhs,
        rhs,
        group_sizes,
        transpose_rhs=transpose_rhs,
        out_dtype=out_dtype,
        first_row=first_row,
        cfg=cfg,
        interpret=interpret,
        blocks=blocks,
    )
