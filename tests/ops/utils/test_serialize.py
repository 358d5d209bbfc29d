"""A config read back is the same object."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import subprocess
import sys
from typing import Any, ClassVar, Literal, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ejkernel.ops.utils import classes, jsontext
from ejkernel.ops.utils.params import BwdParams, FwdParams
from ejkernel.ops.utils.serialize import (
    ConfigEncodeError,
    ConfigMismatchError,
    decode_cfg,
    encode_cfg,
    from_json,
    to_json,
)

FLOAT32 = np.dtype("float32")


class Algorithm(enum.Enum):
    FAST = "fast"
    SAFE = "safe"


class Order(enum.IntEnum):
    ROW = 0
    COLUMN = 1


class Feature(enum.Flag):
    TMA = 1
    WGMMA = 2


class Tile(NamedTuple):
    rows: int
    columns: int = 64


@dataclasses.dataclass(frozen=True)
class Inner:
    blocks: tuple[int, ...] = (1, 2)
    dtype: np.dtype[Any] = FLOAT32


@dataclasses.dataclass(frozen=True)
class Config:
    block_size: int = 128
    scale: float = 1.0
    name: str | None = None
    inner: Inner = Inner()
    tiles: tuple[Tile, ...] = ()
    algorithm: Algorithm = Algorithm.FAST
    order: Order = Order.ROW
    feature: Feature = Feature.TMA
    platform: Literal["triton", "xla", 3] = "xla"
    extra: Any = None
    table: dict[str, Inner] = dataclasses.field(default_factory=dict)


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True, frozen=True)
    block: int = pydantic.Field(128, alias="blockSize", gt=0)
    inner: Inner = Inner()
    order: Order = Order.ROW


@pydantic.dataclasses.dataclass(frozen=True)
class Checked:
    block: int
    tile: Tile = Tile(1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slotted:
    rows: int
    area: int = dataclasses.field(init=False, default=0)
    registry: ClassVar[list[int]] = []

    def __post_init__(self):
        object.__setattr__(self, "area", self.rows * 2)


@dataclasses.dataclass
class Doubling:
    block: int

    def __post_init__(self):
        self.block *= 2


@dataclasses.dataclass
class WithInitVar:
    seed: dataclasses.InitVar[int]
    block: int = 0

    def __post_init__(self, seed):
        self.block += seed


def same(a, b):
    """Equal, of equal classes all the way down."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
    elif dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            same(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert a == b or (a != a and b != b)


CONFIGS = [
    Config(),
    Config(1, 2.5, "x", Inner((4, 5), np.dtype(jnp.bfloat16)), (Tile(1), Tile(2, 3)), Algorithm.SAFE, Order.COLUMN),
    Config(feature=Feature.TMA | Feature.WGMMA, platform=3, extra=(1, [2, (3,)], {"a": (4,)}), table={"k": Inner()}),
    Config(scale=1),  # An int in a float field is still an int.
    Config(extra=Inner()),
    Config(extra=(jnp.bfloat16, np.float32, float, np.dtype("int8"), ml_dtypes.float8_e4m3fn)),
    Config(extra=[np.float32(1.5), np.int64(3), ml_dtypes.bfloat16(2), float("inf"), float("nan"), 1j, b"\x00"]),
    Config(extra={1: "a", ("b", 2): {3}, "$tuple": frozenset({1}), None: Algorithm.SAFE}),
    Config(block_size="not an int", platform="cuda"),  # pyright: ignore[reportArgumentType]
    Tile(3, 4),
    Model(blockSize=256, inner=Inner((7,)), order=Order.COLUMN),
    Checked(3, Tile(5, 6)),
    Slotted(rows=3),
    Doubling(4),
    WithInitVar(seed=3, block=1),
    FwdParams(q_blocksize=64, num_warps=4),
    BwdParams(),
    Algorithm.SAFE,
    {"block": 1, "shape": (2, 3), "dtype": jnp.float16, "nested": {"list": [1, 2.0, None, True]}},
    {},
    (1, 2, (3,)),
    [],
    128,
    "text",
    None,
]


@pytest.mark.parametrize("cfg", CONFIGS, ids=lambda cfg: repr(cfg)[:60])
@pytest.mark.parametrize("typed", [True, False])
def test_reads_back_the_same(cfg, typed):
    same(from_json(to_json(cfg), type(cfg) if typed else None), cfg)


def test_only_a_config_that_contradicts_its_annotations_goes_unchecked():
    assert "exact" not in encode_cfg(Config(scale=1))
    assert encode_cfg(Config(block_size="x"))["exact"]  # pyright: ignore[reportArgumentType]


json_leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
other_leaves = st.sampled_from([Algorithm.FAST, Order.COLUMN, np.dtype("bfloat16"), jnp.int4, np.uint8, Tile(1, 2)])
values = st.recursive(
    json_leaves | other_leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
        | st.builds(Config, extra=inner)
    ),
    max_leaves=10,
)
configs = st.builds(
    Config,
    block_size=st.integers(1, 4096),
    scale=st.floats(allow_nan=False),
    name=st.none() | st.text(),
    inner=st.builds(Inner, st.lists(st.integers()).map(tuple), st.sampled_from([np.dtype("bfloat16"), np.dtype("f8")])),
    tiles=st.lists(st.builds(Tile, st.integers(), st.integers()), max_size=3).map(tuple),
    algorithm=st.sampled_from(Algorithm),
    platform=st.sampled_from(["triton", "xla", 3]),
    extra=values,
)


@given(configs | values)
def test_any_config_survives_json(cfg):
    same(from_json(to_json(cfg)), cfg)


@given(st.binary() | st.text())
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(jsontext.JsonTextError, ConfigMismatchError):
        from_json(text)


mutations = st.recursive(
    json_leaves,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(
            st.sampled_from(
                ["$type", "$enum", "$tuple", "$dict", "$dtype", "$jnp", "$scalar", "$np", "fields", "name", "x"]
            ),
            inner | st.sampled_from([classes.name_of(Config), classes.name_of(Algorithm), "jax:jit"]),
        )
    ),
    max_leaves=8,
)


@given(st.sampled_from([Config, Algorithm, Tile, Model, dict]).map(classes.name_of), mutations)
def test_any_data_is_read_or_refused(name, value):
    with contextlib.suppress(ConfigMismatchError):
        decode_cfg({"type": name, "value": value})


def test_local_classes_read_back_in_the_process_that_wrote_them():
    @dataclasses.dataclass(frozen=True)
    class Local:
        block: int = 1

    same(from_json(to_json(Local(3))), Local(3))


def stored(cfg, **changes):
    data = json.loads(to_json(cfg))
    data["value"].update(changes)
    return data


def test_a_new_field_takes_its_default():
    data = stored(Config(block_size=7))
    del data["value"]["platform"]
    same(decode_cfg(data), Config(block_size=7))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (stored(Config(), gone=1), "no longer has the field"),
        (stored(Config(), block_size="large"), r"Config.block_size: 'large' is not a"),
        (stored(Config(), platform="cuda"), r"Config.platform: 'cuda' is not a"),
        (stored(Config(), inner=3), "must be a .*Inner"),
        (
            stored(Config(), algorithm={"$enum": classes.name_of(Algorithm), "name": "GONE"}),
            "no member 'GONE', only FAST",
        ),
        (stored(FwdParams(), num_warps=-4), "FwdParams.*refuses.*positive integer"),
        (stored(Model(blockSize=1), block=0), "refuses"),
        ({"type": classes.name_of(Tile), "value": {"columns": 3}}, "needs rows"),
        ({"type": "nowhere.at.all:Config", "value": {}}, "no loaded class"),
        ({"type": classes.name_of(Config), "value": {"extra": {"$type": "a:B", "fields": {}}}}, "no loaded class"),
        ({"type": "subprocess:Popen", "value": {"args": "true"}}, "no loaded class"),
        ({"type": "builtins:eval", "value": {"source": "1"}}, "no loaded class"),
        ({"type": classes.name_of(Config), "value": {"extra": {"$what": 1}}}, "not a value that ejkernel wrote"),
        ({"type": classes.name_of(Config), "value": {"extra": {"$dtype": "float33"}}}, "not a value"),
        ({"type": classes.name_of(Config), "value": {"extra": {"$dtype": "f4,f4"}}}, "not the name of a dtype"),
        ({"type": classes.name_of(Config), "value": {"extra": {"$dtype": "(9999,9999)f4"}}}, "not the name of a dtype"),
        ([], "must be"),
        ({"type": 3, "value": 3}, "must be"),
    ],
)
def test_what_does_not_fit_says_why(data, message):
    with pytest.raises(ConfigMismatchError, match=message):
        decode_cfg(data)


@pytest.mark.parametrize(
    "data",
    [
        {"$scalar": "void", "value": 2_000_000_000},
        {"$scalar": "V2000000000", "value": 2_000_000_000},
        {"$scalar": "bytes", "value": 2_000_000_000},
        {"$scalar": "object", "value": 1},
        {"$scalar": "float32", "value": [1.0, 2.0]},
    ],
)
def test_scalars_are_numbers(data):
    with pytest.raises(ConfigMismatchError, match=r"is not a .* number"):
        decode_cfg({"type": classes.name_of(Config), "value": {"extra": data}})


def test_stored_lists_and_names_follow_a_changed_declaration():
    data = stored(Config(), tiles=[], algorithm="safe")
    same(decode_cfg(data), Config(algorithm=Algorithm.SAFE))


def test_a_renamed_class_is_read_through_cfg_type():
    data = json.loads(to_json(Config(inner=Inner((9,)))).replace(":Inner", ":OldInner"))
    data["type"] = "old.place:OldConfig"
    with pytest.raises(ConfigMismatchError, match=r"old\.place:OldConfig"):
        decode_cfg(data)
    same(decode_cfg(data, Config), Config(inner=Inner((9,))))


def test_another_class_is_not_taken_for_cfg_type():
    with pytest.raises(ConfigMismatchError):
        decode_cfg(encode_cfg({"block_size": 3}), Config)
    with pytest.raises(ConfigMismatchError, match="no longer has"):
        decode_cfg(encode_cfg(Tile(1)), Config)


@dataclasses.dataclass(frozen=True)
class Derived(Config):
    more: int = 0


def test_a_subclass_stays_a_subclass():
    same(decode_cfg(encode_cfg(Derived(more=3)), Config), Derived(more=3))
    same(decode_cfg(encode_cfg(Derived(more=3)), Config | Tile), Derived(more=3))


@pytest.mark.parametrize("value", [print, object(), jnp.zeros(2), np.zeros(2), range(3), lambda: 0, np.dtype(">f4")])
def test_what_is_not_data_is_refused_with_its_place(value):
    with pytest.raises(ConfigEncodeError, match=r"Config\.extra\['a'\]\[1\]: a .* cannot be stored"):
        to_json(Config(extra={"a": (0, value)}))


def test_reading_imports_nothing(tmp_path):
    """A file that names a module must not get it imported, by any of its tags."""
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')\n")
    script = """
import sys
from ejkernel.ops.utils.serialize import ConfigMismatchError, decode_cfg
for data in [
    {"type": "trap:Config", "value": {}},
    {"type": "builtins:dict", "value": {"a": {"$type": "trap:Config", "fields": {}}}},
    {"type": "builtins:dict", "value": {"a": {"$enum": "trap:Color", "name": "RED"}}},
]:
    try:
        decode_cfg(data)
    except ConfigMismatchError:
        pass
    else:
        raise SystemExit("accepted")
assert "trap" not in sys.modules
print("fine")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": f".:{tmp_path}"}, capture_output=True, text=True
    )
    assert done.stdout == "fine\n", done.stderr


def test_pydantic_is_loaded_on_first_use_only():
    script = "import sys, ejkernel.ops.utils.serialize\nprint('pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("text", "depth"), [(b"[[1]]", 2), (b'{"a[[[": "]]\\"[["}', 1), (b'"[[[', 0), (b'["\\', 1), (b"", 0), (b"]]", 0)]
)
def test_depth_counts_brackets_outside_strings(text, depth):
    assert jsontext.depth(text) == depth


@pytest.mark.parametrize(
    "text", ["[" * 65 + "]" * 65, "[" * 100_000, '{"a":' * 70, "1" * 101, "NaN", "[Infinity]", "\ud800"]
)
def test_hostile_text_is_refused(text):
    with pytest.raises(jsontext.JsonTextError):
        jsontext.parse(text.encode(errors="surrogatepass"), max_bytes=100 if text[0] == "1" else 1 << 20)
