"""What a call asks for, and how it is written."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels.flash_attention.arguments import canonical, keywords_of
from ejkernel.modules import FlashAttention
from ejkernel.ops import Invocation

WINDOWS = (None, 0, 1, 3, 9, (0, 1), (2, None), (None, 2), (None, 0), (1, 0), (9, 9))
OTHERS = (
    {},
    {"normalize_output": False, "softmax_scale": 2.0},
    {"logits_soft_cap": 3.0, "logits_dtype": "bfloat16"},
)


@pytest.mark.parametrize(("q_len", "kv_len"), [*itertools.product((1, 2, 5), (1, 2, 7))])
def test_keywords_that_describe_a_call_give_the_same_call(q_len, kv_len):
    q, k = (jax.ShapeDtypeStruct((1, n, 2, 4), jnp.float32) for n in (q_len, kv_len))
    for causal, window, others in itertools.product((False, True, "lower_right"), WINDOWS, OTHERS):
        rules = canonical(q, k, k, causal=causal, sliding_window=window, **others)[2]
        written = keywords_of(rules, q_len, kv_len, 4)
        assert canonical(q, k, k, **written)[2] == rules, (causal, window, written)


def test_usual_keywords_are_described_as_they_are_written():
    q, k = (jax.ShapeDtypeStruct((1, n, 2, 4), jnp.float32) for n in (8, 32))
    for written in (
        {},
        {"causal": True},
        {"causal": "lower_right"},
        {"causal": True, "sliding_window": 4},
        {"sliding_window": (4, 2)},
        {"dropout_prob": 0.5},
        {"platform": "xla"},
    ):
        seed = {"dropout_seed": 0} if "dropout_prob" in written else {}
        args, kwargs = FlashAttention().prepare(q, k, k, **written, **seed)
        inv = Invocation(kernel=FlashAttention(), args=args, kwargs=kwargs)
        assert FlashAttention().describe_keywords(inv) == written


def test_a_dtype_that_jax_does_not_have_is_the_one_it_takes_instead():
    x = jax.ShapeDtypeStruct((1, 8, 2, 4), jnp.float32)
    for dtype in (float, "float64"):
        assert canonical(x, x, x, logits_dtype=dtype)[2].logits_dtype == "float32"
        with jax.enable_x64(True):
            assert canonical(x, x, x, logits_dtype=dtype)[2].logits_dtype == "float64"
