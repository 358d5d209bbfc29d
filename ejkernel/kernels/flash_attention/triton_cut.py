"""How a call is cut into tiles for the Triton kernels, and which of them a program visits.

A program owns a block of queries, or of keys, and walks over those of the other side. Where only places decide, its
walk is computed; where arrays do (segments, positions, masks), it was found before the kernel and is read.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ejkernel.kernels.flash_attention import masks, needed, tile
from ejkernel.kernels.flash_attention.arguments import Attention
from ejkernel.kernels.flash_attention.tile import Side
from ejkernel.ops.utils.params import BwdParams, FwdParams

Array = jax.Array
Inputs = dict[str, tuple[Array, pl.BlockSpec]]

_SIDES = {"q_ids": "q_segment_ids", "kv_ids": "kv_segment_ids", "q_at": "q_positions", "kv_at": "kv_positions"}


class Cut:
    """A call cut into tiles: arrays with heads first, lengths in whole blocks, head dims in powers of two."""

    def __init__(self, call: Attention, rows: int, cols: int, params: FwdParams | BwdParams) -> None:
        query, key, value, extras, rules = call
        self.rules, self.params, self.rows, self.cols = rules, params, rows, cols
        self.dim, self.v_dim = (max(16, pl.next_power_of_2(x.shape[3])) for x in (query, value))
        self.kv_len = key.shape[1]
        self.heads, self.group = query.shape[2], query.shape[2] // key.shape[2]
        self.q = tile.heads_first(query, self.rows, self.dim)
        self.k = tile.heads_first(key, self.cols, self.dim)
        self.v = tile.heads_first(value, self.cols, self.v_dim)
        self.q_length, self.kv_length = self.q.shape[2], self.k.shape[2]
        self._extras = extras

    def options(self, interpret: bool) -> dict[str, Any]:
        params = plgpu.CompilerParams(num_warps=self.params.num_warps or 4, num_stages=self.params.num_stages or 2)
        return {"interpret": interpret, "compiler_params": params}

    # --- Specs: the grid is (block, head, batch); a group's heads are adjacent ---

    def per_query(self, dim: int | None = None) -> pl.BlockSpec:
        tail = () if dim is None else (dim,)
        return pl.BlockSpec((None, None, self.rows, *tail), lambda i, h, b: (b, h, i, *[0] * len(tail)))

    def per_key(self, dim: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, self.cols, dim), lambda j, h, b: (b, h, j, 0))

    def whole_queries(self, dim: int | None = None) -> pl.BlockSpec:
        """All queries of the heads that share a key head."""
        tail = () if dim is None else (dim,)
        shape = (None, self.group, self.q_length, *tail)
        return pl.BlockSpec(shape, lambda j, h, b: (b, h, 0, *[0] * len(tail)))

    def whole_keys(self, dim: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, self.kv_length, dim), lambda i, h, b: (b, h // self.group, 0, 0))

    def inputs(self, *, block_q: bool) -> Inputs:
        """What every kernel reads, for programs that own a block of queries or of keys."""
        if block_q:
            specs = self.per_query(self.dim), self.whole_keys(self.dim), self.whole_keys(self.v_dim)
        else:
            specs = self.whole_queries(self.dim), self.per_key(self.dim), self.per_key(self.v_dim)
        found: Inputs = {"q": (self.q, specs[0]), "k": (self.k, specs[1]), "v": (self.v, specs[2])}
        for name, array in self._sides().items():
            owned = block_q == name.startswith("q")
            own = self.rows if block_q else self.cols
            at = (lambda i, h, b: (b, i)) if owned else (lambda i, h, b: (b, 0))
            found[name] = array, pl.BlockSpec((None, own if owned else array.shape[1]), at)
        for name, array in self._planes().items():
            found[name] = array, self._plane(array, block_q)
        if self._extras.dropout_seed is not None:
            found["seed"] = self._extras.dropout_seed.reshape(1), pl.BlockSpec((1,), lambda i, h, b: (0,))
        return {**found, **self._visits(block_q)}

    def whole_inputs(self) -> dict[str, Array]:
        """What a kernel reads that visits all heads of the batch."""
        seed = self._extras.dropout_seed
        found = {"q": self.q, "k": self.k, "v": self.v, **self._sides(), **self._planes()}
        return found if seed is None else {**found, "seed": seed.reshape(1)}

    def _sides(self) -> dict[str, Array]:
        """Segments and positions, [batch, length] in whole blocks."""
        given = {name: getattr(self._extras, field) for name, field in _SIDES.items()}
        length = {"q": self.q_length, "k": self.kv_length}
        return {name: _padded(x.astype(jnp.int32), 1, length[name[0]]) for name, x in given.items() if x is not None}

    def _planes(self) -> dict[str, Array]:
        """Bias and mask, [batch or 1, heads or 1, queries or 1, keys or 1] in whole blocks."""
        given = {"bias": self._extras.bias, "mask": self._extras.mask}
        lengths = (2, self.q_length), (3, self.kv_length)
        found = {name: x for name, x in given.items() if x is not None}
        for axis, length in lengths:
            found = {name: x if x.shape[axis] == 1 else _padded(x, axis, length) for name, x in found.items()}
        return {name: _countable(x) for name, x in found.items()}

    def _plane(self, x: Array, block_q: bool) -> pl.BlockSpec:
        """For a program that owns a block of queries, its rows of one head; else its columns of a group's heads."""
        many = [n > 1 for n in x.shape]
        pick = lambda place: tuple(n if m else 0 for m, n in zip(many, place, strict=True))
        size = lambda axis, n: n if many[axis] else 1
        if block_q:
            shape = (None, None, size(2, self.rows), x.shape[3])
            return pl.BlockSpec(shape, lambda i, h, b: pick((b, h, i, 0)))
        shape = (None, size(1, self.group), x.shape[2], size(3, self.cols))
        return pl.BlockSpec(shape, lambda j, h, b: pick((b, h, 0, j)))

    # --- Inside a kernel ---

    def queries(self, refs: Any, i: Any, at: Any = slice(None)) -> Side:
        """Block `i` of queries, as a column; `at` is where it is in what the program has of them."""
        ids, places = (refs[name][at][:, None] if name in refs else None for name in ("q_ids", "q_at"))
        return Side(tile.places(i * self.rows, self.rows, 0), ids, places)

    def keys(self, refs: Any, j: Any, at: Any = slice(None)) -> Side:
        """Block `j` of keys, as a row."""
        ids, places = (refs[name][at][None, :] if name in refs else None for name in ("kv_ids", "kv_at"))
        return Side(tile.places(j * self.cols, self.cols, 1), ids, places)

    def plane(self, refs: Any, name: str, at: Any, head: Any = None) -> Any:
        """A tile of the bias or the mask, or what of it broadcasts; `head` is the one of a group."""
        if name not in refs:
            return None
        ref = refs[name]
        if head is None:
            return ref[:, at] if ref.shape[1] > 1 else ref[...]
        head = head if ref.shape[0] > 1 else 0
        return ref[head, at, :] if ref.shape[1] > 1 else ref[head, :, :]

    def tile_of(self, refs: Any, batch: Any, head: Any, rows: Any, cols: Any, name: str) -> Any:
        """The same for a program that has the whole of both."""
        if name not in refs:
            return None
        many = [n > 1 for n in refs[name].shape]
        batch, head = (n if m else 0 for m, n in zip(many[:2], (batch, head), strict=True))
        rows, cols = (at if m else slice(None) for m, at in zip(many[2:], (rows, cols), strict=True))
        return refs[name][batch, head, rows, cols]

    def bounds(self) -> tuple[int | None, int | None]:
        """Of the places of keys that a query sees; in sequences with positions any place may be seen."""
        return (self.rules.lower, self.rules.upper) if self._extras.q_positions is None else (None, None)

    def over_keys(self, refs: Any, i: Any, step: Any, carry: Any) -> Any:
        """Runs `step(j, carry, masked)` over the blocks of keys that a block of queries sees."""
        if "spans" in refs:
            return _over(*_read(refs, ()), step, carry)
        rules = self.rules
        spans = masks.spans(i * self.rows, self.rows, self.cols, self.kv_len, rules.lower, rules.upper)
        return _over(spans, _same, step, carry)

    def over_queries(self, refs: Any, j: Any, head: Any, step: Any, carry: Any) -> Any:
        """The same for a block of keys; padding needs no mask: its keys are zeros, its rows have no weights."""
        if "spans" in refs:
            return _over(*_read(refs, (head if refs["spans"].shape[0] > 1 else 0,)), step, carry)
        lower, upper = self.rules.lower, self.rules.upper
        other = None if upper is None else -upper, None if lower is None else -lower
        return _over(masks.spans(j * self.cols, self.cols, self.rows, self.q_length, *other), _same, step, carry)

    # --- Walks ---

    @cached_property
    def _needed(self) -> needed.Needed | None:
        blocks = needed.Blocks(
            self.rows, self.cols, self.q_length // self.rows, self.kv_length // self.cols, self.kv_len
        )
        return needed.find(self._extras, self.rules, blocks)

    def _visits(self, block_q: bool) -> Inputs:
        if self._needed is None:
            return {}
        found = self._needed if block_q else self._needed.turned()
        # Segments follow each other, so that a range has nothing else in it; masks may have holes.
        walk = needed.ranges if self._extras.mask is None else needed.listed
        visits = {name: x for name, x in walk(found)._asdict().items() if x is not None}
        return {name: (x, self._walk(x, block_q)) for name, x in visits.items()}

    def _walk(self, x: Array, block_q: bool) -> pl.BlockSpec:
        batch, heads = (n > 1 for n in x.shape[:2])
        of_heads = None if block_q else self.group if heads else 1
        at = lambda i, h, b: (b if batch else 0, h if heads else 0, i, 0)
        return pl.BlockSpec((None, of_heads, None, x.shape[3]), at)


def _read(refs: Any, head: tuple[Any, ...]) -> tuple[masks.Spans, Any]:
    listed = "order" in refs
    spans = needed.steps(lambda n: refs["spans"][(*head, n)], listed=listed)
    return spans, (lambda step: refs["order"][(*head, step)]) if listed else _same


def _over(spans: masks.Spans, at: Any, step: Any, carry: Any) -> Any:
    for lo, hi, masked in spans.loops():
        carry = lax.fori_loop(lo, hi, partial(_flip, step, at, masked), carry)
    return carry


def _flip(step: Any, at: Any, masked: bool, index: Any, carry: Any) -> Any:
    return step(at(index), carry, masked)


def _same(index: Any) -> Any:
    return index


def _countable(x: Array) -> Array:
    """A mask that padding made too large in two bytes: up to 2**32 of them, Pallas counts elements in 32 bits."""
    return x.astype(jnp.int16) if x.dtype == jnp.bool_ and x.size >= tile.MAX_ELEMENTS else x


def _padded(x: Array, axis: int, length: int) -> Array:
    missing = length - x.shape[axis]
    return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)]) if missing else x
