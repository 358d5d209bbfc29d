import dataclasses
import itertools
import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ejkernel.ops.tuning.search import Space, SpaceError
from ejkernel.ops.tuning.search import space as spaces

ROOT = Path(__file__).parents[4]


@dataclasses.dataclass(frozen=True)
class Inner:
    stages: int = 2
    name: str = "x"


@dataclasses.dataclass(frozen=True)
class Config:
    block: int = 64
    warps: int = 4
    algorithm: str = "a"
    inner: Inner = Inner()


AXES = {"block": (256, 64, 128), "warps": (4, 8), "algorithm": ("b", "a", "c")}


def test_a_list_keeps_its_distinct_configs():
    listed = [Config(64), Config(128), Config(64)]
    assert set(Space.of(listed, Config())) == {Config(64), Config(128)}
    assert len(list(Space.of(listed, Config()))) == 2


def test_a_generator_works_like_a_list():
    assert set(Space.of((Config(2**i) for i in range(5, 8)), Config())) == {Config(32), Config(64), Config(128)}


def test_an_endless_generator_is_cut_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING, logger="ejkernel"):
        space = Space.of((Config(i) for i in itertools.count(1)), Config())
    assert len(list(space)) == spaces.MAX_LISTED
    assert "use axes for more" in caplog.text


def test_axes_are_multiplied_out_from_the_template():
    space = Space.of(AXES, Config(inner=Inner(stages=7)))
    assert space.points == 18 == len(set(space))
    assert all(cfg.inner.stages == 7 for cfg in space)


def test_conditions_cut_the_grid():
    space = Space.of({**AXES, "fits": lambda cfg: cfg.block * cfg.warps <= 512}, Config())
    assert {(cfg.block, cfg.warps) for cfg in space} == {(64, 4), (64, 8), (128, 4)}


def test_dotted_axes_reach_nested_configs():
    assert {cfg.inner.stages for cfg in Space.of({"inner.stages": (1, 3)}, Config())} == {1, 3}
    nested = {"fwd": {"block": 1}, "other": 0}
    assert list(Space.of({"fwd.block": (2,)}, nested)) == [{"fwd": {"block": 2}, "other": 0}]


def test_neighbours_are_one_step_away_on_numbers_and_anywhere_on_names():
    space = Space.of(AXES, Config())
    assert list(space.around(Config(128, 4, "a"))) == [
        Config(64, 4, "a"),
        Config(256, 4, "a"),
        Config(128, 8, "a"),
        Config(128, 4, "b"),
        Config(128, 4, "c"),
    ]


def test_two_steps_reach_diagonal_neighbours_after_the_near_ones():
    space = Space.of({"block": (64, 128, 256), "warps": (4, 8, 16)}, Config())
    around = list(space.around(Config(128, 8), steps=2))
    assert len(around) == 8 == len(set(around))
    assert Config(64, 16) in around[4:]


def test_a_list_has_neighbours_too():
    space = Space.of([Config(b, w) for b in (64, 128, 256) for w in (4, 8)][:-1], Config())
    assert set(space.around(Config(128, 8))) == {Config(64, 8), Config(128, 4)}  # (256, 8) is not in the list.


@pytest.mark.parametrize("mixed", [[1, "two", 3.0], [Config(1), Inner(1)], [{"a": 1}, {"b": 1}]])
def test_a_list_without_common_fields_still_is_a_space(mixed):
    space = Space.of(mixed, mixed[0])
    assert list(space) == mixed
    assert list(space.around(mixed[1])) == [mixed[0], *mixed[2:]]


@given(st.integers(1, 10_000))
def test_a_config_from_elsewhere_is_located_at_the_nearest_point(block):
    space = Space.of({"block": (32, 64, 128, 256, 512)}, Config())
    (position,) = space.locate(Config(block))
    distances = [abs(np.log2(1 + value) - np.log2(1 + block)) for value in space.axes["block"]]
    assert distances[position] == min(distances)


@given(st.integers(0, 100), st.integers(1, 40))
def test_samples_are_distinct_members(seed, n):
    space = Space.of({**AXES, "odd": lambda cfg: cfg.algorithm != "c"}, Config())
    sample = space.sample(np.random.default_rng(seed), n)
    assert len(sample) == len(set(sample)) == min(n, 12)
    assert set(sample) <= set(space)


def test_a_space_that_nothing_fits_is_empty():
    space = Space.of({"block": range(1, 50), "warps": range(1, 50), "never": lambda cfg: False}, Config())
    assert list(space) == []
    assert space.sample(np.random.default_rng(0), 5) == []


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"blok": (1, 2)}, "axis 'blok' must be a field of Config"),
        ({"inner.depth": (1, 2)}, "axis 'inner.depth' must be a field"),
        ({"block": 3}, "must list its values, got 3"),
        ({"algorithm": "abc"}, "must list its values, got 'abc'"),
        ({"block": ()}, "at least one value"),
    ],
)
def test_a_wrong_axis_is_refused_by_name(axes, message):
    with pytest.raises(SpaceError, match=message):
        Space.of(axes, Config())


def test_searching_needs_no_jax():
    # Bare packages stand in for the real ones, whose other modules do need it.
    code = """
import importlib, sys, types
for name in ("ejkernel", "ejkernel.ops", "ejkernel.ops.execution"):
    package = types.ModuleType(name)
    package.__path__ = [name.replace(".", "/")]
    sys.modules[name] = package
importlib.import_module("ejkernel.ops.tuning.search")
sys.exit("jax" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
