"""The Hopper forward kernel: tables made before it starts anywhere, small cases in JAX's interpreter."""

import itertools
import json
import math
import os
import pathlib
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.flash_attention import config as configs
from ejkernel.kernels.flash_attention.mosaic_bits import bit_pairs, packed_bits
from ejkernel.kernels.flash_attention.mosaic_deal import deal
from ejkernel.kernels.flash_attention.mosaic_mask import Band
from ejkernel.kernels.flash_attention.mosaic_segments import segment_spans

ROOT = pathlib.Path(__file__).resolve().parents[3]
RECENT = jax.__version_info__ >= (0, 11)
SHORT = ("72 and 40, odd lengths", "segments in no order", "mask")


@pytest.mark.slow
@pytest.mark.skipif(not RECENT, reason="JAX 0.10 has no public GPU interpreter")
@pytest.mark.parametrize("names", [SHORT, pytest.param(None, marks=pytest.mark.full)], ids=["short", "all"])
def test_output_matches_numpy_in_the_interpreter(names):
    from tests.kernels.flash_attention import interpreted

    env = os.environ | {"NPROC": "8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", interpreted.__name__, *(names or interpreted.CASES)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    errors = json.loads(done.stdout.splitlines()[-1])
    assert all(error < 1e-2 for error in errors.values()), errors


DIMS = list(itertools.product(range(8, 257, 8), repeat=2))


def test_every_pair_of_dims_has_a_guess_that_fits():
    calls = [{}, {"full": True}, {"packed": True}, {"banded": False, "q_len": 197}]
    assert not [dims for dims in DIMS for call in calls if configs.default_forward(*dims, **call).unfit(*dims)]


def test_short_calls_are_not_cut_into_tiles_that_are_mostly_empty():
    rows = {q_len: configs.default_forward(64, q_len=q_len).block_q for q_len in (197, 256, 512, 2048, 8192)}
    assert rows == {197: 128, 256: 128, 512: 128, 2048: 128, 8192: 192}


@pytest.mark.parametrize("dim", range(8, 257, 8))
def test_pieces_of_columns_are_those_in_memory(dim):
    mosaic_columns = pytest.importorskip("ejkernel.kernels.flash_attention.mosaic_columns", exc_type=ImportError)
    pieces = mosaic_columns.split(dim)
    assert [first for first, _ in pieces] == list(itertools.accumulate((w for _, w in pieces[:-1]), initial=0))
    assert sum(width for _, width in pieces) == configs.in_memory(dim)
    assert all(width in (16, 32, 64) for _, width in pieces)


@pytest.mark.parametrize("share_qo", [False, True])
def test_columns_are_copied_in_tiles_that_divide_the_array_or_as_plain_matrices(share_qo):
    mosaic_columns = pytest.importorskip("ejkernel.kernels.flash_attention.mosaic_columns", exc_type=ImportError)
    for dims in DIMS:
        if not configs.MosaicFwdConfig(consumers=1, block_kv=64, share_qo=share_qo).unfit(*dims):
            found = mosaic_columns.columns(*dims, lengths=(64, 64), share_qo=share_qo, interpret=False)
            pieces = ((dim, piece) for dim, part in zip(dims, (found.qk, found.v), strict=True) for piece in part)
            tiles = [(dim, math.gcd(piece.width, 64)) for dim, piece in pieces]
            assert found.plain or all(dim % tile == 0 for dim, tile in tiles), dims


def ids_of(order, rng, length):
    ids = rng.integers(0, 5, (2, length))
    return np.sort(ids, axis=1) if order == "sorted" else ids


@pytest.mark.parametrize(
    ("rows", "cols", "order", "lower", "upper"),
    [(200, 333, "sorted", None, None), (512, 256, "sorted", None, 0), (333, 333, "mixed", -90, 30)],
)
def test_spans_hold_all_pairs_and_clear_ones_no_other(rows, cols, order, lower, upper):
    rng = np.random.default_rng(rows)
    row_ids, col_ids = ids_of(order, rng, rows), ids_of(order, rng, cols)
    find = jax.jit(partial(segment_spans, rows=64, cols=32, lower=lower, upper=upper))
    spans = np.asarray(find(row_ids, col_ids))
    distance = np.arange(cols)[None] - np.arange(rows)[:, None]
    seen = row_ids[:, :, None] == col_ids[:, None, :]
    seen &= True if lower is None else distance >= lower
    seen &= True if upper is None else distance <= upper
    for batch, n in np.ndindex(spans.shape[:2]):
        start, clear, clear_end, end = spans[batch, n]
        strip = seen[batch, n * 64 : n * 64 + 64]
        assert 0 <= start <= clear <= clear_end <= end <= -(-cols // 32)
        assert end > start
        assert not strip[:, : start * 32].any()
        assert not strip[:, end * 32 :].any()
        assert clear == clear_end or (strip[:, clear * 32 : clear_end * 32].all() and clear_end * 32 <= cols)
        found = np.flatnonzero(strip.any(axis=0)) // 32
        if (order, upper) == ("sorted", None) and len(found):
            assert (start, end) == (found[0], found[-1] + 1)


@pytest.mark.parametrize(
    ("batch", "rows", "heads", "blocks", "group"), [(1, 64, 8, 132, 4), (3, 5, 4, 7, 9), (2, 3, 1, 99, 4)]
)
def test_every_tile_is_dealt_once_and_the_work_is_even(batch, rows, heads, blocks, group):
    steps = np.random.default_rng(0).integers(1, 30, (batch, rows))
    counts, tiles = map(np.asarray, jax.jit(partial(deal, heads=heads, blocks=blocks, head_group=group))(steps))
    hands = [tiles[block, :count].tolist() for block, count in enumerate(counts.tolist())]
    assert sorted(itertools.chain(*hands)) == list(range(batch * heads * rows))
    work = [sum(steps[tile // rows // heads, tile % rows] for tile in hand) for hand in hands]
    assert max(work) <= sum(work) / len(work) + steps.max()


def test_bits_of_a_mask_say_which_tiles_are_empty_or_full():
    rng = np.random.default_rng(1)
    share = rng.choice([0.0, 0.5, 1.0], (2, 4, 5)).repeat(32, axis=1).repeat(64, axis=2)[:, :100, :300]
    mask = rng.random(share.shape) < share
    words = np.asarray(packed_bits(jnp.asarray(mask), rows=64, cols=128))
    assert words.shape == (2, 12, 128)
    bits = (words.swapaxes(1, 2)[..., None] >> np.arange(32)) & 1
    np.testing.assert_array_equal(bits.reshape(2, 128, -1)[:, :100, :300] != 0, mask)
    assert not bits.reshape(2, 128, -1)[:, :, 300:].any()
    some, every = map(np.asarray, bit_pairs(jnp.asarray(words), rows=32, cols=64))
    for batch, n, m in np.ndindex(2, 3, 4):
        tile = mask[batch, n * 32 : n * 32 + 32, m * 64 : m * 64 + 64]
        assert bool(some[batch, n, m]) == tile.any()
        assert bool(every[batch, n, m]) == tile.all()


def test_a_table_of_packed_sequences_has_every_tile_with_the_keys_it_needs():
    pytest.importorskip("jax.experimental.pallas.mosaic_gpu", exc_type=ImportError)
    from ejkernel.kernels.flash_attention.mosaic_tiles import packed_table

    rng, heads, cfg = np.random.default_rng(2), 3, configs.MosaicFwdConfig(block_kv=64)
    ids = np.sort(rng.integers(0, 4, (2, 500)), axis=1)
    ids[0, :130] = -1  # These queries see nothing.
    kv_ids = np.where(ids < 0, -2, ids)
    band = Band(q_len=500, kv_len=500, upper=0)
    arrays = (jnp.asarray(ids), jnp.asarray(kv_ids))
    sizes = {"cfg": cfg, "band": band, "batch": 2, "heads": heads, "blocks": 5, "head_group": 2}
    table = np.asarray(jax.jit(lambda ids: packed_table(ids, None, **sizes))(arrays))
    seen = (ids[:, :, None] == kv_ids[:, None, :]) & np.tril(np.ones((500, 500), bool))
    found = []
    for count, *facts in table.tolist():
        for number, start, end, *strips in np.reshape(facts, (-1, 11))[:count]:
            found.append(number)
            batch, row = number // 4 // heads, number % 4 * 128
            for strip, (own_start, clear, clear_end, own_end) in enumerate(np.reshape(strips, (2, 4))):
                assert start <= own_start <= clear <= clear_end <= own_end <= end
                assert own_start < own_end
                part = seen[batch, row + strip * 64 : row + strip * 64 + 64]
                assert not part[:, : own_start * 64].any()
                assert not part[:, own_end * 64 :].any()
                assert part[:, clear * 64 : clear_end * 64].all()
    assert sorted(found) == list(range(2 * heads * 4))
