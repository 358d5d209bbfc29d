"""What is left of a tuning, and which of it counts later."""

import importlib.util
import sys

import pytest

from ejkernel.ops import PersistentCache
from ejkernel.ops.tuning.bench import Rejected
from ejkernel.ops.tuning.history import Decided, History
from ejkernel.ops.tuning.standings import Measurement
from ejkernel.ops.utils.serialize import cfg_id
from tests.tuning_kernels import Doubling, Referenced, Work

KEY = ("device", "op", "0" * 16)


@pytest.fixture
def again(tmp_path):
    """Opens the history anew, as the next process would."""
    return lambda kernel=Doubling, **kwargs: History(PersistentCache(tmp_path), KEY, kernel(), **kwargs)


def test_rounds_of_an_interrupted_race_come_back(again):
    first = again()
    assert first.start_race(["a", "b"], "wall") == []
    first.add_round({"a": 1.0, "b": 2.0})
    second = again()
    assert second.start_race(["b", "a"], "wall") == [{"a": 1.0, "b": 2.0}]
    second.add_round({"a": 1.5, "b": 2.5})
    assert len(again().start_race(["a", "b"], "wall")) == 2


def test_rounds_serve_a_race_among_fewer(again):
    first = again()
    first.start_race(["a", "b", "c"], "wall")
    first.add_round({"a": 1.0, "b": 2.0, "c": 3.0})
    assert len(first.start_race(["a", "c"], "wall")) == 1
    assert len(again().start_race(["a"], "wall")) == 1


@pytest.mark.parametrize(("ids", "clock"), [(["a", "b", "c"], "wall"), (["a", "b"], "cupti")])
def test_rounds_do_not_serve_more_entrants_or_another_clock(again, ids, clock):
    first = again()
    first.start_race(["a", "b"], "wall")
    first.add_round({"a": 1.0, "b": 2.0})
    assert again().start_race(ids, clock) == []
    assert again().start_race(["a"], clock) == []


def test_decided_race_is_not_run_on(again):
    first = again()
    first.start_race(["a", "b"], "wall")
    first.add_round({"a": 1.0, "b": 2.0})
    first.decide(Decided(winner="a", seconds={"a": 1.0, "b": 2.0}))
    assert again().start_race(["a", "b"], "wall") == []
    measurement = Measurement(median_ms=1, low_ms=0.9, high_ms=1.1, samples=8, timer="wall")
    first.decide(Decided(winner="c", seconds={"a": 1.1, "c": 0.5}, measurement=measurement))
    known = again().decided
    assert (known.winner, known.seconds) == ("c", {"a": 1.1, "b": 2.0, "c": 0.5})
    assert known.measurement == measurement


def test_other_source_or_aim_knows_nothing(again):
    first = again()
    first.decide(Decided(winner="a"))
    first.reject(Work(1), Rejected("wrong", "all wrong"))
    first.finish("space")
    for other in (again(Referenced), again(aim="cold")):
        assert other.decided is None
        assert not other.rejected
        assert not other.has_searched("space")
    assert again().has_searched("space")


def test_rejection_is_remembered_unless_its_limit_was_widened(again):
    again().reject(Work(1), Rejected("failed", "slow", ("run_s", 5.0)))
    again().reject(Work(2), Rejected("wrong", "off by one"))
    assert again().rejected == {
        cfg_id(Work(1)): Rejected("failed", "slow"),
        cfg_id(Work(2)): Rejected("wrong", "off by one"),
    }
    assert cfg_id(Work(1)) in again(limits={"run_s": 5.0}).rejected
    assert set(again(limits={"run_s": 6.0}).rejected) == {cfg_id(Work(2))}


def test_configs_have_names_by_content():
    assert cfg_id(Work(1)) == cfg_id(Work(1))
    assert cfg_id(Work(1)) != cfg_id(Work(2))
    assert cfg_id({"block": 1}) == cfg_id({"block": 1})
    assert cfg_id(print) == cfg_id(print)  # No data, but still a name.


def test_history_without_a_store_is_kept_for_the_tuning():
    history = History()
    history.start_race(["a", "b"], "wall")
    history.add_round({"a": 1.0, "b": 2.0})
    assert len(history.start_race(["a"], "wall")) == 1


def test_longer_candidate_list_keeps_what_is_known_and_another_computation_does_not(tmp_path, monkeypatch):
    source = """
from ejkernel.ops import Kernel
from tests.tuning_kernels import Work

def more():
    return {more}

class Edited(Kernel[Work, object]):
    def run(self, x, *, cfg):
        return {run}

    def heuristic_cfg(self, inv):
        return Work(1)

    def config_space(self, inv):
        return [Work(1), *more()]
"""

    def at(folder, **parts):
        path = tmp_path / folder / "edited.py"
        path.parent.mkdir()
        path.write_text(source.format(**parts))
        spec = importlib.util.spec_from_file_location("edited", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "edited", module)
        spec.loader.exec_module(module)
        return History(PersistentCache(tmp_path / "store"), KEY, module.Edited())

    at("one", more="[]", run="2 * x").decide(Decided(winner="a"))
    assert at("two", more="[Work(2)]", run="2 * x").decided is not None
    assert at("three", more="[]", run="x + x").decided is None


@pytest.mark.parametrize(
    "line",
    [
        {"decided": {"winner": "x", "zzz": 1}}, {"decided": {}}, {"decided": None},
        {"decided": {"winner": "x", "seconds": 3}}, {"decided": {"winner": "x", "seconds": {"a": "fast"}}},
        {"rejected": {}}, {"rejected": None}, {"rejected": [1]}, {"race": None}, {"race": {"entrants": 3}},
        {"rejected": {"id": "a", "outcome": "wrong", "reason": "", "limit": 5}},
        {"round": None}, {"round": {"a": "b"}}, {"unheard": 1}, {"round": {"a": 0.0, "b": -1.0}},
        {"round": {"a": 1e400, "b": True}}, {"searched": "x", "round": 3},
        {"decided": {"winner": "x", "measurement": {"median_ms": 1.0}}}, {"decided": {"winner": "x", "speedup": 3}},
        {"decided": {"winner": "x", "speedup": {"value": 1, "low": 1, "high": "2"}}},
        {"decided": {"winner": ["x"]}}, {"decided": {"winner": "x", "seconds": {"a": -1.0}}},
        {"rejected": {"id": "a", "outcome": "gone", "reason": ""}},
        {"rejected": {"id": "a", "outcome": "wrong", "reason": 3}},
        {"rejected": {"id": "a", "outcome": "failed", "reason": "", "limit": ["run_s", "long"]}},
        {"race": {"goes_on": True, "clock": "wall", "entrants": [["a"]]}},
    ],
    ids=str,
)  # fmt: skip
def test_line_that_means_nothing_here_is_passed_over(tmp_path, again, line):
    first = again()
    first.start_race(["a", "b"], "wall")
    first.add_round({"a": 1.0, "b": 2.0})
    first.reject(Work(1), Rejected("wrong", "all wrong"))
    store = PersistentCache(tmp_path)
    store.append_trial(KEY, {"at": store.read_trials(KEY)[0]["at"], **line})
    second = again()
    assert second.decided is None
    assert set(second.rejected) == {cfg_id(Work(1))}
    assert second.start_race(["a", "b"], "wall") == [{"a": 1.0, "b": 2.0}]
