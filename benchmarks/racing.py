"""How often tuning rules pick a slow config, and what they cost, on simulated machines: `python -m benchmarks.racing`.

The race is the shipped code, fed with simulated samples. A machine has 64 candidates, `1 + Exp(0.34)` times as slow as
the best, so that the runner-up is 0.5 % behind on average. The heuristic is one of the best quarter. Regret is how much
slower the pick truly is than the best; cost is counted in runs of the best candidate.
"""

import dataclasses
import sys
from collections.abc import Callable

import numpy as np

from ejkernel.ops.tuning.racing import DEVICE_TIME, WALL_CLOCK, Race, RaceResult

CANDIDATES = 64
PERSISTENCE = 0.99  # Of the slow wander of the clock, from one run to the next.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noise:
    """Standard deviations as fractions: 0.02 is 2 %."""

    white: float = 0.02
    wander: float = 0.0
    warming: float = 0.0  # How much slower a hot machine is than a cold one.
    tail: float = 0.0  # The share of runs that take 20 % longer on average.
    lost: float = 0.0  # The share of runs that take 30 times as long: the scheduler took the core away.
    bias: float = 0.0  # What a candidate is off on this machine for good: no rule can see it.


NOISES = {
    "white 2 %": Noise(),
    "drifting clock": Noise(wander=0.05, warming=0.2),
    "heavy tail": Noise(tail=0.15),
    "lost cores": Noise(lost=0.03),
    "bias 0.4 %": Noise(bias=0.004),
    "all together": Noise(wander=0.01, warming=0.05, tail=0.03, bias=0.004),
    "device timer": Noise(white=0.005, wander=0.002, warming=0.02, tail=0.005, bias=0.002),
    "busy wall clock": Noise(white=0.08, wander=0.02, warming=0.05, tail=0.05, bias=0.004),
}


class Machine:
    """Candidates with a known truth, and the noisy times that one sees of them."""

    def __init__(self, seed: int, noise: Noise, candidates: int = CANDIDATES) -> None:
        self.rng = np.random.default_rng(seed)
        self.noise = noise
        truth = 1 + self.rng.exponential(0.34, candidates)
        self.truth = truth / truth.min()
        self.heuristic = int(np.argsort(truth)[self.rng.integers(max(1, candidates // 4))])
        self.bias = self.rng.normal(0, noise.bias, candidates)
        self.cost = 0.0
        self.wander = 0.0

    def run(self, order: np.ndarray) -> np.ndarray:
        """Returns the times of the candidates named, run one after the other."""
        true, noise = self.truth[order], self.noise
        elapsed = self.cost + np.cumsum(true)
        self.cost = float(elapsed[-1])
        log = self.rng.normal(0, noise.white, len(order)) + self.bias[order] + self._wander(len(order))
        log += noise.warming * (1 - np.exp(-elapsed / 100))
        log += (self.rng.random(len(order)) < noise.tail) * self.rng.exponential(0.2, len(order))
        if noise.lost:
            log += (self.rng.random(len(order)) < noise.lost) * np.log(30)
        return true * np.exp(log)

    def _wander(self, n: int) -> np.ndarray:
        steps = self.rng.normal(0, self.noise.wander * np.sqrt(1 - PERSISTENCE**2), n)
        out = np.empty(n)
        for i, step in enumerate(steps):
            self.wander = PERSISTENCE * self.wander + step
            out[i] = self.wander
        return out


def race(machine: Machine, *, seed: int = 0, rules=DEVICE_TIME) -> RaceResult:
    """Runs the shipped race on a machine."""
    contest = Race(range(len(machine.truth)), heuristic=machine.heuristic, seed=seed, rules=rules)
    while not contest.done:
        order = contest.next_round()
        contest.record(dict(zip(order, machine.run(np.array(order)), strict=True)))
    return contest.result


def in_turn(warmup: int, runs: int, centre: Callable) -> Callable[[Machine], int]:
    """A rule that measures one candidate after the other, and takes the lowest centre."""

    def pick(machine: Machine) -> int:
        order = np.repeat(np.arange(len(machine.truth)), warmup + runs)
        times = machine.run(order).reshape(-1, warmup + runs)
        return int(np.argmin(centre(times[:, warmup:], axis=1)))

    return pick


RULES: dict[str, Callable[[Machine], int]] = {
    "1 + 1 run": in_turn(1, 1, np.mean),
    "1 + 3 runs, mean": in_turn(1, 3, np.mean),
    "10 runs, mean": in_turn(0, 10, np.mean),
    "25 + 100 runs, median (do_bench)": in_turn(25, 100, np.median),
    "race": lambda machine: race(machine).winner,
    "race, wall-clock rules": lambda machine: race(machine, rules=WALL_CLOCK).winner,
}


@dataclasses.dataclass(frozen=True)
class Score:
    regret: np.ndarray
    cost: float
    slower_than_guess: float

    def row(self) -> str:
        r = self.regret
        return (
            f"{r.mean():.2%} | {np.quantile(r, 0.95):.2%} | {np.mean(r > 0.01):.1%} | "
            f"{self.slower_than_guess:.1%} | {self.cost:,.0f}"
        )


def score(rule: Callable[[Machine], int], noise: Noise, trials: int) -> Score:
    """Tries a rule on `trials` machines, the same ones for every rule."""
    regrets, costs, worse = [], [], []
    for seed in range(trials):
        machine = Machine(seed, noise)
        regrets.append(machine.truth[rule(machine)] - 1)
        costs.append(machine.cost)
        worse.append(regrets[-1] > machine.truth[machine.heuristic] - 1)
    return Score(np.array(regrets), float(np.mean(costs)), float(np.mean(worse)))


def main(trials: int = 400) -> None:
    print(f"{CANDIDATES} candidates, {trials} machines a row.\n")
    print("| noise | rule | mean regret | 95th percentile | over 1 % | slower than the guess | cost |")
    print("|---|---|---|---|---|---|---|")
    for noise_name, noise in NOISES.items():
        for rule_name, rule in RULES.items():
            if rule_name.endswith("wall-clock rules") and noise_name != "busy wall clock":
                continue
            print(f"| {noise_name} | {rule_name} | {score(rule, noise, trials).row()} |", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
