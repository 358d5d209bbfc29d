"""Every implementation against the reference in float64: outputs and gradients, or a refusal that was expected."""

from functools import cache
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel.modules import FlashAttention, FlashAttentionConfig
from ejkernel.ops import BwdParams, ConfigCache, ConfigSelectorChain, Executor, FwdParams
from ejkernel.ops.core.dispatch import UnsupportedCallError
from tests.kernels.flash_attention.cases import CASES, FEATURES, GPU_CASES, Case, assert_close, attend, normal, truth

BLOCKS = {
    "xla": (FwdParams(q_blocksize=16, kv_blocksize=32), BwdParams(q_blocksize=32, kv_blocksize=16)),
    "triton": (FwdParams(q_blocksize=16, kv_blocksize=32), BwdParams(q_blocksize=32, kv_blocksize=16)),
    "pallas": (FwdParams(q_blocksize=128, kv_blocksize=128), BwdParams(q_blocksize=128, kv_blocksize=128)),
}
"""Smaller than the sequences, and different in both directions; a TPU's tiles have at least 128 columns."""

PALLAS_REFUSES = {
    "wide bias", "bias", "bias of all heads", "bias of a key", "bias of a query", "mask", "mask of keys",
    "mask that hides all", "packed, other keys", "many sinks", "not normalised", "rounded logits", "everything",
}  # fmt: skip
REFUSES = {
    "xla": set(),
    "triton": PALLAS_REFUSES,
    "pallas": PALLAS_REFUSES | {"plain float16", "causal float16"},
    "cudnn": {
        "wide value dim 64", "wide lower right", "wide window, both sides", "wide soft cap", "wide segments",
        "wide sinks", "wide dropout", "wide bias", "wide float32",
    },
    "mosaic": {
        "wide head dim 80", "wide value dim 64", "wide odd lengths", "wide dropout", "wide bias", "wide float32",
    },
}  # fmt: skip
"""Names of cases that an implementation does not serve, forward or backward; all others it must."""


@cache
def expected(case):
    return truth(*case.arrays())


def through(platform, **blocks):
    """The kernel by one implementation, through the whole pipeline; on a CPU the Pallas ones are interpreted."""
    interpret = jax.default_backend() == "cpu" and platform in ("triton", "pallas")
    kernel, executor = FlashAttention(interpret=interpret), Executor(ConfigSelectorChain(cache=ConfigCache()))
    # Where they are compiled, the implementations' own tiles are used.
    fwd, bwd = BLOCKS.get(platform, (None, None)) if jax.default_backend() == "cpu" else (None, None)
    cfg = FlashAttentionConfig(blocks.get("fwd", fwd), blocks.get("bwd", bwd), platform)
    return lambda *args, **kwargs: executor(kernel, *args, cfg=cfg, **kwargs)


def check(platform, case):
    args, kwargs = case.arrays()
    if case.name in REFUSES[platform]:
        with pytest.raises(UnsupportedCallError, match=f"{platform}: "):
            attend(through(platform), args, kwargs)
    else:
        assert_close(attend(through(platform), args, kwargs), expected(case), case.limit)


@pytest.mark.parametrize("platform", ["xla", "triton", "pallas"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_implementation_agrees_with_the_reference_or_refuses(case, platform):
    check(platform, case)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("platform", ["cudnn", "triton", "mosaic", "xla"])
@pytest.mark.parametrize("case", GPU_CASES, ids=lambda case: case.name)
def test_implementation_agrees_on_a_gpu(case, platform):
    check(platform, case)


def test_table_covers_every_argument():
    named = {name for case in FEATURES for name in case.make}
    assert named == {
        "causal", "softmax_scale", "bias", "attention_mask", "q_segment_ids", "kv_segment_ids", "cum_seqlens_q",
        "cum_seqlens_k", "sliding_window", "logits_soft_cap", "softmax_aux", "dropout_prob", "dropout_seed",
        "normalize_output", "precision", "logits_dtype",
    }  # fmt: skip


def test_float64_is_served_in_float64():
    case = Case("float64", make={"causal": True, "softmax_aux": normal("h"), "logits_dtype": "float64"})
    want = expected(case)
    with jax.enable_x64(True):
        args, kwargs = case.arrays()
        args = [None if x is None else jnp.asarray(np.asarray(x), jnp.float64) for x in args]
        assert_close(attend(through("xla"), args, kwargs), truth(args, kwargs), 1e-12)
    assert want.keys() == {"out", "dquery", "dkey", "dvalue", "dsoftmax_aux"}


@st.composite
def calls(draw):
    """Shapes, head groups and who sees whom, in all combinations."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    q_len, kv_len = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    side = st.none() | st.integers(0, 40)
    make = {
        "causal": draw(st.sampled_from([False, True, "lower_right"])),
        "sliding_window": draw(st.tuples(side, side)),
    }
    if draw(st.booleans()):
        make |= {"q_segment_ids": ids(q_len, draw), "kv_segment_ids": ids(kv_len, draw)}
    return Case(
        "drawn",
        batch=1,
        q_len=q_len,
        kv_len=kv_len,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 24, 32])),
        make=make,
    )


def ids(length, draw):
    """Segment ids, sorted and not."""
    order = draw(st.sampled_from([np.sort, lambda x: x]))
    return lambda rng, case: jnp.asarray(order(rng.integers(0, 3, size=(1, length))), jnp.int32)


@settings(max_examples=12)
@given(case=calls(), blocks=st.tuples(*[st.sampled_from([16, 32, 48])] * 4))
def test_xla_agrees_for_any_shape_window_and_head_group(case, blocks):
    args, kwargs = case.arrays()
    fwd = FwdParams(q_blocksize=blocks[0], kv_blocksize=blocks[1])
    bwd = BwdParams(q_blocksize=blocks[2], kv_blocksize=blocks[3])
    assert_close(attend(through("xla", fwd=fwd, bwd=bwd), args, kwargs), truth(args, kwargs), 2e-5)


@settings(max_examples=6)
@given(case=calls(), platform=st.sampled_from(["triton", "pallas"]))
def test_pallas_kernels_agree_for_any_shape_window_and_head_group(case, platform):
    args, kwargs = case.arrays()
    assert_close(attend(through(platform), args, kwargs), truth(args, kwargs), 2e-5)


# --- Any backward after any forward ---


@pytest.mark.parametrize(("forward", "backward"), [("xla", "triton"), ("triton", "pallas"), ("pallas", "xla")])
def test_any_backward_may_follow_any_forward(forward, backward):
    case = Case("mixed", q_len=37, kv_len=53, make={"causal": True, "softmax_aux": normal("h"), "logits_soft_cap": 2.0})
    args, kwargs = case.arrays()
    kernel = FlashAttention(interpret=True)
    prepared, rules = kernel.prepare(*args, **kwargs)
    method = lambda name, platform: getattr(kernel, f"{name}_{platform}")

    def both(args, dout):
        fwd, bwd = BLOCKS[forward][0], BLOCKS[backward][1]
        out, saved = method("fwd_with_residuals", forward)(*args, cfg=FlashAttentionConfig(fwd_params=fwd), **rules)
        vjp = method("vjp", backward)
        return out, vjp(saved, out, dout, *args, cfg=FlashAttentionConfig(bwd_params=bwd), **rules)

    dout = jnp.asarray(np.random.default_rng(99).normal(size=args[0].shape), jnp.float32)
    out, grads = jax.jit(both)(prepared, dout)
    names = ("dquery", "dkey", "dvalue", None, "dsoftmax_aux")
    aux = grads[4].reshape(args[4].shape)
    got = {"out": out, **dict(zip(names, (*grads[:4], aux), strict=True))}
    got.pop(None)
    assert_close(got, expected(case), 2e-5)


# --- Memory and work ---


def temporary_bytes(length, **kwargs):
    x = jax.ShapeDtypeStruct((1, length, 2, 32), jnp.float32)
    attention = through("xla", fwd=None, bwd=None)
    loss = lambda q, k, v: attention(q, k, v, causal=True, **kwargs).sum()
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_of_xla_is_linear_in_the_sequence():
    sizes = [temporary_bytes(length) for length in (4096, 8192, 16384)]
    # Scores alone would take 2 GiB at the longest.
    assert sizes[-1] < 128 << 20
    for small, large in pairwise(sizes):
        assert large < 2.3 * small


def test_tiles_that_nobody_sees_are_not_computed():
    # A window of 64 in 16384 keys: all tiles together would be 2 * 16384 ** 2 scores, which takes minutes.
    x = jnp.ones((1, 16384, 2, 32))
    out = through("xla")(x, x, x, causal=True, sliding_window=64)
    np.testing.assert_allclose(out, 1.0, rtol=1e-5)
