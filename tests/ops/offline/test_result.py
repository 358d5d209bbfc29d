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
from ejkernel.ops import (
    Autotuner,
    AutotuningResult,
    ConfigSelectorChain,
    Entry,
    Invocation,
    PersistentCache,
    autotune_recorded,
    device_fingerprint,
    get_invocations,
    overlay_cache,
    record_invocation,
)
from ejkernel.ops.offline.result import ResultFileError
from ejkernel.ops.store import layers, merging, packs, upkeep
from ejkernel.ops.store.entry import make
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


def old_dump(path):
    """A file as versions wrote it whose results were no packs."""
    cfg = {"type": "tests.support:Scale", "value": {"factor": 2}}
    entries = [{"op_id": "a", "call_key": "1", "cfg": cfg, "statistics": {"timer": "wall"}}]
    data = {"schema": 1, "kind": "ejkernel tuning result", "device": "d", "entries": entries, "unmatched": ["b 2: x"]}
    path.write_text(json.dumps(data))


def new_dump(path):
    AutotuningResult("d", (Entry("a", "1", Scale(2), {"timer": "wall"}),), ("b 2: x",)).dump(path)


@pytest.mark.parametrize("dump", [old_dump, new_dump])
def test_file_of_a_result_is_a_pack(tmp_path, monkeypatch, dump):
    path = tmp_path / "tuned.json"
    dump(path)
    assert AutotuningResult.load(path) == AutotuningResult("d", (Entry("a", "1", Scale(2)),))
    assert AutotuningResult.load(path).unmatched == ("b 2: x",)
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "store"))
    monkeypatch.setenv("EJKERNEL_CACHE_PACKS", str(path))
    found = PersistentCache().lookup("d", "a", "1", cfg_type=Scale)
    assert (found.cfg, found.layer, found.origin, found.statistics) == (Scale(2), "tuned", "pack", {"timer": "wall"})
    assert not [problem for problem in upkeep.verify(path) if problem.level == "error"]
    mine = PersistentCache(tmp_path / "mine")
    assert merging.add_all(mine, layers.entries_of(path)).added == 1
    assert mine.get("d", "a", "1", cfg_type=Scale) == Scale(2)


def test_pack_of_one_device_is_a_result_and_of_two_is_none(tmp_path):
    one, two = (make((device, "a", "1"), Scale(2)) for device in ("d", "e"))
    packs.write(tmp_path / "one.json", [one])
    packs.write(tmp_path / "two.json", [one, two])
    assert AutotuningResult.load(tmp_path / "one.json") == AutotuningResult("d", (Entry("a", "1", Scale(2)),))
    with pytest.raises(ResultFileError, match=r"two\.json: a result is of one device, this has d, e"):
        AutotuningResult.load(tmp_path / "two.json")


def test_tuned_result_keeps_signature_provenance_and_source(tmp_path):
    selector, kernel = ConfigSelectorChain(), Counting("counting")
    inv = Invocation(kernel=kernel, args=(X,), kwargs={})
    record_invocation(kernel, inv)
    autotune_recorded(get_invocations(), selector, tuner=Autotuner(timer="wall", progress=False)).dump(
        tmp_path / "r.json"
    )
    (entry,) = packs.read(tmp_path / "r.json").entries
    assert entry.signature == inv.signature
    assert {"jax", "kernel_source", "timer", "device"} <= set(entry.provenance)
    assert entry.complete
    # What it says of the source is what a lookup compares.
    cache = PersistentCache(tmp_path / "store", packs=tmp_path / "r.json")
    assert cache.lookup(*inv.key, cfg_type=Scale, kernel=kernel).stale is None


def test_damaged_entry_of_a_result_is_named(tmp_path):
    path = tmp_path / "r.json"
    old_dump(path)
    data = json.loads(path.read_text())
    data["entries"].append({"op_id": 3})
    path.write_text(json.dumps(data))
    with pytest.raises(ResultFileError, match=r"r\.json: entry 1: op_id: must be a str, got 3"):
        AutotuningResult.load(path)
    assert len(packs.read(path).entries) == 1


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


def test_a_printed_entry_is_short_whatever_was_measured():
    entry = Entry("a", "1", 2, statistics={"candidates": [{}] * 99}, signature={"op": "a"}, provenance={"jax": "1"})
    assert repr(entry) == "Entry(op_id='a', call_key='1', cfg=2, complete=True)"


def test_result_travels_between_processes():
    result = AutotuningResult("d", (Entry("a", "1", Scale(2)),), ("x",))
    copy = pickle.loads(pickle.dumps(result))
    assert copy == result
    assert copy.unmatched == ("x",)
    with copy:
        np.testing.assert_array_equal(X, X)
