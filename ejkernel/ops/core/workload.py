"""Workloads: calls that users make, by name, shared by tests, benchmarks, packs and `ejkernel tune --suite`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One call of an operation.

    Attributes:
      name: Its name in tables and on the command line.
      device: The kind of device that it is a workload of.
      shapes: Shape and dtype of each positional argument; None where there is no array.
      kwargs: The keyword arguments, static ones.
      flops: Operations of the forward; 0 if they do not matter.
      backward_flops: Operations of the backward alone.
      bytes: What the forward must read and write at least; 0 if it does not matter.
      backward_bytes: What the backward alone must read and write.
      draw: Fills the arrays, `draw(key, args) -> args`; by default normal floats. Needed for integers.
    """

    name: str
    device: Literal["cpu", "gpu", "tpu"]
    shapes: tuple[tuple[tuple[int, ...], str] | None, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    flops: float = 0.0
    backward_flops: float = 0.0
    bytes: float = 0.0
    backward_bytes: float = 0.0
    draw: Callable[[jax.Array, Args], Args] | None = None

    def abstract(self) -> tuple[Args, Kwargs]:
        """The call without data."""
        args = tuple(None if s is None else jax.ShapeDtypeStruct(s[0], jnp.dtype(s[1])) for s in self.shapes)
        return args, dict(self.kwargs)

    def inputs(self, seed: int = 0) -> tuple[Args, Kwargs]:
        """The call with random data."""
        args, kwargs = self.abstract()
        key = jax.random.key(seed)
        if self.draw is not None:
            return self.draw(key, args), kwargs
        keys = jax.random.split(key, len(args))
        drawn = (None if x is None else jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, args, strict=True))
        return tuple(drawn), kwargs

    def __str__(self) -> str:
        return self.name
