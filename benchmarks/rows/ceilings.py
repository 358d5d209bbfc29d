"""What the card can do: a large product, and a copy."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from benchmarks.figures import Contender, Row


def rows(_: str, dry: bool) -> list[Row]:
    """One of each."""
    side, length = (64, 1 << 10) if dry else (8192, 1 << 31)
    normal = lambda *shape: jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    product = {"XLA": Contender(lambda x: x @ x, alone=True)}
    copy = {"XLA": Contender(lambda x: -x)}
    return [
        Row(table="Products", name=f"{side} cubed", inputs=lambda: (normal(side, side),), contenders=product,
            work=2 * side**3),
        Row(table="Copies", name=f"{2 * length:,} bytes", inputs=lambda: (normal(length),), contenders=copy,
            work=4 * length, unit="TB/s"),
    ]  # fmt: skip
