"""One way to tell configs apart, for everybody who does: `C(True)`, `C(1)` and `C(1.0)` are three."""

import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pydantic
import pytest

from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Invocation, Kernel, PersistentCache, overlay_cache
from ejkernel.ops.config import asking
from ejkernel.ops.core.backend import Backend
from ejkernel.ops.store import merging
from ejkernel.ops.store.entry import make
from ejkernel.ops.tuning import search
from ejkernel.ops.tuning.bench import Rejected
from ejkernel.ops.tuning.history import History
from ejkernel.ops.tuning.roster import Roster
from ejkernel.ops.utils.canonical import canonical, distinct, same_cfg
from ejkernel.ops.utils.serialize import cfg_id


@dataclasses.dataclass(frozen=True)
class C:
    x: Any = 1


class Pair(NamedTuple):
    x: Any


class Model(pydantic.BaseModel, frozen=True):
    x: Any


VALUES = [True, 1, 1.0, np.int32(1), np.float32(1), "1", 0.0, -0.0, 0, False, math.nan, math.inf, None, (1,), [1]]
MAKERS = {
    "dataclass": C,
    "NamedTuple": Pair,
    "model": lambda x: Model(x=x),
    "dict": lambda x: {"x": x},
    "list": lambda x: [x],
    "tuple inside": lambda x: C((x,)),
    "dict inside": lambda x: C({"y": x}),
    "dataclass inside": lambda x: C(C(x)),
}
K = ("device", "op", "0123456789abcdef")


@pytest.mark.parametrize("make_cfg", MAKERS.values(), ids=MAKERS)
def test_every_value_makes_a_config_of_its_own_in_memory_and_in_files(make_cfg):
    cfgs, again = ([make_cfg(x) for x in VALUES] for _ in range(2))
    for tell in (canonical, cfg_id):
        assert len({tell(cfg) for cfg in cfgs}) == len(VALUES), tell
        assert [tell(cfg) for cfg in cfgs] == [tell(cfg) for cfg in again], tell
    assert len(distinct([*cfgs, *again])) == len(VALUES)
    for (i, a), (j, b) in itertools.product(enumerate(cfgs), enumerate(again)):
        assert same_cfg(a, b) == (i == j), (a, b)


def test_another_nan_is_the_same_config():
    assert same_cfg(C(math.nan), C(float("nan")))
    assert same_cfg(Model(x=math.nan), Model(x=float("nan")))
    assert cfg_id(C(math.nan)) == cfg_id(C(float("nan")))


def test_what_has_no_canonical_form_is_itself_alone():
    one, two = bytearray(b"a"), bytearray(b"a")
    assert distinct([one, two, one]) == [one, two]
    assert not same_cfg(one, two)
    with pytest.raises(TypeError):
        canonical(one)


NUMBERS = [C(True), C(1), C(1.0), C(0.0), C(-0.0), C(math.nan)]


@pytest.mark.parametrize("space", [NUMBERS, {"x": [cfg.x for cfg in NUMBERS]}], ids=["list", "axes"])
def test_candidates_that_python_takes_for_equal_are_all_tried(space):
    proposed = search.choose(search.Space.of(space, C(1)), [C(1)]).propose([])
    assert len(proposed) == len(NUMBERS)
    assert {cfg_id(cfg) for cfg in proposed} == {cfg_id(cfg) for cfg in NUMBERS}


def test_a_large_space_keeps_them_apart_too():
    pattern = search.Pattern(search.Space.of({"x": [cfg.x for cfg in NUMBERS]}, C(1)), [C(1)])
    trials = []
    while batch := pattern.propose(trials):
        trials += [search.Trial(cfg, 1.0) for cfg in batch]
    assert sorted(cfg_id(t.cfg) for t in trials) == sorted(cfg_id(cfg) for cfg in NUMBERS)


class Axes(Kernel[C, Any]):
    def run(self, x, *, cfg):
        return x

    def heuristic_cfg(self, inv):
        return C(2)

    def config_space(self, inv):
        return {"x": (1, 2)}


def test_a_config_is_on_an_axis_only_with_its_type():
    kernel = Axes()
    inv = Invocation(kernel=kernel, args=(jnp.ones(2),), kwargs={})
    assert [asking.accepts(inv, kernel, cfg) for cfg in (C(1), C(True), C(1.0))] == [True, False, False]


def test_a_backend_lists_them_all(monkeypatch):
    backend = Backend("xla", __name__, C)
    monkeypatch.setitem(globals(), "forward_space", lambda inv: NUMBERS)
    assert [cfg_id(cfg) for cfg in backend.space(None, backward=False)] == [cfg_id(cfg) for cfg in NUMBERS]


def test_rosters_and_histories_number_them_apart(tmp_path):
    roster = Roster(C(1))
    assert [roster.number(cfg) for cfg in NUMBERS] == list(range(len(NUMBERS)))
    store = PersistentCache(tmp_path)
    History(store, K).reject(C(True), Rejected("wrong", "it is"))
    assert list(History(store, K).rejected) == [cfg_id(C(True))]


def test_the_store_gives_back_the_one_that_was_put(tmp_path):
    for cfg in NUMBERS:
        PersistentCache(tmp_path).put(*K, cfg)
        assert same_cfg(PersistentCache(tmp_path).get(*K, cfg_type=C), cfg)


def test_an_import_replaces_a_config_that_is_only_equal(tmp_path):
    cache = PersistentCache(tmp_path)
    cache.add(make(K, C(True)))
    assert merging.add_all(cache, [make(K, C(True))], keep="theirs").kept == 1
    assert merging.add_all(cache, [make(K, C(1))], keep="theirs").replaced == 1
    assert cache.get(*K, cfg_type=C).x is not True


class Shown(Kernel[C, Any]):
    jit = True

    def run(self, x, *, cfg):
        return x * (10 if cfg.x is True else 20 if type(cfg.x) is int else 30 if math.copysign(1, cfg.x) > 0 else 40)

    def heuristic_cfg(self, inv):
        return C(1)


def test_programs_caches_and_overlays_keep_them_apart():
    kernel, cache, x = Shown(), ConfigCache(), jnp.ones(())
    executor = Executor(ConfigSelectorChain(cache))
    cases = {10: C(True), 20: C(1), 30: C(0.0), 40: C(-0.0)}
    for want, cfg in cases.items():
        assert executor(kernel, x, cfg=cfg) == want
    inv = Invocation(kernel=kernel, args=(x,), kwargs={})
    for want, cfg in cases.items():
        cache.put(*inv.key, cfg)
        assert executor(kernel, x) == want
    for want, cfg in cases.items():
        with overlay_cache({inv.key: cfg}):
            assert executor(kernel, x) == want
