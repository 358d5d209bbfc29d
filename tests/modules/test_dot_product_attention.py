"""`dot_product_attention` against `jax.nn.dot_product_attention`: results, gradients, errors, signature."""

import inspect
import itertools
from functools import partial

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel.modules import dot_product_attention
from ejkernel.modules.hidden_rows import Sight
from tests.kernels.contract import outputs, quick_jit
from tests.kernels.flash_attention.cases import pairwise
from tests.support import fully

theirs = jax.nn.dot_product_attention
BATCH, HEADS, DIM = 2, 4, 8


def coin(*shape):
    return lambda rng, sizes: jnp.asarray(rng.random([sizes.get(n, n) for n in shape]) < 0.4)


def normal(*shape, dtype="float32"):
    return lambda rng, sizes: jnp.asarray(rng.normal(size=[sizes.get(n, n) for n in shape]) * 3, dtype)


def lengths(side, *shares):
    return lambda rng, sizes: jnp.asarray([int(sizes[side] * share) for share in shares[: sizes["b"]]], jnp.int32)


TABLE = {
    "axes": [4, 3],
    "sizes": [(9, 7, 2), (7, 7, 4), (5, 13, 1)],
    "dtype": ["float32", "bfloat16", "float16"],
    "mask": [None, coin("b", 1, "t", "s"), coin("b", 1, 1, "s"), coin("n", "t", 1), coin("t", "s")],
    "bias": [None, normal("b", "n", "t", "s"), normal("n", 1, "s"), normal("s", dtype="int32")],
    "is_causal": [False, True],
    "local_window_size": [None, 2, (1, 0), (3, 9), (-1, 3)],
    "query_seq_lengths": [None, lengths("t", 0.5, 1.0)],
    "key_value_seq_lengths": [None, lengths("s", 0.6, 0.0)],
    "scale": [None, 0.3],
    "return_residual": [False, True],
    "implementation": [None, "xla"],
}
ROWS = pairwise(TABLE)
SHORT = 3
"""Rows of the short suite: in the first ones most pairs are new."""


def call_of(row):
    """Query, key, value and bias, and the keywords."""
    rng = np.random.default_rng(3)
    (q_len, kv_len, kv_heads), axes = row["sizes"], row["axes"]
    sizes = {"b": BATCH if axes == 4 else 1, "n": HEADS, "t": q_len, "s": kv_len}
    shapes = [(q_len, HEADS), (kv_len, kv_heads), (kv_len, kv_heads)]
    lead = () if axes == 3 else (BATCH,)
    qkv = [jnp.asarray(rng.normal(size=(*lead, *shape, DIM)), row["dtype"]) for shape in shapes]
    made = {name: x(rng, sizes) if callable(x) else x for name, x in row.items() if name in TABLE}
    if axes == 3 and made["mask"] is not None and made["mask"].ndim == 4:
        made["mask"] = made["mask"][0]
    kwargs = {name: x for name, x in made.items() if name not in ("axes", "sizes", "dtype", "bias")}
    return (*qkv, made["bias"]), kwargs


def floating(x):
    return x is not None and jnp.issubdtype(x.dtype, jnp.floating)


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=str(n), marks=() if n < SHORT else pytest.mark.full) for n, row in enumerate(ROWS)],
)
def test_agrees_with_jax(row):
    check(row)


def check(row, slack=1):
    args, kwargs = call_of(row)
    # In float32: JAX rounds weights to 16 bits, we do not.
    wide = [x.astype(jnp.float32) if floating(x) else x for x in args]
    want = outputs(theirs, wide, kwargs)
    got = outputs(dot_product_attention, args, kwargs)
    tolerance = slack * {"float32": 2e-5, "float16": 6e-3, "bfloat16": 5e-2}[row["dtype"]]
    assert got.keys() == want.keys()
    for name, other in want.items():
        ours = got[name]
        assert ours.shape == other.shape
        ours, other = (np.nan_to_num(np.asarray(x, np.float64), neginf=-1e5) for x in (ours, other))
        # A log-sum-exp of nothing is no float16.
        other = np.maximum(other, -1e5 if row["dtype"] == "float16" else -np.inf)
        np.testing.assert_allclose(ours, other, atol=tolerance * max(1.0, np.median(np.abs(other))), rtol=tolerance)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("number", range(len(ROWS)))
def test_agrees_with_jax_on_a_gpu(number):
    with jax.default_matmul_precision("highest"):
        # Kernels round weights to 16 bits, as JAX does there.
        check({**ROWS[number], "dtype": "bfloat16" if number % 2 else "float16", "axes": 4}, slack=2)


def test_dtypes_are_those_of_jax():
    for dtype in ("bfloat16", "float16"):
        args, kwargs = call_of({**ROWS[0], "dtype": dtype, "return_residual": True})
        ours, other = (jax.eval_shape(partial(f, **kwargs), *args) for f in (dot_product_attention, theirs))
        assert ours == other


def test_signature_is_that_of_jax():
    ours, other = (inspect.signature(f).parameters for f in (dot_product_attention, theirs))
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [(p.name, p.kind, p.default) for p in other.values()]


def qkv(batch=2, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(batch, 6, heads, DIM)), dtype) for heads in (4, 2, 2)]


BAD = {
    "implementation must be": lambda f, q, k, v: f(q, k, v, implementation="triton"),
    "key must be": lambda f, q, k, v: f(q[None], k[None], v[None]),
    "value must be like key": lambda f, q, k, v: f(q, k, v[..., :4]),
    "value must be like key, float32": lambda f, q, k, v: f(q, k, v.astype(jnp.bfloat16)),
    "query must be float32": lambda f, q, k, v: f(q.astype(jnp.bfloat16), k, v),
    "query must be float32 of": lambda f, q, k, v: f(q[:1], k, v),
    "query has 3 heads": lambda f, q, k, v: f(q[:, :, :3], k, v),
    "mask must be boolean": lambda f, q, k, v: f(q, k, v, mask=jnp.ones((6, 6))),
    "mask must have at most four axes": lambda f, q, k, v: f(q, k, v, mask=jnp.ones((1, 1, 1, 6, 6), bool)),
    "bias must have at most four axes": lambda f, q, k, v: f(q, k, v, jnp.ones((1, 1, 1, 6, 6))),
    "query_seq_lengths must be int32": lambda f, q, k, v: f(q, k, v, query_seq_lengths=jnp.ones(2)),
    "key_value_seq_lengths must be int32": lambda f, q, k, v: f(q, k, v, key_value_seq_lengths=jnp.ones(3, jnp.int32)),
}


@pytest.mark.parametrize("message", BAD)
def test_errors_are_those_of_jax(message):
    with pytest.raises(ValueError, match=message):
        BAD[message](dot_product_attention, *qkv())
    with pytest.raises(ValueError):  # noqa: PT011 - JAX's own words are not ours to pin.
        BAD[message](theirs, *qkv())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"local_window_size": 1.5}, r"pair \(left, right\) of integers, got 1.5"),
        ({"local_window_size": (1, 2, 3)}, r"local_window_size must be .* got \(1, 2, 3\)"),
        ({"local_window_size": (None, 2)}, r"local_window_size must be .* got \(None, 2\)"),
        ({"local_window_size": "ab"}, "local_window_size must be .* got 'ab'"),
        ({"scale": "small"}, "scale must be a real number.* got 'small'"),
        ({"scale": 1j}, "scale must be a real number.* got 1j"),
        ({"mask": "x"}, "mask must be an array, got str"),
        ({"bias": "x"}, "bias must be an array, got str"),
        ({"query_seq_lengths": "ab"}, "query_seq_lengths must be an array, got str"),
    ],
    ids=str,
)
def test_what_jax_fails_on_without_a_name_is_named(given, message):
    with pytest.raises((TypeError, ValueError)):
        theirs(*qkv(), **given)
    with pytest.raises(ValueError, match=f"^dot_product_attention: .*{message}"):
        dot_product_attention(*qkv(), **given)


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_what_cannot_be_broadcast_is_refused(name):
    dtype = bool if name == "mask" else None
    with pytest.raises(ValueError, match=rf"dot_product_attention: {name} must .*\[3, 6, 6\].*\[heads, q, kv\]"):
        dot_product_attention(*qkv(), **{name: jnp.ones((3, 6, 6), dtype)})
    with pytest.raises(ValueError, match=rf"got shape \[2, 6\]\. .* is {name}\[:, None, None, :\]"):
        dot_product_attention(*qkv(), **{name: jnp.ones((2, 6), dtype)})


def test_only_another_head_dim_of_values_is_referred_to_flash_attention():
    q, k, v = qkv()
    for value, other in ((v[..., :4], True), (v[:, 1:], False), (v.astype(jnp.bfloat16), False)):
        with pytest.raises(ValueError, match="value must be like key") as caught:
            dot_product_attention(q, k, value)
        assert ("flash_attention takes" in str(caught.value)) == other


def test_traced_scale_has_a_gradient():
    q, k, v = qkv()
    loss = lambda f, scale: jnp.sum(f(q, k, v, scale=scale) ** 2)
    ours, other = (
        quick_jit(jax.value_and_grad(lambda s, f=f: loss(f, s)))(0.4) for f in (dot_product_attention, theirs)
    )
    np.testing.assert_allclose(ours, other, rtol=1e-5)


WINDOWS = {
    "far": lambda f, mask: f(*qkv(), mask=mask, local_window_size=(2, 2**31 - 1)),
    "far, from the next key on": lambda f, mask: f(*qkv(), mask=mask, local_window_size=(-1, 2**31 - 1)),
    "traced": lambda f, mask: quick_jit(lambda n: f(*qkv(), mask=mask, local_window_size=(n, 0)))(2),
}


@pytest.mark.parametrize("window", WINDOWS)
def test_windows_that_are_no_small_numbers(window):
    mask = jnp.arange(6) % 3 != jnp.arange(6)[:, None] % 3
    ours, other = (WINDOWS[window](f, mask) for f in (dot_product_attention, theirs))
    np.testing.assert_allclose(ours, other, atol=2e-5)


def test_several_scales():
    scales = jnp.linspace(0.1, 1.0, 6)  # JAX takes what broadcasts to the logits: one for each key.
    ours, other = (quick_jit(lambda s, f=f: f(*qkv(), scale=s))(scales) for f in (dot_product_attention, theirs))
    np.testing.assert_allclose(ours, other, atol=2e-5)


@pytest.mark.parametrize("bias", [(6,), *fully((4, 6, 6), (2, 1, 6, 1))], ids=str)
def test_64_bits(bias):
    with jax.enable_x64(True):
        q, k, v = qkv(dtype=jnp.float64)
        bias = jnp.asarray(np.random.default_rng(1).normal(size=bias))
        run = lambda f: quick_jit(lambda *args: jax.vjp(partial(f, is_causal=True), *args)[1](q))(q, k, v, bias)
        for ours, other in zip(run(dot_product_attention), run(theirs), strict=True):
            assert ours.dtype == other.dtype == jnp.float64
            np.testing.assert_allclose(ours, other, atol=1e-5)  # JAX's softmax has 32 bits.


def test_what_there_is_no_kernel_for_is_left_to_jax():
    with pytest.raises(ValueError, match="8-bit floats do not support implicit promotion"):
        dot_product_attention(*(x.astype(jnp.float8_e4m3fn) for x in qkv()))
    lengths = jax.export.symbolic_shape("t, s")
    shapes = [(2, lengths[0], 4, DIM), (2, lengths[1], 2, DIM), (2, lengths[1], 2, DIM)]
    shaped = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    assert jax.eval_shape(dot_product_attention, *shaped).shape == shapes[0]


def test_in_the_place_of_jaxs_own_it_does_not_call_itself(monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", dot_product_attention)
    ints = [x.astype(jnp.int32) for x in qkv()]
    np.testing.assert_array_equal(jax.nn.dot_product_attention(*ints), theirs(*ints))


@pytest.mark.parametrize("specs", [[P("data", None, "model")], *fully([P(None, "model"), P("data"), P()])], ids=str)
def test_arrays_with_shardings_in_their_types(specs):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    q, k, v = qkv()
    mask = jnp.arange(6) > jnp.arange(2)[:, None, None, None] * 9
    want = theirs(q, k, v, mask=mask, return_residual=True)
    for spec in specs:
        with jax.set_mesh(mesh):
            placed = [*(jax.device_put(x, spec) for x in (q, k, v)), jax.device_put(mask, P("data"))]
            got = quick_jit(lambda q, k, v, mask: dot_product_attention(q, k, v, mask=mask, return_residual=True))(
                *placed
            )
        for ours, other in zip(got, want, strict=True):
            np.testing.assert_allclose(ours, other, atol=2e-5)


@pytest.mark.parametrize("axes", ["bhqk", "b1qk", "b11k", "1h1k", "bhq1", "b1q1"])
def test_rows_that_see_nothing_are_found_for_every_kind_of_mask(axes):
    rng, sizes = np.random.default_rng(0), {"b": 2, "h": 3, "q": 7, "k": 5, "1": 1}
    mask = rng.random([sizes[a] for a in axes]) < 0.3
    place = np.arange(5) - np.arange(7)[:, None]
    for left, right, lengths in itertools.product((None, 0, 2, 2**31 - 1), (None, 0, 1, 2**31 - 1), (None, [0, 3])):
        sight = Sight(
            mask=jnp.asarray(mask), left=left, right=right, kv_lengths=None if lengths is None else jnp.asarray(lengths)
        )
        seen = np.broadcast_to(mask, (2, 3, 7, 5)) & (place >= -(left if left is not None else 99))
        seen = seen & (place <= (right if right is not None else 99))
        seen = seen if lengths is None else seen & (np.arange(5) < np.asarray(lengths)[:, None, None, None])
        found = np.broadcast_to(sight.hidden_rows(7, 5), (2, 7, 3))
        np.testing.assert_array_equal(found, ~seen.any(axis=3).swapaxes(1, 2), f"{left}, {right}, {lengths}")


def test_a_mask_of_keys_takes_no_memory_of_rows_times_keys():
    rows = jax.jit(lambda mask: Sight(mask=mask, right=0).hidden_rows(4096, 4096))
    compiled = rows.lower(jax.ShapeDtypeStruct((2, 1, 1, 4096), jnp.bool_)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20
