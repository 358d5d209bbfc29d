"""The linear cross entropy against float64, and in how much memory it runs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel.kernels.linear_cross_entropy.params import ChunkParams
from ejkernel.modules import LinearCrossEntropy, LinearCrossEntropyConfig, linear_cross_entropy
from ejkernel.modules.linear_cross_entropy import LossArgumentError
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


@pytest.mark.thin(3)
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loss_and_gradients_agree_with_float64(case, chunks):
    params = CHUNKS[chunks]
    check(LinearCrossEntropy, "xla", case, oracle, fwd_params=params, bwd_params=params)
