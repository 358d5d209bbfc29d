"""A call that nobody tuned borrows from the nearest that somebody did."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ejkernel.ops.config import transfer
from ejkernel.ops.store.persistent import PersistentCache
from ejkernel.ops.utils.fingerprint import short_hash


@dataclasses.dataclass(frozen=True)
class Config:
    block: int


def array(*shape, dtype="float32"):
    return {"dtype": dtype, "shape": list(shape)}


def signature(*args, **changes):
    base = {"op": "op", "version": "0", "args": list(args), "kwargs": {}, "batch_axes": None, "context": None}
    return base | changes


@pytest.fixture
def cache(tmp_path):
    return PersistentCache(tmp_path)


def tune(cache, sig, cfg, **options):
    cache.put("dev", "op", short_hash(sig), cfg, signature=sig, **options)


def ask(cache, sig, **options):
    found = transfer.nearest(cache, "dev", "op", sig, cfg_type=Config, **options)
    return found and found.cfg.block


def test_the_nearest_in_log_space_wins(cache):
    for n in (128, 1000, 16384):
        tune(cache, signature(array(n, n)), Config(n))
    assert ask(cache, signature(array(2000, 2000))) == 1000
    assert ask(cache, signature(array(4000, 4000))) == 1000  # 16384 is more than four times as much.
    assert ask(cache, signature(array(4096, 4096))) == 16384
    assert ask(cache, signature(array(32, 512))) == 128
    assert ask(cache, signature(array(31, 512))) is None, "a size that differs too much"
    assert ask(cache, signature(array(65536, 65536))) == 16384
    assert ask(cache, signature(array(65537, 65536))) is None


def test_nothing_is_stored(cache):
    tune(cache, signature(array(8)), Config(8))
    assert ask(cache, signature(array(9))) == 8
    assert len(cache) == 1


TUNED = signature(array(8, 8), {"static": True}, kwargs={"scale": {"float": None}})


@pytest.mark.parametrize(
    "other",
    [
        signature(array(9, 9), {"static": True}),
        signature(array(9, 9), {"static": False}, kwargs={"scale": {"float": None}}),
        signature(array(9, 9, dtype="bfloat16"), {"static": True}, kwargs={"scale": {"float": None}}),
        signature(array(9), {"static": True}, kwargs={"scale": {"float": None}}),
        signature(array(9, 9), {"static": True}, array(1), kwargs={"scale": {"float": None}}),
        signature(array(9, 9), {"static": True}, kwargs={"scale": {"float": None}}, version="1"),
        signature(array(9, 9), {"static": True}, kwargs={"scale": {"float": None}}, context="shard_map"),
        signature(array(9, 9), {"static": True}, kwargs={"scale": {"float": None}}, batch_axes=[0]),
        {"op": "op"},
    ],
)
def test_only_shapes_may_differ(cache, other):
    tune(cache, TUNED, Config(1))
    assert ask(cache, other) is None
    assert ask(cache, TUNED | {"args": [array(9, 9), {"static": True}]}) == 1


def test_a_static_that_looks_like_an_array_is_not_a_shape(cache):
    tune(cache, signature(array(8), {"static": array(4)}), Config(1))
    assert ask(cache, signature(array(9), {"static": array(5)})) is None
    assert ask(cache, signature(array(9), {"static": array(4)})) == 1


def test_nested_containers_are_compared_whole(cache):
    tree = lambda n, key: {"node": "dict", "aux": None, "children": [[key, array(n)], ["b", array(3, n)]]}
    tune(cache, signature(tree(8, "a")), Config(1))
    assert ask(cache, signature(tree(16, "a"))) == 1
    assert ask(cache, signature(tree(16, "c"))) is None


def test_what_the_kernel_refuses_is_passed_over(cache):
    for n in (10, 20, 40):
        tune(cache, signature(array(n)), Config(n))
    assert ask(cache, signature(array(11)), accept=lambda entry: entry.cfg.block > 10) == 20
    assert ask(cache, signature(array(11)), accept=lambda entry: False) is None


def test_the_same_shape_is_not_its_own_neighbour(cache):
    tune(cache, signature(array(8)), Config(8))
    assert ask(cache, signature(array(8))) is None


def test_other_ops_and_devices_do_not_count(cache):
    sig = signature(array(8))
    cache.put("dev", "other", short_hash(sig), Config(1), signature=sig)
    cache.put("other", "op", short_hash(sig), Config(1), signature=sig)
    cache.put("dev", "op", "no signature", Config(1))
    assert ask(cache, signature(array(9))) is None


def test_a_complete_entry_is_preferred_at_equal_distance(cache):
    tune(cache, signature(array(5, 10)), Config(1), complete=False)
    tune(cache, signature(array(10, 5)), Config(2))
    assert ask(cache, signature(array(10, 10))) == 2


def test_entries_of_other_processes_are_seen(cache, tmp_path):
    assert ask(cache, signature(array(9))) is None
    tune(PersistentCache(tmp_path), signature(array(8)), Config(8))
    assert ask(cache, signature(array(9))) == 8
    tune(cache, signature(array(10)), Config(10))
    assert ask(cache, signature(array(11))) == 10
    cache.delete("dev", "op", short_hash(signature(array(10))))
    assert ask(cache, signature(array(11))) == 8


def test_the_directory_is_read_once(cache, monkeypatch):
    tune(cache, signature(array(8)), Config(8))
    assert ask(cache, signature(array(9))) == 8
    monkeypatch.setattr(cache, "entries", lambda *_: pytest.fail("read again"))
    assert ask(cache, signature(array(10))) == 8


class KernelA:
    def run(self, x):
        return x


class KernelB:
    def run(self, x):
        return x + 1


@pytest.mark.parametrize(("stale", "expected"), [("use", 8), ("retune", None), ("ignore", None), (None, 8)])
def test_stale_neighbours_follow_the_policy(cache, stale, expected):
    tune(cache, signature(array(8)), Config(8), kernel=KernelA)
    assert ask(cache, signature(array(9)), kernel=KernelA, stale=stale) == 8
    assert ask(cache, signature(array(9)), kernel=KernelB, stale=stale) == expected


sizes = st.lists(st.integers(0, 10**6), min_size=2, max_size=2).map(tuple)


@given(sizes, sizes, sizes)
def test_distance_is_a_distance(a, b, c):
    assert transfer.distance(a, b) == transfer.distance(b, a) >= 0
    assert (transfer.distance(a, b) == 0) == (a == b)
    assert transfer.distance(a, c) <= transfer.distance(a, b) + transfer.distance(b, c) + 1e-9
