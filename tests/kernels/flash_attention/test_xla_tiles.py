"""Which tiles XLA's backend takes if nobody has tuned it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ejkernel.kernels.flash_attention import xla, xla_blocks
from ejkernel.kernels.flash_attention.arguments import Attention, canonical
from ejkernel.modules import FlashAttention, flash_attention
from ejkernel.ops.utils.params import BwdParams, FwdParams
from tests.kernels import contract
from tests.kernels.flash_attention.cases import Case, assert_close, attend, normal, truth

LENGTHS, COIN = st.integers(0, 5000), st.booleans()


@given(block=st.sampled_from([16, 64, 128, 512]), length=LENGTHS)
def test_blocks_are_no_more_than_needed_and_leave_little_empty(block, length):
    length = max(length, 1)
    fitted = xla_blocks.fitted(block, length)
    count = -(-length // fitted)
    assert fitted <= block
    assert count == -(-length // block)
    assert count * fitted - length < 16 * count
    assert count > 1 or fitted == length


@given(
    heads=st.integers(1, 2048),
    q_len=LENGTHS,
    kv_len=LENGTHS,
    sparse=st.booleans(),
    banded=st.booleans(),
    back=st.booleans(),
)
def test_scores_of_a_tile_are_bounded(heads, q_len, kv_len, sparse, banded, back):
    rows, cols = xla_blocks.default_blocks(heads, q_len, kv_len, sparse=sparse, banded=banded, backward=back)
    assert 1 <= rows <= max(q_len, 1)
    assert 1 <= cols <= max(kv_len, 1)
    most = xla_blocks.SPARSE_TILE_SCORES if sparse else xla_blocks.TILE_SCORES
    if not sparse and kv_len <= (xla_blocks.VERY_FEW_KEYS // 2 if banded else xla_blocks.FEW_KEYS):
        most = xla_blocks.FEW_KEYS_SCORES
    few = rows <= 64 and cols <= xla_blocks.FEW_KEYS
    assert heads * rows * cols <= most or few or heads * q_len * kv_len < 2 * xla_blocks.ONE_TILE_SCORES


@pytest.mark.parametrize(
    ("heads", "length", "banded", "forward", "backward"),
    [
        (768, 197, False, (197, 197), (197, 197)),
        (768, 256, False, (128, 256), (128, 256)),
        (96, 384, False, (64, 384), (384, 384)),
        (1024, 77, True, (77, 77), (77, 77)),
        (384, 256, True, (64, 64), (64, 64)),
    ],
)
def test_tiles_of_few_keys_are_large_where_that_is_fast(heads, length, banded, forward, backward):
    blocks = [xla_blocks.default_blocks(heads, length, length, banded=banded, backward=back) for back in (False, True)]
    assert blocks == [forward, backward]


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
        qkv, extras, rules = canonical(q, k, k, **kwargs)
        call = Attention(*qkv, extras, rules)
        out, sums = xla.forward(call)
        return xla.backward(call, sums.lse, sums.lse, out)

    text = jax.jit(both).lower(q, k).as_text()
    assert "stablehlo.while" not in text
    assert "stablehlo.pad" not in text


@pytest.mark.parametrize("make", [{"softmax_aux": normal("h")}, {"bias": normal("h", "q", "k")}], ids=["sinks", "bias"])
def test_one_tile_has_what_is_added_to_its_scores(make):
    args, kwargs = Case("one tile", q_len=9, kv_len=13, make=make).arrays()
    assert_close(attend(contract.through(FlashAttention, "xla"), args, kwargs), truth(args, kwargs), 2e-5)


def test_weights_of_large_logits_are_the_same_in_both_directions():
    """Those of a row add up to one: the gradients of all values have the sum of the output's gradients."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (jnp.asarray(rng.standard_normal((1, 40, 2, 8)), jnp.float32) for _ in range(4))
    tiles = {
        "fwd_params": FwdParams(q_blocksize=16, kv_blocksize=16),
        "bwd_params": BwdParams(q_blocksize=16, kv_blocksize=16),
    }
    call = contract.through(FlashAttention, "xla", **tiles)

    @jax.jit  # With constants the compiler would compute in another way.
    def dv(q, k, v, dout):
        return jax.vjp(lambda v: call(q, k, v, None, None), v)[1](dout)[0]

    for size in (100.0, 3000.0):
        np.testing.assert_allclose(dv(size * q, size * k, v, dout).sum(1), dout.sum(1), atol=1e-4)


@pytest.mark.parametrize("shapes", [((0, 1, 4, 8), (0, 40, 2, 8)), ((2, 0, 4, 8), (2, 0, 2, 8))])
def test_calls_of_nothing_give_nothing(shapes):
    q, k = map(jnp.zeros, shapes)
    assert jax.grad(lambda q: flash_attention(q, k, k).sum())(q).shape == q.shape
