"""Checking: whether a candidate's output is the right answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.core.kernel import KernelDefinitionError

TOLERANCES = {
    "float64": 1e-9,
    "complex128": 1e-9,
    "float32": 1e-4,
    "complex64": 1e-4,
    "float16": 5e-3,
    "bfloat16": 2e-2,
}
"""Relative to the root mean square of the right answer plus the element itself; narrower floats get `NARROW`."""
NARROW = 0.25
REDUCED_FLOAT32 = 5e-3
"""For float32 on accelerators, whose matrix units round to fewer bits by default."""

Tolerance = float | Mapping[str, float] | None


def check_tolerance(tolerance: Any, owner: str) -> None:
    """Refuses a `tolerance` that would have no effect, or another than intended.

    Raises:
      KernelDefinitionError: It is neither a number nor a mapping from dtypes to numbers.
    """
    if tolerance is None:
        return
    by_dtype = tolerance if isinstance(tolerance, Mapping) else {"float32": tolerance}
    for name, limit in by_dtype.items():
        if not _is_dtype(name):
            raise KernelDefinitionError(
                f"{owner}: tolerance has {name!r}, which is no dtype. Write names such as 'float32' and 'bfloat16'."
            )
        if not (isinstance(limit, (int, float, np.number)) and not isinstance(limit, bool) and limit >= 0):
            raise KernelDefinitionError(
                f"{owner}: tolerance must be a number from 0 on, or a mapping from dtypes to such, got {limit!r:.100}."
            )


def _is_dtype(name: Any) -> bool:
    try:
        jnp.dtype(name)
    except TypeError:
        return False
    return name is not None


def tolerance_for(dtype: Any, override: Tolerance) -> float:
    """The tolerance for an output of this dtype; a kernel's own `tolerance` has priority."""
    name = np.dtype(dtype).name
    if isinstance(override, Mapping):
        override = {jnp.dtype(key).name: value for key, value in override.items()}.get(name)
    if override is not None:
        return float(override)
    if name in ("float32", "complex64") and jax.default_backend() != "cpu":
        return REDUCED_FLOAT32
    return TOLERANCES.get(name, NARROW)


def mismatch(got: Any, want: Any, tolerance: Tolerance = None) -> str | None:
    """How `got` differs from `want`; None if it is the same structure, shapes, dtypes and numbers."""
    if jax.tree.structure(got) != jax.tree.structure(want):
        return f"structure {jax.tree.structure(got)} instead of {jax.tree.structure(want)}"
    paths = jax.tree_util.tree_flatten_with_path(want)[0]
    for (path, expected), actual in zip(paths, jax.tree.leaves(got), strict=True):
        if (reason := _leaf_mismatch(actual, expected, tolerance)) is not None:
            where = jax.tree_util.keystr(path)
            return f"output{where}: {reason}" if where else reason
    return None


def _leaf_mismatch(got: Any, want: Any, tolerance: Tolerance) -> str | None:
    got, want = (x if hasattr(x, "dtype") else jnp.asarray(x) for x in (got, want))
    if got.shape != want.shape:
        return f"shape {got.shape} instead of {want.shape}"
    if got.dtype != want.dtype:
        return f"dtype {got.dtype} instead of {want.dtype}"
    if got.dtype == jax.dtypes.float0 or got.size == 0:
        return None
    if jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
        got, want = jax.random.key_data(got), jax.random.key_data(want)
    if not jnp.issubdtype(got.dtype, jnp.inexact):
        wrong = int((got != want).sum())
        return f"{wrong} of {got.size} elements differ" if wrong else None
    limit = tolerance_for(got.dtype, tolerance)
    nans, worst = (float(x) for x in _compare(got, want))
    if nans:
        return f"{nans:.0f} of {got.size} elements are NaN or infinite where the right answer is not, or the reverse"
    return None if worst <= limit else f"error {worst:.1e} is above the tolerance {limit:.1e} of {got.dtype}"


@jax.jit
def _compare(got: jax.Array, want: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Elements that are finite on one side only, and the largest error, relative to the right answer's size."""
    # The largest numbers of a dtype are used as infinity in masks: they say nothing about scale.
    info = jnp.finfo(got.dtype)
    most = 0.99 * float(info.max) if info.bits >= 16 else float("inf")
    # Converted explicitly: 8-bit floats have no type promotion.
    wide = got.dtype if info.bits >= 32 else jnp.dtype(jnp.float32)
    got, want = got.astype(wide), want.astype(wide)
    finite = (jnp.abs(got) < most) & (jnp.abs(want) < most)
    # Infinities must have the same sign on both sides; a NaN need only be a NaN.
    endless = lambda x: jnp.abs(x) >= most
    other_sign = endless(got) & endless(want) & (jnp.sign(jnp.real(got)) != jnp.sign(jnp.real(want)))
    unlike = (jnp.isnan(got) != jnp.isnan(want)) | (endless(got) != endless(want)) | other_sign
    got, want = jnp.where(finite, got, 0), jnp.where(finite, want, 0)
    # In units of the largest element: neither the squares nor the differences may overflow.
    top = jnp.maximum(jnp.abs(want).max(), jnp.finfo(wide).tiny)
    got, want = got / top, want / top
    size = jnp.abs(want)
    scale = jnp.sqrt(jnp.mean(size**2)) + size
    error = jnp.abs(got - want)
    worst = jnp.max(jnp.where(error > 0, error / jnp.maximum(scale, jnp.finfo(wide).tiny), 0))
    return jnp.sum(unlike), worst


def norm_mismatch(got: Any, want: Any, tolerances: Mapping[str, float]) -> str | None:
    """The first array of a dtype in `tolerances` whose error is too large by its norm, not by its worst element.

    For kernels whose worst element says little, because rounding alone can make a few elements wrong; call `mismatch`
    as well.
    """
    paths = jax.tree_util.tree_flatten_with_path(want)[0]
    for (path, expected), actual in zip(paths, jax.tree.leaves(got), strict=True):
        limit = tolerances.get(np.dtype(expected.dtype).name)
        if limit is None or (error := float(_norm_error(actual, expected))) <= limit:
            continue
        return (
            f"output{jax.tree_util.keystr(path)}: relative error {error:.1e} is above {limit:.1e} of {expected.dtype}"
        )
    return None


@jax.jit
def _norm_error(got: jax.Array, want: jax.Array) -> jax.Array:
    got, want = (x.astype(np.promote_types(x.dtype, np.float32)) for x in (got, want))
    return jnp.linalg.norm(got - want) / jnp.maximum(jnp.linalg.norm(want), jnp.finfo(want.dtype).tiny)
