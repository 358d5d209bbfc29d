"""Which tiles a call needs: none that has something to see is left out, and with sorted ids no other is computed."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.flash_attention import needed
from ejkernel.kernels.flash_attention.arguments import Extras, Rules
from ejkernel.kernels.flash_attention.needed import Blocks
from tests.support import fully

ROWS, COLS, Q, KV = 4, 8, 22, 29
BLOCKS = Blocks(ROWS, COLS, 6, 4, KV)


def ids(length, *, order):
    found = np.random.default_rng(length).integers(0, 5, size=(2, length))
    return jnp.asarray(np.sort(found, axis=1) if order == "sorted" else found)


def places(lower=None, upper=None):
    distance = np.arange(KV)[None, :] - np.arange(Q)[:, None]
    inside = np.ones((Q, KV), bool)
    inside &= True if lower is None else distance >= lower
    return inside & (True if upper is None else distance <= upper)


def call(name):
    """Extras, rules, and who sees whom: [batch or 1, heads or 1, q, kv]."""
    q_ids, kv_ids = (ids(n, order="mixed" if name == "mixed" else "sorted") for n in (Q, KV))
    same = np.asarray(q_ids)[:, None, :, None] == np.asarray(kv_ids)[:, None, None, :]
    late = np.arange(KV) > 9
    squares = np.random.default_rng(3).random((2, 3, 6, 4)) < 0.3
    squares = squares.repeat(ROWS, axis=2).repeat(COLS, axis=3)[:, :, :Q, :KV]
    extras = Extras(q_segment_ids=q_ids, kv_segment_ids=kv_ids)
    return {
        "sorted": (extras, Rules(scale=1.0), same),
        "mixed": (extras, Rules(scale=1.0), same),
        "window": (extras, Rules(scale=1.0, lower=-9, upper=2), same & places(-9, 2)),
        "squares": (Extras(mask=jnp.asarray(squares)), Rules(scale=1.0, upper=0), squares & places(upper=0)),
        "keys": (Extras(mask=jnp.asarray(late)[None, None, None]), Rules(scale=1.0), places() & late),
        "positions": (
            extras._replace(q_positions=jnp.arange(Q)[None] % 7, kv_positions=jnp.arange(KV)[None] % 9),
            Rules(scale=1.0, upper=0),
            same & (np.arange(KV)[None, :] % 9 <= np.arange(Q)[:, None] % 7),
        ),
    }[name]  # fmt: skip


def tiles(seen):
    """Whether a tile has anything, and everything."""
    seen = seen.reshape(*(1,) * (4 - seen.ndim), *seen.shape)
    pad = [(0, 0), (0, 0), (0, 6 * ROWS - Q), (0, 4 * COLS - KV)]
    cut = lambda x: x.reshape(*x.shape[:2], 6, ROWS, 4, COLS)
    some = cut(np.pad(seen, pad)).any(axis=(3, 5))
    # Queries of padding may see anything.
    whole = cut(np.pad(seen, pad) | (np.arange(6 * ROWS)[:, None] >= Q)).all(axis=(3, 5))
    return some, whole


def walked(visits, others):
    """[batch, heads, blocks, others]: how often a walk reaches a block, and how often without a mask."""
    spans = np.asarray(visits.spans)
    reached, clear = (np.zeros((*spans.shape[:3], others), int) for _ in range(2))
    for at in np.ndindex(spans.shape[:3]):
        steps = needed.steps(lambda n, at=at: int(spans[at][n]), listed=visits.order is not None)
        for lo, hi, masked in steps.loops():
            for step in range(lo, hi):
                block = step if visits.order is None else int(visits.order[at][step])
                reached[(*at, block)] += 1
                clear[(*at, block)] += not masked
    return reached, clear


@pytest.mark.parametrize("name", ["mixed", "squares", "positions", *fully("sorted", "window", "keys")])
def test_walks_reach_every_tile_that_is_needed_once(name):
    extras, rules, seen = call(name)
    some, whole = tiles(seen)
    ways = list(product((False, True), (needed.ranges, needed.listed)))

    @jax.jit
    def all_visits():
        found = needed.find(extras, rules, BLOCKS)
        return [walk(found.turned() if turned else found) for turned, walk in ways]

    for (turned, walk), visits in zip(ways, jax.device_get(all_visits()), strict=True):
        reached, clear = walked(visits, BLOCKS.q_blocks if turned else BLOCKS.kv_blocks)
        reached, clear = (x.swapaxes(2, 3) if turned else x for x in (reached, clear))
        assert reached.max() <= 1
        assert (reached >= some).all()
        assert (clear <= whole).all()
        if name in ("squares", "keys") and walk is needed.listed:
            np.testing.assert_array_equal(reached, np.broadcast_to(some, reached.shape))
        assert name != "keys" or clear.any()


def test_only_places_need_no_array():
    assert needed.find(Extras(), Rules(scale=1.0, upper=0), BLOCKS) is None
