"""Keys: equal for equal calls in every process, different for different work."""

import dataclasses
import enum
import functools
import json
import os
import subprocess
import sys
from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.ops import (
    Invocation,
    Kernel,
    abstractify,
    default_key_builder_with_sharding,
    device_fingerprint,
    device_kind,
    sharding_fingerprint,
    short_hash,
    stable_json,
)
from tests.support import Plain

KERNEL = Plain("k")


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


def key(*args, **kwargs):
    return Invocation(kernel=KERNEL, args=args, kwargs=kwargs).call_key


arrays = st.builds(
    lambda shape, dtype: jax.ShapeDtypeStruct(tuple(shape), dtype),
    st.lists(st.integers(1, 9), max_size=3),
    st.sampled_from([jnp.float32, jnp.bfloat16, jnp.int32, jnp.bool_]),
)
statics = st.one_of(st.booleans(), st.integers(-9, 9), st.text(max_size=3), st.none(), st.sampled_from(Colour))
trees = st.recursive(
    st.one_of(arrays, statics),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
    ),
    max_leaves=6,
)
calls = st.tuples(st.lists(trees, max_size=3), st.dictionaries(st.sampled_from("abc"), trees, max_size=2))


def identity(tree):
    """An independent notion of 'the same abstract call', to compare keys with."""
    if isinstance(tree, dict):
        return ("dict", tuple(sorted((k, identity(v)) for k, v in tree.items())))
    if isinstance(tree, (list, tuple)):
        return (type(tree).__name__, tuple(identity(x) for x in tree))
    if isinstance(tree, jax.ShapeDtypeStruct):
        return ("array", tree.shape, str(tree.dtype))
    return (type(tree).__name__, str(tree))


@given(calls, calls)
def test_keys_are_equal_exactly_when_the_abstract_calls_are(one, two):
    same = identity([*one[0], one[1]]) == identity([*two[0], two[1]])
    assert (key(*one[0], **one[1]) == key(*two[0], **two[1])) == same


@given(calls)
def test_key_does_not_depend_on_the_order_of_keywords_or_dicts(call):
    args, kwargs = call
    reverse = lambda t: {k: reverse(t[k]) for k in reversed(t)} if isinstance(t, dict) else t
    assert key(*args, **kwargs) == key(*map(reverse, args), **reverse(kwargs))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.floats(allow_nan=True), st.floats(allow_nan=True))
def test_values_of_arrays_and_floats_are_not_in_the_key(shape, a, b):
    assert key(jnp.zeros(shape), scale=a) == key(jnp.ones(shape), scale=b) == key(np.ones(shape, np.float32), scale=1.0)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (1, 2), (1, True), (1, 1.0), ("a", "b"), (None, False), (Colour.RED, Colour.BLUE), (jnp.float32, jnp.bfloat16),
        (jnp.sin, jnp.cos), ([1], (1,)), ({"a": 1}, OrderedDict(a=1)), ((), None), ((), []),
        (functools.partial(jnp.sum, axis=0), functools.partial(jnp.sum, axis=1)),
        (jax.lax.Precision.HIGH, jax.lax.Precision.DEFAULT), ({"1": 2}, {1: 2}),
        (jnp.ones(3), jnp.ones((3, 1))), (jnp.ones(3), jnp.ones(3, jnp.bfloat16)), (b"a", "a"),
        (jnp.add, jnp.multiply), (np.add, jnp.add), (slice(0, 1), slice(0, 2)), (range(2), range(3)),
        (P("x"), P("y")), (P("x"), ("x",)),
    ],
)  # fmt: skip
def test_different_work_has_different_keys(one, two):
    assert key(one) != key(two)
    assert key(x=one) != key(x=two)


@pytest.mark.parametrize("spelling", [np.dtype("float32"), np.float32, jnp.float32, jnp.dtype("float32")])
def test_a_dtype_counts_as_itself_however_it_is_spelt(spelling):
    assert key(spelling) == key(jnp.float32)


def test_batch_axes_context_and_operation_are_in_the_key():
    x = jnp.ones(3)
    make = lambda **kw: Invocation(**{"kernel": KERNEL, "args": (x,), **kw}).call_key
    assert len({make(), make(batch_axes=(0,)), make(batch_axes=(1,)), make(context="shard_map"), make(op_id="z")}) == 5
    assert make() == make(stamp=False) == make(metadata={"a": 1}) == make(override_cfg=3) == make(platform="triton")


def test_static_fields_of_registered_classes_are_in_the_key():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Node:
        x: jax.Array
        mode: str = dataclasses.field(metadata={"static": True})

    x = jnp.ones(3)
    assert key(Node(x, "a")) == key(Node(x * 2, "a")) != key(Node(x, "b"))


PROGRAM = """
import enum, functools, json, dataclasses
import jax, jax.numpy as jnp
from ejkernel.ops import Invocation, Kernel, device_fingerprint, short_hash

class Colour(enum.Enum):
    RED = 1

@dataclasses.dataclass(frozen=True)
class Options:
    names: frozenset = frozenset("abcdefgh")

def helper(x): return x

x = jnp.ones((3, 4), jnp.bfloat16)
callables = helper, lambda x: x, functools.partial(helper, 3)
args = (x, {"b": x, "a": [1, None]}, Colour.RED, jnp.float16, *callables, Options())
inv = Invocation(kernel=Kernel("k"), args=args, kwargs={"z": {"p", "q", "r"}, "a": 2.5})
print(json.dumps([inv.call_key, device_fingerprint(), short_hash({"b": 1, "a": 2})]))
"""


def test_keys_are_equal_across_processes_hash_seeds_files_and_line_numbers(tmp_path):
    answers = set()
    for seed, padding in (("0", 0), ("1", 7), ("12345", 30)):
        script = tmp_path / f"deep{seed}" / "program.py"
        script.parent.mkdir()
        script.write_text("\n" * padding + PROGRAM)
        env = {**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()}
        run = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=True)
        answers.add(run.stdout)
    assert len(answers) == 1
    assert "0x" not in answers.pop()


def test_signature_is_readable_json_and_the_key_is_its_hash():
    inv = Invocation(kernel=KERNEL, args=(jnp.ones((2, 3)),), kwargs={"causal": True, "scale": 0.5})
    assert json.loads(stable_json(inv.signature)) == inv.signature
    assert inv.signature["args"] == [{"dtype": "float32", "shape": [2, 3]}]
    assert inv.signature["kwargs"] == {"causal": {"static": True}, "scale": {"float": None}}
    assert inv.call_key == short_hash(inv.signature)


def test_stable_json_sorts_and_stays_ascii():
    assert stable_json({"b": [1, None], "a": "é"}) == '{"a":"\\u00e9","b":[1,null]}'
    assert short_hash({"b": 1, "a": 2}) == short_hash({"a": 2, "b": 1}) == short_hash('{"a":2,"b":1}')


def test_device_names_fit_in_a_path():
    name = device_fingerprint()
    assert name.startswith(device_kind())
    assert all(c.isalnum() or c in "._-" for c in name)


def test_default_device_is_respected():
    cpu = jax.local_devices(backend="cpu")[-1]
    with jax.default_device(cpu):
        assert device_kind() == "cpu"
        assert device_fingerprint() == device_fingerprint(cpu)


def test_abstractify_leaves_no_array_and_keeps_the_rest():
    tree = {"a": jnp.ones((2, 3)), "b": [np.zeros(4), "text", None, 3]}
    got = abstractify(tree)
    assert got["a"] == jax.ShapeDtypeStruct((2, 3), jnp.float32)
    assert got["b"] == [jax.ShapeDtypeStruct((4,), jnp.float32), "text", None, 3]


class Card:
    """An H200 to a process that may take `share` of its memory."""

    platform, device_kind, compute_capability, core_count = "gpu", "NVIDIA H200", "9.0", 132

    def __init__(self, share):
        self.share = share

    def memory_stats(self):
        return {"bytes_limit": int(self.share * 139.8 * 2**30)}


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, None])
def test_a_gpu_is_the_same_whatever_share_of_its_memory_a_process_may_take(share, name, monkeypatch):
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    if share is not None:
        monkeypatch.setenv(name, str(share))
    assert device_fingerprint(Card(share or 0.75)) == "gpu-nvidia_h200-sm90-132c-128g"


def test_sharding_fingerprint_names_meshes_and_specs_and_never_devices():
    devices = np.array(jax.local_devices(backend="cpu")[:4])
    mesh = lambda d: jax.sharding.Mesh(d.reshape(2, 2), ("x", "y"))
    x = np.ones((4, 4), np.float32)
    put = lambda d, spec: jax.device_put(x, NamedSharding(mesh(d), spec))
    assert sharding_fingerprint(put(devices, P("x"))) == sharding_fingerprint(put(devices[::-1], P("x")))
    assert sharding_fingerprint(put(devices, P("x"))) != sharding_fingerprint(put(devices, P("y")))
    inv = lambda x: Invocation(kernel=KERNEL, args=(x,))
    one, two = (default_key_builder_with_sharding(inv(put(devices, s))) for s in (P("x"), P("y")))
    assert one != two


@dataclasses.dataclass(frozen=True)
class Tiles:
    rows: int
    scale: float = 1.0
    dtype: object = jnp.float32
    mode: Colour = Colour.RED


def test_configs_are_hashed_by_all_their_fields():
    assert short_hash(Tiles(1)) == short_hash(Tiles(1)) == short_hash(dataclasses.replace(Tiles(2), rows=1))
    others = [Tiles(2), Tiles(1, 0.5), Tiles(1, dtype=jnp.bfloat16), Tiles(1, mode=Colour.BLUE), {"rows": 1}]
    assert len({short_hash(x) for x in [Tiles(1), *others]}) == 6
    assert stable_json({"n": np.int64(3), "dtype": jnp.float32}) == '{"dtype":{"dtype":"float32"},"n":3}'


ANYTHING = """
import enum, functools, operator
import jax.numpy as jnp, numpy as np
Mode = enum.Enum("Mode", "FAST EXACT", module="m")
VALUES = [
    {"b", "a", "c"}, {1.5, None, ("x", 1)}, frozenset({frozenset({"p", "q"}), "r"}), len, operator.add, np.tanh, dict,
    lambda: 1, functools.partial(int, base=2), {Mode.FAST: 1}, {1: 2, "a": 3}, {(1, 2): {3}},
    float("nan"), [float("inf")], 1j, b"raw", object(), range(3), {None: Mode.EXACT},
    np.ones(2), jnp.ones((2, 3)), "lone \\ud800",
]
"""


def test_anything_has_one_text_in_every_process():
    """The order of sets and the addresses of objects differ; the texts do not."""
    scope = {"__name__": "__main__"}
    exec(ANYTHING, scope)
    ask = "from ejkernel.ops import short_hash, stable_json\nprint([(stable_json(x), short_hash(x)) for x in VALUES])"
    env = {**os.environ, "PYTHONHASHSEED": "5", "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()}
    run = subprocess.run([sys.executable, "-c", ANYTHING + ask], env=env, capture_output=True, text=True, check=True)
    here = [(stable_json(x), short_hash(x)) for x in scope["VALUES"]]
    assert run.stdout.strip() == repr(here)
    assert len({text for text, _ in here}) == len(here), "each is told from the others"
    assert all(json.loads(text) is not None and "0x" not in text for text, _ in here)


def test_texts_that_name_stored_configs_stay_what_they_are():
    here = __name__
    assert stable_json([1, 2.5, None, True]) == "[1,2.5,null,true]"
    assert stable_json({1: 2}) == '{"1":2}'
    assert stable_json(Colour.RED) == f'{{"enum":"{here}.Colour.RED"}}'
    fields = '{"dtype":{"dtype":"float32"},"mode":"m","rows":1,"scale":1.0}'
    assert stable_json(Tiles(1, mode="m")) == f'{{"fields":{fields},"object":"{here}.Tiles"}}'


class Model(pydantic.BaseModel):
    rows: int


def test_other_classes_of_configs_count_by_their_fields():
    assert short_hash(Model(rows=1)) != short_hash(Model(rows=2))
    assert json.loads(stable_json(Model(rows=1)))["fields"] == {"rows": 1}


def test_key_with_shardings_is_built_of_a_call_in_either_form():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    put = lambda *spec: jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P(*spec)))
    build = default_key_builder_with_sharding
    keys = [build(KERNEL, (put(*spec),), {"causal": True}) for spec in (("d",), (None, "d"), ())]
    assert len(set(keys)) == 3
    assert keys[0] == build(Invocation(kernel=KERNEL, args=(put("d"),), kwargs={"causal": True}))
    assert len({keys[0], build(KERNEL, (put("d"),), {"causal": False}), build(KERNEL, (put("d"),))}) == 3

    class Keyed(Kernel):
        key_builder = build

    inv = Invocation(kernel=Keyed(), args=(put("d"),))
    assert Keyed().key_builder(inv) == build(inv) == inv.call_key
