"""What the Triton kernels get of a call: arrays that they can count."""

import jax
import jax.numpy as jnp

from ejkernel.kernels.flash_attention import tile
from ejkernel.kernels.flash_attention.arguments import Attention, canonical
from ejkernel.kernels.flash_attention.triton_cut import Cut
from ejkernel.modules import FlashAttention
from ejkernel.ops.utils.params import BwdParams, FwdParams
from tests.kernels import contract
from tests.kernels.flash_attention.cases import Case, assert_close, attend, coin, truth

TILE = {"q_blocksize": 32, "kv_blocksize": 16}


def test_a_mask_that_padding_makes_too_large_is_counted_in_64_bits():
    # Up to 2**32 bytes Pallas counts elements in 32 bits, with a sign.
    q, mask = jax.ShapeDtypeStruct((1, 46340, 1, 16), jnp.bfloat16), jax.ShapeDtypeStruct((1, 1, 46340, 46340), bool)

    def cut(q, mask):
        qkv, extras, rules = canonical(q, q, q, attention_mask=mask)
        return Cut(Attention(*qkv, extras, rules), 128, 64, FwdParams()).whole_inputs()["mask"]

    assert mask.size < tile.MAX_ELEMENTS
    found = jax.eval_shape(cut, q, mask)
    assert found.size >= tile.MAX_ELEMENTS
    assert found.size * found.dtype.itemsize > 1 << 32


def test_such_a_mask_hides_the_same(monkeypatch):
    case = Case("mask", q_len=37, kv_len=41, make={"attention_mask": coin("b", 1, "q", "k"), "causal": True})
    args, kwargs = case.arrays()
    monkeypatch.setattr(tile, "MAX_ELEMENTS", 2 * 37 * 41 + 1)  # The mask has one less.
    call = contract.through(FlashAttention, "triton", fwd_params=FwdParams(**TILE), bwd_params=BwdParams(**TILE))
    assert_close(attend(call, args, kwargs), truth(args, kwargs), case.limit)
