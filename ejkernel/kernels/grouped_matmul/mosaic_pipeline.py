"""What the Hopper kernels for grouped products share: the walk over a block's tiles, and the steps of one tile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.hopper.launch import as_consumer, as_producer

Array = jax.Array


def walk(mine: Any, fetch: Any, decode: Any, tile: Any, held: Any = None) -> Any:
    """Runs a warpgroup over the block's items, and returns the number of steps and what it holds in the end.

    `fetch(i)` reads from memory, one item ahead; `decode(i, ...)` turns what it read into an item and its number of
    steps; `tile(item, steps, step, held)` returns what to hold until the next item.
    """

    def one(i, carry):
        step, fields, held = carry
        item, steps = decode(i, fields)
        fields = fetch(i + 1)
        held = tile(item, steps, step, held)
        return step + steps, fields, held

    step, _, held = lax.fori_loop(0, mine, one, (jnp.int32(0), fetch(0), held))
    return step, held


@dataclasses.dataclass(frozen=True, slots=True)
class Ring:
    """Slots of shared memory that the producer fills and the consumers empty, a step of a product in each.

    The first consumer is `cfg.lag` steps ahead from the start, and stays so: it computes while the others store.

    Attributes:
      cfg: The config of the kernel.
      wg: The number of this warpgroup.
      full: The barriers on which the producer arrives.
      free: Those on which the consumers arrive.
      ahead: That on which the other consumers wait for the first.
    """

    cfg: Any
    wg: Any
    full: Any
    free: Any
    ahead: Any

    def slot(self, step: Any) -> Any:
        """Where a step is."""
        return lax.rem(step, jnp.int32(self.cfg.stages))

    def produce(self, run: Callable[[], None]) -> None:
        """Calls `run` in the warpgroup of the producer; its last act is to `wait`."""

        @pl.when(self.wg == self.cfg.consumers)
        def _():
            as_producer(self.cfg.consumers)
            run()

    def wait(self) -> None:
        """Waits until all is free: before a block ends, all arrivals must be waited for, and data that others send."""
        for s in range(self.cfg.stages):
            plgpu.barrier_wait(self.free.at[s])

    def consume(self, run: Callable[[], Any]) -> None:
        """Calls `run`, which returns the number of steps, in the warpgroups of the consumers."""

        @pl.when(self.wg < self.cfg.consumers)
        def _():
            as_consumer(self.cfg.consumers)
            for s in range(self.cfg.stages):
                plgpu.barrier_arrive(self.free.at[s])
            if self.cfg.lag:
                pl.when(self.wg > 0)(lambda: plgpu.barrier_wait(self.ahead))
            done = run()
            if self.cfg.lag:  # There may have been too few steps for `_begun`.
                pl.when((self.wg == 0) & (done <= self.cfg.lag))(lambda: plgpu.barrier_arrive(self.ahead))
            plgpu.wait_smem_to_gmem(0)

    def tiles(self, walk: Callable[..., Any], tile: Any, save: Callable[[Any], None], none: Any) -> Any:
        """Computes and stores a consumer's tiles, and returns the number of steps.

        `walk(tile, held)` goes through the items. `tile(item, steps, step, held, before)` returns what `save` stores:
        at once, or with `hold` while the next tile is computed, for which it calls `before`. `save` ignores `none`.
        """
        if not self.cfg.hold:
            at_once = lambda item, steps, step, _: save(tile(item, steps, step, none, lambda: None))
            return walk(at_once, None)[0]
        later = lambda item, steps, step, held: tile(item, steps, step, held, lambda: save(held))
        steps, held = walk(later, none)
        save(held)
        return steps

    def _begun(self, step: Any) -> None:
        """Lets the others begin once the first consumer is far enough."""
        if self.cfg.lag:
            pl.when((self.wg == 0) & (step == self.cfg.lag))(lambda: plgpu.barrier_arrive(self.ahead))

    def skip(self, step: Any, steps: Any) -> None:
        """Goes on by `steps` steps, with which this consumer has nothing to do."""

        def one(s, _):
            slot = self.slot(step + s)
            plgpu.barrier_wait(self.full.at[slot])
            self._begun(step + s)
            plgpu.barrier_arrive(self.free.at[slot])

        lax.fori_loop(0, steps, one, None)

    def multiply(
        self,
        shape: tuple[int, int],
        step: Any,
        steps: Any,
        operands: Any,
        prepare: Any = lambda slot: None,
        meanwhile: Callable[[], None] = lambda: None,
        start: Array | None = None,
    ) -> Array:
        """Sums `start` and the products of `operands(slot)`, each `shape`, of `steps` steps from `step` on.

        A step's memory is released while the next one runs. `meanwhile` is called while the first one runs.
        """

        def body(acc):
            def product(s):
                slot = self.slot(step + s)
                plgpu.barrier_wait(self.full.at[slot])
                prepare(slot)
                plgpu.wgmma(acc, *operands(slot))
                self._begun(step + s)

            if start is not None:
                acc[...] = start
            product(0)
            meanwhile()

            def advance(s, _):
                product(s)
                plgpu.wgmma_wait(1)
                plgpu.barrier_arrive(self.free.at[self.slot(step + s - 1)])

            lax.fori_loop(1, steps, advance, None)
            value = acc[...]
            plgpu.barrier_arrive(self.free.at[self.slot(step + steps - 1)])
            return value

        return pl.run_scoped(body, plgpu.ACC(shape, jnp.float32))  # pyright: ignore[reportPrivateImportUsage]
