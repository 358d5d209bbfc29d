"""The calls of RMSNorm that tables and packs hold; the bytes are those of x, the norm, and the gradients."""

from __future__ import annotations

from typing import Literal

from ejkernel.ops.core.workload import Workload


def norm(device: Literal["cpu", "gpu"], rows: int, columns: int, dtype: str, width: int) -> Workload:
    """One row of a table; `width` is the bytes of an element."""
    return Workload(
        name=f"{rows} x {columns}, {dtype}",
        device=device,
        shapes=(((rows, columns), dtype), ((columns,), dtype)),
        bytes=2 * rows * columns * width,
        backward_bytes=3 * rows * columns * width,
    )


WORKLOADS = (
    norm("cpu", 4096, 1024, "float32", 4),
    norm("gpu", 16384, 4096, "bfloat16", 2),
    norm("gpu", 8192, 8192, "bfloat16", 2),
    norm("gpu", 65536, 1024, "bfloat16", 2),
)
