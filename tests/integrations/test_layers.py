"""The attention layers of other libraries on ours: forward, and a step of training, against their own attention."""

import logging
import math
import os
import tempfile
from functools import partial

# Keras reads these when it is imported, and writes its settings there.
os.environ.update(KERAS_BACKEND="jax", KERAS_HOME=tempfile.mkdtemp(prefix="keras"))

import equinox
import flax.linen as linen
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from flax import nnx

from ejkernel.integrations import equinox_attention, flax_attention
from ejkernel.kernels.flash_attention.checks import AttentionArgumentError
from ejkernel.modules import (
    dot_product_attention,
    flash_attention,
    grouped_matmul,
    layer_norm,
    linear_cross_entropy,
    rms_norm,
)
from tests.kernels.contract import quick_jit
from tests.support import fully

BATCH, LENGTH, SIZE, HEADS = 2, 10, 16, 4


def inputs(*lead):
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=(*(lead or (BATCH,)), LENGTH, SIZE)), jnp.float32)


def padded(*lead):
    """A mask of numbers, as Flax makes it: causal; the second sequence has padding, whose rows see nothing."""
    tokens = jnp.ones((*(lead or (BATCH,)), LENGTH)).at[..., 1, 7:].set(0)
    mask = linen.combine_masks(linen.make_causal_mask(tokens), linen.make_attention_mask(tokens, tokens))
    return mask.at[0].set(jnp.zeros_like(mask[0]).at[..., 0].set(1))


def close(ours, theirs, atol=2e-5):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), atol=atol)


def step(layer, params):
    """What `layer(params)` gives, and the parameters after a step that makes it smaller."""

    def run(params):
        out, pull = jax.vjp(layer, params)
        return out, jax.tree.map(lambda p, g: p - 0.1 * g, params, *pull(out))

    return quick_jit(run)(params)


# --- Flax ---


@pytest.mark.parametrize("lead", [(BATCH,), pytest.param((3, BATCH), marks=pytest.mark.full)], ids=str)
def test_linen(lead):
    x, mask = inputs(*lead), padded(*lead)
    own = linen.MultiHeadDotProductAttention(num_heads=HEADS)
    ours = own.clone(attention_fn=flax_attention)
    params = quick_jit(own.init)(jax.random.key(0), x)
    run = lambda layer: step(lambda params: layer.apply(params, x, mask=mask), params)
    close(run(ours), run(own))


def test_linen_with_a_bare_flash_attention_gets_its_mask():
    x = inputs()
    mask = padded().astype(bool)
    own = linen.MultiHeadDotProductAttention(num_heads=HEADS)
    params = quick_jit(own.init)(jax.random.key(0), x)
    run = lambda layer: quick_jit(lambda params: layer.apply(params, x, mask=mask))(params)
    seen = np.asarray(mask).any(-1)[:, 0, :, None]
    close(np.where(seen, run(own.clone(attention_fn=flash_attention)), 0), np.where(seen, run(own), 0))


def nnx_layer(**kwargs):
    return nnx.MultiHeadAttention(HEADS, SIZE, decode=False, rngs=nnx.Rngs(0), **kwargs)


@pytest.mark.parametrize("way", ["attention_fn", "jax.nn"])
@pytest.mark.parametrize("masked", [True, *fully(False)])
def test_nnx(way, masked, monkeypatch):
    given = {"mask": padded()} if masked else {"is_causal": True}
    graph, state = nnx.split(nnx_layer())
    call = lambda graph: step(lambda state: nnx.merge(graph, state)(inputs(), **given), state)
    want = call(graph)
    if way == "jax.nn":
        calls = counted(monkeypatch)
        got = call(graph)
        assert calls
    else:
        got = call(nnx.split(nnx_layer(attention_fn=flax_attention))[0])
    close(jax.tree.leaves(got), jax.tree.leaves(want))


def counted(monkeypatch):
    """Puts ours in the place of JAX's own; returns a list that grows with every call."""
    calls = []

    def spy(*args, **kwargs):
        calls.append(kwargs)
        return dot_product_attention(*args, **kwargs)

    monkeypatch.setattr(jax.nn, "dot_product_attention", spy)
    return calls


def test_flax_dropout_drops_its_share_and_follows_its_key():
    # Arguments of the program: as its constants, XLA on a CPU may multiply the zeros to nan ("Limits" in the docs).
    q = jnp.zeros((2, 32, 4, 8))
    v = jnp.ones_like(q)
    call = lambda q, v, key, **kwargs: flax_attention(q, q, v, dropout_rng=key, dropout_rate=0.25, **kwargs)
    drop = quick_jit(call)
    first, again, other = (drop(q, v, jax.random.key(seed)) for seed in (0, 0, 1))
    assert abs(float(first.mean()) - 1) < 0.03
    close(first, again)
    assert not np.allclose(first, other)
    close(quick_jit(partial(call, deterministic=True))(q, v, jax.random.key(0)), v)
    with pytest.raises(AttentionArgumentError, match="dropout_seed is needed"):
        flax_attention(q, q, v, dropout_rate=0.5)


@pytest.mark.full
@pytest.mark.parametrize("library", ["nnx", "linen"])
def test_flax_layer_that_keeps_its_weights_gets_them(library):
    x, mask = inputs(), padded()
    if library == "linen":
        own = linen.MultiHeadDotProductAttention(num_heads=HEADS)
        params = quick_jit(own.init)(jax.random.key(0), x)
        run = lambda layer: layer.apply(params, x, mask=mask, sow_weights=True, mutable=["intermediates"])
        close(run(own.clone(attention_fn=flax_attention)), run(own))
        return
    ours, own = nnx_layer(attention_fn=flax_attention), nnx_layer()
    run = nnx.capture(nnx.Intermediate)(lambda layer: layer(x, mask=mask, sow_weights=True))
    (got, weights), (want, theirs) = run(ours), run(own)
    close(got, want)
    close(jax.tree.leaves(weights), jax.tree.leaves(theirs))


def test_linens_own_products_run():
    calls = []
    einsum = lambda *args: calls.append(args[0]) or jnp.einsum(*args)
    q = inputs().reshape(BATCH, LENGTH, HEADS, -1)
    products = {"qk_attn_weights_einsum": einsum, "attn_weights_value_einsum": einsum}
    run = lambda **own: flax_attention(q, q, q, is_causal=True, **own)
    close(*quick_jit(lambda: (run(**products), run()))())
    assert len(calls) == 2


def test_flax_arguments_that_do_not_fit_are_named():
    q = jnp.zeros((2, 5, 4, 8))
    with pytest.raises(AttentionArgumentError, match="flax_attention: mask must be broadcastable"):
        flax_attention(q, q, q, mask=jnp.ones((3, 1, 5, 5)))
    with pytest.raises(AttentionArgumentError, match="same batch axes"):
        flax_attention(q, q[0], q[0])
    for name in ("query", "key", "bias", "mask"):
        with pytest.raises(AttentionArgumentError, match=f"flax_attention: {name} must be an array, got str"):
            flax_attention(**{"query": q, "key": q, "value": q, name: "x"})
    with pytest.raises(AttentionArgumentError, match="flax_attention: dtype must be a floating-point dtype"):
        flax_attention(q, q, q, dtype="half a float")
    with pytest.raises(AttentionArgumentError, match="dtype must be a floating-point dtype or None, got int32"):
        flax_attention(q, q, q, dtype=jnp.int32)


def test_flax_types_are_promoted():
    q = inputs().reshape(BATCH, LENGTH, HEADS, -1)
    half = q.astype(jnp.bfloat16)
    assert jax.eval_shape(flax_attention, half, q, half).dtype == jnp.float32
    assert jax.eval_shape(lambda q: flax_attention(q, q, q, dtype=jnp.bfloat16), q).dtype == jnp.bfloat16
    for run in (flax_attention, linen.dot_product_attention):
        wide = jax.eval_shape(partial(run, force_fp32_for_softmax=True), half, half, half)
        assert wide.dtype == jnp.float32


def test_flax_masks_with_fewer_axes_than_batches():
    q = inputs(3, BATCH).reshape(3, BATCH, LENGTH, HEADS, -1)
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    want = flax_attention(q, q, q, is_causal=True)
    for mask in (causal, causal[None, None, None]):
        close(flax_attention(q, q, q, mask=mask, bias=jnp.zeros(LENGTH)), want)


# --- Keras ---


@pytest.mark.parametrize("masked", [True, *fully(False)])
def test_keras(masked, monkeypatch, caplog):
    x = inputs()
    layer = keras.layers.MultiHeadAttention(HEADS, SIZE // HEADS)
    layer.build(x.shape, x.shape)
    weights = [v.value for v in layer.trainable_variables]
    # Keras' masks have three axes, [batch, q, kv].
    given = {"attention_mask": padded()[:, 0]} if masked else {"use_causal_mask": True}

    call = lambda: step(lambda weights: layer.stateless_call(weights, [], x, x, **given)[0], weights)
    want = call()
    calls = counted(monkeypatch)
    with caplog.at_level(logging.ERROR):
        got = call()
    assert len(calls) == 1
    assert not caplog.records  # Keras logs what is raised, and takes its own attention.
    close(got, want)


# --- Equinox ---


@pytest.mark.parametrize("per_head", [True, *fully(False)])
def test_equinox(per_head, monkeypatch):
    layer = equinox.nn.MultiheadAttention(HEADS, SIZE, vo_size=6, use_query_bias=True, key=jax.random.key(0))
    x = inputs()
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool)).at[3].set(False)
    mask = jnp.stack([mask, mask.T] * (HEADS // 2)) if per_head else mask

    params, rest = equinox.partition(layer, equinox.is_array)
    batched = lambda layer: jax.vmap(lambda x: layer(x, x, x, mask))(x)
    call = lambda: step(lambda params: batched(equinox.combine(params, rest)), params)
    want = call()
    monkeypatch.setattr(equinox.nn.MultiheadAttention, "__call__", equinox_attention)
    close(call(), want)


def test_equinox_dropout_needs_a_key():
    layer = equinox.nn.MultiheadAttention(HEADS, SIZE, dropout_p=0.5, key=jax.random.key(0))
    x = inputs()[0]
    call = lambda **kwargs: equinox_attention(layer, x, x, x, **kwargs)
    drop = quick_jit(lambda key: call(key=key))
    assert not np.allclose(drop(jax.random.key(1)), drop(jax.random.key(2)))
    alike = quick_jit(lambda: (call(inference=True), layer(x, x, x, inference=True)))
    close(*alike())
    with pytest.raises(AttentionArgumentError, match="key= is needed"):
        call()
    layer_of = lambda p: equinox.tree_at(lambda layer: layer.dropout.p, layer, p)
    with pytest.raises(AttentionArgumentError, match=r"dropout\.p of the layer must be a number, .* a traced float32"):
        jax.eval_shape(lambda p: equinox_attention(layer_of(p), x, x, x, key=jax.random.key(1)), 0.5)
    with pytest.raises(AttentionArgumentError, match="mask must be boolean"):
        call(mask=jnp.ones((LENGTH, LENGTH)), inference=True)


def test_equinox_types_are_promoted():
    layer = equinox.nn.MultiheadAttention(HEADS, SIZE, dropout_p=0.5, dtype=jnp.bfloat16, key=jax.random.key(0))
    x = inputs()[0]
    call = lambda run: jax.eval_shape(lambda x: run(x.astype(jnp.bfloat16), x, x, deterministic=True), x)
    with pytest.warns(UserWarning, match="deprecated in favour"):
        want = call(layer)
    assert call(partial(equinox_attention, layer)) == want


@pytest.mark.full
def test_equinox_heads_can_be_processed():
    layer = equinox.nn.MultiheadAttention(HEADS, SIZE, key=jax.random.key(0))
    x = inputs()[0]
    halved = lambda q, k, v: (q / 2, k, v * 3)
    given = {"process_heads": halved}
    close(*quick_jit(lambda: (equinox_attention(layer, x, x, x, **given), layer(x, x, x, **given)))())
    with pytest.raises(AttentionArgumentError, match="must keep the shapes"):
        equinox_attention(layer, x, x, x, process_heads=lambda q, k, v: (q[1:], k, v))


# --- Parameters of NNX in calls ---


PARAMETERS = {
    "rms_norm": lambda x, w: rms_norm(x, w),
    "rms_norm over rows": lambda x, w: rms_norm(x.T, w, axis=0),
    "layer_norm": lambda x, w: layer_norm(x, w, w),
    "linear_cross_entropy": lambda x, w: linear_cross_entropy(x, jnp.eye(8), jnp.arange(4), bias=w),
    "grouped_matmul": lambda x, w: grouped_matmul(x.reshape(32, 1), w, jnp.array([20, 12])),
    "flash_attention": lambda x, w: flash_attention(*[x.reshape(1, 2, 2, 8)] * 3, softmax_aux=w),
    "scale of dot_product_attention": lambda x, w: dot_product_attention(*[x.reshape(1, 2, 2, 8)] * 3, scale=w),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_parameter_of_nnx_may_be_passed_as_it_is(name):
    x, call = jax.random.normal(jax.random.key(0), (4, 8)), PARAMETERS[name]
    shapes = {"grouped_matmul": (2, 1, 4), "flash_attention": (2, 4), "scale of dot_product_attention": ()}
    shape = shapes.get(name, (8,))
    plain = jnp.linspace(0.5, 1.5, math.prod(shape)).reshape(shape)
    np.testing.assert_allclose(call(x, nnx.Param(plain)), call(x, plain), atol=1e-6)
    loss = lambda w: (call(x, w) ** 2).sum()
    np.testing.assert_allclose(nnx.grad(loss)(nnx.Param(plain))[...], jax.grad(loss)(plain), atol=1e-5)
