"""Exhaustive search: all configs in one batch."""

from collections.abc import Sequence
from typing import Generic, TypeVar

from ejkernel.ops.tuning.search.base import Trial
from ejkernel.ops.tuning.search.space import Space
from ejkernel.ops.utils.canonical import distinct, token

Cfg = TypeVar("Cfg")


class Exhaustive(Generic[Cfg]):
    """Tries the seeds and everything in the space."""

    def __init__(self, space: Space[Cfg], seeds: Sequence[Cfg] = ()) -> None:
        self.space = space
        self.seeds = list(seeds)

    def propose(self, trials: Sequence[Trial[Cfg]]) -> list[Cfg]:
        tried = {token(trial.cfg) for trial in trials}
        return [cfg for cfg in distinct((*self.seeds, *self.space)) if token(cfg) not in tried]
