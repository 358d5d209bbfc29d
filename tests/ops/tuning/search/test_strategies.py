import dataclasses
import math

import numpy as np
import pytest

from ejkernel.ops.tuning.search import Exhaustive, Pattern, Space, Trial, choose


@dataclasses.dataclass(frozen=True)
class Tile:
    m: int = 64
    n: int = 64
    k: int = 32
    warps: int = 4
    stages: int = 2
    order: str = "row"


AXES = {
    "m": (16, 32, 64, 128, 256),
    "n": (16, 32, 64, 128, 256),
    "k": (16, 32, 64, 128),
    "warps": (1, 2, 4, 8, 16),
    "stages": (1, 2, 3, 4, 5),
    "order": ("row", "column"),
}
SPACE = Space.of({**AXES, "fits": lambda t: (t.m + t.n) * t.k * t.stages <= 98_304}, Tile())


def landscape(seed):
    """A tiled product in outline: one valley that turns with the shape, ripples, and configs that do not run."""
    rng = np.random.default_rng(seed)
    area, depth, ripple = rng.uniform(11, 15), rng.uniform(4.5, 6.5), rng.uniform(0.02, 0.08)
    phases = rng.uniform(0, 6, 5)

    def seconds(t):
        m, n, k, w, s = (math.log2(value) for value in (t.m, t.n, t.k, t.warps, t.stages))
        if t.m * t.n / t.warps > 16_384:
            return math.inf  # Out of registers.
        log = 0.1 * (m + n - area) ** 2 + 0.05 * (m - n) ** 2 + 0.08 * (k - depth) ** 2
        log += 0.1 * (w - (m + n - 9) / 2) ** 2 + 0.05 * (s - 1.6) ** 2 + 0.05 * (t.order == "column")
        return math.exp(log + ripple * sum(math.sin(3 * x + p) for x, p in zip((m, n, k, w, s), phases, strict=True)))

    return seconds


def run(strategy, seconds):
    trials, batches = [], 0
    while batch := strategy.propose(trials):
        trials += [Trial(cfg, seconds(cfg)) for cfg in batch]
        batches += 1
        assert batches < 100
    return trials


def best(trials):
    return min(trial.seconds for trial in trials)


def test_exhaustive_search_tries_everything_once():
    space = Space.of({"m": (16, 32), "n": (16, 32)}, Tile())
    trials = run(Exhaustive(space, [Tile(16, 16), Tile(999)]), lambda cfg: 1.0)
    assert [trial.cfg for trial in trials] == [Tile(16, 16), Tile(999), Tile(16, 32), Tile(32, 16), Tile(32, 32)]


def test_a_config_added_later_is_the_only_new_trial():
    old = run(Exhaustive(Space.of([Tile(16), Tile(32)], Tile())), lambda cfg: 1.0)
    assert Exhaustive(Space.of([Tile(16), Tile(32), Tile(64)], Tile())).propose(old) == [Tile(64)]


def test_the_strategy_depends_on_the_size():
    def powers(n):
        return Space.of([Tile(i) for i in range(1, n + 1)], Tile())

    assert isinstance(choose(powers(64)), Exhaustive)
    assert isinstance(choose(powers(65)), Pattern)


def test_pattern_search_starts_with_the_seeds():
    seeds = [Tile(128, 128, 32, 8, 3), Tile(48, 48)]  # The second from a shape with other blocks.
    assert Pattern(SPACE, seeds).propose([])[:2] == seeds


def test_pattern_search_finds_nearly_the_best_in_a_few_hundred_of_thousands():
    everything = list(SPACE)
    assert len(everything) > 3000
    losses, random_losses = [], []
    for seed in range(12):
        seconds = landscape(seed)
        optimum = min(map(seconds, everything))
        trials = run(Pattern(SPACE, [Tile()], seed=seed), seconds)
        assert len(trials) <= 256
        assert len({trial.cfg for trial in trials}) == len(trials)
        losses.append(best(trials) / optimum - 1)
        at_random = SPACE.sample(np.random.default_rng(seed), len(trials))
        random_losses.append(min(map(seconds, at_random)) / optimum - 1)
    assert np.mean(losses) <= 0.002
    assert np.mean(losses) < np.mean(random_losses) / 10


def test_a_narrow_valley_across_two_axes_is_followed():
    space = Space.of({"m": range(32), "n": range(32)}, Tile())
    seconds = lambda t: 100.0 - t.m + 10 * abs(t.m - t.n)  # Each single step leads uphill.
    trials = run(Pattern(space, [Tile(20, 20)], batch=8), seconds)
    assert best(trials) == seconds(Tile(31, 31))


def test_good_seeds_shorten_the_way():
    seconds = landscape(1)
    optimum = min(SPACE, key=seconds)
    near = dataclasses.replace(optimum, warps=2 if optimum.warps != 2 else 4)
    assert best([Trial(cfg, seconds(cfg)) for cfg in Pattern(SPACE, [near]).propose([])]) == seconds(optimum)


def test_an_interrupted_search_goes_on_where_it_was():
    seconds, strategy = landscape(3), Pattern(SPACE, [Tile()])
    trials = run(strategy, seconds)
    again = Pattern(SPACE, [Tile()])
    assert again.propose(trials[:32]) == [trial.cfg for trial in trials[32 : 32 + len(again.propose(trials[:32]))]]


def test_when_all_fail_other_regions_are_tried():
    strategy = Pattern(SPACE, [Tile()], max_trials=96)
    trials = run(strategy, lambda cfg: math.inf)
    assert len(trials) == 96


@pytest.mark.parametrize("limit", [1, 10, 70])
def test_the_number_of_trials_is_kept(limit):
    assert len(run(Pattern(SPACE, [Tile()], max_trials=limit), landscape(0))) <= limit
