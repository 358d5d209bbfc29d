"""Grouped products in float64, one group after the other."""

from __future__ import annotations

from typing import Any

import numpy as np


def forward(
    lhs: Any, rhs: Any, group_sizes: Any, *, transpose_rhs: bool = False, first_row: int = 0, existing_out: Any = None
) -> np.ndarray:
    """`[M, N]`; rows of no group are zeros, or `existing_out`'s."""
    lhs, rhs = np.asarray(lhs, np.float64), np.asarray(rhs, np.float64)
    rhs = rhs.swapaxes(1, 2) if transpose_rhs else rhs
    out = np.zeros((lhs.shape[0], rhs.shape[2])) if existing_out is None else np.array(existing_out, np.float64)
    for rows, weights in zip(_slices(group_sizes, first_row), rhs, strict=True):
        out[rows] = lhs[rows] @ weights
    return out


def drhs(lhs: Any, dout: Any, group_sizes: Any, *, first_row: int = 0) -> np.ndarray:
    """`[G, K, N]`; zeros for groups without rows."""
    lhs, dout = np.asarray(lhs, np.float64), np.asarray(dout, np.float64)
    return np.stack([lhs[rows].T @ dout[rows] for rows in _slices(group_sizes, first_row)])


def _slices(group_sizes: Any, first_row: int) -> list[slice]:
    ends = np.cumsum(np.asarray(group_sizes)) + first_row
    return [slice(int(end - size), int(end)) for end, size in zip(ends, np.asarray(group_sizes), strict=True)]
