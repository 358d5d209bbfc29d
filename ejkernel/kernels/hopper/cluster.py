"""Blocks that load a tile together: each reads a part from memory and sends it to all of them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

AXIS = "together"


def cluster_options(blocks: int) -> dict[str, Any]:
    """Returns the arguments that have `plgpu.kernel` launch clusters of `blocks` blocks."""
    return {"cluster": (blocks,), "cluster_names": (AXIS,)} if blocks > 1 else {}


def place_in_cluster(blocks: int) -> Any:
    return lax.axis_index(AXIS) if blocks > 1 else jnp.int32(0)


def shared_barrier(blocks: int, count: int, arrivals: int) -> Any:
    """Returns `count` barriers for memory that is loaded together: every block waits for the arrivals of all."""
    if blocks == 1:
        return plgpu.Barrier(num_barriers=count, num_arrivals=arrivals)
    return plgpu.ClusterBarrier(collective_axes=(AXIS,), num_barriers=count, num_arrivals=arrivals)


def shared_load(blocks: int, source: Any, target: Any, barrier: Any) -> None:
    """Loads a tile into the same place of every block; all must call it."""
    plgpu.copy_gmem_to_smem(source, target, barrier, collective_axes=AXIS if blocks > 1 else None)
