"""What type checkers know of calls; checked by `make lint` and by `tests/test_package.py`, never run."""

from dataclasses import dataclass
from typing import assert_type

import jax

from ejkernel.modules import dot_product_attention
from ejkernel.ops import Executor, Kernel, autotune, pmap_with_config, vmap_with_config


@dataclass(frozen=True)
class Tiles:
    rows: int = 1


class Typed(Kernel[Tiles, jax.Array]):
    pass


def check(executor: Executor, kernel: Typed, x: jax.Array) -> None:
    assert_type(kernel(x), jax.Array)
    assert_type(executor(kernel, x), jax.Array)
    assert_type(executor(kernel, x, cfg=Tiles(2), causal=True), jax.Array)
    assert_type(executor.choose_config(kernel, x), Tiles)
    assert_type(executor.compile(kernel, x)(x), jax.Array)
    assert_type(executor.compile(kernel, x).lower(x), jax.stages.Lowered)
    assert_type(autotune(kernel, x), Tiles)
    assert_type(vmap_with_config(executor, kernel, in_axes=0)(x), jax.Array)
    assert_type(vmap_with_config(kernel, in_axes=(0,))(x), jax.Array)
    assert_type(pmap_with_config(executor, kernel, axis_name="d")(x), jax.Array)
    assert_type(pmap_with_config(kernel, axis_name="d", cfg=Tiles(2))(x), jax.Array)
    assert_type(dot_product_attention(x, x, x), jax.Array)
    assert_type(dot_product_attention(x, x, x, return_residual=True), tuple[jax.Array, jax.Array])
    executor(kernel, x, cfg=3)  # pyright: ignore[reportArgumentType]
