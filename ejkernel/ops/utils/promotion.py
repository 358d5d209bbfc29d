"""What our own code may mix: dtypes and ranks, also in a program that forbids itself to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def usual_promotion() -> Iterator[None]:
    """JAX's defaults of `jax_numpy_dtype_promotion` and `jax_numpy_rank_promotion`; also a decorator."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
