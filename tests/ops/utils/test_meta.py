import json
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from ejkernel.ops import (
    LABEL_RE,
    ConfigSelectorChain,
    Executor,
    Kernel,
    extract_labels_from_hlo_text,
    find_labels_in_lowered,
    label,
    labels_to_configs,
    registry,
    stable_json,
)
from ejkernel.ops.utils import meta
from tests.support import OwnBackward, Plain, Scale, new_executor

X = jnp.ones((4,))
NAMES = ["simple", "with space", "a/b", "k@v1", "k#2", "k:3", "ядро", "核", 'quo"te', "a~b", "jit(f)", "x\\y", "a\nb"]


@pytest.fixture(autouse=True)
def labels_tell_programs_apart():
    """JAX keeps compiled programs by what they compute: one with another label would come back."""
    name = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    yield
    jax.config.update(name, before)


def lowered_forms(f, *args):
    lowered = jax.jit(f).lower(*args)
    return lowered, lowered.compile()


@pytest.mark.parametrize("mode", ["hash", "json"])
@pytest.mark.parametrize("name", NAMES)
def test_label_survives_in_stablehlo_and_in_compiled_hlo(monkeypatch, name, mode):
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", mode)
    executor, kernel = new_executor(), Plain(name)
    _, op_id, call_key = executor.explain(kernel, X, X).key
    for form in lowered_forms(lambda x: executor(kernel, x, x), X):
        (found,) = find_labels_in_lowered(form)
        parts = meta.parse_label(found)
        assert (parts.prefix, parts.op_id, parts.call_key) == ("ejkernel_ops", op_id, call_key)
        assert LABEL_RE.fullmatch(found)
        if mode == "json":
            signature = executor.explain(kernel, X, X).selection.inv.signature
            told = json.loads(found[found.index("{") :])
            want = {"op": name, "key": call_key, "signature": signature, "cfg": json.loads(stable_json(Scale(1)))}
            assert told == want
            assert (parts.signature, parts.cfg) == (signature, want["cfg"])
            assert extract_labels_from_hlo_text(f"before {found}\nafter") == [found]


@dataclass(frozen=True)
class Awkward:
    text: str = 'quo"te / @ # : {} ~ \\ \n ядро'
    scale: float = float("nan")
    act: object = jnp.tanh


def test_readable_label_holds_the_config_in_use_whatever_it_is(monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", "json")
    executor, kernel = new_executor(), OwnBackward("op")
    for cfg in (Scale(7), Awkward(), {"block": (1, 2)}):
        for form in lowered_forms(lambda x: executor(NoMatter(cfg), x, cfg=cfg), X):  # noqa: B023
            assert meta.parse_label(*find_labels_in_lowered(form)).cfg == json.loads(stable_json(cfg))
    executor.chooser.cache.put(*executor.explain(kernel, X, X).key, Scale(5))
    for form in lowered_forms(jax.grad(lambda x: executor(kernel, x, x).sum()), X):
        found = {p.op_id: p.cfg["fields"] for p in map(meta.parse_label, find_labels_in_lowered(form))}
        assert found == {"op": {"factor": 5}, "op.vjp": {"factor": 1}}


class NoMatter(Kernel):
    """Takes a config of any class: its guess is one too."""

    def __init__(self, cfg):
        super().__init__("op")
        self.cfg = cfg

    def heuristic_cfg(self, inv):
        return self.cfg

    def run(self, x, *, cfg):
        return jnp.sin(x)


def test_readable_label_of_the_first_version_is_read():
    old = f"p#op:0123456789abcdef:{meta.escape(stable_json({'op': 'op', 'args': []}))}"
    (found,) = extract_labels_from_hlo_text(f'loc("jit(f)/{old}/sin")')
    assert (
        meta.parse_label(found)
        == meta.parse_label(old)
        == ("p", "op", "0" + "123456789abcdef", {"op": "op", "args": []}, None)
    )


@dataclass
class Holder:
    """As other libraries wrap what `jax.jit(f).lower(...)` returns."""

    lowered: object


def test_labels_are_found_in_what_holds_a_program():
    executor = new_executor()
    forms = lowered_forms(lambda x: executor(Plain("op"), x, x), X)
    for form in forms:
        assert find_labels_in_lowered(Holder(form)) == find_labels_in_lowered(form) != []
    jitted = nnx.jit(lambda x: executor(Plain("op"), x, x)).lower(X)
    for form in (jitted, jitted.compile()):
        assert find_labels_in_lowered(form) == find_labels_in_lowered(forms[0])


@pytest.mark.parametrize("thing", [3, "text", None, Holder(3), jnp.sin], ids=lambda x: type(x).__name__)
def test_what_is_no_program_is_refused(thing):
    with pytest.raises(meta.ProgramError, match=rf"got {type(thing).__name__}"):
        find_labels_in_lowered(thing)


def test_label_has_the_form_of_the_contract():
    executor = new_executor()
    (found,) = find_labels_in_lowered(lowered_forms(lambda x: executor(Plain("my.kernel"), x, x), X)[0])
    assert found == f"ejkernel_ops#my.kernel:{executor.explain(Plain('my.kernel'), X, X).key[2]}"


@pytest.mark.parametrize("prefix", ["mine", "my prefix", "a#b:c@d"])
def test_any_prefix_is_found(prefix):
    executor = Executor(ConfigSelectorChain(), stamp_prefix=prefix)
    for form in lowered_forms(lambda x: executor(Plain(), x, x), X):
        (found,) = find_labels_in_lowered(form)
        assert meta.parse_label(found).prefix == prefix


def test_no_labels_in_none_mode(monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", "none")
    executor = new_executor()
    for form in lowered_forms(lambda x: executor(Plain(), x, x), X):
        assert find_labels_in_lowered(form) == []


def test_unknown_mode_lists_the_known_ones(monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", "full")
    with pytest.raises(ValueError, match="EJKERNEL_OPS_STAMP: 'full' is not one of 'hash', 'json', 'none'"):
        new_executor()(Plain(), X, X)


def test_each_label_once_in_order_of_appearance():
    executor = new_executor()

    def f(x):
        for _ in range(3):
            x = executor(Plain("first"), x, x)
        return executor(Plain("second"), x[:2], x[:2]).sum() + executor(Plain("first"), x[1:], x[1:]).sum()

    for form in lowered_forms(f, X):
        labels = [meta.parse_label(t) for t in find_labels_in_lowered(form)]
        assert sorted(p.op_id for p in labels) == ["first", "first", "second"]
        assert len(set(labels)) == 3
    ops = [meta.parse_label(t).op_id for t in find_labels_in_lowered(jax.jit(f).lower(X))]
    assert ops[0] == "first"


@pytest.mark.parametrize("where", ["scan", "cond", "while", "remat", "vmap", "shard_map", "grad"])
def test_labels_are_found_inside_control_flow(where):
    executor, kernel = new_executor(), OwnBackward("op")
    call = lambda x: executor(kernel, x, x)
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    f = {
        "scan": lambda x: jax.lax.scan(lambda c, _: (call(c), None), x, None, length=3)[0],
        "cond": lambda x: jax.lax.cond(x.sum() > 0, call, lambda x: x, x),
        "while": lambda x: jax.lax.while_loop(lambda x: x.sum() > 0, call, x),
        "remat": jax.grad(lambda x: jax.checkpoint(call)(x).sum()),
        "vmap": lambda x: jax.vmap(call)(x[None]),
        "shard_map": jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec),
        "grad": jax.grad(lambda x: call(x).sum()),
    }[where]
    want = {"op", "op.vjp"} if where in ("grad", "remat") else {"op"}
    for form in lowered_forms(f, X):
        assert {meta.parse_label(t).op_id for t in find_labels_in_lowered(form)} == want


@given(st.text(max_size=20))
def test_escape_is_reversible_and_stays_in_its_alphabet(text):
    escaped = meta.escape(text)
    assert meta.unescape(escaped) == text
    assert escaped.isascii()
    assert not set(escaped) & set('@/#:"\\() \n')


def test_text_without_labels_and_broken_labels():
    assert extract_labels_from_hlo_text("nothing # here : 0123456789abcdef") == []
    assert extract_labels_from_hlo_text("a#b:0123456789abcdef:zzz a~ff#b:0123456789abcdef") == []
    with pytest.raises(meta.LabelError, match="is damaged"):
        meta.parse_label("a#b:0123456789abcdef:zzz")
    with pytest.raises(meta.LabelError, match="'x#y' is not of the form"):
        meta.parse_label("x#y")


def test_labels_give_the_configs_their_calls_get():
    executor, kernel = new_executor(), OwnBackward("op")
    lowered = jax.jit(jax.grad(lambda x: executor(kernel, x, x).sum())).lower(X)
    labels = find_labels_in_lowered(lowered)
    assert labels_to_configs(labels, selector=executor.chooser) == dict.fromkeys(labels, Scale(1))
    executor.chooser.cache.put(*executor.explain(kernel, X, X).key, Scale(4))
    configs = labels_to_configs(labels, selector=executor.chooser)
    assert {meta.parse_label(text).op_id: cfg for text, cfg in configs.items()} == {"op": Scale(4), "op.vjp": Scale(1)}
    assert labels_to_configs(labels) == dict.fromkeys(labels, Scale(1))
    registry.clear()
    with pytest.raises(meta.LabelError, match="was not traced in this process"):
        labels_to_configs(labels)


def test_label_decorator_names_operations():
    @label("my_attention")
    def f(x):
        """Doc."""
        return jnp.sin(x)

    lowered, compiled = lowered_forms(lambda x: f(f(x)), X)
    assert "my_attention" in lowered.as_text(debug_info=True)
    assert "my_attention" in compiled.as_text()
    assert (f.__name__, f.__doc__) == ("f", "Doc.")
    with pytest.raises(meta.LabelError, match="name must be a non-empty string, got ''"):
        label("")


def test_labels_are_found_at_once_beside_a_large_constant():
    """Programs hold constants as one word of digits: searching must not take the square of its length."""
    label, start = "ejkernel_ops#op:0123456789abcdef", time.perf_counter()
    assert extract_labels_from_hlo_text(f'dense<"0x{"3F80" * 15_000}"> loc("jit(f)/{label}/sin")') == [label]
    assert time.perf_counter() - start < 2
