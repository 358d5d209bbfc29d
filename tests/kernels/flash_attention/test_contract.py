"""Every implementation against NumPy in float64: outputs and gradients, or a refusal that was expected.

The short suite runs a table in which every two features meet; each feature by each implementation is in the full one.
"""

from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel.kernels.flash_attention.arguments import canonical
from ejkernel.modules import FlashAttention, FlashAttentionConfig, flash_attention
from ejkernel.ops import BwdParams, FwdParams
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.dispatch import UnsupportedCallError
from ejkernel.ops.core.kernel import Invocation
from tests.kernels import contract
from tests.kernels.flash_attention import oracle
from tests.kernels.flash_attention.cases import (
    CASES,
    FEATURES,
    GPU_CASES,
    PAIRS,
    Case,
    assert_close,
    attend,
    normal,
    segments,
    truth,
)
from tests.support import fully, table

BLOCKS = {
    "xla": (FwdParams(q_blocksize=16, kv_blocksize=32), BwdParams(q_blocksize=32, kv_blocksize=16)),
    "triton": (FwdParams(q_blocksize=16, kv_blocksize=32), BwdParams(q_blocksize=32, kv_blocksize=16)),
    "pallas": (FwdParams(q_blocksize=128, kv_blocksize=128), BwdParams(q_blocksize=128, kv_blocksize=128)),
}
"""Smaller than the sequences, and different in both directions; a TPU's tiles have at least 128 columns."""

PALLAS_REFUSES = {"bias of a query", "not normalised", "rounded logits"}
REFUSES = {
    "xla": set(),
    "reference": set(),
    "triton": PALLAS_REFUSES,
    "pallas": PALLAS_REFUSES | {"plain float16", "causal float16"},
    "cudnn": {
        "wide value dim 64", "wide lower right", "wide window, both sides", "wide soft cap", "wide segments",
        "wide sinks", "wide dropout", "wide bias", "wide float32", "wide segments, mixed", "wide packed",
        "wide packed, other keys", "wide mask", "wide mask of heads", "wide mask of keys", "wide bias of all heads",
        "wide bias of a key",
    },
    "mosaic": {"wide dropout", "wide float32", "wide packed, other keys", "wide mask of heads"},
}  # fmt: skip
"""Names of cases that an implementation does not serve, forward or backward; all others it must."""


@cache
def expected(case):
    return truth(*case.arrays())


def through(platform, **params):
    """The kernel by one implementation."""
    if platform == "reference":
        return lambda q, k, v, bias, aux, **kwargs: flash_attention(
            q, k, v, bias=bias, softmax_aux=aux, platform="reference", **kwargs
        )
    return contract.through(FlashAttention, platform, **tiles(platform) | params)


def tiles(platform):
    """Where kernels are compiled for a device, their own tiles are used."""
    small = BLOCKS if jax.default_backend() == "cpu" else {}
    return dict(zip(("fwd_params", "bwd_params"), small.get(platform, (None, None)), strict=True))


def check(platform, case):
    if case.name in REFUSES[platform]:
        contract.check_refusal(FlashAttention, platform, case, **tiles(platform))
    else:
        assert_close(attend(through(platform), *case.arrays()), expected(case), case.limit)


@pytest.mark.parametrize(("platform", "case"), PAIRS, ids=lambda x: getattr(x, "name", x))
def test_implementation_agrees_with_numpy_where_features_meet(platform, case):
    args, kwargs = case.arrays()
    assert_close(attend(through(platform), args, kwargs), truth(args, kwargs), case.limit)


@pytest.mark.full
@pytest.mark.parametrize("platform", ["xla", "triton", "pallas", "reference"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_implementation_agrees_with_numpy_or_refuses(case, platform):
    check(platform, case)


@pytest.mark.parametrize("name", ["rounded logits", "precision", "head dim 256"])
def test_xla_agrees_with_numpy_in_what_no_pair_has(name):
    check("xla", next(case for case in FEATURES if case.name == name))


def test_implementations_serve_what_they_are_to():
    kernel = FlashAttention(interpret=True)
    for case in CASES:
        args, kwargs = case.arrays()
        args, kwargs = kernel.prepare(*args, **kwargs)
        for owner, platform in product((kernel, BackwardKernel(kernel)), ("xla", "triton", "pallas")):
            answer = kernel.supports(Invocation(kernel=owner, args=args, kwargs=kwargs), platform)
            assert (answer is not True) == (case.name in REFUSES[platform]), (case.name, platform, answer)


def test_refused_call_is_an_error_with_the_reason():
    args, kwargs = Case("bias", make={"bias": normal("q", 1)}).arrays()
    with pytest.raises(UnsupportedCallError, match="triton: this kernel has no gradient of a bias that"):
        through("triton")(*args, **kwargs)


@pytest.mark.parametrize("precision", [("highest", "default"), jax.lax.DotAlgorithmPreset.F32_F32_F32])
def test_tpu_kernels_take_one_precision_for_both_operands(precision):
    args, kwargs = Case("precision", make={"precision": precision}).arrays()
    with pytest.raises(UnsupportedCallError, match="pallas: Mosaic takes one precision"):
        through("pallas")(*args, **kwargs)


@pytest.mark.parametrize(("q_len", "kv_len"), list(product((1, 2, 3, 4), repeat=2)))
def test_bounds_of_tiny_calls_leave_exactly_the_keys_that_are_seen(q_len, kv_len):
    q, kv = (jax.ShapeDtypeStruct((1, n, 1, 8), jnp.float32) for n in (q_len, kv_len))
    distance = np.arange(kv_len)[None, :] - np.arange(q_len)[:, None]
    for causal, window in product((False, True, "lower_right"), (None, 1, *product((None, 0, 1, 2, 3, 5), repeat=2))):
        call = {"causal": causal, "sliding_window": window}
        rules = canonical(q, kv, kv, **call)[2]
        seen = (distance >= (-9 if rules.lower is None else rules.lower)) & (
            distance <= (9 if rules.upper is None else rules.upper)
        )
        np.testing.assert_array_equal(seen, oracle.visible(q_len, kv_len, **call), str(call))


def test_segment_that_begins_inside_of_a_tile_is_seen_from_all_of_its_tiles():
    halves = lambda rng, case: jnp.repeat(jnp.arange(2), 24)[None]
    make = {"q_segment_ids": halves, "kv_segment_ids": halves}
    args, kwargs = Case("halves", 1, 48, 48, 1, 1, 8, make=make).arrays()
    call = through(
        "xla",
        fwd_params=FwdParams(q_blocksize=16, kv_blocksize=16),
        bwd_params=BwdParams(q_blocksize=16, kv_blocksize=16),
    )
    assert_close(attend(call, args, kwargs), truth(args, kwargs), 2e-5)


# --- Tiles that nobody needs, by what arrays say ---


@pytest.mark.parametrize(("platform", "by_mask"), table(("xla", "triton", "pallas"), (True, False)))
def test_tiles_between_segments_are_not_touched(platform, by_mask):
    # Anything that a weight of zero is multiplied with is zero, but for what is no number.
    size = 128 if platform == "pallas" else 16
    ids = np.arange(4 * size) // size
    pairs = jnp.asarray(ids[:, None] == ids[None, :])
    make = {"attention_mask": pairs} if by_mask else {"q_segment_ids": jnp.asarray(ids)[None]}
    params = {"q_blocksize": size, "kv_blocksize": size}
    args, kwargs = Case("segments", 1, 4 * size, 4 * size, 1, 1, 16, make=make).arrays()
    call = through(platform, fwd_params=FwdParams(**params), bwd_params=BwdParams(**params))
    poisoned = [None if x is None else x.at[:, size : 2 * size].set(jnp.nan) for x in args]
    got, want = attend(call, poisoned, kwargs), truth(args, kwargs)
    kept = np.r_[:size, 2 * size : 4 * size]
    assert_close({name: x[:, kept] for name, x in got.items()}, {name: x[:, kept] for name, x in want.items()}, 2e-5)


@pytest.mark.parametrize("make", [{"q_segment_ids": segments("q")}, *fully({"causal": True})])
def test_gradient_of_a_gradient_where_tiles_are_left_out(make):
    args, kwargs = Case("twice", 1, 40, 40, 2, 1, 8, make=make).arrays()
    blocks = {"q_blocksize": 16, "kv_blocksize": 16}
    tiled = through("xla", fwd_params=FwdParams(**blocks), bwd_params=BwdParams(**blocks))

    def twice(call):
        loss = lambda x: (call(args[0], x, x, None, None, **kwargs) ** 2).sum()
        return jax.jit(jax.grad(lambda x: jnp.sin(jax.grad(loss)(x)).sum()))(args[1])

    np.testing.assert_allclose(twice(tiled), twice(through("reference")), atol=1e-4)


# --- Logits so large that float32 cannot hold them and the logarithm of their sum ---


@pytest.mark.thin(2)
@pytest.mark.parametrize(("platform", "by_bias"), [("xla", True), ("xla", False), ("triton", False), ("pallas", False)])
def test_gradients_of_rows_whose_logits_are_all_far_from_zero(platform, by_bias):
    # Logits are a huge whole number and a small one, exactly: what float32 sees of them is what float64 sees.
    rng, far = np.random.default_rng(3), 2.0**23
    whole = lambda *shape: rng.integers(-1, 2, size=shape).astype(np.float32)
    q, k, v = whole(2, 21, 4, 8), whole(2, 37, 2, 8), rng.normal(size=(2, 37, 2, 8))
    aux, sign = np.array([1 - far, -1 - far, 0.0, far]), np.array([0, -1, 0, 1])[np.arange(21) % 4]
    bias = sign[:, None] * far
    if not by_bias:
        bias, q[..., 0], k[..., 0] = None, sign[:, None], far
    args = [None if x is None else jnp.asarray(x, jnp.float32) for x in (q, k, v, bias, aux)]
    got, want = (run(args, {"softmax_scale": 1.0}) for run in (partial(attend, through(platform)), truth))
    # Of the huge number that all keys share, the gradient is a small difference of huge ones.
    got["dquery"], want["dquery"] = got["dquery"][..., 1:], want["dquery"][..., 1:]
    assert_close(got, want, 2e-5)


def test_gradients_of_rows_of_which_a_bias_leaves_nothing_else():
    far = np.array([0.0, -1e9, 1e9, np.finfo(np.float32).min])[np.arange(40) % 4]
    args, kwargs = Case("far", make={"bias": lambda rng, case: far[:, None]}).arrays()
    # In float32 the logits of such a row are all alike; for float64 its query is zero.
    want = truth([jnp.where(far[:, None, None] == 0, args[0], 0.0), *args[1:]], kwargs)
    got = attend(through("xla"), args, kwargs)
    del want["dkey"], got["dkey"]  # Of which the query is a factor.
    assert_close(got, want, 2e-5)


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


def test_a_bias_has_a_gradient_by_triton_with_64_bits_enabled():
    case = Case("bias", q_len=20, kv_len=20, make={"bias": normal("h", "q", "k")})
    with jax.enable_x64(True):
        args, kwargs = case.arrays()
        assert_close(attend(through("triton"), args, kwargs), truth(args, kwargs), case.limit)


@pytest.mark.parametrize("platform", ["triton", *fully("pallas", "xla")])
def test_ids_that_differ_in_their_upper_32_bits_alone_are_two_segments(platform):
    order = np.array([3, -1, 3, 2, 0])
    with jax.enable_x64(True):
        wide = lambda side: lambda rng, case: jnp.asarray(order[rng.integers(0, 5, (2, getattr(case, side)))] << 32)
        make = {"q_segment_ids": wide("q_len"), "kv_segment_ids": wide("kv_len")}
        args, kwargs = Case("wide ids", kv_len=24, make=make).arrays()
        assert_close(attend(through(platform), args, kwargs), truth(args, kwargs), 2e-5)


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


@pytest.mark.full
@settings(max_examples=24)
@given(case=calls(), blocks=st.tuples(*[st.sampled_from([16, 32, 48])] * 4))
def test_xla_agrees_for_any_shape_window_and_head_group(case, blocks):
    args, kwargs = case.arrays()
    fwd = FwdParams(q_blocksize=blocks[0], kv_blocksize=blocks[1])
    bwd = BwdParams(q_blocksize=blocks[2], kv_blocksize=blocks[3])
    assert_close(attend(through("xla", fwd_params=fwd, bwd_params=bwd), args, kwargs), truth(args, kwargs), 2e-5)


@pytest.mark.full
@settings(max_examples=12)
@given(case=calls(), platform=st.sampled_from(["triton", "pallas"]))
def test_pallas_kernels_agree_for_any_shape_window_and_head_group(case, platform):
    args, kwargs = case.arrays()
    assert_close(attend(through(platform), args, kwargs), truth(args, kwargs), 2e-5)


# --- Any backward after any forward ---


@pytest.mark.thin(2)
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
    out, grads = contract.quick_jit(both)(prepared, dout)
    names = ("dquery", "dkey", "dvalue", None, "dsoftmax_aux")
    aux = grads[4].reshape(args[4].shape)
    got = {"out": out, **dict(zip(names, (*grads[:4], aux), strict=True))}
    got.pop(None)
    assert_close(got, expected(case), 2e-5)


# --- Memory and work ---


def temporary_bytes(length, **kwargs):
    x = jax.ShapeDtypeStruct((1, length, 2, 32), jnp.float32)
    attention = through("xla", fwd_params=None, bwd_params=None)
    loss = lambda q, k, v: attention(q, k, v, causal=True, **kwargs).sum()
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_of_xla_is_linear_in_the_sequence():
    small, large = (temporary_bytes(length) for length in (4096, 16384))
    # Scores alone would take 2 GiB.
    assert large < 128 << 20
    assert large < 5 * small


def test_tiles_that_nobody_sees_are_not_computed():
    # A window of 64 in 16384 keys: all tiles together would be 2 * 16384 ** 2 scores, which takes minutes.
    x = jnp.ones((1, 16384, 2, 32))
    out = through("xla")(x, x, x, causal=True, sliding_window=64)
    np.testing.assert_allclose(out, 1.0, rtol=1e-5)
