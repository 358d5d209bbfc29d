"""How the logits are cut into chunks, and what that costs in memory.

The gradient of the weights sums over rows, and a row's part of it needs the row's whole vocabulary. So a chunk is some
rows by the whole vocabulary, and the weights' gradient is a float32 sum over chunks. Chunks of the vocabulary would
need no such sum, but the logits twice: once for the log-sum-exp, once for the gradient.

With 16-bit weights two things make this cheap. A chunk of as many rows as the weights have fits into the memory of the
weights' gradient, where it lies until the gradient takes its place. And as long as all rows are one chunk, there is no
sum at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any

import jax.numpy as jnp

from ejkernel.errors import EjkernelError
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.utils.fingerprint import device_kind

LOSS_BYTES = {"cpu": 1 << 24, "gpu": 1 << 28, "tpu": 1 << 28}
"""Logits of a chunk where no gradient is wanted; on CPUs those that stay in a cache."""

CPU_LOGITS = 1 << 20
"""Of a chunk on a CPU where gradients are computed, if these are more than 256 rows."""


@dataclass(frozen=True, kw_only=True)
class ChunkParams:
    """The size of chunks.

    Attributes:
      rows: Rows whose logits are in memory at a time, where gradients are computed.
      columns: Columns of the weights' gradient that are computed at a time, where it takes the place of the logits or
        is added to a sum; None is all.
      loss_rows: Rows whose logits are in memory at a time, where only the loss is computed.
    """

    rows: int
    columns: int | None = None
    loss_rows: int = 1024

    def __post_init__(self) -> None:
        sizes = (self.rows, self.loss_rows, *(() if self.columns is None else (self.columns,)))
        if not all(isinstance(n, Integral) and n > 0 for n in sizes):
            raise ChunkSizeError(f"ChunkParams: sizes must be integers above 0, columns also None, got {self}.")


class ChunkSizeError(EjkernelError, ValueError):
    """A chunk cannot have so many rows or columns."""


def kept_dtype(weights: Any) -> Any:
    """The dtype in which gradients wait for the cotangent: float16 has too few exponents for them."""
    return jnp.dtype(jnp.float32) if weights.dtype == jnp.float16 else weights.dtype


def guess(rows: int, weights: Any) -> ChunkParams:
    """The fewest chunks for which the memory is about that of the weights' gradient in float32."""
    height, width = weights.shape
    loss_rows = max(LOSS_BYTES[device_kind()] // (width * weights.dtype.itemsize), 1)
    loss_rows = min(1 << (loss_rows.bit_length() - 1), rows)
    if device_kind() == "cpu":
        most = max(256, CPU_LOGITS // width)
        # In equal parts: a last chunk that is not whole costs as much as one that is.
        return ChunkParams(rows=-(-rows // -(-rows // most)), columns=_even(width, 4096), loss_rows=loss_rows)
    wide = kept_dtype(weights).itemsize > 2
    return ChunkParams(
        rows=rows if rows <= (height if wide else 2 * height) else height, columns=16384, loss_rows=loss_rows
    )


def _even(width: int, most: int) -> int:
    """At most so many columns, of which a whole number makes the width, if there is one above half of it."""
    least = -(-width // most)
    return next((width // n for n in range(least, 2 * least + 1) if width % n == 0), most)


def forward_space(inv: Invocation[Any, Any]) -> list[ChunkParams]:
    """The guess, and other chunks of a loss without gradients, in as much memory."""
    first = guess_of(inv)
    others = (first.loss_rows // 2, first.loss_rows // 4)
    return [first, *(ChunkParams(rows=first.rows, columns=first.columns, loss_rows=r) for r in others if r > 0)]


def gradients_space(inv: Invocation[Any, Any]) -> list[ChunkParams]:
    """The guess, and other chunks of a loss with gradients, in as much memory."""
    first = guess_of(inv)
    fewer = [c for c in (2048, 4096, 8192) if c < (first.columns or 0)]
    sizes = [*((first.rows, c) for c in fewer), (first.rows // 2, first.columns)]
    return [first, *(ChunkParams(rows=r, columns=c, loss_rows=first.loss_rows) for r, c in sizes if r > 0)]


def guess_of(inv: Invocation[Any, Any]) -> ChunkParams:
    """That of a call."""
    x, weights = inv.args[:2]
    return guess(max(x.size // max(x.shape[-1], 1), 1), weights)
