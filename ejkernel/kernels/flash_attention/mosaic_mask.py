"""Which keys a query may see, and which tiles that leaves to compute."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """Query `r` sees key `c` when `lower <= c - r <= upper`; `None` is no bound.

    Causal attention is `upper=0` (`upper=kv_len - q_len` when the last query sees the last key); a sliding window of
    `left` keys adds `lower=upper - left`.
    """

    q_len: int
    kv_len: int
    lower: int | None = None
    upper: int | None = None

    def columns(self, row: Any, rows: int) -> tuple[Any, Any]:
        """Returns the first key, and the one after the last, that rows `row` to `row + rows` may see."""
        first, end = row * 0, row * 0 + self.kv_len
        if self.lower is not None:
            first = jnp.clip(row + self.lower, 0, self.kv_len - 1)
        if self.upper is not None:
            end = jnp.clip(row + (rows + self.upper), 1, self.kv_len)
        return first, end

    def blocks(self, row: Any, rows: int, block_kv: int) -> tuple[Any, Any]:
        """Returns the first key block, and the one after the last, of a tile of queries; at least one block."""
        first, end = self.columns(row, rows)
        start = lax.div(first, jnp.int32(block_kv))
        return start, jnp.maximum(lax.div(end + (block_kv - 1), jnp.int32(block_kv)), start + 1)

    def steps(self, block_q: int, block_kv: int) -> tuple[int, ...]:
        """Returns the number of key blocks of every tile of queries."""
        counts = []
        for row in range(0, self.q_len, block_q):
            first = 0 if self.lower is None else min(max(row + self.lower, 0), self.kv_len - 1)
            end = self.kv_len if self.upper is None else min(max(row + block_q + self.upper, 1), self.kv_len)
            counts.append(max(-(-end // block_kv) - first // block_kv, 1))
        return tuple(counts)

    def query_blocks(self, col: Any, cols: int, block_q: int) -> tuple[Any, Any]:
        """Returns the first query block, and the one after the last, that may see keys `col` to `col + cols`.

        At least one block, so that every tile of keys writes its gradients.
        """
        first, end = col * 0, col * 0 + self.q_len
        if self.upper is not None:
            first = jnp.clip(col - self.upper, 0, self.q_len - 1)
        if self.lower is not None:
            end = jnp.clip(col + (cols - self.lower), 1, self.q_len)
        start = lax.div(first, jnp.int32(block_q))
        return start, jnp.maximum(lax.div(end + (block_q - 1), jnp.int32(block_q)), start + 1)

    def query_steps(self, block_q: int, block_kv: int) -> tuple[int, ...]:
        """Returns the number of query blocks of every tile of keys."""
        counts = []
        for col in range(0, self.kv_len, block_kv):
            first = 0 if self.upper is None else min(max(col - self.upper, 0), self.q_len - 1)
            end = self.q_len if self.lower is None else min(max(col + block_kv - self.lower, 1), self.q_len)
            counts.append(max(-(-end // block_q) - first // block_q, 1))
        return tuple(counts)
