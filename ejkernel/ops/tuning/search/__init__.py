"""Search: which configs of a space get measured. One strategy per file."""

import itertools
from collections.abc import Sequence
from typing import TypeVar

from ejkernel.ops.tuning.search.base import Strategy as Strategy
from ejkernel.ops.tuning.search.base import Trial as Trial
from ejkernel.ops.tuning.search.exhaustive import Exhaustive as Exhaustive
from ejkernel.ops.tuning.search.pattern import Pattern as Pattern
from ejkernel.ops.tuning.search.space import Space as Space
from ejkernel.ops.tuning.search.space import SpaceError as SpaceError

Cfg = TypeVar("Cfg")

EXHAUSTIVE_LIMIT = 64


def choose(space: Space[Cfg], seeds: Sequence[Cfg] = (), *, seed: int = 0) -> Strategy[Cfg]:
    """Returns the strategy for a space of this size."""
    small = len(list(itertools.islice(space, EXHAUSTIVE_LIMIT + 1))) <= EXHAUSTIVE_LIMIT
    return Exhaustive(space, seeds) if small else Pattern(space, seeds, seed=seed)
