"""The linear cross entropy against float64, and in how much memory it runs."""

from functools import partial
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel.kernels.linear_cross_entropy import gradients
from ejkernel.kernels.linear_cross_entropy.params import ChunkParams, ChunkSizeError, guess
from ejkernel.kernels.linear_cross_entropy.rule import AxisNameError
from ejkernel.kernels.linear_cross_entropy.triton_rule import TritonRule
from ejkernel.modules import LinearCrossEntropy, LinearCrossEntropyConfig, linear_cross_entropy
from ejkernel.modules.linear_cross_entropy import LossArgumentError, LossGradients
from ejkernel.ops.tuning import comparison
from tests.kernels.contract import OperationCase, check

CHUNKS = {
    "at once": ChunkParams(rows=64, columns=16, loss_rows=4),
    "in turn": ChunkParams(rows=6, columns=5, loss_rows=6),
    "not even": ChunkParams(rows=5, columns=None, loss_rows=7),
}


def oracle(
    x, weights, labels, bias, ignore_index=None, label_smoothing=0.0, z_loss=0.0, logits_soft_cap=None, reduction="mean"
):
    """One-hot targets, JAX's own softmax, the gradient by JAX."""
    logits = x @ weights if bias is None else x @ weights + bias
    if logits_soft_cap is not None:
        logits = jnp.tanh(logits / logits_soft_cap) * logits_soft_cap
    vocabulary = weights.shape[1]
    targets = jax.nn.one_hot(labels, vocabulary) * (1 - label_smoothing) + label_smoothing / vocabulary
    lse = jax.nn.logsumexp(logits, axis=-1)
    loss = -jnp.sum(targets * jax.nn.log_softmax(logits, axis=-1), axis=-1) + z_loss * lse**2
    counts = jnp.ones(labels.shape) if ignore_index is None else (labels != ignore_index).astype(float)
    loss = jnp.where(counts > 0, loss, 0.0)
    return {"mean": lambda: loss.sum() / counts.sum(), "sum": loss.sum, "none": lambda: loss}[reduction]()


def case(name, *shape, vocabulary=37, bias=False, ignored=False, **options):
    def make(rng):
        labels = rng.integers(0, vocabulary, shape[:-1]).astype(np.int32)
        if ignored:
            labels[::3] = -100
        weights = rng.normal(size=(shape[-1], vocabulary)) / shape[-1] ** 0.5
        return [rng.normal(size=shape), weights, labels, rng.normal(size=vocabulary) if bias else None]

    kwargs = options.pop("kwargs", {}) | ({"ignore_index": -100} if ignored else {})
    return OperationCase(name, make, kwargs=kwargs, **options)


CASES = [
    case("plain", 18, 8),
    case("as many rows as the weights have", 18, 18),
    case("three axes", 3, 6, 8, bias=True),
    case("sum, some ignored", 18, 8, ignored=True, kwargs={"reduction": "sum"}),
    case("mean, some ignored, bias", 18, 8, ignored=True, bias=True),
    case("none", 18, 8, kwargs={"reduction": "none"}),
    case("none, all else", 18, 18, bias=True, ignored=True, kwargs={
        "reduction": "none", "label_smoothing": 0.1, "z_loss": 1e-2, "logits_soft_cap": 2.0}),
    case("smoothing", 18, 8, kwargs={"label_smoothing": 0.2}),
    case("z-loss", 18, 8, kwargs={"z_loss": 0.1}),
    case("soft cap, bias", 18, 8, bias=True, kwargs={"logits_soft_cap": 1.5}),
    case("one row", 1, 8),
    case("bfloat16", 18, 8, dtype="bfloat16", limit=1e-2),
    case("bfloat16, as many rows as the weights have", 18, 18, dtype="bfloat16", limit=1e-2),
    case("bfloat16, all else", 18, 6, dtype="bfloat16", bias=True, ignored=True, limit=2e-2, kwargs={
        "label_smoothing": 0.1, "z_loss": 1e-2, "logits_soft_cap": 3.0}),
    case("float16", 18, 6, dtype="float16"),
]  # fmt: skip


@pytest.mark.thin(11)
@pytest.mark.parametrize("platform", ["xla", "triton"])
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loss_and_gradients_agree_with_float64(case, chunks, platform):
    params = CHUNKS[chunks]
    check(LinearCrossEntropy, platform, case, oracle, fwd_params=params, bwd_params=params)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("platform", ["xla", "triton"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loss_and_gradients_agree_on_a_gpu(case, platform):
    params = CHUNKS["in turn"]
    check(LinearCrossEntropy, platform, case, oracle, fwd_params=params, bwd_params=params)


@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.parametrize("narrow", [0, 1])
def test_sums_have_the_wider_dtype_of_x_and_weights(narrow, chunk):
    with jax.enable_x64(True):
        args = [np.asarray(a, "float64") for a in inputs()[:2]]
        args[narrow] = args[narrow].astype("float32")
        params = ChunkParams(rows=chunk, columns=5, loss_rows=chunk)
        labels, cfg = jnp.arange(24), LinearCrossEntropyConfig(params, params)
        run = lambda x, w: linear_cross_entropy(x, w, labels, cfg=cfg)
        loss, grads = jax.value_and_grad(run, (0, 1))(*args)
        want = jax.value_and_grad(lambda x, w: oracle(x, w, labels, None), (0, 1))(*args)
        assert [g.dtype for g in grads] == [a.dtype for a in args]
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), (loss, grads), want)
        np.testing.assert_allclose([loss, run(*args)], want[0], rtol=1e-12)


def test_triton_reads_the_label_s_logit_before_its_warps_part():
    """The derivative takes the place of the logits: what a slow warp still reads, a fast one may have written."""
    arrays = jnp.zeros((2, 37)), jnp.zeros(2, int), jnp.ones(2)
    rule = TritonRule(interpret=True)
    traced = jax.make_jaxpr(lambda raw, labels, factor: rule.rows_and_derivative(raw, None, labels, factor))(*arrays)
    kernel = next(e.params["jaxpr"] for e in traced.eqns if "jaxpr" in e.params and e.primitive.name == "pallas_call")
    raw = kernel.invars[0]
    reads = [n for n, e in enumerate(kernel.eqns) if e.primitive.name == "masked_load" and e.invars[0] is raw]
    waits = [n for n, e in enumerate(kernel.eqns) if e.primitive.name == "reduce_max"]
    assert reads
    assert max(reads) < min(waits)


# --- Several devices ---

SHARED = {"ignore_index": -100, "label_smoothing": 0.1, "z_loss": 1e-2, "logits_soft_cap": 2.0}


def inputs(rows=24, height=8, vocabulary=32):
    arrays, _ = case("", rows, height, vocabulary=vocabulary, bias=True, ignored=True).arrays()
    x, weights, labels, bias = (jnp.asarray(a) for a in arrays if a is not None)
    return x, weights, labels, bias


def value_and_gradients(fn, x, weights, labels, bias):
    """Of a loss that is not merely summed: the cotangent is not 1."""
    run = lambda x, w, b: jnp.sum(jnp.sin(fn(x, w, labels, b)))
    return jax.jit(jax.value_and_grad(run, (0, 1, 2)))(x, weights, bias)


@pytest.mark.thin(3)
@pytest.mark.parametrize("chunk", [8, 64])
@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_vocabulary_on_four_devices_is_the_whole_one(reduction, tracked, chunk):
    args = inputs()
    cfg = LinearCrossEntropyConfig(ChunkParams(rows=chunk), ChunkParams(rows=chunk))
    loss = lambda x, w, y, b, **more: linear_cross_entropy(
        x, w, y, bias=b, reduction=reduction, cfg=cfg, **SHARED, **more
    )
    mesh = jax.make_mesh((4,), ("v",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.shard_map(
        partial(loss, axis_name="v"),
        mesh=mesh,
        in_specs=(P(), P(None, "v"), P(), P("v")),
        out_specs=P(),
        check_vma=tracked,
    )
    got, want = (value_and_gradients(fn, *args) for fn in (spread, loss))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), got, want)


@pytest.mark.parametrize("tracked", [True, False])
def test_rows_and_vocabulary_may_both_be_spread(tracked):
    args = inputs()
    loss = lambda x, w, y, b, **more: linear_cross_entropy(x, w, y, bias=b, **SHARED, **more)
    mesh = jax.make_mesh((2, 2), ("d", "v"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = (P("d"), P(None, "v"), P("d"), P("v"))
    names = {"axis_name": "v", "batch_axis_name": "d"}
    spread = jax.shard_map(partial(loss, **names), mesh=mesh, in_specs=specs, out_specs=P(), check_vma=tracked)
    got, want = (value_and_gradients(fn, *args) for fn in (spread, loss))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), got, want)


def test_rows_may_be_sharded_under_plain_jit():
    x, weights, labels, bias = inputs()
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, P("d"))
    loss = lambda x, w, y, b: linear_cross_entropy(x, w, y, bias=b, **SHARED)
    want = value_and_gradients(loss, x, weights, labels, bias)
    got = value_and_gradients(loss, jax.device_put(x, rows), weights, jax.device_put(labels, rows), bias)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), got, want)


@pytest.mark.parametrize("chunk", [8, 64])
def test_what_tpus_do_their_own_way_agrees(chunk, monkeypatch):
    args = inputs()
    cfg = LinearCrossEntropyConfig(bwd_params=ChunkParams(rows=chunk))
    loss = lambda x, w, y, b, **more: linear_cross_entropy(x, w, y, bias=b, cfg=cfg, **SHARED, **more)
    mesh = jax.make_mesh((2, 2), ("d", "v"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = (P("d"), P(None, "v"), P("d"), P("v"))
    spread = jax.shard_map(partial(loss, axis_name="v", batch_axis_name="d"), mesh=mesh, in_specs=specs, out_specs=P())
    want = value_and_gradients(loss, *args)
    monkeypatch.setattr(gradients, "device_kind", lambda: "tpu")
    for fn in (loss, spread):
        got = value_and_gradients(fn, *args)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), got, want)


# --- Statistics, values that stand out ---


def test_statistics_of_rows():
    x, weights, labels, bias = inputs()
    loss, stats = linear_cross_entropy(x, weights, labels, bias=bias, return_stats=True, ignore_index=-100)
    logits = x @ weights + bias
    np.testing.assert_allclose(stats.log_sum_exp, jax.nn.logsumexp(logits, axis=1), rtol=1e-5)
    np.testing.assert_array_equal(stats.correct, jnp.argmax(logits, axis=1) == labels)
    run = lambda x: linear_cross_entropy(x, weights, labels, bias=bias, ignore_index=-100, return_stats=True)
    grads = jax.grad(lambda x: (lambda out: out[0] + 0.0 * out[1].log_sum_exp.sum())(run(x)))(x)
    alone = jax.grad(lambda x: linear_cross_entropy(x, weights, labels, bias=bias, ignore_index=-100))(x)
    np.testing.assert_array_equal(grads, alone)
    assert loss == linear_cross_entropy(x, weights, labels, bias=bias, ignore_index=-100)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("height", [1, 16])
def test_a_label_with_the_largest_logit_is_correct_whatever_is_rounded(height, dtype):
    """The largest of logits that XLA has not rounded yet is above the same logit from memory, where it is."""
    x, weights, _, bias = (jnp.asarray(a, dtype) for a in inputs(64, height, 100))
    wide = x.astype("float32") @ weights.astype("float32") + bias.astype("float32")
    labels, (second, first) = jnp.argmax(wide, axis=1), jnp.sort(wide, axis=1)[:, -2:].T
    run = lambda x: linear_cross_entropy(x, weights, labels, bias=bias, return_stats=True)
    for _, stats in (jax.jit(run)(x), jax.value_and_grad(run, has_aux=True)(x)[0]):
        assert stats.correct[first - second > 0.05].all()


def test_no_row_that_counts_is_a_loss_of_zero():
    x, weights, labels, _ = inputs()
    run = lambda x, w: linear_cross_entropy(x, w, jnp.full_like(labels, -100), ignore_index=-100)
    loss, grads = jax.value_and_grad(run, (0, 1))(x, weights)
    assert loss == 0
    assert all(not g.any() for g in grads)


@pytest.mark.parametrize("label", [-1, 32])
def test_a_label_outside_of_the_vocabulary_is_nan_and_not_a_number(label):
    x, weights, labels, _ = inputs()
    labels = jnp.abs(labels % 32).at[3].set(label)
    losses = linear_cross_entropy(x, weights, labels, reduction="none")
    assert jnp.isnan(losses).tolist() == [i == 3 for i in range(24)]
    assert jnp.isnan(jax.grad(linear_cross_entropy)(x, weights, labels)[3]).all()


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_labels_may_have_few_bits(dtype):
    """A vocabulary or an ignore_index that the dtype cannot hold must not wrap around to a label that it can."""
    x, weights = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(6, 8), (8, 300)]))
    labels = np.array([0, 43, 44, 45, 100, 127 if dtype == "int8" else 156])
    run = lambda labels: jax.value_and_grad(linear_cross_entropy)(x, weights, labels, ignore_index=-100)
    got, want = (run(labels.astype(d)) for d in (dtype, "int32"))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), got, want)


def test_large_logits_neither_overflow_nor_vanish():
    x, weights, labels, bias = inputs()
    big = linear_cross_entropy(x * 1e4, weights, labels, bias=bias - 3e4, ignore_index=-100)
    want = oracle(x * 1e4, weights, labels, bias - 3e4, ignore_index=-100)
    np.testing.assert_allclose(big, want, rtol=1e-5)


def test_gradients_of_a_mean_in_float16_do_not_vanish_with_many_rows():
    """Those of most logits are below the least float16, but what is asked for is scaled by the cotangent."""
    rng, rows, vocabulary = np.random.default_rng(0), 4096, 8192
    x, weights = rng.normal(size=(rows, 4)).astype("float16"), np.zeros((4, vocabulary), "float16")
    cfg = LinearCrossEntropyConfig(bwd_params=ChunkParams(rows=256))
    loss = lambda w: 2.0**12 * linear_cross_entropy(x, w, np.zeros(rows, "int32"), cfg=cfg)
    want = 2.0**12 * x.astype("float64").mean(axis=0) / vocabulary  # Of a column that is no label.
    np.testing.assert_allclose(jax.grad(loss)(weights)[:, 1], want, rtol=1e-2)


@pytest.mark.full
def test_second_derivatives_agree_with_plain_jax():
    x, weights, labels, bias = inputs(rows=6)
    ours = lambda x: linear_cross_entropy(x, weights, labels, bias=bias, ignore_index=-100)
    plain = lambda x: oracle(x, weights, labels, bias, ignore_index=-100)
    of = lambda fn: jax.grad(lambda x: jnp.sum(jnp.sin(jax.grad(fn)(x))))(x)
    np.testing.assert_allclose(of(ours), of(plain), rtol=1e-4, atol=1e-5)


def test_vmap_agrees_with_a_loop():
    x, weights, labels, _ = inputs()
    x, labels = x.reshape(3, 8, 8), jnp.abs(labels % 32).reshape(3, 8)
    run = lambda x, y: linear_cross_entropy(x, weights, y)
    want = jnp.stack([run(*pair) for pair in zip(x, labels, strict=True)])
    np.testing.assert_allclose(jax.vmap(run)(x, labels), want, rtol=1e-6)


def test_the_guess_on_a_cpu_computes_few_rows_twice():
    sizes = {
        (rows, width): guess(rows, jnp.zeros((8, width))).rows for rows in (1, 256, 300, 4097) for width in (2, 5000)
    }
    assert all(-(-rows // size) * size < 1.01 * rows for (rows, _), size in sizes.items())
    assert sizes[4097, 2] == 4097  # A small vocabulary needs no chunks.
    assert sizes[4097, 5000] <= 256


def test_a_last_chunk_that_is_not_whole_counts_rows_once():
    x, weights, labels, _ = inputs()
    of = lambda rows: jax.grad(
        lambda w: linear_cross_entropy(
            x, w, labels, ignore_index=-100, cfg=LinearCrossEntropyConfig(bwd_params=ChunkParams(rows=rows))
        )
    )(weights)
    np.testing.assert_allclose(of(7), of(24), rtol=1e-5, atol=1e-7)


# --- Memory ---


def temporaries(fn, *args):
    memory = jax.jit(fn).lower(*args).compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


@pytest.mark.thin(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_that_of_a_chunk(dtype):
    rows, height, vocabulary = 2048, 64, 4096
    shapes = [((rows, height), dtype), ((height, vocabulary), dtype), ((rows,), "int32")]
    args = [jax.ShapeDtypeStruct(*s) for s in shapes]
    params = ChunkParams(rows=64, columns=512, loss_rows=64)
    cfg = LinearCrossEntropyConfig(params, params)
    loss = lambda x, w, y: linear_cross_entropy(x, w, y, cfg=cfg)
    chunk, width = 64 * vocabulary, 4  # A CPU computes in float32.
    total = height * vocabulary * 4
    assert temporaries(loss, *args) < 3 * chunk * width
    assert temporaries(jax.value_and_grad(loss, (0, 1)), *args) < 4 * chunk * width + 2 * total
    assert temporaries(jax.value_and_grad(oracle_of_four, (0, 1)), *args) > 10 * chunk * width


def oracle_of_four(x, weights, labels):
    return oracle(x, weights, labels, None)


# --- Errors ---


@pytest.mark.parametrize(
    ("change", "kwargs", "words"),
    [
        ({"weights": jnp.zeros((32, 8))}, {}, "Transpose weights that are"),
        ({"labels": jnp.zeros(24)}, {}, "labels must be integers of shape"),
        ({"labels": jnp.zeros(3, int)}, {}, r"labels must be integers of shape \(24,\)"),
        ({"x": jnp.zeros((24, 8), int)}, {}, "x must be of a floating dtype"),
        ({}, {"bias": jnp.zeros(8)}, r"bias must have shape \(32,\), got \(8,\)"),
        ({}, {"reduction": "avg"}, "reduction must be one of mean, sum, none"),
        ({}, {"return_stats": "no"}, "return_stats must be True or False, known while tracing, got 'no'"),
        ({}, {"label_smoothing": 1.0}, "label_smoothing must be at least 0 and less than 1"),
        ({}, {"logits_soft_cap": -1.0}, "linear_cross_entropy: logits_soft_cap must be above 0"),
        ({}, {"logits_soft_cap": 0.0}, "logits_soft_cap must be above 0"),
        ({}, {"logits_soft_cap": jnp.inf}, "logits_soft_cap must be above 0 and finite"),
        ({}, {"z_loss": -1.0}, "linear_cross_entropy: z_loss must be at least 0 and finite, got -1.0"),
        ({}, {"z_loss": jnp.nan}, "z_loss must be at least 0 and finite, got nan"),
        ({}, {"bias": [0.0] * 32}, "bias must be an array, got list"),
        ({}, {"z_loss": "1e-4"}, "z_loss must be a number, known while tracing, got '1e-4'"),
        ({}, {"ignore_index": "-100"}, "ignore_index must be an integer, known while tracing, got '-100'"),
        ({}, {"z_loss": True}, "z_loss must be a number, known while tracing, got True"),
        ({}, {"ignore_index": np.True_}, "ignore_index must be an integer, known while tracing, got np.True_"),
        ({}, {"ignore_index": 1.5}, "ignore_index must be an integer, known while tracing, got 1.5"),
        ({"weights": jnp.zeros((8, 32), "float8_e4m3fn")}, {}, "weights must have at least 16 bits, got float8_e4m3fn"),
        ({"weights": jnp.zeros((8, 0))}, {}, r"weights must not be empty, got shape \(8, 0\)"),
        ({"labels": None}, {}, "labels must be an array, got NoneType"),
        ({"labels": [1] * 24}, {}, "labels must be an array, got list"),
    ],
)
def test_wrong_arguments_are_named(change, kwargs, words):
    x, weights, labels, _ = inputs()
    given = {"x": x, "weights": weights, "labels": labels} | change
    with pytest.raises(LossArgumentError, match=words):
        linear_cross_entropy(**given, **kwargs)


def test_symbolic_rows_are_refused_by_name():
    x, weights, labels, _ = inputs()
    (rows,) = jax.export.symbolic_shape("b")
    shapes = [jax.ShapeDtypeStruct((rows, x.shape[1]), x.dtype), jax.ShapeDtypeStruct((rows,), labels.dtype)]
    call = jax.jit(lambda x, labels: linear_cross_entropy(x, weights, labels))
    with pytest.raises(LossArgumentError, match=r"the sizes of x and weights must be known, got \(b, 8\)"):
        jax.export.export(call)(*shapes)


@pytest.mark.parametrize("argument", ["axis_name", "batch_axis_name"])
@pytest.mark.parametrize("name", ["v", ("v", "d"), 1], ids=str)
def test_a_name_of_no_mesh_axis_is_named(argument, name):
    x, weights, labels, _ = inputs()
    first = name[0] if isinstance(name, tuple) else name
    with pytest.raises(AxisNameError, match=rf"{argument} must name mesh axes .* got {first!r}\."):
        jax.grad(linear_cross_entropy)(x, weights, labels, **{argument: name})


def test_rows_and_vocabulary_cannot_be_spread_over_one_axis():
    x, weights, labels, _ = inputs()
    mesh = jax.make_mesh((4,), ("v",), axis_types=(jax.sharding.AxisType.Auto,))
    loss = partial(linear_cross_entropy, axis_name=["v"], reduction="sum")
    specs = {"mesh": mesh, "in_specs": (P(), P(None, "v"), P()), "out_specs": P()}
    np.testing.assert_allclose(
        jax.shard_map(loss, **specs)(x, weights, labels), loss(x, weights, labels, axis_name=None), rtol=1e-5
    )
    with pytest.raises(AxisNameError, match="must name different mesh axes, got 'v' in both"):
        jax.shard_map(partial(loss, batch_axis_name="v"), **specs)(x, weights, labels)


@pytest.mark.parametrize("sizes", [{"rows": 0}, {"rows": 2.5}, {"rows": 2, "columns": -5}, {"rows": 2, "loss_rows": 0}])
def test_sizes_of_chunks_are_above_zero(sizes):
    with pytest.raises(ChunkSizeError, match="sizes must be integers above 0"):
        ChunkParams(**sizes)


NUMBERS = {"label_smoothing": 0.1, "z_loss": 1e-2, "logits_soft_cap": 2.0, "ignore_index": -100}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_may_be_of_numpy_and_jax_but_not_traced(name):
    x, weights, labels, _ = inputs()
    given: dict[str, Any] = {"ignore_index": -100}
    run = lambda number: linear_cross_entropy(x, weights, labels, **given | {name: number})
    want = run(NUMBERS[name])
    for number in (np.asarray(NUMBERS[name])[()], jnp.asarray(NUMBERS[name])):
        np.testing.assert_allclose(run(number), want, rtol=1e-6)
    with pytest.raises(LossArgumentError, match=rf"{name} must be .*, known while tracing, got a traced \w+\[\]"):
        jax.jit(run)(NUMBERS[name])


def test_a_tuning_on_large_logits_of_16_bits_finds_its_guess_right():
    rng = np.random.default_rng(0)
    x, weights = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((32, 64), (64, 100)))
    kernel, factor = LossGradients(), jnp.full(32, 1 / 32)
    args, kwargs = kernel.prepare(x, weights, jnp.arange(32), None, factor)
    got, want = kernel(*args, **kwargs), kernel.reference(*args, **kwargs)
    assert comparison.mismatch(got, want) is None
