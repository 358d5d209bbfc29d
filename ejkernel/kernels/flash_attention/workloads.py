"""The calls of flash attention that tables and packs hold.

Forward counts 4·batch·heads·length²·dim operations, half of it when causal; the backward counts 2.5 times that.
"""

from __future__ import annotations

from typing import Literal

from ejkernel.ops.core.workload import Workload


def attention(
    device: Literal["cpu", "gpu", "tpu"],
    batch: int,
    length: int,
    heads: int,
    kv_heads: int,
    dim: int,
    causal: bool,
    dtype: str = "bfloat16",
) -> Workload:
    """One row of a table."""
    flops = 4 * batch * heads * length**2 * dim / (2 if causal else 1)
    shown = f"{heads}" if heads == kv_heads else f"{heads} ({kv_heads})"
    q, kv = (((batch, length, n, dim), dtype) for n in (heads, kv_heads))
    return Workload(
        name=f"{batch}, {length}, {shown}, {dim}, {'causal' if causal else 'full'}, {dtype}",
        device=device,
        shapes=(q, kv, kv),
        kwargs={"causal": True} if causal else {},
        flops=flops,
        backward_flops=2.5 * flops,
    )


WORKLOADS = (
    attention("cpu", 1, 4096, 8, 8, 64, True, "float32"),
    attention("cpu", 1, 4096, 8, 8, 64, False, "float32"),
    attention("cpu", 4, 1024, 16, 16, 64, True, "float32"),
    attention("cpu", 1, 2048, 16, 4, 128, True, "float32"),
    attention("cpu", 1, 2048, 8, 8, 64, True),
    attention("gpu", 4, 4096, 16, 16, 128, True),
    attention("gpu", 4, 4096, 16, 16, 128, False),
    attention("gpu", 1, 16384, 16, 16, 128, True),
    attention("gpu", 8, 2048, 32, 8, 64, True),
    attention("gpu", 16, 1024, 16, 16, 128, True),
    attention("gpu", 2, 8192, 16, 16, 64, True),
    attention("gpu", 2, 8192, 8, 8, 256, True),
    attention("tpu", 4, 4096, 16, 16, 128, True),
    attention("tpu", 4, 4096, 16, 16, 128, False),
    attention("tpu", 1, 16384, 16, 16, 128, True),
    attention("tpu", 4, 2048, 32, 8, 128, True),
    attention("tpu", 2, 8192, 16, 16, 64, True),
    attention("tpu", 2, 8192, 8, 8, 256, True),
)
