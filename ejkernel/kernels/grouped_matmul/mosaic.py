"""Grouped products for Hopper: the forward pass, which also computes dlhs.

Persistent blocks go through a list of tiles that is made on the device. One producer warpgroup loads tiles of both
operands into a ring of shared memory, consumers own a part of the tile each; loads of the next tile overlap the store
of this one. There are two kernels, by which operand is the left one of the matrix units.
`docs/hopper_grouped_matmul.md` has the measured effect of each choice.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.grouped_matmul import mosaic_rows, mosaic_weights
from ejkernel.kernels.grouped_matmul.config import ALIGNED_ROWS, STEP, MosaicConfig, space, unaligned
from ejkernel.kernels.grouped_matmul.dimensions import product
from ejkernel.kernels.hopper.chip import SMS
from ejkernel.kernels.hopper.cluster import shared_barrier
from ejkernel.kernels.hopper.launch import launch
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
    dims = product(lhs, rhs, transpose_rhs=transpose_rhs, out_dtype=lhs.dtype if out_dtype is None else out_dtype)
    cfg = cfg or space(dims)[0]
    if cfg.left == "rows" and (reason := unaligned(dims, STEP)):
        raise OperationArgumentError(f'grouped_matmul: cfg has left="rows", for which {reason}. Take left="weights".')
    by = mosaic_rows if cfg.left == "rows" else mosaic_weights
    if by is mosaic_rows and (missing := -dims.rows % ALIGNED_ROWS):
        lhs = jnp.pad(lhs, ((0, missing), (0, 0)))
    tiling = by.tiling(cfg, dims.n)
    table, facts = tiling.items(group_sizes, dims.rows, first_row)
    blocks = min(blocks // cfg.cluster, table[0].shape[0])
    options = {"transpose_rhs": transpose_rhs, "interpret": bool(interpret)}
    out = launch(
        functools.partial(by.kernel, cfg=cfg, tiling=tiling, rows=dims.rows, blocks=blocks, **options),
        *(lhs, rhs, *table, *facts),
        out_type=jax.ShapeDtypeStruct((lhs.shape[0], dims.n), dims.out_dtype),
        blocks=blocks,
        cluster=cfg.cluster,
        consumers=cfg.consumers,
        scratch={
            **by.scratch(cfg, lhs.dtype, dims.out_dtype, **options),
            "free": shared_barrier(cfg.cluster, cfg.stages, cfg.consumers),
            "ahead": plgpu.Barrier(),
        },
        interpret=interpret,
    )
    return out if lhs.shape[0] == dims.rows else out[: dims.rows]
