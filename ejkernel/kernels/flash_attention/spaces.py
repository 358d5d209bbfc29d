"""What each implementation may be tuned over for one call: the guess first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ejkernel.kernels.flash_attention import xla
from ejkernel.kernels.flash_attention.config import is_full
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.utils.params import BwdParams, FwdParams


def few(platform: str, platforms: Sequence[str], space: list[Any]) -> list[Any]:
    """What to try of an implementation's space: so few of the less promising ones that the tuner can try all.

    Where an implementation is the only one beside XLA, it is tried in full.
    """
    better = len(platforms[: platforms.index(platform)])
    if platform == "mosaic" or not better:
        return space
    return space[:: max(len(space) * better // 6, 1)]


def forward_space(platform: str, inv: Invocation[Any, Any]) -> list[Any]:
    """Parameters of an implementation's forward, the guess first."""
    if platform == "xla":
        return [FwdParams(q_blocksize=rows, kv_blocksize=cols) for rows, cols in _xla_blocks(inv)]
    if platform == "triton":
        from ejkernel.kernels.flash_attention import triton

        return triton.forward_space(inv.args[0].shape[3])
    if platform == "pallas":
        from ejkernel.kernels.flash_attention import pallas

        return pallas.forward_space(inv.args[0].shape[1], inv.args[1].shape[1])
    if platform == "mosaic":
        from ejkernel.kernels.flash_attention import hopper

        return hopper.forward_configs(inv.args[0].shape[3], full=_is_full(inv))
    return [None]


def backward_space(platform: str, inv: Invocation[Any, Any]) -> list[Any]:
    """Parameters of an implementation's backward, the guess first."""
    if platform == "xla":
        return [BwdParams(q_blocksize=rows, kv_blocksize=cols) for rows, cols in _xla_blocks(inv)]
    if platform == "triton":
        from ejkernel.kernels.flash_attention import triton

        return triton.backward_space(inv.args[0].shape[3])
    if platform == "pallas":
        from ejkernel.kernels.flash_attention import pallas

        return pallas.backward_space(inv.args[0].shape[1], inv.args[1].shape[1])
    if platform == "mosaic":
        from ejkernel.kernels.flash_attention import hopper

        return hopper.backward_configs(inv.args[0].shape[3], full=_is_full(inv))
    return [None]


def _is_full(inv: Invocation[Any, Any]) -> bool:
    rules = inv.kwargs["rules"]
    return is_full(inv.args[0].shape[1], inv.args[1].shape[1], rules.lower, rules.upper)


def _xla_blocks(inv: Invocation[Any, Any]) -> list[tuple[int, int]]:
    """Tiles for all heads at once: none so large that a handful of them would not fit a cache, few small ones."""
    (batch, q_len, heads, _), kv_len = inv.args[0].shape, inv.args[1].shape[1]
    many = xla.known(batch * heads)
    sizes = (128, 256, 512, 1024) if many <= 32 else (64, 128, 256, 512)
    all_blocks = [(xla.fitted(rows, q_len), xla.fitted(cols, kv_len)) for rows in sizes for cols in sizes]
    guess = xla.default_blocks(many, q_len, kv_len)
    small = [b for b in all_blocks if many * b[0] * b[1] <= 4 * xla.TILE_SCORES]
    return list(dict.fromkeys([guess, *small]))
