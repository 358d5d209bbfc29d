"""The shared memory and the barriers of a block of the backward kernel."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.flash_attention.config import MosaicBwdConfig
from ejkernel.kernels.flash_attention.mosaic_bwd_operand import Operand, tiled
from ejkernel.kernels.flash_attention.mosaic_dq import SWIZZLED_F32, GradientSum
from ejkernel.kernels.hopper.chip import WGMMA_ROWS
from ejkernel.kernels.hopper.cluster import shared_barrier


def scratch(
    cfg: MosaicBwdConfig, operands: tuple[Operand, Operand], dtype: Any, dq_sum: GradientSum | None, *, ids: bool
) -> dict[str, Any]:
    """Returns what a block needs; `ids` if there are any, of segments."""
    (qk, vo), parts = operands, cfg.block_kv // WGMMA_ROWS
    keys = cfg.kv_stages * parts
    ids = ids and cfg.split == "keys"
    row = (cfg.stages, cfg.block_q)
    # One warpgroup has the gradient of the scores for all, or one of the two the weights for the other.
    writers = 1 if cfg.split == "gradients" else cfg.consumers
    return {
        "k_smem": qk.memory(keys, WGMMA_ROWS, dtype=dtype),
        "v_smem": vo.memory(keys, WGMMA_ROWS, dtype=dtype),
        "q_smem": qk.memory(*row, dtype=dtype),
        "do_smem": vo.memory(*row, dtype=dtype),
        "p_smem": _weights(cfg, vo, dtype),
        "ds_smem": None if cfg.split == "gradients" else tiled((2, parts, WGMMA_ROWS, cfg.block_q), dtype, qk.tile),
        "dq_smem": None if dq_sum is None else dq_sum.staging(cfg.consumers),
        "lse_smem": plgpu.SMEM(row, jnp.float32),
        "delta_smem": plgpu.SMEM(row, jnp.float32),
        "q_ids": plgpu.SMEM(row, jnp.int32) if ids else None,
        "kv_ids": plgpu.SMEM((keys, WGMMA_ROWS), jnp.int32) if ids else None,
        "k_full": plgpu.Barrier(num_barriers=keys, num_arrivals=2 if ids else 1),
        "v_full": plgpu.Barrier(num_barriers=keys),
        "kv_free": plgpu.Barrier(num_barriers=cfg.kv_stages, num_arrivals=cfg.consumers),
        "q_full": plgpu.Barrier(num_barriers=cfg.stages, num_arrivals=3 if ids else 2),
        "do_full": plgpu.Barrier(num_barriers=cfg.stages, num_arrivals=2),
        "q_free": shared_barrier(cfg.cluster, cfg.stages, cfg.consumers),
        "do_free": shared_barrier(cfg.cluster, cfg.stages, cfg.consumers),
        "ds_full": plgpu.Barrier(num_barriers=2, num_arrivals=writers),
        "ds_free": plgpu.Barrier(num_barriers=2, num_arrivals=writers),
        "tile_done": plgpu.Barrier(num_arrivals=cfg.consumers),
    }


def _weights(cfg: MosaicBwdConfig, vo: Operand, dtype: Any) -> Any:
    """Returns memory for two tiles of weights that go from one warpgroup to another, if any do."""
    shape = (2, WGMMA_ROWS, cfg.block_q)
    if cfg.split == "columns":
        return tiled(shape, dtype, vo.tile)
    return plgpu.SMEM(shape, jnp.float32, transforms=SWIZZLED_F32) if cfg.split == "gradients" else None
