"""Which tiles XLA's backend takes if nobody has tuned it."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ejkernel.kernels.flash_attention import xla, xla_blocks
from ejkernel.kernels.flash_attention.arguments import canonical
from ejkernel.modules import FlashAttention
from tests.kernels import contract
from tests.kernels.flash_attention.cases import Case, assert_close, attend, normal, truth

LENGTHS = st.integers(0, 5000)


@given(block=st.sampled_from([16, 64, 128, 512]), length=LENGTHS)
def test_blocks_are_no_more_than_needed_and_leave_little_empty(block, length):
    length = max(length, 1)
    fitted = xla_blocks.fitted(block, length)
    count = -(-length // fitted)
    assert fitted <= block
    assert count == -(-length // block)
    assert count * fitted - length < 16 * count
    assert count > 1 or fitted == length


@given(heads=st.integers(1, 2048), q_len=LENGTHS, kv_len=LENGTHS, sparse=st.booleans(), banded=st.booleans())
def test_scores_of_a_tile_are_bounded(heads, q_len, kv_len, sparse, banded):
    rows, cols = xla_blocks.default_blocks(heads, q_len, kv_len, sparse=sparse, banded=banded)
    assert 1 <= rows <= max(q_len, 1)
    assert 1 <= cols <= max(kv_len, 1)
    most = xla_blocks.SPARSE_TILE_SCORES if sparse else xla_blocks.TILE_SCORES
    few = rows <= 64 and cols <= xla_blocks.FEW_KEYS
    assert heads * rows * cols <= most or few or heads * q_len * kv_len < xla_blocks.ONE_TILE_SCORES


SHORT = {
    "a row for each of 8 sequences": ((8, 1, 4, 64), 2048, {}),
    "the same, at the end of the keys": ((8, 1, 4, 64), 2048, {"causal": "lower_right"}),
    "197": ((2, 197, 4, 64), 197, {}),
    "causal": ((2, 50, 4, 64), 50, {"causal": True}),
}


@pytest.mark.parametrize("name", SHORT)
def test_short_calls_have_no_loop_and_no_padding(name):
    shape, kv_len, kwargs = SHORT[name]
    q, k = jnp.zeros(shape), jnp.zeros((shape[0], kv_len, *shape[2:]))

    def both(q, k):
        (q, k, v), extras, rules = canonical(q, k, k, **kwargs)
        out, sums = xla.forward(q, k, v, extras, rules)
        return xla.backward(q, k, v, extras, rules, sums.lse, sums.lse, out)

    text = jax.jit(both).lower(q, k).as_text()
    assert "stablehlo.while" not in text
    assert "stablehlo.pad" not in text


@pytest.mark.parametrize("make", [{"softmax_aux": normal("h")}, {"bias": normal("h", "q", "k")}], ids=["sinks", "bias"])
def test_one_tile_has_what_is_added_to_its_scores(make):
    args, kwargs = Case("one tile", q_len=9, kv_len=13, make=make).arrays()
    assert_close(attend(contract.through(FlashAttention, "xla"), args, kwargs), truth(args, kwargs), 2e-5)
