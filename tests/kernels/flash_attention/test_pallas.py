"""The TPU kernels where a call has many tiles, in the interpreter: walks, edges, parts of a tile, numbers per row."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.flash_attention import masks, pallas_cut, pallas_tile
from ejkernel.kernels.flash_attention.arguments import Rules
from ejkernel.kernels.flash_attention.pallas_cut import Walk
from ejkernel.modules import FlashAttention, FlashAttentionConfig
from ejkernel.ops import BwdParams, ConfigCache, ConfigSelectorChain, Executor, FwdParams
from tests.kernels.flash_attention.cases import Case, assert_close, attend, normal, segments, truth

_call = partial(Case, batch=1, q_len=384, kv_len=384, heads=2, kv_heads=1, head_dim=16)
CALLS = [
    _call("causal", q_len=512, kv_len=512, make={"causal": True}),
    _call("causal, odd lengths", q_len=301, kv_len=333, make={"causal": True}),
    _call("lower right", q_len=140, make={"causal": "lower_right", "softmax_aux": normal("h")}),
    _call("more queries than keys", kv_len=150, make={"causal": "lower_right"}),
    _call("window of few blocks", make={"causal": True, "sliding_window": 70}),
    _call("window on both sides", kv_len=300, make={"sliding_window": (130, 20), "logits_soft_cap": 2.0}),
    _call("rows that see nothing", q_len=384, kv_len=130, make={"sliding_window": (20, 4)}),
    _call("segments", make={"q_segment_ids": segments("q"), "kv_segment_ids": segments("kv"), "causal": True}),
    _call("dropout", q_len=512, kv_len=512, make={"causal": True, "dropout_prob": 0.3, "dropout_seed": 5}),
    _call("negative scale", value_dim=40, make={"softmax_scale": -0.4, "causal": True}),
    _call("wide values", value_dim=136, head_dim=24, make={"causal": True}, dtype="bfloat16"),
]


def through(block_q, block_kv):
    cfg = FlashAttentionConfig(
        FwdParams(q_blocksize=block_q, kv_blocksize=block_kv),
        BwdParams(q_blocksize=block_q, kv_blocksize=block_kv),
        "pallas",
    )
    executor = Executor(ConfigSelectorChain(cache=ConfigCache()))
    return lambda *args, **kwargs: executor(FlashAttention(interpret=True), *args, cfg=cfg, **kwargs)


@pytest.mark.thin(6)
@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.name)
def test_calls_of_many_tiles_agree_with_numpy(case, monkeypatch):
    # Tiles on the diagonal have two parts, of which each needs other columns.
    monkeypatch.setattr(pallas_cut, "PART", 128)
    args, kwargs = case.arrays()
    blocks = (256, 256) if case.name in ("causal", "dropout") else (128, 256)
    assert_close(attend(through(*blocks), args, kwargs), truth(args, kwargs), case.limit)


def test_tile_on_the_diagonal_is_computed_in_parts(monkeypatch):
    monkeypatch.setattr(pallas_cut, "PART", 128)
    found = []
    note = lambda masked, part: found.append((masked, part))
    Walk(256, 2, 256, 512, None, 0, masked=False).each(note, True)
    Walk(256, 2, 256, 512, 0, None, masked=False).each(note, True)
    assert [tuple(part) for _, part in found] == [
        (0, 128, 0, 128),
        (128, 128, 0, 256),
        (0, 128, 0, 256),
        (128, 128, 128, 128),
    ]
    found.clear()
    for walk, masked in [
        (Walk(256, 2, 256, 512, None, 0, masked=False), False),
        (Walk(256, 2, 256, 512, None, 0, masked=True), True),
        (Walk(256, 2, 256, 500, None, 0, masked=False), True),
        (Walk(256, 2, 128, 512, None, 0, masked=False), True),
        (Walk(256, 2, 256, 512, -3, 0, masked=False), True),
    ]:
        walk.each(note, masked)
        assert all(tuple(part[2:]) == (0, walk._other) for _, part in found), found
        found.clear()


@pytest.mark.parametrize("length", [1, 5, 12, 16])
def test_walks_are_as_long_as_the_longest_one_that_is_needed(length):
    bounds = (None, -9, -4, 0, 3, 8)
    for own, other, lower, upper in product((2, 4), (2, 4), bounds, bounds):
        blocks = 4
        walk = Walk(own, blocks, other, length, lower, upper, masked=False)
        spans = [masks.spans(jnp.int32(i * own), own, other, length, lower, upper) for i in range(blocks)]
        assert walk.width == max(1, *(int(s.end) - int(s.start) for s in spans))


# --- Numbers ---


@pytest.mark.thin(3)
@pytest.mark.parametrize("scale", [0.3, 128**-0.5, 0.25])
def test_gradients_of_far_rows_are_right_at_any_scale(scale):
    # The products are whole numbers that float32 holds; scaled, they are not, and nor is their log-sum-exp.
    rng, far = np.random.default_rng(3), 2.0**22
    whole = lambda *shape: rng.integers(-1, 2, size=shape).astype(np.float32)
    q, k, v = whole(1, 21, 2, 8), whole(1, 37, 2, 8), rng.normal(size=(1, 37, 2, 8))
    q[..., 0], k[..., 0] = np.array([0, -1, 1])[np.arange(21) % 3][:, None], far
    args = [jnp.asarray(x, jnp.float32) for x in (q, k, v)] + [None, None]
    got, want = (run(args, {"softmax_scale": scale}) for run in (partial(attend, through(128, 128)), truth))
    got["dquery"], want["dquery"] = got["dquery"][..., 1:], want["dquery"][..., 1:]
    assert_close(got, want, 2e-5)


@pytest.mark.parametrize("factor", [0.3, 0.25, 1.7])
def test_product_and_its_error_are_the_whole_product(factor):
    factor = float(np.float32(factor))
    x = np.random.default_rng(0).normal(size=100).astype(np.float32) * np.float32(1e6)
    rounded, error = (np.asarray(part, np.float64) for part in jax.jit(lambda x: pallas_tile.product(x, factor))(x))
    np.testing.assert_allclose(rounded + error, np.float64(x) * factor, rtol=1e-14)
    assert (error == 0).all() == (factor == 0.25)


def test_columns_are_rows_turned():
    x = jnp.arange(256, dtype=jnp.float32)[None]
    assert pallas_tile.column(x).shape == (256, 128)
    np.testing.assert_array_equal(pallas_tile.row(pallas_tile.column(x)), x)
    wide = pallas_tile.spread(pallas_tile.column(x), 200)
    np.testing.assert_array_equal(wide, jnp.broadcast_to(x.T, (256, 200)))
    np.testing.assert_array_equal(
        pallas_tile.folded(jnp.ones((8, 384)) * jnp.arange(384)), jnp.ones((8, 1)) * (3 * jnp.arange(128) + 384)
    )


def test_unit_is_positive_so_that_the_largest_logit_stays_the_largest():
    assert pallas_tile.unit(Rules(scale=0.5)) == 0.5
    assert pallas_tile.unit(Rules(scale=-0.5)) == 1.0
    assert pallas_tile.unit(Rules(scale=-0.5, soft_cap=3.0)) == 3.0
