"""Results of tuning: files, joins and overlays."""

import json
import pickle
import threading
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.errors import EjkernelError
from ejkernel.ops import AutotuningResult, Entry, device_fingerprint, overlay_cache
from ejkernel.ops.offline.result import ResultFileError
from tests.support import Plain, Scale, new_executor

X = jnp.ones((3,)) * 0.5


class Counting(Plain):
    traces = 0

    def run(self, x, *, cfg):
        type(self).traces += 1
        return x * cfg.factor


@pytest.fixture
def setting():
    Counting.traces = 0
    executor, kernel = new_executor(), Counting("counting")
    key = executor.explain(kernel, X).key
    result = lambda factor: AutotuningResult(key[0], (Entry(key[1], key[2], Scale(factor)),))
    jitted = jax.jit(lambda x: executor(kernel, x))
    return result, lambda: float(jitted(X)[0] / X[0])


def test_result_reaches_functions_that_were_jitted_before(setting):
    result, factor = setting
    assert factor() == 1
    with result(3) as entered:
        assert entered == result(3)
        assert factor() == 3
    assert factor() == 1
    with result(4).as_overlay():
        assert factor() == 4


def test_overlay_of_a_result_is_a_mapping_and_a_context(setting):
    result, factor = setting
    overlay = result(4).as_overlay()
    assert isinstance(overlay, Mapping)
    assert dict(overlay) == result(4).as_mapping()
    assert len(overlay) == 1
    with overlay_cache(overlay):
        assert factor() == 4
    with overlay, overlay:
        assert factor() == 4
    with overlay_cache(result(3).as_overlay()), overlay:
        assert factor() == 4
    assert factor() == 1


def test_result_is_re_entrant(setting):
    result, factor = setting
    three = result(3)
    with three, result(4):
        assert factor() == 4
        with three:
            assert factor() == 3
        assert factor() == 4
    assert factor() == 1


def test_result_survives_an_exception(setting):
    result, factor = setting
    three = result(3)
    with pytest.raises(ZeroDivisionError), three:
        1 / 0  # noqa: B018
    assert factor() == 1


def test_equal_results_share_a_trace(setting):
    result, factor = setting
    with result(3):
        factor()
    traces = Counting.traces
    with result(3):
        assert factor() == 3
    assert Counting.traces == traces


def test_one_result_serves_many_threads_and_no_others(setting):
    result, factor = setting
    three, seen, barrier = result(3), [], threading.Barrier(5)

    def inside():
        for _ in range(3):
            with three:
                barrier.wait(30)
                seen.append(factor())
                barrier.wait(30)

    def outside():
        for _ in range(3):
            barrier.wait(30)
            seen.append(factor() + 100)
            barrier.wait(30)

    threads = [threading.Thread(target=inside) for _ in range(4)] + [threading.Thread(target=outside)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [3] * 12 + [101] * 3


def test_join_prefers_the_right_hand_side():
    left = AutotuningResult("d", (Entry("a", "1", Scale(1)), Entry("b", "2", Scale(2))), ("x",))
    right = AutotuningResult("d", [Entry("b", "2", Scale(3)), Entry("c", "3", Scale(4))], ("y",))
    joined = left | right
    assert [(e.op_id, e.cfg.factor) for e in joined] == [("a", 1), ("b", 3), ("c", 4)]
    assert joined.unmatched == ("x", "y")
    assert len(joined) == 3
    with pytest.raises(EjkernelError, match="different devices"):
        left | AutotuningResult("other")
    with pytest.raises(TypeError):
        left | 3


def test_dump_and_load_give_the_same_result(tmp_path):
    result = AutotuningResult(
        entries=(Entry("a", "1", Scale(2), {"timer": "wall", "rounds": 3}),), unmatched=("b 2: no kernel",)
    )
    result.dump(tmp_path / "r.json")
    loaded = AutotuningResult.load(tmp_path / "r.json")
    assert loaded == result
    assert loaded.device == device_fingerprint()
    assert loaded.entries[0].statistics == {"timer": "wall", "rounds": 3}
    assert loaded.unmatched == result.unmatched
    assert type(loaded.entries[0].cfg) is Scale


@pytest.mark.parametrize("text", ["", "[]", "{}", "not json", '{"schema": 1}', '{"schema": 99, "entries": []}'])
def test_file_that_is_no_result_is_named(tmp_path, text):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ResultFileError, match=r"r\.json"):
        AutotuningResult.load(path)


def test_file_is_plain_json(tmp_path):
    AutotuningResult("d", (Entry("a", "1", Scale(2)),)).dump(tmp_path / "r.json")
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["entries"][0]["op_id"] == "a"


def test_result_travels_between_processes():
    result = AutotuningResult("d", (Entry("a", "1", Scale(2)),), ("x",))
    copy = pickle.loads(pickle.dumps(result))
    assert copy == result
    assert copy.unmatched == ("x",)
    with copy:
        np.testing.assert_array_equal(X, X)
