import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.racing import NOISES, RULES, Machine, Noise, race, score
from ejkernel.ops.tuning.racing import WALL_CLOCK, Race, RaceError, RaceRules, drive
from tests.support import fully

ROOT = Path(__file__).parents[3]


def exact(times):
    return lambda key: times[key]


def test_the_fastest_wins_without_noise():
    times = {"slow": 3e-3, "fast": 1e-3, "middle": 2e-3}
    result = drive(Race(list(times), heuristic="middle"), exact(times))
    assert result.winner == "fast"
    assert result.complete
    assert result.measurement.median_ms == pytest.approx(1)
    assert result.measurement.samples == 16
    assert result.speedup.low == pytest.approx(2) == result.speedup.high


# The shipped rules meet their goals under each kind of noise; `benchmarks/racing.py` shows the same for 400 machines.
@pytest.mark.parametrize(
    "name",
    ["white 2 %", "all together", "lost cores", *fully("drifting clock", "heavy tail", "bias 0.4 %")],
)
def test_regret_and_cost_meet_their_goals_on_simulated_machines(name):
    trial = score(RULES["race"], NOISES[name], trials=60)
    assert trial.regret.mean() <= 0.0025
    assert np.mean(trial.regret > 0.01) <= 0.05
    assert trial.cost <= 1000
    assert trial.slower_than_guess <= 0.02


def test_measuring_in_turn_is_fooled_by_a_drifting_clock():
    # Guards the simulation: if its noise were too tame, the goals above would mean nothing.
    trial = score(RULES["10 runs, mean"], NOISES["drifting clock"], trials=30)
    assert trial.regret.mean() > 0.01


def test_the_intervals_cover_the_truth():
    hits = [[], []]
    for seed in range(80):
        machine = Machine(seed, Noise(wander=0.01, tail=0.03), candidates=6)
        result = race(machine, seed=seed)
        speedup = machine.truth[machine.heuristic] / machine.truth[result.winner]
        hits[0].append(result.speedup.low <= speedup * (1 + 1e-12) and speedup * (1 - 1e-12) <= result.speedup.high)
        hits[1].append(result.measurement.low_ms <= result.measurement.median_ms <= result.measurement.high_ms)
    assert np.mean(hits[0]) >= 0.88
    assert all(hits[1])


def test_the_heuristic_keeps_ties():
    times = {"guess": 1.008, "rival": 1.0}
    assert drive(Race(list(times), heuristic="guess"), exact(times)).winner == "guess"
    assert drive(Race(list(times), heuristic=None), exact(times)).winner == "rival"


def test_a_doubtful_gain_does_not_unseat_the_heuristic():
    rng = np.random.default_rng(0)
    rules = RaceRules(final_rounds=(16, 16))
    wins = 0
    for seed in range(40):
        result = drive(Race([0, 1], heuristic=0, seed=seed, rules=rules), lambda key: np.exp(rng.normal(0, 0.2)))
        wins += result.winner == 0
    assert wins >= 36


def test_among_equals_the_earlier_candidate_wins():
    times = {"a": 1.001, "b": 1.0, "c": 1.1}
    assert drive(Race(["a", "b", "c"]), exact(times)).winner == "a"
    assert drive(Race(["b", "a", "c"]), exact(times)).winner == "b"
    assert drive(Race(["c", "a", "b"]), exact(times)).winner == "a"


def test_a_hopeless_candidate_runs_twice():
    times = {"good": 1.0, "hopeless": 100.0, "poor": 4.0}
    standings = {s.cfg: s for s in drive(Race(list(times)), exact(times)).standings}
    assert standings["hopeless"].measurement.samples == 2
    assert standings["hopeless"].status == "screened"
    assert standings["poor"].measurement.samples == 4
    assert "4.0 times as slow after 4 rounds" in standings["poor"].reason


@pytest.mark.parametrize("at", [0, 1, 3, 5])
def test_one_sample_that_lost_its_core_throws_nobody_out(at):
    times, rounds = {"guess": 1.0, "fast": 0.5, "slow": 5.0}, itertools.count()
    contest = Race(list(times), heuristic="guess")
    while not contest.done:
        hiccup = {"fast": 100.0} if next(rounds) == at else {}
        contest.record({key: (times | hiccup)[key] for key in contest.next_round()})
    assert contest.result.winner == "fast"


def test_a_beaten_heuristic_is_measured_again_in_the_final():
    times = {"good": 1.0, "guess": 5.0}
    result = drive(Race(list(times), heuristic="guess"), exact(times))
    guess = result.standings[1]
    assert (guess.status, guess.measurement.samples) == ("finalist", 16)
    assert result.speedup.value == pytest.approx(5)


def test_min_rounds_is_the_least_number_of_reported_samples():
    times = {"a": 1.0, "b": 2.0}
    assert drive(Race(list(times), min_rounds=100), exact(times)).measurement.samples == 100


def test_every_round_runs_each_survivor_once_in_a_new_order():
    contest = Race(range(20), seed=3)
    orders = []
    for _ in range(3):
        orders.append(contest.next_round())
        contest.record(dict.fromkeys(orders[-1], 1.0))
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_replaying_the_records_gives_the_same_race():
    machine, records = Machine(5, NOISES["all together"], candidates=12), []
    original = Race(range(12), heuristic=machine.heuristic, seed=1)
    while not original.done:
        order = original.next_round()
        records.append(dict(zip(order, machine.run(np.array(order)), strict=True)))
        original.record(records[-1])

    resumed = Race(range(12), heuristic=machine.heuristic, seed=1)
    for row in records[:7]:
        resumed.record(row)
    assert set(resumed.next_round()) == set(records[7])
    for row in records[7:]:
        resumed.record(row)
    assert resumed.done
    assert resumed.result == original.result


def test_a_stopped_race_gives_the_best_so_far_and_says_so():
    times = {"guess": 2.0, "fast": 1.0, "slow": 3.0}
    contest = Race(list(times), heuristic="guess")
    contest.record(times)
    contest.stop()
    assert contest.done
    assert contest.result.winner == "fast"
    assert not contest.result.complete
    assert contest.result.speedup is None  # One sample has no interval.


@pytest.mark.parametrize("rounds", [1, 2, 3, 5])
def test_few_noisy_rounds_do_not_unseat_the_heuristic(rounds):
    # The guess is the fastest, the others up to a quarter slower, and a sample is off by a tenth.
    for seed in range(40):
        rng, contest = np.random.default_rng(seed), Race(range(16), heuristic=0, seed=seed)
        for _ in range(rounds):
            contest.record({key: (1 + key / 64) * np.exp(rng.uniform(-0.1, 0.1)) for key in contest.next_round()})
        contest.stop()
        assert contest.result.winner == 0


@pytest.mark.parametrize("rounds", [1, 5, 7, 35, 40])
def test_a_race_stopped_anywhere_picks_the_truly_fast(rounds):
    machine = Machine(11, Noise(white=0.005), candidates=16)
    contest = Race(range(16), heuristic=machine.heuristic)
    while contest.rounds < rounds and not contest.done:
        order = contest.next_round()
        contest.record(dict(zip(order, machine.run(np.array(order)), strict=True)))
    order = contest.next_round()[:2]
    contest.stop(dict(zip(order, machine.run(np.array(order)), strict=True)))
    assert machine.truth[contest.result.winner] < 1.02


def test_stopped_early_in_the_final_the_heats_still_count():
    contest = Race(["worse", "good", "guess"], heuristic="guess")
    while contest.phase == "heats":
        times = {"worse": 1.02 * (1.03 if contest.rounds % 2 else 0.97), "good": 1.0, "guess": 20.0}
        contest.record({key: times[key] for key in contest.next_round()})
    assert contest.survivors == ["worse", "good", "guess"]
    contest.record({"worse": 0.5, "good": 1.0, "guess": 20.0})  # One lucky sample against all of the heats.
    contest.stop()
    assert contest.result.winner == "good"


def test_stopping_inside_the_first_round_uses_what_was_measured():
    contest = Race("abcd", heuristic="a")
    contest.stop({"b": 1.0, "c": 2.0})
    assert contest.result.winner == "b"


def test_stopping_before_any_sample_leaves_the_heuristic():
    contest = Race("ab", heuristic="b")
    contest.stop()
    assert (contest.result.winner, contest.result.measurement) == ("b", None)
    contest = Race("ab")
    contest.stop()
    with pytest.raises(RaceError, match="no heuristic"):
        _ = contest.result


def test_a_failing_candidate_leaves_with_its_reason():
    contest = Race("abc", heuristic="a")
    while not contest.done:
        order = contest.next_round()
        if "b" in order and contest.rounds == 2:
            contest.fail("b", "out of memory")
            order.remove("b")
        contest.record({key: {"a": 2.0, "b": 1.0, "c": 1.5}[key] for key in order})
    b = contest.result.standings[1]
    assert (b.status, b.reason, b.measurement.samples) == ("failed", "out of memory", 2)
    assert contest.result.winner == "c"


def test_a_failed_heuristic_is_not_recalled():
    contest = Race("ab", heuristic="a")
    contest.fail("a", "crashed")
    result = drive(contest, exact({"b": 1.0}))
    assert (result.winner, result.speedup) == ("b", None)


def test_when_all_fail_the_reasons_are_told():
    contest = Race("ab")
    contest.fail("a", "crashed")
    contest.fail("b", "timed out")
    assert contest.done
    with pytest.raises(RaceError, match=r"'a': crashed; 'b': timed out"):
        _ = contest.result


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: Race([]), "at least one"),
        (lambda: Race("aa"), "distinct"),
        (lambda: Race("ab", heuristic="c"), "Add it"),
        (lambda: Race("ab").record({"a": 1.0}), r"missing \['b'\]"),
        (lambda: Race("ab").record({"a": 1.0, "b": float("nan")}), "positive and finite, got nan for 'b'"),
        (lambda: Race("ab").record({"a": 0.0, "b": 1.0}), "positive and finite"),
        (lambda: Race("ab").fail("c", ""), "only a survivor"),
    ],
)
def test_misuse_is_refused_with_the_way_out(act, message):
    with pytest.raises(RaceError, match=message):
        act()


def test_a_finished_race_takes_no_more_rounds():
    contest = Race("ab")
    drive(contest, lambda key: 1.0)
    with pytest.raises(RaceError, match="finished"):
        contest.record({"a": 1.0, "b": 1.0})


def test_wall_clock_rules_measure_longer():
    noise = NOISES["busy wall clock"]
    assert race(Machine(0, noise), rules=WALL_CLOCK).rounds > race(Machine(0, noise)).rounds


def test_racing_needs_no_jax():
    # Bare packages stand in for the real ones, whose other modules do need it.
    code = """
import importlib, sys, types
for name in ("ejkernel", "ejkernel.ops", "ejkernel.ops.execution"):
    package = types.ModuleType(name)
    package.__path__ = [name.replace(".", "/")]
    sys.modules[name] = package
importlib.import_module("ejkernel.ops.tuning.racing")
sys.exit("jax" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
