"""What each step of a TPU kernel gets of a call's arrays: the blocks of a tile, and which tile it is.

Segments, positions and masks say which tiles are needed. That is found before the kernel and put into scalar memory,
where it is read to choose what to load: what is not needed is not loaded either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.flash_attention import needed, pallas_tile, tile
from ejkernel.kernels.flash_attention.arguments import Attention, Extras
from ejkernel.kernels.flash_attention.pallas_cut import Part, Place, Walk, fitted
from ejkernel.kernels.flash_attention.pallas_views import ByKey, ByQuery, View
from ejkernel.kernels.flash_attention.tile import Side

Array = jax.Array
Inputs = dict[str, tuple[Array, pl.BlockSpec]]

MAX_SCALARS = 1 << 15
"""Numbers in scalar memory that say which tiles are needed; if there were more, all tiles are computed and masked."""


class Cut:
    """A call cut into tiles: arrays with heads first, lengths in whole blocks."""

    def __init__(self, call: Attention, block_q: int, block_kv: int) -> None:
        query, key, value, extras, rules = call
        self.rules = rules
        self.rows, self.cols = fitted(block_q, query.shape[1]), fitted(block_kv, key.shape[1])
        self.batch, self.kv_len = query.shape[0], key.shape[1]
        self.heads, self.group = query.shape[2], query.shape[2] // key.shape[2]
        self._arrays = tuple(
            tile.heads_first(x, block) for x, block in ((query, self.rows), (key, self.cols), (value, self.cols))
        )
        self.q_length, self.kv_length = self._arrays[0].shape[2], self._arrays[1].shape[2]
        self.q_blocks, self.kv_blocks = self.q_length // self.rows, self.kv_length // self.cols
        self._listed = extras.mask is not None
        self._extras = _with_mask_as_segments(extras, query.shape, self.kv_len)
        self.unit = pallas_tile.unit(rules, biased=extras.bias is not None)
        # Positions are bounded, if there are any, and not places.
        self.bounds = lower, upper = (rules.lower, rules.upper) if extras.q_positions is None else (None, None)
        found = self._needed is not None
        how = {"masked": found and not self._fits, "placed": not found}
        keys = Walk(self.rows, self.q_blocks, self.cols, self.kv_len, lower, upper, **how)
        # Padding needs no mask here: what a key gets is its own, and queries that are none have no weights.
        other = None if upper is None else -upper, None if lower is None else -lower
        queries = Walk(self.cols, self.kv_blocks, self.rows, self.q_length, *other, **how)
        self.by_query, self.by_key = ByQuery(self, keys), ByKey(self, queries)

    # --- Which tiles ---

    @cached_property
    def _needed(self) -> needed.Needed | None:
        blocks = needed.Blocks(self.rows, self.cols, self.q_blocks, self.kv_blocks, self.kv_len)
        return needed.find(self._extras, self.rules, blocks)

    @property
    def _fits(self) -> bool:
        """Whether the ranges of all walks fit scalar memory."""
        assert self._needed is not None
        some = self._needed.some
        return 4 * some.shape[0] * some.shape[1] * max(some.shape[2:]) <= MAX_SCALARS

    def visits(self, *, turned: bool) -> needed.Visits | None:
        """The walks of all blocks, of queries or of keys; None if places decide."""
        if self._needed is None or not self._fits:
            return None
        found = self._needed.turned() if turned else self._needed
        return needed.listed(found) if self._listed and found.some.size <= MAX_SCALARS else needed.ranges(found)

    # --- Inputs ---

    def inputs(self, view: View) -> Inputs:
        """What every kernel reads."""
        q, k, v = self._arrays
        found = {"q": (q, view.queries(q.shape[3])), "k": (k, view.keys(k.shape[3])), "v": (v, view.keys(v.shape[3]))}
        for name, (of_q, of_kv) in self._sides.items():
            found[f"q_{name}"] = _rows(of_q, self.q_length), view.query_row()
            found[f"kv_{name}"] = _rows(of_kv, self.kv_length), view.key_row()
        for name in ("bias", "mask"):
            if (x := getattr(self._extras, name)) is not None:
                x = _plane(x, self.q_length, self.kv_length)
                found[name] = x.swapaxes(2, 3) if view.turned else x, view.plane(x)
        if self._extras.dropout_seed is not None:
            # Of two axes: `jax.vmap` adds one, and of the last two a block needs the whole.
            found["seed"] = self._extras.dropout_seed.reshape(1, 1), pl.BlockSpec(memory_space=pltpu.SMEM)
        return found

    @cached_property
    def _sides(self) -> dict[str, tuple[Array, Array]]:
        extras = self._extras
        found = {"ids": (extras.q_segment_ids, extras.kv_segment_ids), "at": (extras.q_positions, extras.kv_positions)}
        return {name: pair for name, pair in found.items() if pair[0] is not None}

    def columns(self, rows: int) -> list[Any]:
        """Memory for what the block that stays has of segments and positions, kept for its whole walk."""
        return [pltpu.VMEM((rows, pallas_tile.LANES), jnp.int32)] * len(self._sides)

    # --- Inside a kernel ---

    def keep(self, columns: tuple[Any, ...], refs: Any, side: str) -> None:
        """Fills them, for a block of queries (`q`) or keys (`kv`)."""
        for name, kept in zip(self._sides, columns, strict=True):
            kept[...] = pallas_tile.column(refs[f"{side}_{name}"][...])

    def turned(self, refs: Any, side: str, part: Part) -> list[Any]:
        """The same for a part, without keeping it."""
        return [pallas_tile.column(refs[f"{side}_{name}"][:, part.own_rows]) for name in self._sides]

    def seen(self, refs: Any, columns: Iterable[Any], place: Place, part: Part, axis: int) -> Any:
        """Which queries of a part see which keys; queries are along `axis`, and `columns` are of its own rows."""
        own, other = {}, {}
        for name, column in zip(self._sides, columns, strict=True):
            own[name] = pallas_tile.spread(column, part.others)
            other[name] = refs[f"{'q' if axis else 'kv'}_{name}"][:, part.other_rows]
        rows, cols = self._indices(place, part, axis)
        of_q, of_kv = (own, other) if axis == 0 else (other, own)
        of_q, of_kv = Side(rows, of_q.get("ids"), of_q.get("at")), Side(cols, of_kv.get("ids"), of_kv.get("at"))
        return tile.seen(of_q, of_kv, self.kv_len, self.rules, self.plane(refs, "mask", part))

    def plane(self, refs: Any, name: str, part: Part) -> Any:
        """A part of the bias or the mask, or what of it broadcasts."""
        if name not in refs:
            return None
        wanted = zip(refs[name].shape, (part.own_rows, part.other_rows), strict=True)
        return refs[name][tuple(at if n > 1 else slice(None) for n, at in wanted)]

    def dropper(self, refs: Any, place: Place, part: Part, axis: int) -> Callable[[Any], Any]:
        seed = refs["seed"][0, 0] if "seed" in refs else None
        return tile.dropper(seed, place.head, *self._indices(place, part, axis), self.rules)

    def _indices(self, place: Place, part: Part, axis: int) -> tuple[Any, Any]:
        """Where the queries of a part are, along `axis`, and its keys, along the other; its own rows are axis 0."""
        own, others = (part.start, part.size), (part.other, part.others)
        (row, rows), (col, cols) = (own, others) if axis == 0 else (others, own)
        return (
            tile.places(place.i * self.rows + row, rows, axis),
            tile.places(place.j * self.cols + col, cols, 1 - axis),
        )


def _with_mask_as_segments(extras: Extras, shape: tuple[int, ...], kv_len: int) -> Extras:
    """A mask of keys, or of queries, that all heads share can be one of segments, if there are none.

    What it hides is in a segment of its own then.
    """
    mask, (batch, q_len, *_) = extras.mask, shape
    if mask is None or extras.q_segment_ids is not None or mask.shape[1] > 1 or (1 not in mask.shape[2:]):
        return extras
    hidden = lambda seen, alone, length: jnp.broadcast_to(jnp.where(seen, 0, alone), (batch, length)).astype(jnp.int32)
    of_keys = mask.shape[2] == 1
    q_ids = hidden(True if of_keys else mask[:, 0, :, 0], 1, q_len)
    kv_ids = hidden(mask[:, 0, 0, :] if of_keys else True, 2, kv_len)
    return extras._replace(mask=None, q_segment_ids=q_ids, kv_segment_ids=kv_ids)


def _rows(x: Array, length: int) -> Array:
    return jnp.pad(x.astype(jnp.int32), ((0, 0), (0, length - x.shape[1])))[:, None, :]


def _plane(x: Array, q_length: int, kv_length: int) -> Array:
    """A bias or a mask in whole blocks, in a type that can be loaded: a single row of few bits cannot."""
    wide = (jnp.int32, jnp.int8) if x.dtype == jnp.bool_ else (jnp.float32, x.dtype)
    x = x.astype(wide[0] if 1 in x.shape[2:] or x.dtype == jnp.float16 else wide[1])
    widths = [(0, 0 if n == 1 else length - n) for n, length in zip(x.shape[2:], (q_length, kv_length), strict=True)]
    return jnp.pad(x, [(0, 0), (0, 0), *widths])
