"""The grouped products that tables and packs hold."""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.core.workload import Workload

Distribution = Literal["even", "uneven", "one-hot", "with empty groups"]
DISTRIBUTIONS: tuple[Distribution, ...] = get_args(Distribution)


def product(
    name: str,
    device: Literal["cpu", "gpu", "tpu"],
    sizes: tuple[int, int, int, int],
    distribution: Distribution = "uneven",
    dtype: str = "bfloat16",
) -> Workload:
    """`[rows, k] x [groups, k, n]`, given as rows, groups, k and n, and how the rows fall on the groups."""
    rows, groups, k, n = sizes

    def draw(key: jax.Array, args: tuple[Any, ...]) -> tuple[Any, ...]:
        lhs, rhs, _ = args
        keys = jax.random.split(key)
        drawn = jnp.asarray(draw_group_sizes(rows, groups, distribution))
        return jax.random.normal(keys[0], lhs.shape, lhs.dtype), jax.random.normal(keys[1], rhs.shape, rhs.dtype), drawn

    width = jnp.dtype(dtype).itemsize
    return Workload(
        name=name,
        device=device,
        shapes=(((rows, k), dtype), ((groups, k, n), dtype), ((groups,), "int32")),
        flops=2 * rows * k * n,
        backward_flops=4 * rows * k * n,
        bytes=width * (rows * (k + n) + groups * k * n),
        backward_bytes=2 * width * (rows * (k + n) + groups * k * n),
        draw=draw,
    )


WORKLOADS = (
    product("small experts", "cpu", (1024, 8, 256, 512), dtype="float32"),
    product("mixtral", "gpu", (16_384, 8, 4096, 14_336)),
    product("mixtral-down", "gpu", (16_384, 8, 14_336, 4096)),
    product("qwen3-30b", "gpu", (65_536, 128, 2048, 768)),
    product("qwen3-30b-down", "gpu", (65_536, 128, 768, 2048)),
    product("even-32", "gpu", (65_536, 32, 6144, 2048), "even"),
    product("deepseek-v3", "gpu", (32_768, 256, 7168, 2048)),
    product("decode-qwen3-30b", "gpu", (512, 128, 2048, 768)),
    product("decode-deepseek-v3", "gpu", (2048, 256, 7168, 2048)),
    product("mixtral", "tpu", (16_384, 8, 4096, 14_336)),
    product("mixtral-down", "tpu", (16_384, 8, 14_336, 4096)),
    product("qwen3-30b", "tpu", (65_536, 128, 2048, 768)),
    product("qwen3-30b-down", "tpu", (65_536, 128, 768, 2048)),
    product("decode-qwen3-30b", "tpu", (512, 128, 2048, 768)),
)


def draw_group_sizes(rows: int, groups: int, distribution: Distribution = "uneven", *, seed: int = 0) -> np.ndarray:
    """Sizes that add up to `rows`, int32.

    `even`: as equal as can be. `uneven`: shares from a Dirichlet distribution with parameter 2. `one-hot`: all rows in
    one group. `with empty groups`: uneven, every other group without rows.
    """
    rng = np.random.default_rng(seed)
    if distribution == "one-hot":
        shares = np.eye(groups)[rng.integers(groups)]
    elif distribution == "even":
        shares = np.full(groups, 1 / groups)
    else:
        shares = rng.dirichlet(np.full(groups, 2.0))
        if distribution == "with empty groups" and groups > 1:
            shares[::2] = 0.0
            shares /= shares.sum()
    ends = np.rint(np.cumsum(shares) * rows).astype(np.int32)
    ends[-1] = rows
    return np.diff(ends, prepend=0).astype(np.int32)
