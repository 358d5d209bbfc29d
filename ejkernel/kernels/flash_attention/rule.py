"""Which backend an untuned call takes: a rule, and the measurements that it comes from.

On Hopper both `mosaic` and `cudnn` serve most calls, and neither is always the faster one. `KINDS` lists what was
measured, as times of cuDNN over times of ours; a call is of the first kind that fits it, and the figures of that kind
decide. So a new measurement is a new figure here, or a new kind before those that fit too much. Where one of the two
does not support a call, the other one runs, then `triton`, then `xla`. docs/flash_attention.md shows the same table.

Figures: one H200, JAX 0.11.2, bfloat16, device time by CUPTI, medians of rounds in which all take turns. The tables are
in `benchmarks/results/` (h200-untuned, h200-attention-shapes, h200-hopper-forward); `python -m benchmarks.h200 --only
attention` measures each kind again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ejkernel.kernels.flash_attention.arguments import Attention


class Facts(NamedTuple):
    """What the rule looks at in a call."""

    q_len: int
    kv_len: int
    head_dim: int
    group: int
    """Query heads that share a key head."""
    banded: bool
    """Whether there is a window: a bound on the left."""
    full: bool
    """Whether every query sees every key, by place."""

    @classmethod
    def of(cls, call: Attention) -> Facts:
        """The facts of a call; reads shapes and static rules only."""
        _, q_len, heads, head_dim = call.query.shape
        _, kv_len, kv_heads, _ = call.key.shape
        lower, upper = call.rules.lower, call.rules.upper
        return cls(q_len, kv_len, head_dim, heads // kv_heads, lower is not None, lower is None and upper is None)


class Kind(NamedTuple):
    """Calls of one kind, and how much faster than cuDNN ours was at them."""

    name: str
    fits: Callable[[Facts], Any]
    forward: float | None = None
    """cuDNN's time over ours, forward; None if it was not measured, and ours is taken."""
    both: float | None = None
    """The same of forward and backward together, if it was measured."""
    at: str = ""
    """What was measured: batch x length x heads(/key heads) x head dim."""

    def is_ours(self, *, backward: bool) -> bool:
        """Whether `mosaic` is to run the forward, or the backward."""
        ratio = self.both if backward and self.both is not None else self.forward
        return ratio is None or ratio >= 1.0


KINDS = (
    # The backward pads such arrays, which takes as long as much of the work of a short sequence.
    Kind(
        "a length that is no multiple of 8, below 8192",
        lambda f: (f.q_len % 8 or f.kv_len % 8) and max(f.q_len, f.kv_len) < 8192,
        1.01,
        0.66,
        at="the least of 64x197x16x64, 16x729x16x80 and 8x1500x20x64 (forward 1.31, 1.26, 1.01); 28x577x16x64 0.98",
    ),
    Kind("window", lambda f: f.banded, 1.09, 1.08, at="the least of five windows, 2x8192x32/8x128 to 2x8192x8/4x256"),
    Kind("head dim 97 to 127", lambda f: 96 < f.head_dim < 128, 0.98, 1.00, at="4x4096x16x112, causal"),
    Kind(
        "all keys, head dim above 128, at least 8192",
        lambda f: f.full and f.head_dim > 128 and min(f.q_len, f.kv_len) >= 8192,
        0.96,
        1.04,
        at="2x8192x8x256",
    ),
    Kind(
        "all keys, head dim above 128",
        lambda f: f.full and f.head_dim > 128,
        0.96,
        0.95,
        at="the least of 4x2048x8x256 (with the backward 1.01), 4x2048x16x256 and 16x2048x16x256",
    ),
    Kind("all keys, at most 128", lambda f: f.full and f.kv_len <= 128, 0.97, 0.94, at="64x128x16x64"),
    Kind(
        "all keys, at most 384, head dim up to 64",
        lambda f: f.full and f.kv_len <= 384 and f.head_dim <= 64,
        1.05,
        1.00,
        at="the least of 64x256x16x64 and 64x384x16x64",
    ),
    Kind(
        "all keys, at most 1024",
        lambda f: f.full and f.kv_len <= 1024,
        1.01,
        0.96,
        at="the least of 32x256x16x128, 32x512x16x128, 16x1024x16x64 and 8x1024x24x128",
    ),
    Kind("all keys", lambda f: f.full, 1.07, 1.03, at="4x4096x16x128"),
    Kind(
        "causal, key heads shared by 7 or more",
        lambda f: f.group >= 7,
        1.09,
        1.02,
        at="the least of 1x8192x64/8x128, 4x2048x28/4x128 and 8x2048x28/4x128",
    ),
    Kind("causal", lambda f: True, 1.05, 1.05, at="the least of ten shapes, 16x1024x16x128 to 1x32768x8x128"),
)
"""What was measured; a call is of the first kind that fits it."""


def kind_of(facts: Facts) -> Kind:
    """The first kind that fits a call."""
    return next(kind for kind in KINDS if kind.fits(facts))


def order(facts: Facts, *, backward: bool) -> tuple[str, ...]:
    """Names of all backends, the most promising for a call first."""
    first = ("mosaic", "cudnn") if kind_of(facts).is_ours(backward=backward) else ("cudnn", "mosaic")
    return (*first, "triton", "pallas", "xla")


def is_known(capability: tuple[int, int]) -> bool:
    """Whether the order was measured on such a device; elsewhere what was tuned for another shape says more."""
    return capability[0] == 9
