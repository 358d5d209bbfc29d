"""How large the tiles of XLA's backend are: the guess, and what it may be tuned over."""

from __future__ import annotations

from typing import Any

from ejkernel.kernels.flash_attention.arguments import Attention, Extras

TILE_SCORES = 1 << 20
"""Scores of one tile over all heads that a CPU's caches still hold, or nearly."""
SPARSE_TILE_SCORES = 1 << 15
"""The same for calls whose arrays leave out tiles: of large ones less is left out."""
ONE_TILE_SCORES = 1 << 22
"""With fewer there is one tile for all: large steps are spread over all cores, which those of a loop are not. With half
as many, the four arrays of a backward are less than 32 MiB, which the C library does not hand back after each call.
Where a band leaves out tiles, that decides. A forward without a band has one array, and so twice as many."""
LONG = 2048
"""Keys from which on little is lost at the edge of a band: tiles are then as large as without one."""
FEW_KEYS = 512
"""Up to so many, a tile has all keys, if there is no band that leaves out tiles."""
VERY_FEW_KEYS = 256
"""Up to so many, XLA's softmax of large tiles is as fast as that of small ones; with more keys only the backward is.
Up to half as many, what a band leaves out does not pay for tiles."""
FEW_KEYS_SCORES = 1 << 25
"""Scores of a tile where large ones are fast: what that saves is more than what caches do. 128 MiB for each array."""


FOLDED_ROWS = 64
"""Queries times heads, up to which all heads are multiplied at once (see `xla_products`)."""
FOLDED_KEYS = 1 << 16
"""Elements of the keys that there must be for each of these rows: what a cache holds is soon moved."""


def folds(call: Attention, *, backward: bool) -> bool:
    """Whether queries are so few that all heads are multiplied at once, in one tile.

    Forward not with 16 bits, of which the larger products cost more than is saved.
    """
    if call.key.dtype.itemsize < 4 and not backward:
        return False
    (batch, q_len, heads, dim), (_, kv_len, kv_heads, _) = call.query.shape, call.key.shape
    rows = min(FOLDED_ROWS, known(batch * kv_len * kv_heads * dim) // FOLDED_KEYS)
    return q_len * heads <= rows and 0 < 16 * q_len <= kv_len and not _is_sparse(call.extras)


def default_blocks(
    heads: int, q_len: int, kv_len: int, *, sparse: bool = False, banded: bool = False, backward: bool = False
) -> tuple[int, int]:
    """Rows and columns of a tile: as large as `TILE_SCORES` allows for all `heads` of the batch together.

    A call of few scores is one tile, and one of few keys has all of them in a tile: nothing is rescaled or padded.
    `sparse` calls have arrays that leave out tiles, `banded` ones a causal mask or a window: of large tiles less is
    left out.
    """
    heads, most = known(heads), SPARSE_TILE_SCORES if sparse else TILE_SCORES
    q_len, kv_len, rows, cols = max(q_len, 1), max(kv_len, 1), 512, 256
    if heads * q_len * kv_len < 2 * ONE_TILE_SCORES >> (banded + backward) and not sparse:
        return q_len, kv_len
    few = VERY_FEW_KEYS // 2 if banded else FEW_KEYS
    if kv_len <= few and not sparse:
        most = FEW_KEYS_SCORES if backward or kv_len <= VERY_FEW_KEYS else most
        return fitted(max(64, most // (heads * kv_len) // 16 * 16), q_len, 4), kv_len
    if banded:
        most //= 2 if kv_len < LONG else 1
        rows, cols = (max(128, min(block, length // 32 * 16)) for block, length in ((rows, q_len), (cols, kv_len)))
    while heads * rows * cols > most and rows > 64:
        rows, cols = (rows // 2, cols) if rows > cols else (rows, cols // 2)
    return fitted(rows, q_len, 4), fitted(cols, kv_len)


def _is_sparse(extras: Extras) -> bool:
    """Whether a call may need few tiles: packed sequences, or a mask with rows of its own."""
    return extras.q_segment_ids is not None or (extras.mask is not None and extras.mask.shape[2] > 1)


def known(size: Any) -> int:
    """A product of dimensions as a number; a symbolic one, of an exported program, counts as large."""
    return size if isinstance(size, int) else TILE_SCORES


def fitted(block: int, length: int, aligned: int = 16) -> int:
    """`block`, or less: the whole of a shorter sequence; of a longer one what leaves little of the last block empty."""
    length = max(length, 1)
    return length if block >= length else -(-length // (-(-length // block) * aligned)) * aligned


def space(call: Attention, *, backward: bool) -> list[tuple[int, int]]:
    """The guess, and other tiles for all heads at once: a handful must fit a cache, and there are few small ones."""
    (batch, q_len, heads, _), kv_len = call.query.shape, call.key.shape[1]
    many = known(batch * heads)
    sizes = (128, 256, 512, 1024) if many <= 32 else (64, 128, 256, 512)
    all_blocks = [(fitted(rows, q_len), fitted(cols, kv_len)) for rows in sizes for cols in sizes]
    small = [b for b in all_blocks if many * b[0] * b[1] <= 4 * TILE_SCORES]
    return [guess(call, backward=backward), *small]


def guess(call: Attention, *, backward: bool) -> tuple[int, int]:
    """Rows and columns of a tile of an untuned call."""
    (batch, q_len, heads, _), kv_len = call.query.shape, call.key.shape[1]
    if folds(call, backward=backward):
        return q_len, kv_len
    banded = call.rules.lower is not None or call.rules.upper is not None
    kind = {"sparse": _is_sparse(call.extras), "banded": banded, "backward": backward}
    return default_blocks(batch * heads, q_len, kv_len, **kind)
