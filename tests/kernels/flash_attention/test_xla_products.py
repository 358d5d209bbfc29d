"""Products of all heads at once, which XLA's backend takes for few queries on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel.kernels.flash_attention import xla, xla_blocks
from ejkernel.kernels.flash_attention.arguments import Attention, canonical
from ejkernel.kernels.flash_attention.xla_products import Products
from ejkernel.modules import FlashAttention
from tests.kernels import contract
from tests.kernels.flash_attention.cases import Case, assert_close, attend, coin, normal, truth

SIZES = st.integers(1, 4)


@settings(max_examples=20)
@given(batch=SIZES, kv_heads=SIZES, group=SIZES, q_len=SIZES, kv_len=st.integers(1, 40), dim=st.integers(1, 24))
def test_all_heads_at_once_give_the_products_of_each_head(batch, kv_heads, group, q_len, kv_len, dim):
    rng = np.random.default_rng(0)
    shapes = (kv_heads, group, q_len, dim), (kv_heads, kv_len, dim), (kv_heads, group, q_len, kv_len)
    q, k, p = (jnp.asarray(rng.standard_normal((batch, *shape)), jnp.float32) for shape in shapes)
    folded, by_head = (
        Products(narrow=jnp.float32, dtype=jnp.float32, precision="highest", folded=x) for x in (True, False)
    )
    for name, args in (("scores", (q, k)), ("weighted", (p, k)), ("onto_keys", (p, q))):
        ours, other = (getattr(products, name)(*args) for products in (folded, by_head))
        np.testing.assert_allclose(ours, other, rtol=0, atol=2e-5, err_msg=name)


PADDED = {"attention_mask": coin("b", 1, 1, "k")}
FEW = [
    Case("one query", q_len=1, kv_len=70),
    Case("causal at the end", q_len=3, kv_len=70, make={"causal": "lower_right"}),
    Case("a window and a soft cap", q_len=4, kv_len=70, make={"sliding_window": (20, 0), "logits_soft_cap": 5.0}),
    Case("values of their own width", q_len=2, kv_len=64, value_dim=24),
    Case("bias and sinks", q_len=2, kv_len=64, make={"bias": normal("h", "q", "k"), "softmax_aux": normal("h")}),
    Case("dropout", q_len=2, kv_len=64, make={"dropout_prob": 0.3, "dropout_seed": 3}),
    Case("padding", q_len=1, kv_len=64, make=PADDED),
    Case("bfloat16", q_len=2, kv_len=64, dtype="bfloat16"),
    Case("one key head", q_len=2, kv_len=64, kv_heads=1),
]


@pytest.fixture
def small_calls_fold(monkeypatch):
    """Also of few keys, of which a call would be computed by head; nothing traced before or after is reused."""
    monkeypatch.setattr(xla_blocks, "FOLDED_KEYS", 1)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.usefixtures("small_calls_fold")
@pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)
def test_few_queries(case):
    args, kwargs = case.arrays()
    (q, k, v), extras, rules = canonical(*args, **kwargs)
    assert xla_blocks.folds(Attention(q, k, v, extras, rules), backward=True)
    assert_close(attend(contract.through(FlashAttention, "xla"), args, kwargs), truth(args, kwargs), case.limit)


@pytest.mark.parametrize(
    ("batch", "q_len", "kv_len", "heads", "folds"),
    [
        *((8, 1, 2048, 12, True), (1, 1, 4096, 8, True), (8, 4, 4096, 16, True)),
        *((8, 8, 4096, 16, False), (8, 16, 512, 8, False), (1, 2, 512, 8, False), (8, 1, 8, 8, False)),
    ],
)
def test_heads_are_multiplied_at_once_where_moving_the_keys_costs_more(batch, q_len, kv_len, heads, folds):
    q, k = (jax.ShapeDtypeStruct((batch, length, heads, 64), jnp.float32) for length in (q_len, kv_len))
    (q, k, v), extras, rules = canonical(q, k, k)
    call = Attention(q, k, v, extras, rules)
    assert [xla_blocks.folds(call, backward=backward) for backward in (False, True)] == [folds, folds]


def test_sixteen_bits_are_multiplied_at_once_in_the_backward_alone():
    q, k = (jax.ShapeDtypeStruct((8, length, 8, 64), jnp.bfloat16) for length in (1, 4096))
    (q, k, v), extras, rules = canonical(q, k, k)
    call = Attention(q, k, v, extras, rules)
    assert [xla_blocks.folds(call, backward=backward) for backward in (False, True)] == [False, True]


def test_one_query_does_not_copy_its_keys():
    q, k = jnp.zeros((2, 1, 8, 64)), jnp.zeros((2, 4096, 8, 64))

    def forward(q, k, v):
        qkv, extras, rules = canonical(q, k, v)
        return xla.forward(Attention(*qkv, extras, rules))[0]

    used = jax.jit(forward).lower(q, k, k).compile().memory_analysis().temp_size_in_bytes
    assert used < k.nbytes / 4
