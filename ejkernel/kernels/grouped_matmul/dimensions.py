"""The sizes and dtypes of a grouped product: all that backends depend on."""

from __future__ import annotations

import dataclasses
from numbers import Integral
from typing import Any

import jax.numpy as jnp

from ejkernel.errors import EjkernelError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Dimensions:
    """`[rows, k] x [groups, k, n] -> [rows, n]`, or the gradient of its weights, `[rows, k] x [rows, n]`.

    Attributes:
      rows: Rows of lhs; a symbol while exporting a program for any number of them.
      groups: Groups whose weights are on this device.
      k: Columns of lhs.
      n: Columns of the other rows.
      dtypes: Of the two operands.
      out_dtype: Of the result.
    """

    rows: Any
    groups: int
    k: int
    n: int
    dtypes: tuple[Any, Any] = (jnp.bfloat16, jnp.bfloat16)
    out_dtype: Any = jnp.bfloat16

    @property
    def item_bytes(self) -> int:
        """Bytes of the wider operand's elements."""
        return max(jnp.dtype(d).itemsize for d in self.dtypes)

    @property
    def out_bytes(self) -> int:
        """Bytes of the result's elements."""
        return jnp.dtype(self.out_dtype).itemsize

    def unsupported(self, *dtypes: Any) -> str | None:
        """Why a kernel for these dtypes cannot serve it, whatever its tiles; `None` if it can."""
        left, right = (jnp.dtype(d) for d in self.dtypes)
        if left != right or left not in dtypes or self.out_dtype not in (left, jnp.float32):
            names = ", ".join(jnp.dtype(d).name for d in dtypes)
            return (
                f"both operands must have one dtype of {names}, the result the same or float32, "
                f"got {left}, {right} and {jnp.dtype(self.out_dtype)}"
            )
        if not isinstance(self.rows, int):
            return f"the number of rows must be known, got {self.rows}"
        if 0 in (self.rows, self.groups, self.k, self.n):
            return "this kernel takes no empty arrays"
        return None


class TileSizeError(EjkernelError, ValueError):
    """A config has a size that is no number above 0."""


def check_sizes(cfg: Any) -> None:
    """Refuses a config of which a number is not above 0."""
    sizes = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg)}
    wrong = [f"{name}={x!r}" for name, x in sizes.items() if not isinstance(x, Integral) or x < 1]
    if wrong:
        raise TileSizeError(f"{type(cfg).__name__}: sizes must be integers above 0, got {', '.join(wrong)}.")


def product(lhs: Any, rhs: Any, *, transpose_rhs: bool = False, out_dtype: Any = None) -> Dimensions:
    """Those of a forward pass."""
    groups, k, n = rhs.shape if not transpose_rhs else (rhs.shape[0], rhs.shape[2], rhs.shape[1])
    return _dimensions(lhs, rhs, groups, k, n, out_dtype)


def contraction(lhs: Any, dout: Any, groups: int, *, out_dtype: Any = None) -> Dimensions:
    """Those of a gradient of the weights."""
    return _dimensions(lhs, dout, groups, lhs.shape[1], dout.shape[1], out_dtype)


def _dimensions(lhs: Any, other: Any, groups: int, k: int, n: int, out_dtype: Any) -> Dimensions:
    out_dtype = common_dtype(lhs.dtype, other.dtype) if out_dtype is None else out_dtype
    dtypes = (jnp.dtype(lhs.dtype), jnp.dtype(other.dtype))
    return Dimensions(rows=lhs.shape[0], groups=groups, k=k, n=n, dtypes=dtypes, out_dtype=jnp.dtype(out_dtype))


def common_dtype(a: Any, b: Any) -> Any:
    """The dtype to which both are promoted.

    Of two that JAX does not promote: the one that is a wider float; else bfloat16 if one is a float, or int8.
    """
    a, b = jnp.dtype(a), jnp.dtype(b)
    if a == b or (_is_promoted(a) and _is_promoted(b)):
        return jnp.result_type(a, b)
    floats = [d for d in (a, b) if jnp.issubdtype(d, jnp.inexact)]
    some = [d for d in floats or (a, b) if _is_promoted(d)]
    return some[0] if some else jnp.dtype(jnp.bfloat16 if floats else jnp.int8)


def rounded(dout: Any, a: Any, b: Any) -> Any:
    """A cotangent in the dtype of the operands, as their gradients are; not in 8 bits, whose least value is 0.002."""
    common = common_dtype(a, b)
    if _is_promoted(common):
        return dout.astype(common)
    return dout.astype(jnp.bfloat16) if _is_promoted(dout.dtype) else dout


def _is_promoted(dtype: Any) -> bool:
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits > 8
    return not jnp.issubdtype(dtype, jnp.integer) or jnp.iinfo(dtype).bits >= 8
