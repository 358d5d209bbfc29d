"""`flash_attention` as users call it: arguments, errors, implementations, transformations, sharding, tuning."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel.errors import EjkernelError
from ejkernel.kernels.flash_attention import reference
from ejkernel.kernels.flash_attention.arguments import canonical
from ejkernel.kernels.flash_attention.checks import AttentionArgumentError
from ejkernel.kernels.flash_attention.config import MosaicBwdConfig, MosaicFwdConfig
from ejkernel.modules import FlashAttention, FlashAttentionConfig, flash_attention
from ejkernel.ops import (
    Autotuner,
    BwdParams,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    FwdParams,
    autotune,
    from_json,
    to_json,
)
from ejkernel.ops.core.dispatch import UnsupportedCallError
from tests.kernels.contract import quick_jit
from tests.kernels.flash_attention import oracle


def arrays(batch=2, q_len=24, kv_len=24, heads=4, kv_heads=2, dim=16, dtype=jnp.float32, value_dim=None):
    rng = np.random.default_rng(0)
    shapes = [(batch, q_len, heads, dim), (batch, kv_len, kv_heads, dim), (batch, kv_len, kv_heads, value_dim or dim)]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def close(a, b, atol=2e-5):
    np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), atol=atol)


def test_agrees_with_jax_nn():
    q, k, v = arrays()
    for kwargs, theirs in [
        ({"causal": True, "softmax_scale": 0.3}, {"is_causal": True, "scale": 0.3}),
        ({"sliding_window": (3, 5)}, {"local_window_size": (3, 5)}),
    ]:
        close(flash_attention(q, k, v, **kwargs), jax.nn.dot_product_attention(q, k, v, **theirs))


def test_lower_right_is_the_end_of_a_longer_causal_call():
    q, k, v = arrays(q_len=24, kv_len=24)
    whole = flash_attention(q, k, v, causal=True, sliding_window=(6, 0))
    close(flash_attention(q[:, -5:], k, v, causal="lower_right", sliding_window=(6, 0)), whole[:, -5:])


def test_packed_sequences_are_as_if_called_alone():
    q, k, v = arrays(batch=1, q_len=24, kv_len=24)
    ends = jnp.array([0, 7, 16, 20])
    out = flash_attention(q, k, v, cum_seqlens_q=ends, causal=True)
    for start, stop in [(0, 7), (7, 16), (16, 20)]:
        part = slice(start, stop)
        close(out[:, part], flash_attention(q[:, part], k[:, part], v[:, part], causal=True))
    assert not out[:, 20:].any()


def test_packed_decoding_aligns_every_sequence_at_its_end():
    q, k, v = arrays(batch=1, q_len=5, kv_len=24)
    out = flash_attention(
        q, k, v, cum_seqlens_q=jnp.array([0, 2, 5]), cum_seqlens_k=jnp.array([0, 9, 24]), causal="lower_right"
    )
    close(out[:, :2], flash_attention(q[:, :2], k[:, :9], v[:, :9], causal="lower_right"))
    close(out[:, 2:], flash_attention(q[:, 2:], k[:, 9:], v[:, 9:], causal="lower_right"))


def test_one_array_may_be_the_ends_of_queries_and_keys_of_other_lengths():
    q, k, ends = jnp.ones((1, 10, 2, 8)), jnp.ones((1, 12, 2, 8)), jnp.array([0, 4, 8])
    run = lambda ends_k: flash_attention(q, k, k, cum_seqlens_q=ends, cum_seqlens_k=ends_k)
    assert jnp.array_equal(run(ends), run(ends + 0))


def test_dropout_keeps_the_expected_share_and_follows_its_seed():
    q, k, v = arrays(q_len=64, kv_len=64)
    ones = jnp.ones_like(v)
    drop = lambda seed: flash_attention(q, k, ones, dropout_prob=0.25, dropout_seed=seed)
    close(drop(1), drop(jnp.int32(1)))
    assert jnp.abs(drop(1) - drop(2)).max() > 0.1
    # Rows sum to one on average, and over many rows nearly so.
    assert abs(float(drop(3).mean()) - 1.0) < 0.02
    assert not np.allclose(drop(3)[0], drop(3)[1])


def test_a_key_of_jax_is_a_seed():
    q, k, v = arrays()
    drop = lambda key: flash_attention(q, k, v, dropout_prob=0.5, dropout_seed=key)
    typed = drop(jax.random.key(5))
    close(typed, drop(jax.random.PRNGKey(5)))
    close(typed, jax.jit(drop)(jax.random.key(5)))
    assert not np.allclose(typed, drop(jax.random.key(6)))
    assert not np.allclose(*jax.vmap(drop)(jax.random.split(jax.random.key(5))))


def test_a_seed_without_dropout_changes_nothing():
    q, k, v = arrays()
    want = flash_attention(q, k, v)
    for seed in (None, 7, jax.random.key(0), jax.random.PRNGKey(0)):
        np.testing.assert_array_equal(flash_attention(q, k, v, dropout_seed=seed), want)


def test_mask_is_another_name_of_attention_mask():
    q, k, v = arrays()
    mask = jnp.arange(24) % 3 > 0
    close(flash_attention(q, k, v, mask=mask), flash_attention(q, k, v, attention_mask=mask))
    assert not np.allclose(flash_attention(q, k, v, mask=mask), flash_attention(q, k, v))


def test_a_new_seed_is_not_a_new_program():
    q, k, v = arrays()
    traces = []
    fn = jax.jit(lambda seed: traces.append(1) or flash_attention(q, k, v, dropout_prob=0.5, dropout_seed=seed))
    fn(1), fn(2)
    assert len(traces) == 1


@pytest.mark.thin(2)
@pytest.mark.parametrize(("batch", "q_len", "kv_len"), [(2, 0, 3), (2, 3, 0), (0, 3, 3)])
@pytest.mark.parametrize("whole", [True, False])
def test_empty_calls_have_zeros_and_gradients(batch, q_len, kv_len, whole):
    q, k, v = arrays(batch=batch, q_len=q_len, kv_len=kv_len)
    bias = jnp.zeros((batch, 4, q_len, kv_len) if whole else (1, 1, 1, kv_len))
    mask = jnp.ones((1, 1, q_len, kv_len) if whole else (batch, 1, q_len, 1), bool)

    def loss(*floats, platform):
        out = flash_attention(*floats[:3], bias=floats[3], attention_mask=mask, platform=platform)
        return out.sum(), out

    for platform in (None, "reference"):
        grads, out = jax.grad(partial(loss, platform=platform), range(4), has_aux=True)(q, k, v, bias)
        assert out.shape == q.shape
        assert not out.any()
        assert [g.shape for g in grads] == [x.shape for x in (q, k, v, bias)]
        assert not any(g.any() for g in grads)


@pytest.mark.parametrize("causal", [False, "lower_right"])
@pytest.mark.parametrize("window", [23, 2**31 - 1, sys.maxsize], ids=str)
def test_window_that_no_key_is_outside_of_is_none(window, causal):
    qkv = arrays(q_len=20)
    rules = lambda window: canonical(*qkv, causal=causal, sliding_window=window)[2]
    assert rules(window) == rules((None, window)) == rules(None)


def test_window_that_no_packed_key_is_outside_of_is_none():
    q, k, v = arrays(q_len=20)
    packed = {"cum_seqlens_q": jnp.array([0, 7, 20]), "cum_seqlens_k": jnp.array([0, 9, 24]), "causal": "lower_right"}
    want = flash_attention(q, k, v, **packed)
    for platform in (None, "reference"):
        close(flash_attention(q, k, v, **packed, sliding_window=sys.maxsize, platform=platform), want)


@pytest.mark.thin(2)
@pytest.mark.parametrize("kernel", ["xla", "reference", "pallas", "triton"])
def test_sink_of_minus_infinity_is_none(kernel):
    q, k, v = arrays()
    mask = jnp.ones((24, 24), bool).at[5].set(False)
    sinks = jnp.array([-jnp.inf, 0.0, -jnp.inf, 0.0])

    def call(q, sinks):
        if kernel in ("xla", "reference"):
            return flash_attention(q, k, v, softmax_aux=sinks, attention_mask=mask, platform=kernel)
        ids = {"q_segment_ids": jnp.arange(24)[None].repeat(2, 0) == 5, "kv_segment_ids": jnp.zeros((2, 24), bool)}
        ids = {name: x.astype(jnp.int32) for name, x in ids.items()}
        cfg = FlashAttentionConfig(platform=kernel)
        return FlashAttention(interpret=True)(q, k, v, None, sinks, cfg=cfg, **ids)

    def loss(q, sinks):
        out = call(q, sinks)
        return out.sum(), out

    grads, out = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(q, sinks)
    without = oracle.attend((q, k, v, None, None), {"attention_mask": mask}, np.ones)["out"]
    close(out[:, :, ::2], without[:, :, ::2])
    assert not out[:, 5].any()
    assert all(np.isfinite(np.asarray(grad)).all() for grad in grads)


# --- Errors name their argument ---

BAD = {
    "missing a required argument: 'key'. A call takes query, key and value": lambda q, k, v: FlashAttention()(q),
    "unexpected keyword argument 'scale'.* by keyword causal, softmax_scale": lambda q, k, v: FlashAttention()(
        q, k, v, scale=2.0
    ),
    "query must be \\[batch": lambda q, k, v: flash_attention(q[0], k, v),
    "query must be an array, got NoneType": lambda q, k, v: flash_attention(None, k, v),
    "query must be floating point of at least 16 bits, got float8": lambda q, k, v: flash_attention(
        *(x.astype(jnp.float8_e4m3fn) for x in (q, k, v))
    ),
    "query must have at least one head": lambda q, k, v: flash_attention(q[:, :, :0], k, v),
    "of a shape only the batch may be symbolic": lambda q, k, v: jax.eval_shape(
        lambda q: flash_attention(q, q, q),
        jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, t, 2, 8"), jnp.float32),
    ),
    "cum_seqlens_q must be an array": lambda q, k, v: flash_attention(q, k, v, cum_seqlens_q=[[0, 24], [0, 5, 24]]),
    "logits_soft_cap must be positive and finite": lambda q, k, v: flash_attention(
        q, k, v, logits_soft_cap=float("inf")
    ),
    "mesh must be a jax.sharding.Mesh, got int": lambda q, k, v: flash_attention(q, k, v, mesh=3, in_specs=P()),
    "query must be floating": lambda q, k, v: flash_attention(q.astype(int), k.astype(int), v.astype(int)),
    "key is bfloat16 and query is float32": lambda q, k, v: flash_attention(q, k.astype(jnp.bfloat16), v),
    "value has batch 1": lambda q, k, v: flash_attention(q, k, v[:1]),
    "key has head_dim 8": lambda q, k, v: flash_attention(q, k[..., :8], v),
    "key and value must agree": lambda q, k, v: flash_attention(q, k, v[:, 1:]),
    "query has 3 heads and key has 2": lambda q, k, v: flash_attention(q[:, :, :3], k, v),
    "causal must be": lambda q, k, v: flash_attention(q, k, v, causal="upper_left"),
    "sliding_window must be": lambda q, k, v: flash_attention(q, k, v, sliding_window=(1, -2)),
    "logits_soft_cap must be positive": lambda q, k, v: flash_attention(q, k, v, logits_soft_cap=0.0),
    "bias must be broadcastable": lambda q, k, v: flash_attention(q, k, v, bias=jnp.zeros((3, 24))),
    r"Three axes are \[heads, q, kv\]; one of \[batch, q, kv\] is bias\[:, None\]": lambda q, k, v: flash_attention(
        q, k, v, bias=jnp.zeros((2, 24, 24))
    ),
    r"heads and key has 24; .* Axes are \[batch, sequence, heads, head_dim\]": lambda q, k, v: flash_attention(
        q, k.swapaxes(1, 2), v.swapaxes(1, 2)
    ),
    r"cum_seqlens_q must start with 0, .*end at 24 or before, got \[10, 14\]\. Of lengths": lambda q, k, v: (
        flash_attention(q, k, v, cum_seqlens_q=jnp.array([10, 14]))
    ),
    r"cum_seqlens_q must start with 0, not decrease": lambda q, k, v: flash_attention(
        q, k, v, cum_seqlens_q=np.array([[0, 4, 24], [0, 20, 12]], np.uint32)
    ),
    r"cum_seqlens_k must start with 0, .*got \[0, 20, 30\]": lambda q, k, v: flash_attention(
        q, k, v, cum_seqlens_q=[0, 4, 24], cum_seqlens_k=[0, 20, 30]
    ),
    "bias must be floating": lambda q, k, v: flash_attention(q, k, v, bias=jnp.zeros((24, 24), int)),
    "attention_mask must be boolean": lambda q, k, v: flash_attention(q, k, v, attention_mask=jnp.zeros((24, 24))),
    "attention_mask has three axes": lambda q, k, v: flash_attention(q, k, v, mask=jnp.ones((2, 24, 24), bool)),
    r"One value per key and batch is attention_mask\[:, None, None, :\]": lambda q, k, v: flash_attention(
        q, k, v, mask=jnp.ones((2, 24), bool)
    ),
    "mask and attention_mask are one argument": lambda q, k, v: flash_attention(
        q, k, v, mask=jnp.ones((24, 24), bool), attention_mask=jnp.ones((24, 24), bool)
    ),
    "or one key of jax.random, got key<fry>": lambda q, k, v: flash_attention(
        q, k, v, dropout_prob=0.5, dropout_seed=jax.random.split(jax.random.key(0))
    ),
    "q_segment_ids must be integers": lambda q, k, v: flash_attention(q, k, v, q_segment_ids=jnp.zeros((2, 3), int)),
    "q_segment_ids and kv_segment_ids are both needed": lambda q, k, v: flash_attention(
        q, k[:, 1:], v[:, 1:], q_segment_ids=jnp.zeros((2, 24), int)
    ),
    "give q_segment_ids and kv_segment_ids, or": lambda q, k, v: flash_attention(
        q, k, v, q_segment_ids=jnp.zeros((2, 24), int), cum_seqlens_q=jnp.array([0, 24])
    ),
    "cum_seqlens_q must be integers": lambda q, k, v: flash_attention(q, k, v, cum_seqlens_q=jnp.array([0.0, 24.0])),
    "cum_seqlens_q and cum_seqlens_k count the same": lambda q, k, v: flash_attention(
        q, k, v, cum_seqlens_q=jnp.array([0, 24]), cum_seqlens_k=jnp.array([0, 4, 24])
    ),
    "bias must be an array, got int": lambda q, k, v: flash_attention(q, k, v, bias=2**70),
    "softmax_scale must be finite, .*got nan": lambda q, k, v: flash_attention(q, k, v, softmax_scale=float("nan")),
    "softmax_aux must be": lambda q, k, v: flash_attention(q, k, v, softmax_aux=jnp.zeros(7)),
    "dropout_prob must be in": lambda q, k, v: flash_attention(q, k, v, dropout_prob=1.5),
    "dropout_seed is needed": lambda q, k, v: flash_attention(q, k, v, dropout_prob=0.5),
    "dropout_seed must be one integer": lambda q, k, v: flash_attention(q, k, v, dropout_prob=0.5, dropout_seed=0.5),
    "dropout_seed must be one integer.*got bool": lambda q, k, v: flash_attention(
        q, k, v, dropout_prob=0.5, dropout_seed=True
    ),
    "dropout_seed must be one integer.*got float32": lambda q, k, v: flash_attention(q, k, v, dropout_seed=0.5),
    r"dropout_seed must be one integer.*got uint32\[3\]": lambda q, k, v: flash_attention(
        q, k, v, dropout_prob=0.0, dropout_seed=jnp.zeros(3, jnp.uint32)
    ),
    "normalize_output must be": lambda q, k, v: flash_attention(q, k, v, normalize_output="yes"),
    "precision is 'best'": lambda q, k, v: flash_attention(q, k, v, precision="best"),
    "logits_dtype must be": lambda q, k, v: flash_attention(q, k, v, logits_dtype=jnp.int8),
    "logits_dtype must be a floating-point dtype, got None": lambda q, k, v: flash_attention(
        q, k, v, logits_dtype=None
    ),
    "platform must be": lambda q, k, v: flash_attention(q, k, v, platform="cuda"),
    "platform is 'xla' and cfg.platform is 'cudnn'": lambda q, k, v: flash_attention(
        q, k, v, platform="xla", cfg=FlashAttentionConfig(platform="cudnn")
    ),
    "cfg must be a FlashAttentionConfig": lambda q, k, v: flash_attention(q, k, v, cfg={"platform": "xla"}),
    "cfg.fwd_params must be FwdParams for platform 'xla', got MosaicFwdConfig": lambda q, k, v: flash_attention(
        q, k, v, cfg=FlashAttentionConfig(MosaicFwdConfig())
    ),
    "in_specs and out_specs need mesh": lambda q, k, v: flash_attention(q, k, v, in_specs=P()),
    r"softmax_scale must be a Python number.*Multiply the query by a scale that is traced": lambda q, k, v: jax.jit(
        lambda s: flash_attention(q, k, v, softmax_scale=s)
    )(0.5),
    "causal must be .* got an array that is traced .* static_argnames": lambda *qkv: jax.jit(flash_attention)(
        *qkv, causal=True
    ),
    "sliding_window must be .* got an array that is traced": lambda *qkv: jax.jit(flash_attention)(
        *qkv, sliding_window=2
    ),
    r"sliding_window must be .* got \(1, 2, 3\)": lambda q, k, v: flash_attention(
        q, k, v, sliding_window=np.array([1, 2, 3])
    ),
    r"causal must be .* got \[True, False\]": lambda q, k, v: flash_attention(q, k, v, causal=jnp.arange(2) < 1),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message):
    with pytest.raises(EjkernelError, match=message):
        BAD[message](*arrays())


# --- Which implementation ---


def test_a_platform_that_cannot_serve_is_an_error_with_its_reason():
    with pytest.raises(UnsupportedCallError, match="asks for platform='cudnn', but cudnn needs a GPU, this is a CPU"):
        flash_attention(*arrays(), platform="cudnn")
    with pytest.raises(UnsupportedCallError, match="cudnn needs a GPU"):
        flash_attention(*arrays(), cfg=FlashAttentionConfig(platform="cudnn"))


def test_reference_is_refused_above_its_size_limit(monkeypatch):
    q, k, v = arrays()
    close(flash_attention(q, k, v, platform="reference"), flash_attention(q, k, v))
    monkeypatch.setattr(reference, "MAX_SCORES", 100)
    with pytest.raises(reference.ReferenceTooLargeError, match=r"hold .*scores at once"):
        flash_attention(q, k, v, platform="reference")


def test_truth_for_tuning_needs_no_quadratic_memory(monkeypatch):
    q, k, v = arrays()
    kernel = FlashAttention()
    args, kwargs = kernel.prepare(q, k, v, None, jnp.ones(4), causal=True)
    grads = jax.grad(lambda q, k, v, aux: (kernel.reference(q, k, v, None, aux, **kwargs) ** 2).sum(), (0, 1, 2, 3))
    small = grads(*args[:3], args[4])
    monkeypatch.setattr(reference, "MAX_SCORES", 100)
    for a, b in zip(small, grads(*args[:3], args[4]), strict=True):
        close(a, b, atol=1e-4)


def test_guess_names_an_implementation_and_is_a_candidate():
    executor = Executor(ConfigSelectorChain(cache=ConfigCache()))
    kernel = FlashAttention()
    cfg = executor.choose_config(kernel, *arrays(q_len=600, kv_len=300), causal=True)
    assert cfg.platform == "xla"
    assert cfg.fwd_params is not None
    assert cfg.bwd_params is None


def test_explicit_blocks_reach_forward_and_backward():
    q, k, v = arrays(q_len=64, kv_len=64)
    cfg = FlashAttentionConfig(FwdParams(q_blocksize=16, kv_blocksize=32), BwdParams(q_blocksize=32, kv_blocksize=16))
    loss = lambda q: flash_attention(q, k, v, cfg=cfg).sum()
    shapes = str(jax.make_jaxpr(jax.grad(loss))(q))
    assert "2,2,2,16,32" in shapes
    assert "2,2,2,32,16" in shapes


@pytest.mark.parametrize("policy", ["frozen", "on"])
@pytest.mark.parametrize("platform", [None, "xla"])
def test_explicit_config_with_both_parts_covers_the_backward(platform, policy):
    asked = set()
    note = lambda name, op_id, **_: asked.add(op_id)
    executor = Executor(ConfigSelectorChain(cache=ConfigCache(), autotune=policy, on_event=note))
    q, k, v = arrays(q_len=64, kv_len=64)
    cfg = FlashAttentionConfig(FwdParams(q_blocksize=16, kv_blocksize=32), BwdParams(q_blocksize=32), platform)
    jax.jit(jax.grad(lambda q: executor(FlashAttention(), q, k, v, cfg=cfg).sum())).lower(q)
    assert "flash_attention.vjp" not in asked


def test_configs_survive_json():
    for cfg in [
        FlashAttentionConfig(FwdParams(q_blocksize=64), None, "xla"),
        FlashAttentionConfig(MosaicFwdConfig(stages=3), MosaicBwdConfig(), "mosaic"),
    ]:
        assert from_json(to_json(cfg), FlashAttentionConfig) == cfg


# --- Transformations ---


def test_vmap_jit_remat_and_scan():
    q, k, v = arrays()
    want = flash_attention(q, k, v, causal=True)
    call = lambda q, k, v: flash_attention(q[None], k[None], v[None], causal=True)[0]
    close(jax.vmap(call)(q, k, v), want)
    loss = lambda q: (flash_attention(q, k, v, causal=True) ** 2).sum()
    close(jax.grad(jax.checkpoint(loss))(q), jax.jit(jax.grad(loss))(q))
    _, outs = jax.lax.scan(lambda c, x: (c, flash_attention(x, k, v, causal=True)), 0, q[None])
    close(outs[0], want)


def test_rows_that_see_nothing_are_no_nan_on_the_way():
    mask = jnp.eye(24, k=-1, dtype=bool)
    loss = lambda q, k, v: flash_attention(q, k, v, mask=mask).sum()
    error, grads = quick_jit(checkify.checkify(jax.grad(loss), errors=checkify.float_checks))(*arrays())
    assert error.get() is None
    assert not grads[:, 0].any()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"platform": "reference"}], ids=str)
def test_exported_with_a_symbolic_batch(options):
    q, k, v = arrays()
    call = jax.jit(lambda q, k, v: flash_attention(q, k, v, **options))
    (batch,) = jax.export.symbolic_shape("b")
    exported = jax.export.export(call)(*(jax.ShapeDtypeStruct((batch, *x.shape[1:]), jnp.float32) for x in (q, k, v)))
    close(exported.call(q, k, v), call(q, k, v))


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("spec", "platform"), [(P("d"), None), (P("d", None, "h"), None), (P(None, "d"), None), (P("d"), "reference")]
)
def test_arrays_with_explicit_sharding(spec, platform):
    q, k, v = arrays()
    found = oracle.attend((q, k, v, None, None), {"causal": True}, np.ones)
    want, want_grad = found["out"], found["dquery"]
    with jax.set_mesh(jax.make_mesh((2, 2), ("d", "h"), axis_types=(AxisType.Explicit,) * 2)):
        q, k, v = (jax.device_put(x, spec) for x in (q, k, v))
        call = lambda q: flash_attention(q, k, v, causal=True, platform=platform)
        out, grad = call(q), jax.jit(jax.grad(lambda q: call(q).sum()))(q)
        assert jax.typeof(out).sharding.spec == jax.typeof(q).sharding.spec
    close(out, want)
    close(grad, want_grad)


def test_keys_of_calls_do_not_depend_on_scale_or_seed():
    executor = Executor(ConfigSelectorChain(cache=ConfigCache()))
    kernel = FlashAttention()
    key = lambda **kwargs: executor.explain(kernel, *arrays(), **kwargs).key
    assert key(softmax_scale=0.5) == key(softmax_scale=0.25)
    assert key(dropout_prob=0.1, dropout_seed=1) == key(dropout_prob=0.2, dropout_seed=2)
    assert key() != key(causal=True) != key(causal=True, sliding_window=3)


# --- Sharding ---


@pytest.mark.thin(2)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_batch_and_heads_shard_without_communication(axis_type):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    q, k, v = arrays(batch=4)
    rng = np.random.default_rng(1)
    bias = jnp.asarray(rng.normal(size=(1, 4, 24, 24)), jnp.float32)
    sinks = jnp.asarray(rng.normal(size=4), jnp.float32)
    ids = jnp.asarray(np.sort(rng.integers(0, 3, size=(4, 24))), jnp.int32)

    def loss(q, k, v, bias, sinks, **kwargs):
        out = flash_attention(q, k, v, bias=bias, softmax_aux=sinks, q_segment_ids=ids, causal=True, **kwargs)
        return (out**2).sum(), out

    grad = jax.jit(jax.grad(loss, argnums=range(5), has_aux=True), static_argnames=("mesh", "in_specs"))
    want = grad(q, k, v, bias, sinks)
    got = grad(q, k, v, bias, sinks, mesh=mesh, in_specs=P("data", None, "model"))
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        close(a, b, atol=1e-4)
    forward = jax.jit(lambda q, k, v: flash_attention(q, k, v, mesh=mesh, in_specs=P("data", None, "model")))
    text = forward.lower(q, k, v).compile().as_text()
    assert "all-reduce" not in text
    assert "all-gather" not in text


def test_one_key_head_may_be_whole_on_every_device():
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    q, k, v = arrays(kv_heads=1)
    specs = (P(None, None, "model"), P(), P())
    close(flash_attention(q, k, v, mesh=mesh, in_specs=specs), flash_attention(q, k, v))


def test_shards_drop_different_weights():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    q, k, v = (jnp.concatenate([x[:1], x[:1]]) for x in arrays())
    out = flash_attention(q, k, v, mesh=mesh, in_specs=P("data"), dropout_prob=0.5, dropout_seed=1)
    assert not np.allclose(out[0], out[1])


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (P(None, "x"), "shards the sequence"),
        ((P("x"), P(), P()), "batch is sharded by 'x' in query and None in key"),
        ((P(None, None, "x"), P(), P()), "They must agree"),
        (P("y"), "names axis 'y'"),
        (None, "in_specs must be a PartitionSpec"),
    ],
)
def test_specs_that_cannot_work_are_refused(specs, message):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    with pytest.raises(EjkernelError, match=message):
        flash_attention(*arrays(), mesh=mesh, in_specs=specs)


# --- Tuning ---


@pytest.mark.full
def test_forward_and_backward_are_tuned_apart():
    tuned = {}
    tuner = Autotuner(timer="wall", max_candidates=1, budget_s=600, progress=False)

    def note(name, **data):
        if name == "tuned":
            tuned[data["op_id"]] = data["cfg"]

    executor = Executor(ConfigSelectorChain(cache=ConfigCache(), autotune=True, tuner=tuner, on_event=note))
    q, k, v = arrays(q_len=96, kv_len=96)
    jax.grad(lambda q: executor(FlashAttention(), q, k, v, causal=True).sum())(q)
    assert tuned.keys() == {"flash_attention", "flash_attention.vjp"}
    forward, backward = tuned["flash_attention"], tuned["flash_attention.vjp"]
    assert forward.platform == backward.platform == "xla"
    assert isinstance(forward.fwd_params, FwdParams)
    assert forward.bwd_params is None
    assert isinstance(backward.bwd_params, BwdParams)
    assert backward.fwd_params is None


def test_an_abstract_call_with_segments_and_masks_can_be_tuned():
    chain = ConfigSelectorChain(cache=ConfigCache())
    tuner = Autotuner(timer="wall", max_candidates=1, budget_s=600, progress=False)
    q, k, v = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays())
    ids = jax.ShapeDtypeStruct((2, 24), jnp.int32)
    mask = jax.ShapeDtypeStruct((2, 1, 24, 24), jnp.bool_)
    kernel = FlashAttention()
    cfg = autotune(kernel, q, k, v, q_segment_ids=ids, attention_mask=mask, selector=chain, tuner=tuner)
    assert cfg.platform == "xla"


def test_importing_the_module_brings_in_no_pallas():
    code = "import sys, ejkernel.modules; print('jax.experimental.pallas' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=Path.cwd())
    assert done.stdout.strip() == "False", done.stderr


def test_spoiled_row_and_a_missing_tile_are_wrong_and_rounding_is_not():
    want = jax.random.normal(jax.random.key(0), (1, 4096, 2, 64)).astype(jnp.bfloat16)
    wrong = FlashAttention().mismatch
    assert wrong(want * 1.002, want) is None
    assert wrong(want.at[0, 3, 0, 0].add(0.15), want) is None
    assert "error" in wrong(want.at[0, 4095, 1].multiply(-1), want)
    assert "relative error" in wrong(want * 1.1, want)


@pytest.mark.parametrize(
    "options",
    [
        {"softmax_scale": 1 / np.sqrt(16)}, {"softmax_scale": jnp.float32(0.25)}, {"logits_soft_cap": np.float64(30)},
        {"sliding_window": np.int64(4)}, {"sliding_window": (np.int32(3), None)}, {"causal": np.bool_(True)},
        {"normalize_output": np.bool_(False)}, {"dropout_prob": np.float32(0.5), "dropout_seed": 1},
    ],
    ids=str,
)  # fmt: skip
def test_numbers_of_numpy_and_jax_count_as_pythons(options):
    plain = lambda x: tuple(map(plain, x)) if isinstance(x, tuple) else getattr(x, "item", lambda: x)()
    asked = lambda **options: jax.make_jaxpr(lambda *qkv: flash_attention(*qkv, **options))(*arrays())
    assert str(asked(**options)) == str(asked(**{name: plain(x) for name, x in options.items()}))


def test_traced_scale_says_what_to_give():
    with pytest.raises(AttentionArgumentError, match="softmax_scale must be a Python number, known while tracing"):
        jax.jit(lambda s: flash_attention(*arrays(), softmax_scale=s))(0.5)


def test_a_refused_call_does_not_change_what_the_next_one_is_told():
    kernel = FlashAttention()
    for wrong in (np.float32(0.1), "a", object()):
        with pytest.raises(AttentionArgumentError, match="softmax_scale must be a Python number, known while tracing"):
            kernel(*arrays(), softmax_scale=wrong)
