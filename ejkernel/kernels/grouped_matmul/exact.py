"""What configs are compared with: grouped products by XLA at the highest precision.

JAX cannot differentiate loops whose number of steps is data, so they have gradients of their own.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from ejkernel.kernels.grouped_matmul import xla
from ejkernel.kernels.grouped_matmul.dimensions import rounded

Array = jax.Array
_FEW_SIZES = xla.XlaConfig(least_rows=128, steps=1)  # Each is code to compile, and this runs once or twice.
_forward = functools.partial(xla.forward, precision="highest", cfg=_FEW_SIZES)
_drhs = functools.partial(xla.drhs, precision="highest", cfg=_FEW_SIZES)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def product(
    lhs: Array, rhs: Array, sizes: Array, first_row: Array | None, transpose_rhs: bool, out_dtype: Any
) -> Array:
    """As `xla.forward`."""
    return _forward(lhs, rhs, sizes, first_row=first_row, transpose_rhs=transpose_rhs, out_dtype=out_dtype)


def _product_forward(*args: Any) -> tuple[Array, Any]:
    return product(*args), args[:4]


def _product_backward(transpose_rhs: bool, out_dtype: Any, saved: Any, dout: Array) -> tuple[Any, ...]:
    lhs, rhs, sizes, first_row = saved
    dout = rounded(dout, lhs.dtype, rhs.dtype)
    options = {"first_row": first_row, "out_dtype": lhs.dtype}
    dlhs = _forward(dout, rhs, sizes, transpose_rhs=not transpose_rhs, **options)
    pair = (dout, lhs) if transpose_rhs else (lhs, dout)
    return dlhs, _drhs(*pair, sizes, **{**options, "out_dtype": rhs.dtype}), None, None


product.defvjp(_product_forward, _product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def contraction(lhs: Array, dout: Array, sizes: Array, first_row: Array | None, out_dtype: Any) -> Array:
    """As `xla.drhs`."""
    return _drhs(lhs, dout, sizes, first_row=first_row, out_dtype=out_dtype)


def _contraction_forward(*args: Any) -> tuple[Array, Any]:
    return contraction(*args), args[:4]


def _contraction_backward(out_dtype: Any, saved: Any, given: Array) -> tuple[Any, ...]:
    lhs, dout, sizes, first_row = saved
    given = rounded(given, lhs.dtype, dout.dtype)
    dlhs = _forward(dout, given, sizes, first_row=first_row, transpose_rhs=True, out_dtype=lhs.dtype)
    return dlhs, _forward(lhs, given, sizes, first_row=first_row, out_dtype=dout.dtype), None, None


contraction.defvjp(_contraction_forward, _contraction_backward)
