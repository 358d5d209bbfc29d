"""Named grouped products, shared by tests, benchmark and packs."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

Distribution = Literal["even", "uneven", "one-hot", "with empty groups"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A grouped product `[rows, k] x [groups, k, n]`, and how its rows fall on the groups."""

    rows: int
    groups: int
    k: int
    n: int
    distribution: Distribution = "uneven"

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.k * self.n


WORKLOADS = {
    "mixtral": Workload(rows=16_384, groups=8, k=4096, n=14_336),
    "mixtral-down": Workload(rows=16_384, groups=8, k=14_336, n=4096),
    "qwen3-30b": Workload(rows=65_536, groups=128, k=2048, n=768),
    "qwen3-30b-down": Workload(rows=65_536, groups=128, k=768, n=2048),
    "even-32": Workload(rows=65_536, groups=32, k=6144, n=2048, distribution="even"),
    "deepseek-v3": Workload(rows=32_768, groups=256, k=7168, n=2048),
    "decode-qwen3-30b": Workload(rows=512, groups=128, k=2048, n=768),
    "decode-deepseek-v3": Workload(rows=2048, groups=256, k=7168, n=2048),
}


def draw_group_sizes(rows: int, groups: int, distribution: Distribution = "uneven", *, seed: int = 0) -> np.ndarray:
    """Sizes that add up to `rows`, int32.

    `even`: as equal as can be. `uneven`: shares from a Dirichlet distribution with parameter 2. `one-hot`: all rows in
    one group. `with empty groups`: uneven, every other group without rows.
    """
    rng = np.random.default_rng(seed)
    if distribution == "one-hot":
        shares = np.eye(groups)[rng.integers(groups)]
    elif distribution == "even":
        shares = np.full(groups, 1 / groups)
    else:
        shares = rng.dirichlet(np.full(groups, 2.0))
        if distribution == "with empty groups" and groups > 1:
            shares[::2] = 0.0
            shares /= shares.sum()
    ends = np.rint(np.cumsum(shares) * rows).astype(np.int32)
    ends[-1] = rows
    return np.diff(ends, prepend=0).astype(np.int32)
