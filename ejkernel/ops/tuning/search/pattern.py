"""Pattern search: step to better neighbours of good configs, for spaces that are too large to try completely.

The first batch holds the seeds (the heuristic, winners of similar shapes), their neighbours and a random sample. Each
further batch holds the untried neighbours of the best few so far. When those are used up without a gain, neighbours
that differ on two axes are tried before giving up, because a larger block on one axis often needs a smaller one on
another.
"""

from collections.abc import Container, Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np

from ejkernel.ops.tuning.search.base import Trial
from ejkernel.ops.tuning.search.space import Space
from ejkernel.ops.utils.canonical import token

Cfg = TypeVar("Cfg")


class Pattern(Generic[Cfg]):
    """Neighbourhood search.

    Args:
      space: Where to look.
      seeds: Configs to start from, in the space or not; they are always tried.
      seed: For the random sample.
      batch: The most configs to propose at once.
      leaders: How many of the best configs are starting points at the same time.
      max_trials: How many configs to try in all.
    """

    def __init__(
        self,
        space: Space[Cfg],
        seeds: Sequence[Cfg] = (),
        *,
        seed: int = 0,
        batch: int = 32,
        leaders: int = 5,
        max_trials: int = 256,
    ) -> None:
        self.space = space
        self.seeds = list(seeds)
        self.seed = seed
        self.batch = batch
        self.leaders = leaders
        self.max_trials = max_trials

    def propose(self, trials: Sequence[Trial[Cfg]]) -> list[Cfg]:
        tried = {token(trial.cfg) for trial in trials}
        room = min(self.batch, self.max_trials - len(tried))
        return self._untried(self._start() if not trials else self._downhill(trials, tried), tried, room)

    def _start(self) -> Iterable[Cfg]:
        yield from self.seeds
        near = [self.space.around(cfg) for cfg in self.seeds]
        spread = self.space.sample(np.random.default_rng(self.seed), self.batch)
        # Half near the seeds, half anywhere: the guess may be near a poor local optimum.
        yield from _in_turn([_in_turn(near), spread])

    def _downhill(self, trials: Sequence[Trial[Cfg]], tried: Container[object]) -> Iterable[Cfg]:
        alive = sorted((trial for trial in trials if trial.seconds < float("inf")), key=lambda trial: trial.seconds)
        best = [trial.cfg for trial in alive[: self.leaders]]
        if not best:  # All failed: only other regions can help.
            yield from self.space.sample(np.random.default_rng([self.seed, len(trials)]), self.batch)
            return
        beside = list(_in_turn([self.space.around(cfg) for cfg in best]))
        yield from beside
        if all(token(cfg) in tried for cfg in beside):
            yield from self.space.around(best[0], steps=2)

    def _untried(self, configs: Iterable[Cfg], tried: Container[object], room: int) -> list[Cfg]:
        fresh: dict[object, Cfg] = {}
        for cfg in configs:
            if len(fresh) >= room:
                break
            if token(cfg) not in tried:
                fresh.setdefault(token(cfg), cfg)
        return list(fresh.values())


def _in_turn(rows: Iterable[Iterable[Cfg]]) -> Iterable[Cfg]:
    """Yields the first of each row, then the second of each, and so on."""
    waiting = [iter(row) for row in rows]
    while waiting:
        for row in list(waiting):
            try:
                yield next(row)
            except StopIteration:
                waiting.remove(row)
