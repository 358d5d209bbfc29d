"""What the Hopper kernels for grouped products share: the walk over a block's tiles, and the loop over one tile."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

Array = jax.Array


def walk(mine: Any, fetch: Any, decode: Any, tile: Any) -> Any:
    """Runs a warpgroup over the block's items, and returns the number of steps.

    `fetch(i)` reads from memory, one item ahead; `decode(i, ...)` turns what it read into an item and its number of
    steps.
    """

    def one(i, carry):
        step, fields = carry
        item, steps = decode(i, fields)
        fields = fetch(i + 1)
        tile(item, steps, step)
        return step + steps, fields

    return lax.fori_loop(0, mine, one, (jnp.int32(0), fetch(0)))[0]


def multiply(
    shape: tuple[int, int],
    step: Any,
    steps: Any,
    begun: Any,
    *,
    slot_of: Any,
    operands: Any,
    full: Any,
    free: Any,
    prepare: Any = lambda s, slot: None,
) -> Array:
    """Sums the products, each `shape`, of `steps` steps from `step` on.

    A step's memory is released while the next one runs.
    """

    def body(acc):
        def product(s):
            slot = slot_of(step + s)
            plgpu.barrier_wait(full.at[slot])
            prepare(s, slot)
            plgpu.wgmma(acc, *operands(slot))
            begun(step + s)

        product(0)

        def advance(s, _):
            product(s)
            plgpu.wgmma_wait(1)
            plgpu.barrier_arrive(free.at[slot_of(step + s - 1)])

        lax.fori_loop(1, steps, advance, None)
        value = acc[...]
        plgpu.barrier_arrive(free.at[slot_of(step + steps - 1)])
        return value

    return pl.run_scoped(body, plgpu.ACC(shape, jnp.float32))  # pyright: ignore[reportPrivateImportUsage]


# The first consumer is `cfg.lag` steps ahead from the start, and stays so: it computes while the others store.


def follow(cfg: Any, wg: Any, ahead: Any) -> None:
    """Makes the other consumers wait for the first."""
    if cfg.lag:
        pl.when(wg > 0)(lambda: plgpu.barrier_wait(ahead))


def lead(cfg: Any, wg: Any, ahead: Any, step: Any) -> None:
    """Lets the others begin once the first consumer is far enough."""
    if cfg.lag:
        pl.when((wg == 0) & (step == cfg.lag))(lambda: plgpu.barrier_arrive(ahead))


def lead_out(cfg: Any, wg: Any, ahead: Any, done: Any) -> None:
    """Lets the others begin if there were too few steps for `lead`."""
    if cfg.lag:
        pl.when((wg == 0) & (done <= cfg.lag))(lambda: plgpu.barrier_arrive(ahead))
