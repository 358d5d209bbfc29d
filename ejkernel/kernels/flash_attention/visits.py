"""How many pairs of blocks a call computes: what its mask leaves out costs nearly nothing."""

from __future__ import annotations

from typing import Any

from ejkernel.kernels.flash_attention.arguments import Attention
from ejkernel.kernels.flash_attention.pallas_cut import fitted
from ejkernel.ops.core.kernel import Invocation


def needed_steps(inv: Invocation[Any, Any], params: Any, *, backward: bool) -> int | None:
    """Steps of a TPU kernel's grid that compute something; each kernel of a backward has as many."""
    call = Attention.of(inv.args, inv.kwargs)
    if params is None:
        return None
    batch, q_len, heads, _ = call.query.shape
    rows, cols = fitted(params.q_blocksize, q_len), fitted(params.kv_blocksize, call.key.shape[1])
    pairs = visited(q_len, call.key.shape[1], rows, cols, call.rules.lower, call.rules.upper)
    return batch * heads * pairs


def visited(q_len: int, kv_len: int, rows: int, cols: int, lower: int | None, upper: int | None) -> int:
    """Pairs of blocks with at least one key j for a query i, i + lower <= j <= i + upper."""
    count = 0
    for first in range(0, q_len, rows):
        last = min(first + rows, q_len) - 1
        start = 0 if lower is None else max(first + lower, 0)
        end = kv_len - 1 if upper is None else min(last + upper, kv_len - 1)
        count += end // cols - start // cols + 1 if start <= end else 0
    return count
