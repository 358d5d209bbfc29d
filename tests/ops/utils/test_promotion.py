"""A program that forbids itself to mix dtypes or ranks can use every operation, and tune it."""

from contextlib import ExitStack

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import dot_product_attention, flash_attention, grouped_matmul, layer_norm, linear_cross_entropy
from ejkernel.ops import Autotuner, ConfigSelectorChain, autotune_lowered
from tests.kernels.contract import quick_jit

X = np.random.default_rng(0).normal(size=(2, 8, 2, 16))
ENDS = np.array([0, 3, 8], np.int32)
CALLS = {
    "attention": lambda x: flash_attention(x, x, x, causal=True),
    "attention, packed": lambda x: flash_attention(x, x, x, cum_seqlens_q=ENDS, cum_seqlens_k=ENDS + ENDS % 8 // 3),
    "attention, reference": lambda x: flash_attention(
        x, x, x, softmax_aux=x[0, 0, :, 0], dropout_prob=0.5, dropout_seed=1, platform="reference"
    ),
    "jax.nn, mask": lambda x: dot_product_attention(x, x, x, mask=np.eye(8, k=-1, dtype=bool)[None, None]),
    "jax.nn, lengths": lambda x: dot_product_attention(x, x, x, scale=x[0, 0, 0, 0], key_value_seq_lengths=ENDS[1:]),
    "jax.nn, traced window": lambda x: dot_product_attention(
        x, x, x, local_window_size=(x[0, 0, 0, 0].astype(jnp.int32), 2)
    ),
    "norm": lambda x: layer_norm(x, x[0, 0, 0]),
    "loss": lambda x: linear_cross_entropy(x[..., 0, :], x[0, 0].T, jnp.ones((2, 8), jnp.int32)),
    "experts": lambda x: grouped_matmul(x[0, :, 0], x.reshape(2, 16, -1), np.array([3, 5], np.int32)),
}


@pytest.fixture
def strict():
    with ExitStack() as stack:
        stack.enter_context(jax.numpy_dtype_promotion("strict"))
        stack.enter_context(jax.numpy_rank_promotion("raise"))
        yield


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_an_operation_and_its_gradient_mix_what_their_program_must_not(strict, call, x64):
    loss = lambda x: call(x).astype(jnp.float32).sum()
    with jax.enable_x64(x64):
        assert jnp.isfinite(quick_jit(jax.grad(loss))(jnp.asarray(X, jnp.bfloat16))).all()


def test_a_tuning_compares_what_its_program_must_not_mix(strict):
    x, labels = jnp.asarray(X.reshape(-1, 16), jnp.bfloat16), jnp.ones(32, jnp.int32)
    step = jax.jit(jax.grad(lambda x: linear_cross_entropy(x, x.T, labels)))
    result = autotune_lowered(ConfigSelectorChain(tuner=Autotuner(max_candidates=1, progress=False)), step.lower(x))
    assert {entry.op_id for entry in result.entries} == {"linear_cross_entropy", "linear_cross_entropy_gradients"}
