"""The race: which of several candidates is fastest, decided only from noisy samples.

Pure statistics without clocks or JAX: real timers, recorded samples and simulated ones drive the same code.

    race = Race(candidates, heuristic=guess)
    while not race.done:
        race.record({key: measure(key) for key in race.next_round()})
    print(race.result.winner)

Every round runs each survivor once, in random order: changes of the clock, the temperature or the load affect all of a
round, and cancel in the ratio of two samples of one round. The *heats* drop candidates until the rest cannot be told
apart. The *final* measures the best of them and the heuristic again, and only these fresh samples decide and are
reported: the smallest of many noisy times is, on average, too small.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Literal

import numpy as np

from ejkernel.errors import EjkernelError
from ejkernel.ops.tuning import robust
from ejkernel.ops.tuning.standings import Candidate, Key, Measurement, RaceResult, Ratio, Status


class RaceError(EjkernelError):
    """A race has invalid candidates, rules or samples."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RaceRules:
    """The constants of a race; `benchmarks/racing.py` measures their cost and benefit."""

    # (after this round, drop what was this many times slower than the best in every round so far): one 100x candidate
    # costs as much as the whole race of the others. Never on a single sample: a process that loses its core for a time
    # slice sees a call of 40 us take 8 ms.
    screens: tuple[tuple[int, float], ...] = ((2, 10.0), (4, 3.0))
    halvings: tuple[int, ...] = (4, 8, 16)
    keep: int = 8  # Halving never goes below this many.
    first_test: int = 6  # With fewer rounds, intervals are not used.
    level: float = 0.99  # The confidence of the interval that drops a candidate; it is checked after every round.
    half_width: float = 0.005  # A ratio with an interval this narrow needs no more samples.
    heat_rounds: int = 32
    finalists: int = 4
    final_rounds: tuple[int, int] = (16, 64)  # At least, at most.
    heuristic_tie: float = 0.01  # A new config must be faster than the guess by more than this.
    clear_win: float = 1.25  # And by this in every round, if the race was stopped too early for an interval.
    tie: float = 0.0025  # Among candidates this close to the fastest, the preferred one wins.


DEVICE_TIME = RaceRules()
# Wall-clock samples on a busy machine scatter by 8 % where device timers scatter by 0.5 to 2 %.
WALL_CLOCK = RaceRules(heat_rounds=256, final_rounds=(16, 256))


class Race(Generic[Key]):
    """A race among `candidates`: call `next_round`, run what it returns, `record` the seconds, until `done`.

    The same seed and the same records give the same race again, so an interrupted one resumes by replaying its records.

    Args:
      candidates: Distinct keys. Among equally fast ones the earlier wins, so put the preferred first: less memory, then
        the lower config hash.
      heuristic: The guess. It is always in the final, and stays unless something else is surely faster.
      seed: For the order within the rounds.
      min_rounds: The least number of samples behind the reported figures.
      rules: The constants.
      timer: The name of the clock.
    """

    def __init__(
        self,
        candidates: Sequence[Key],
        *,
        heuristic: Key | None = None,
        seed: int = 0,
        min_rounds: int = 1,
        rules: RaceRules = DEVICE_TIME,
        timer: str = "",
    ) -> None:
        self.rules = rules
        self._timer = timer
        self._keys = list(candidates)
        self._index = {key: i for i, key in enumerate(self._keys)}
        if not self._keys or len(self._index) != len(self._keys):
            raise RaceError(f"Race: candidates must be at least one and distinct, got {self._keys!r}.")
        if heuristic is not None and heuristic not in self._index:
            raise RaceError(f"Race: the heuristic must be a candidate, got {heuristic!r}. Add it to the candidates.")
        self._heuristic = None if heuristic is None else self._index[heuristic]
        self._seed = seed
        self._min_rounds = min_rounds
        self._alive = list(range(len(self._keys)))
        self._left: dict[int, tuple[Status, str]] = {}
        self._heats: list[np.ndarray] = []
        self._final: list[np.ndarray] = []
        self._in_final = len(self._keys) == 1
        self._recalled = False
        self._state: Literal["running", "complete", "stopped"] = "running"

    @property
    def done(self) -> bool:
        """Whether there is nothing left to measure."""
        return self._state != "running"

    @property
    def survivors(self) -> list[Key]:
        """The candidates that are still in the race."""
        return [self._keys[i] for i in self._alive]

    @property
    def rounds(self) -> int:
        """How many rounds were recorded."""
        return len(self._heats) + len(self._final)

    @property
    def phase(self) -> Literal["heats", "final"]:
        """Whether the next round belongs to the heats or to the final."""
        return "final" if self._in_final else "heats"

    def next_round(self) -> list[Key]:
        """Returns the candidates to measure next, in order."""
        order = np.random.default_rng([self._seed, self.rounds]).permutation(self._alive)
        return [self._keys[i] for i in order]

    def record(self, seconds: Mapping[Key, float]) -> None:
        """Takes one round: a time for every survivor."""
        if self.done:
            raise RaceError("Race: a finished race takes no more rounds. Look at `done` before recording.")
        missing = [key for key in self.survivors if key not in seconds]
        if missing:
            raise RaceError(f"Race: a round needs every survivor, missing {missing!r}. `fail` those that broke.")
        self._append(seconds)
        if self._in_final:
            self._state = "complete" if self._final_is_over() else "running"
            return
        self._drop()
        if self._heats_are_over():
            self._enter_final()

    def fail(self, key: Key, reason: str) -> None:
        """Removes a survivor that could not be measured."""
        if self._index.get(key) not in self._alive:
            raise RaceError(f"Race: only a survivor can fail, got {key!r}.")
        self._leave(self._index[key], "failed", reason)
        if not self._alive:
            self._state = "complete"

    def stop(self, seconds: Mapping[Key, float] | None = None) -> None:
        """Ends the race now, with the times of an unfinished round if there are any; the best so far wins."""
        if self.done:
            return
        if seconds:
            self._append(seconds)
        self._state = "stopped"

    def _append(self, seconds: Mapping[Key, float]) -> None:
        row = np.full(len(self._keys), np.nan)
        for key, value in seconds.items():
            if not (value > 0 and math.isfinite(value)):
                raise RaceError(f"Race: a time must be positive and finite, got {value!r} for {key!r}.")
            row[self._index[key]] = math.log(value)
        (self._final if self._in_final else self._heats).append(row)

    def _leave(self, i: int, status: Status, reason: str) -> None:
        self._alive.remove(i)
        self._left[i] = (status, reason)

    # --- the heats

    def _drop(self) -> None:
        rounds, rules = len(self._heats), self.rules
        ranked, ratios = _ranked(self._heats, self._alive)
        slower = robust.centre(ratios)
        limit = dict(rules.screens).get(rounds, math.inf)
        tested = rounds >= rules.first_test
        surely = slower - robust.margin(ratios, rules.level) if tested else np.zeros_like(slower)
        for i, by, always, at_least in zip(ranked, slower, ratios.min(axis=0), surely, strict=True):
            if always > math.log(limit):
                self._leave(i, "screened", f"{math.exp(by):.1f} times as slow after {rounds} rounds")
            elif at_least > rules.tie:  # A candidate that may be as fast as the best may also win as the preferred one.
                self._leave(i, "raced out", f"{math.expm1(by):.1%} slower after {rounds} rounds")
        if rounds in rules.halvings:
            still = [i for i in ranked if i in self._alive]
            for i in still[max(rules.keep, len(still) // 2) :]:
                self._leave(i, "raced out", f"slower half after {rounds} rounds")

    def _heats_are_over(self) -> bool:
        rounds = len(self._heats)
        if len(self._alive) == 1 or rounds >= self.rules.heat_rounds:
            return True
        if rounds < self.rules.first_test:
            return False
        _, ratios = _ranked(self._heats, self._alive)
        return bool(robust.margin(ratios, 0.95).max() < self.rules.half_width)

    # --- the final

    def _enter_final(self) -> None:
        ranked, _ = _ranked(self._heats, self._alive)
        for i in ranked[self.rules.finalists :]:
            self._leave(i, "raced out", "not among the finalists")
        h = self._heuristic
        if h is not None and h in self._left and self._left[h][0] != "failed":
            del self._left[h]
            self._alive.append(h)
            self._recalled = True
        self._in_final = True

    def _final_is_over(self) -> bool:
        least, most = self.rules.final_rounds
        if len(self._final) < max(least, self._min_rounds):
            return False
        if len(self._final) >= most:
            return True
        _, ratios = _ranked(self._final, self._alive)
        slower, known_to = robust.centre(ratios), robust.margin(ratios, 0.95)
        beaten = slower - known_to > self.rules.heuristic_tie
        return bool(np.all(beaten | (known_to < self.rules.half_width)))

    # --- the result

    @property
    def result(self) -> RaceResult[Key]:
        """The result so far; final once `done`."""
        winner, rows = self._decide()
        standings = tuple(self._standing(i, winner) for i in range(len(self._keys)))
        return RaceResult(
            winner=self._keys[winner],
            complete=self._state == "complete",
            measurement=standings[winner].measurement,
            speedup=self._speedup(winner, rows),
            rounds=self.rounds,
            standings=standings,
        )

    def _decide(self) -> tuple[int, list[np.ndarray]]:
        """Returns the winner and the rounds that decided."""
        if not self._alive:
            reasons = "; ".join(f"{self._keys[i]!r}: {reason}" for i, (_, reason) in self._left.items())
            raise RaceError(f"Race: no candidate could be measured. {reasons}")
        enough = self._state == "complete" or len(self._final) >= self.rules.first_test
        rows = self._final if enough else self._heats + self._final
        h = self._heuristic
        # A heuristic that was dropped in the heats and came back for the final has no samples of the later heats.
        pool = self._alive if enough else [i for i in self._alive if i != h or not self._recalled] or self._alive
        whole = [row for row in rows if not np.isnan(row[pool]).any()]
        if not whole:  # Stopped inside the first round: there are only the samples of that round.
            whole = rows[-1:]
        entrants = [i for i in pool if whole and not np.isnan(whole[-1][i])]
        if not entrants:
            if h is None:
                raise RaceError("Race: stopped before anything was measured, and there is no heuristic to use.")
            return h, []
        return self._pick(*_ranked(whole, entrants)), rows

    def _pick(self, ranked: list[int], ratios: np.ndarray) -> int:
        slower = dict(zip(ranked, robust.centre(ratios), strict=True))
        h = self._heuristic
        if h is not None and h in slower:
            column = ratios[:, [ranked.index(h)]]
            if len(ratios) >= self.rules.first_test:
                doubtful = slower[h] <= max(robust.margin(column, 0.95)[0], self.rules.heuristic_tie)
            else:  # Too few rounds for an interval.
                doubtful = column.min() <= math.log(self.rules.clear_win)
            if doubtful:
                return h
        return min(i for i in ranked if slower[i] <= self.rules.tie)

    def _speedup(self, winner: int, rows: list[np.ndarray]) -> Ratio | None:
        if self._heuristic is None:
            return None
        both = np.array([row[[self._heuristic, winner]] for row in rows]).reshape(-1, 2)
        gain = both[~np.isnan(both).any(axis=1)] @ [[1.0], [-1.0]]
        if len(gain) < 4:
            return None
        value, known_to = robust.centre(gain)[0], robust.margin(gain, 0.95)[0]
        return Ratio(value=math.exp(value), low=math.exp(value - known_to), high=math.exp(value + known_to))

    def _standing(self, i: int, winner: int) -> Candidate:
        heats, final = (_column(rows, i) for rows in (self._heats, self._final))
        running: Status = "finalist" if self._in_final else "unfinished"
        status, reason = ("winner", "") if i == winner else self._left.get(i, (running, ""))
        return Candidate(
            cfg=self._keys[i],
            status=status,
            reason=reason,
            measurement=Measurement.of(final if len(final) else heats, self._timer),
        )


def drive(race: Race[Key], measure: Callable[[Key], float]) -> RaceResult[Key]:
    """Runs a race to its end, with `measure` giving the seconds of one run."""
    while not race.done:
        race.record({key: measure(key) for key in race.next_round()})
    return race.result


def _ranked(rows: list[np.ndarray], columns: list[int]) -> tuple[list[int], np.ndarray]:
    """Returns the columns, best first, and their log-ratios to the best in every round."""
    x = np.stack(rows)[:, columns]
    # Centred by round before ranking: a slow round must not distort the ranking.
    order = np.argsort(robust.centre(x - np.median(x, axis=1, keepdims=True)), kind="stable")
    x = x[:, order]
    return [columns[j] for j in order], x - x[:, :1]


def _column(rows: list[np.ndarray], i: int) -> np.ndarray:
    """Returns one candidate's seconds."""
    column = np.array([row[i] for row in rows])
    return np.exp(column[~np.isnan(column)])
