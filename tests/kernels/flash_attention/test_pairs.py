"""Forwards and backwards of different implementations fit together, also those that need a GPU: their kernels are
stood in for by others, and what is around them is tested.
"""

import itertools
import math
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import _compat
from ejkernel.errors import EjkernelError
from ejkernel.kernels.flash_attention import cudnn, hopper, masks, rule, xla
from ejkernel.kernels.flash_attention.arguments import Attention, Extras, Rules
from ejkernel.kernels.flash_attention.mosaic_support import unsupported_backward
from ejkernel.kernels.flash_attention.triton import gradient_of_bias
from ejkernel.modules import FlashAttention, FlashAttentionConfig, flash_attention
from ejkernel.ops import ConfigCache, ConfigSelectorChain
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.tuning import search
from ejkernel.ops.utils import fingerprint
from tests.kernels.contract import quick_jit
from tests.kernels.flash_attention.cases import Case, assert_close, normal, truth

NAMES = ("dquery", "dkey", "dvalue", "dbias", "dsoftmax_aux")


def both(forward, backward, case):
    """Output and gradients by the forward of one implementation and the backward of another."""
    args, kwargs = case.arrays()
    kernel = FlashAttention()
    prepared, rules = kernel.prepare(*args, **kwargs)
    cfg = FlashAttentionConfig()

    def run(args, dout):
        out, saved = getattr(kernel, f"fwd_with_residuals_{forward}")(*args, cfg=cfg, **rules)
        return out, getattr(kernel, f"vjp_{backward}")(saved, out, dout, *args, cfg=cfg, **rules)

    dout = jnp.asarray(np.random.default_rng(99).normal(size=args[0].shape), args[0].dtype)
    out, grads = quick_jit(run)(prepared, dout)
    got = {"out": out}
    for name, grad, arg in zip(NAMES, grads, args, strict=True):
        if arg is not None:
            got[name] = grad.reshape(arg.shape)
    assert_close(got, truth(args, kwargs), case.limit)


@pytest.fixture
def fake_cudnn(monkeypatch):
    """Stands in for cuDNN's two operations, with their signatures."""

    def rules(scale, causal, window):
        return Rules(scale=scale, lower=None if window is None else 1 - window, upper=0 if causal else None)

    def forward(q, k, v, *, scale, causal, window):
        out, sums = xla.forward(Attention(q, k, v, Extras(), rules(scale, causal, window)))
        return out, sums.lse

    def backward(q, k, v, out, lse, dout, *, scale, causal, window):
        delta = masks.row_products(out, dout, lse.dtype)
        return xla.backward(Attention(q, k, v, Extras(), rules(scale, causal, window)), lse, delta, dout)[:3]

    monkeypatch.setattr(_compat, "cudnn_forward", forward)
    monkeypatch.setattr(_compat, "cudnn_backward", backward)


@pytest.mark.parametrize(
    ("forward", "backward", "make"),
    [
        ("cudnn", "cudnn", {"causal": True, "sliding_window": 9}),
        ("cudnn", "xla", {"causal": True}),
        ("xla", "cudnn", {}),
    ],
)
@pytest.mark.usefixtures("fake_cudnn")
def test_cudnn_pairs_with_itself_and_with_others(forward, backward, make):
    both(forward, backward, Case("pair", make=make))


@pytest.mark.gpu
@pytest.mark.parametrize("make", [{}, {"causal": True}, {"causal": True, "sliding_window": 100}], ids=str)
@pytest.mark.parametrize("backward", ["cudnn", "mosaic", "triton", "xla"])
@pytest.mark.parametrize("forward", ["cudnn", "mosaic", "triton", "xla"])
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_any_backward_follows_any_forward_on_a_gpu(forward, backward, make):
    both(forward, backward, Case("pair", 2, 512, 512, 4, 2, 128, dtype="bfloat16", make=make))


@pytest.mark.parametrize("rules", [{"causal": False, "window": None}, {"causal": True, "window": 64}], ids=str)
def test_cudnn_operations_have_the_signatures_of_this_jax(rules):
    q, kv = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16), jax.ShapeDtypeStruct((2, 128, 2, 64), jnp.bfloat16)

    def run(q, k, v, dout):
        out, lse = _compat.cudnn_forward(q, k, v, scale=0.125, **rules)
        return out, lse, _compat.cudnn_backward(q, k, v, out, lse, dout, scale=0.125, **rules)

    out, lse, grads = jax.eval_shape(run, q, kv, kv, q)
    assert (lse.shape, lse.dtype) == ((2, 4, 256), jnp.float32)
    assert [x.shape for x in (out, *grads)] == [q.shape, q.shape, kv.shape, kv.shape]


@pytest.fixture
def fake_hopper(monkeypatch):
    """Stands in for the Hopper kernels, with their signatures and units, of log2 or with a bias natural ones."""

    def call_of(q, k, v, rules):
        extras = Extras(**{name: rules.pop(name) for name in ("q_segment_ids", "kv_segment_ids", "mask", "bias")})
        return Attention(q, k, v, extras, Rules(**rules)), 1.0 if extras.bias is not None else math.log(2.0)

    def forward(q, k, v, *, cfg=None, **rules):
        call, unit = call_of(q, k, v, rules)
        out, sums = xla.forward(call)
        return out, sums.lse / unit, sums.rest / unit

    def backward(q, k, v, out, lse, rest, dout, *, cfg=None, **rules):
        call, unit = call_of(q, k, v, rules)
        lse, rest = lse * unit, rest * unit
        dout, delta = masks.unlost(dout, masks.row_products(out, dout, lse.dtype), rest)
        return xla.backward(call, lse, delta, dout)[:3]

    home = "ejkernel.kernels.flash_attention"
    monkeypatch.setitem(sys.modules, f"{home}.mosaic", SimpleNamespace(flash_attention_forward=forward))
    monkeypatch.setitem(sys.modules, f"{home}.mosaic_bwd", SimpleNamespace(flash_attention_backward=backward))


@pytest.mark.parametrize(("forward", "backward"), [("mosaic", "mosaic"), ("mosaic", "xla"), ("xla", "mosaic")])
@pytest.mark.parametrize("bias", [{}, {"bias": normal("b", 1, "q", "k")}, {"bias": normal("h", 1, "k")}], ids=len)
@pytest.mark.usefixtures("fake_hopper")
def test_hopper_pairs_with_itself_and_with_others(forward, backward, bias, monkeypatch):
    # The gradient of a bias is Triton's.
    monkeypatch.setattr(hopper, "triton", SimpleNamespace(gradient_of_bias=partial(gradient_of_bias, interpret=True)))
    make = {"causal": True, "softmax_aux": normal("h"), "logits_soft_cap": 2.0, "sliding_window": 9}
    both(forward, backward, Case("pair", make=make | bias))


# --- cuDNN's backward is wrong for large arrays ---


@pytest.mark.parametrize(
    ("shape", "kv_shape", "served"),
    [
        ((7, 32768, 64, 128), (7, 32768, 64, 128), True),
        ((9, 32768, 64, 128), (9, 32768, 64, 128), False),
        ((36, 8192, 64, 128), (36, 8192, 8, 128), False),
        ((1, 128, 64, 128), (1, 262144, 64, 128), False),
    ],
)
def test_cudnn_serves_no_backward_of_large_arrays(shape, kv_shape, served):
    q, kv = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in (shape, kv_shape))
    inv = Invocation(kernel=FlashAttention(), args=(q, kv, kv, None, None), kwargs={"rules": Rules(scale=1.0)})
    why = lambda backward: cudnn.unsupported(inv, backward=backward)
    assert why(False) is None
    assert why(True) is None if served else "backward is wrong from 2,147,483,648 elements" in why(True)


@pytest.mark.usefixtures("fake_cudnn")
def test_cudnn_is_given_the_parts_of_a_batch_that_it_gets_right(monkeypatch):
    real, sizes = _compat.cudnn_backward, []

    def checked(q, *arrays, **rules):
        sizes.append(q.size)
        return real(q, *arrays, **rules)

    monkeypatch.setattr(_compat, "cudnn_backward", checked)
    monkeypatch.setattr(cudnn, "BACKWARD_LIMIT", 4 * 16 * 2 * 8)
    rng = np.random.default_rng(0)
    q, k, v, out, dout = (jnp.asarray(rng.normal(size=(6, 2, 16, 2, 8)), jnp.float32) for _ in range(5))
    lse = jnp.ones((6, 2, 2, 16))

    def back(q, k, v, out, lse, dout):
        call = Attention(q, k, v, Extras(), Rules(scale=0.3, upper=0))
        return cudnn.backward(call, lse, None, dout, None, out=out)[:3]

    alone = quick_jit(back)
    want = [alone(*x) for x in zip(q, k, v, out, lse, dout, strict=True)]
    sizes.clear()
    got = quick_jit(jax.vmap(back))(q, k, v, out, lse, dout)
    assert max(sizes) == 3 * 16 * 2 * 8
    shared = quick_jit(jax.vmap(back, in_axes=(0, None, None, 0, 0, 0)))(q, k[0], v[0], out, lse, dout)
    nested = quick_jit(jax.vmap(jax.vmap(back)))(*(x[:, :, None] for x in (q, k, v, out, lse, dout)))
    for i in range(6):
        for a, b, c in zip(want[i], got, nested, strict=True):
            np.testing.assert_allclose(a, b[i], atol=1e-5)
            np.testing.assert_allclose(a, c[i, :, 0], atol=1e-5)
    for a, b in zip(alone(q[3], k[0], v[0], out[3], lse[3], dout[3]), shared, strict=True):
        np.testing.assert_allclose(a, b[3], atol=1e-5)
    monkeypatch.setattr(cudnn, "BACKWARD_LIMIT", 100)
    with pytest.raises(EjkernelError, match="backward is wrong"):
        back(*(x[0] for x in (q, k, v, out, lse, dout)))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("shape", [(9, 32768, 64, 128), (36, 8192, 64, 128)], ids=str)
def test_gradients_of_large_arrays_are_those_of_their_slices_on_a_gpu(shape):
    make = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))
    q, k, v, dout = map(make, jax.random.split(jax.random.key(0), 4))

    @jax.jit
    def gradients(q, k, v, dout):
        return jax.vjp(lambda *x: flash_attention(*x, causal=True), q, k, v)[1](dout)

    last = [np.asarray(g[-1:, :, :2], np.float32) for g in gradients(q, k, v, dout)]
    alone = gradients(*(x[-1:, :, :2] for x in (q, k, v, dout)))
    for got, want in zip(last, alone, strict=True):
        want = np.asarray(want, np.float32)
        assert np.linalg.norm(got - want) <= 1e-2 * np.linalg.norm(want)


# --- What is chosen on a GPU, without one ---


class Hopper:
    platform, device_kind, compute_capability = "gpu", "NVIDIA H200", "9.0"

    def memory_stats(self):
        return {}


@pytest.fixture
def on_hopper(monkeypatch, fake_hopper):
    monkeypatch.setattr(fingerprint, "current_device", Hopper)


def call(backward=False, forward=None, length=256, heads=(2, 2), head_dim=128, dtype=jnp.bfloat16, **kwargs):
    kernel = FlashAttention()
    q, k = (jax.ShapeDtypeStruct((1, length, n, head_dim), dtype) for n in heads)
    args, kwargs = kernel.prepare(q, k, k, kwargs.pop("bias", None), kwargs.pop("aux", None), **kwargs)
    owner = BackwardKernel(kernel) if backward else kernel
    return Invocation(kernel=owner, args=args, kwargs=kwargs, platform=forward)


def guess(**kwargs):
    inv = call(**kwargs)
    assert inv.kernel is not None
    return inv.kernel.heuristic_cfg(inv)


@pytest.mark.usefixtures("on_hopper")
def test_guess_on_hopper_is_what_measured_faster(monkeypatch):
    assert guess(causal=True).platform == "mosaic"
    assert guess(causal=True, sliding_window=8).platform == "mosaic"
    assert guess(length=4096).platform == "mosaic"
    assert guess(length=256).platform == "mosaic"
    assert guess(length=512, head_dim=64).platform == "mosaic"
    assert guess(length=512, head_dim=64, backward=True).platform == "cudnn"
    assert guess(length=577, head_dim=64).platform == "mosaic"
    assert guess(length=577, head_dim=64, backward=True).platform == "cudnn"
    assert guess(length=128, head_dim=64).platform == "cudnn"
    assert guess(length=1024, head_dim=112, causal=True).platform == "cudnn"
    assert guess(length=4096, head_dim=256).platform == "cudnn"
    assert guess(length=8192, head_dim=256).platform == "cudnn"
    if not unsupported_backward(256):
        assert guess(length=8192, head_dim=256, backward=True).platform == "mosaic"
        assert guess(length=4096, head_dim=256, backward=True).platform == "cudnn"
    assert guess(length=4096, head_dim=256, causal=True).platform == "mosaic"
    monkeypatch.setattr(rule, "KINDS", (rule.Kind("all", lambda facts: True, 0.9, 1.1),))
    assert guess(causal=True).platform == "cudnn"
    if not unsupported_backward(128):
        assert guess(backward=True, causal=True).platform == "mosaic"


@pytest.mark.usefixtures("on_hopper")
def test_guess_on_hopper_is_one_that_can_serve():
    assert guess(logits_soft_cap=2.0).platform == "mosaic"
    assert guess(aux=jnp.zeros(2)).platform == "mosaic"
    assert guess(head_dim=80, logits_soft_cap=2.0).platform == "mosaic"
    assert guess(head_dim=84, logits_soft_cap=2.0).platform == "triton"
    assert guess(attention_mask=jnp.ones((1, 1, 1, 256), bool)).platform == "mosaic"
    assert guess(dropout_prob=0.1, dropout_seed=1).platform == "triton"
    assert guess(dtype=jnp.float32).platform == "triton"
    assert guess(bias=jnp.zeros((256, 256))).platform == "mosaic"
    assert guess(bias=jnp.zeros((2, 1, 256)), causal=True).platform == "mosaic"
    assert guess(bias=jnp.zeros((256, 1))).platform == "xla"
    assert guess(causal=True, platform="xla").platform == "xla"


@pytest.mark.usefixtures("on_hopper")
def test_guess_on_other_gpus_follows_what_they_can(monkeypatch):
    for capability, narrow, wide in [("8.0", "cudnn", "triton"), ("7.5", "xla", "xla"), ("gfx942", "xla", "xla")]:
        monkeypatch.setattr(Hopper, "compute_capability", capability)
        assert guess(causal=True).platform == narrow
        assert guess(causal=True, head_dim=256).platform == wide


@pytest.mark.usefixtures("on_hopper")
def test_backward_on_hopper_is_what_measured_faster_whatever_the_forward_is():
    fastest = "cudnn" if unsupported_backward(128) else "mosaic"
    for forward in ("cudnn", "mosaic", "triton", "xla"):
        assert guess(backward=True, forward=forward, causal=True).platform == fastest
        assert guess(backward=True, forward=forward, causal=True, platform="triton").platform == "triton"
    assert guess(backward=True, forward="mosaic", length=1024).platform == "cudnn"


@pytest.mark.usefixtures("on_hopper")
def test_backward_elsewhere_stays_with_the_forward_if_it_can(monkeypatch):
    monkeypatch.setattr(Hopper, "compute_capability", "8.0")
    for forward in ("cudnn", "triton", "xla"):
        assert guess(backward=True, forward=forward, causal=True).platform == forward
    assert guess(backward=True, forward="cudnn", causal=True).bwd_params is None
    assert guess(backward=True, forward="cudnn", causal=True, dtype=jnp.float32).platform == "triton"
    assert guess(backward=True, forward="triton", bias=jnp.zeros((256, 1))).platform == "xla"


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("backward", [False, True])
def test_config_of_another_shape_is_not_taken_if_its_backend_is_slower_here(backward, tmp_path, monkeypatch):
    chain = ConfigSelectorChain(cache=ConfigCache(), persistent=PersistentCache(path=tmp_path))
    assert chain.persistent is not None
    far, near = call(backward=backward, length=512), call(backward=backward, length=256)
    tuned = FlashAttention().cfg_on("triton", far, backward=backward)
    chain.persistent.put(*far.key, tuned, signature=far.signature, kernel=FlashAttention())
    assert chain.explain(near, near.kernel).cfg.platform == ("cudnn" if backward else "mosaic")
    # Where nothing was measured, what was tuned says more than an order.
    monkeypatch.setattr(rule, "is_known", lambda capability: False)
    assert chain.explain(near, near.kernel).cfg == tuned


def test_page_has_the_table_of_the_rule():
    page = (Path(__file__).parents[3] / "docs/flash_attention.md").read_text()
    shown = page.partition("<!-- rule -->")[2].partition("<!-- end of rule -->")[0].strip().splitlines()[2:]
    by = lambda kind, backward: "`mosaic`" if kind.is_ours(backward=backward) else "`cudnn`"
    figure = lambda ratio: "-" if ratio is None else f"{ratio:.2f}"
    rows = [
        f"| {k.name} | {k.at} | {figure(k.forward)} | {figure(k.both)} | {by(k, False)} | {by(k, True)} |"
        for k in rule.KINDS
    ]
    assert shown == rows, "docs/flash_attention.md should have\n" + "\n".join(rows)


def test_rule_knows_every_backend_and_gives_each_call_one_kind():
    names = [backend.platform for backend in FlashAttention.backends]
    for q_len, kv_len, head_dim, group, banded, full in itertools.product(
        (1, 4096, 8192), (1, 128, 197, 256, 512, 4096, 8192), (64, 112, 256), (1, 8), (False, True), (False, True)
    ):
        facts = rule.Facts(q_len, kv_len, head_dim, group, banded, full)
        for backward in (False, True):
            order = rule.order(facts, backward=backward)
            assert sorted(order) == sorted(names)
            assert (order[0] == "mosaic") == rule.kind_of(facts).is_ours(backward=backward)
    sizes = (4096, 8192), (128, 197, 256, 512, 4096, 8192), (64, 112, 256), (1, 8), (False, True), (False, True)
    used = {rule.kind_of(rule.Facts(*facts)).name for facts in itertools.product(*sizes)}
    assert used == {kind.name for kind in rule.KINDS}, "a kind that no call is of"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.usefixtures("on_hopper")
def test_candidates_on_hopper_span_the_implementations(head_dim):
    kernel = FlashAttention()
    x = jnp.zeros((1, 256, 2, head_dim), jnp.bfloat16)
    args, kwargs = kernel.prepare(x, x, x, causal=True)
    inv = Invocation(kernel=kernel, args=args, kwargs=kwargs)
    space = kernel.config_space(inv)
    assert {cfg.platform for cfg in space} == {"cudnn", "mosaic", "triton", "xla"}
    assert space[0] == kernel.heuristic_cfg(inv)
    assert len(set(space)) == len(space) <= search.EXHAUSTIVE_LIMIT
    backward = Invocation(kernel=BackwardKernel(kernel), args=args, kwargs=kwargs, platform="cudnn")
    expected = {"cudnn", "mosaic", "triton", "xla"} - ({"mosaic"} if unsupported_backward(head_dim) else set())
    assert {cfg.platform for cfg in kernel.config_space_vjp(backward)} == expected


@pytest.mark.usefixtures("on_hopper")
def test_hopper_says_why_not(monkeypatch):
    x = jnp.zeros((1, 256, 2, 128), jnp.bfloat16)

    def why(capability="9.0", bias=None, **more):
        monkeypatch.setattr(Hopper, "compute_capability", capability)
        kernel = FlashAttention()
        arrays = {name: more.pop(name) for name in list(more) if name in Extras._fields}
        kwargs = arrays | {"rules": Rules(scale=1.0, **more)}
        inv = Invocation(kernel=kernel, args=(x, x, x, bias, None), kwargs=kwargs)
        return kernel.backend("mosaic").refusal(inv, backward=False, interpret=False)

    assert why() is None
    assert why(mask=jnp.ones((1, 1, 256, 256), bool)) is None
    assert "per head" in why(mask=jnp.ones((1, 2, 256, 256), bool))
    ids = jnp.zeros((1, 256), jnp.int32)
    packed = {"q_segment_ids": ids, "kv_segment_ids": ids}
    assert "segments alone" in why(mask=jnp.ones((1, 1, 1, 256), bool), **packed)
    assert why(bias=jnp.zeros((1, 2, 1, 256))) is None
    assert "same for all keys" in why(bias=jnp.zeros((1, 1, 256, 1)))
    assert "float64" in why(bias=jax.ShapeDtypeStruct((1, 1, 256, 256), "float64"))
    assert "one precision" in why(precision="highest")
    assert "9.0" in why(capability="8.0")
    assert "Hopper" in why(capability="10.0")
    monkeypatch.setitem(sys.modules, "ejkernel.kernels.flash_attention.mosaic", None)
    assert "cannot be imported" in why()
