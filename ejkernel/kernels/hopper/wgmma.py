"""Asynchronous matrix products, with a replacement for JAX's GPU interpreter.

The interpreter (`plgpu.InterpretGPUParams`, JAX 0.11 on) supports neither products with the left operand in
registers nor accumulators that start from a value, so there the products are plain `jnp.dot`s of the references'
contents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# JAX's decorators hide the signatures of these from type checkers.
layout_cast: Any = plgpu.layout_cast
inline_mgpu: Any = plgpu.inline_mgpu


@dataclasses.dataclass(slots=True)
class _Emulated:
    """An accumulator that holds its value."""

    value: jax.Array


@dataclasses.dataclass(frozen=True, slots=True)
class MatrixUnit:
    """Runs a warpgroup's matrix products."""

    interpret: bool

    def scoped(self, body: Callable[..., Any], *shapes: tuple[int, int]) -> Any:
        """Calls `body` with one float32 accumulator of zeros per shape and returns what it returns."""
        if self.interpret:
            return body(*(_Emulated(jnp.zeros(shape, jnp.float32)) for shape in shapes))
        return pl.run_scoped(body, *(plgpu.WGMMAAccumulatorRef(shape, jnp.float32) for shape in shapes))

    def start_from(self, acc: Any, value: jax.Array) -> None:
        """Makes `acc` hold `value`; no product on it may be in flight."""
        if self.interpret:
            acc.value = value
        else:
            acc[...] = value

    def multiply(self, acc: Any, a: Any, b: Any, *, a_t: bool = False, b_t: bool = False) -> None:
        """Issues `acc += a @ b`; `a` is a value or a reference, `b` a reference."""
        if self.interpret:
            a_value = a if isinstance(a, jax.Array) else a[...]
            b_value = b[...]
            contract = ((0 if a_t else 1,), (1 if b_t else 0,))
            acc.value += lax.dot_general(a_value, b_value, (contract, ((), ())), preferred_element_type=jnp.float32)
        else:
            plgpu.wgmma(acc, a.transpose((1, 0)) if a_t else a, b.transpose((1, 0)) if b_t else b)

    def result(self, acc: Any, *, in_flight: int = 0) -> jax.Array:
        """Waits until at most `in_flight` later products run, and returns the accumulator."""
        if self.interpret:
            return acc.value
        return plgpu.wgmma_accumulator_load(acc, wait_n=in_flight)


def unhoisted(index: Any, n: Any) -> Any:
    """Returns `index` in a form that seems to depend on the step `n`.

    Otherwise ptxas computes the addresses of every product with that operand before the loop, and spills them (seen
    with JAX 0.11.2).
    """
    return index + lax.shift_right_logical(n, jnp.int32(30))
