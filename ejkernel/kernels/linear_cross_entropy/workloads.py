"""The losses that tables and packs hold."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from ejkernel.ops.core.workload import Workload


def loss(
    name: str, device: Literal["cpu", "gpu", "tpu"], rows: int, height: int, vocabulary: int, dtype: str = "bfloat16"
) -> Workload:
    """`[rows, height] x [height, vocabulary]`, labels drawn evenly, weights as large as at the start of a training."""

    def draw(key: jax.Array, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, weights, labels = args
        keys = jax.random.split(key, 3)
        drawn = jax.random.randint(keys[2], labels.shape, 0, vocabulary, labels.dtype)
        scale = jnp.asarray(height**-0.5, weights.dtype)
        return (
            jax.random.normal(keys[0], x.shape, x.dtype),
            jax.random.normal(keys[1], weights.shape, weights.dtype) * scale,
            drawn,
        )

    return Workload(
        name=name,
        device=device,
        shapes=(((rows, height), dtype), ((height, vocabulary), dtype), ((rows,), "int32")),
        flops=2 * rows * height * vocabulary,
        backward_flops=4 * rows * height * vocabulary,
        draw=draw,
    )


WORKLOADS = (
    loss("2048 x 512 to 32000, float32", "cpu", 2048, 512, 32_000, "float32"),
    loss("4096 x 4096 to 128256", "gpu", 4096, 4096, 128_256),
    loss("32768 x 2560 to 128256", "gpu", 32_768, 2560, 128_256),
    loss("16384 x 2048 to 32000", "gpu", 16_384, 2048, 32_000),
    loss("8192 x 4096 to 128256", "tpu", 8192, 4096, 128_256),
    loss("16384 x 2048 to 32000", "tpu", 16_384, 2048, 32_000),
)
