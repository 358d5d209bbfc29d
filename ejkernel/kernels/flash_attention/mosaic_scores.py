"""The weights of a tile of scores, and the gradient of those scores."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel._compat import load_with_layout
from ejkernel.kernels.flash_attention.mosaic_bias import Bias
from ejkernel.kernels.flash_attention.mosaic_bits import BITS
from ejkernel.kernels.flash_attention.mosaic_mask import Band

_LOG2E = math.log2(math.e)
_FAR = -1e19  # Hides a key before the cap's factor: its weight is zero, and the derivative of the cap still finite.
_VECTORS = (plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0))  # Along the rows, along the columns.


class Weights(NamedTuple):
    """The weights of a tile, and the same times the derivative of the soft cap, which `gradient` needs.

    The derivative itself would take as many registers once more, until the gradient of the weights is there.
    """

    plain: jax.Array
    sloped: jax.Array


class Hides(NamedTuple):
    """What hides keys of a tile besides the band, and whether anything does.

    `queries` and `keys` are the segments' ids, `optimized` if in shared memory. `words` are bits of a mask: a vector
    along the rows of the tile for every 32 columns.
    """

    cut: Any
    queries: Any = None
    keys: Any = None
    optimized: bool = True
    words: tuple[jax.Array, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Scores:
    """How scores become weights: scale, cap and masks.

    `query_axis` is the axis of a tile's queries, `ragged` whether a tile may reach past the last key, `rest` the
    rounding error of the log-sum-exp, if that matters. With a `bias` both are in natural units, else in those of log2.
    """

    band: Band
    scale: float
    soft_cap: float | None
    query_axis: int
    ragged: bool
    rest: Any = None
    bias: Bias | None = None

    def of_queries(self, ref: Any, *, optimized: bool = True) -> jax.Array:
        """Loads a vector along the queries of a tile; `optimized=False` from global memory."""
        return load_with_layout(ref, layout=_VECTORS[self.query_axis], optimized=optimized)

    def weights(
        self, s: jax.Array, lse: jax.Array, batch: Any, head: Any, col: Any, row: Any, hides: Hides | None = None
    ) -> Weights:
        """Returns the weights of a tile from key `col` and query `row` on."""
        t = s if self.soft_cap is None else jnp.tanh(s * (self.scale / self.soft_cap))
        along_keys = lambda x: lax.broadcast_in_dim(x, s.shape, [self.query_axis])
        if self.bias is None:
            # Before the factor of the cap, so that there is one array at the branch, not the result beside `t`.
            t = self._hidden(t, -jnp.inf if self.soft_cap is None else _FAR, col, row, hides)
            capped = t if self.soft_cap is None else self.soft_cap * t
            factor = _LOG2E if self.soft_cap is not None else self.scale * _LOG2E
            p = jnp.exp2(capped * factor - along_keys(lse))
        else:
            found = self.bias.of_tile(batch, head, *((col, row) if self.query_axis else (row, col)), s.shape)
            capped = self.bias.added(t * (self.scale if self.soft_cap is None else self.soft_cap), found)
            # After the bias, beside which nothing but -inf may be far enough.
            p = jnp.exp2((self._hidden(capped, -jnp.inf, col, row, hides) - along_keys(lse)) * _LOG2E)
        if self.soft_cap is None:
            p = lax.optimization_barrier(p)
            return Weights(p, p)
        return Weights(*lax.optimization_barrier((p, p * (1.0 - t * t))))

    def restored(self, weights: Weights, batch: Any, head: Any, row: Any) -> Weights:
        """Returns the weights with the factor that they miss because their log-sum-exp was rounded."""
        if self.rest is None:
            return weights
        shape = weights.plain.shape
        rest = self.of_queries(self.rest.at[batch, head, pl.ds(row, shape[self.query_axis])], optimized=False)
        share = jnp.exp2(-rest) if self.bias is None else jnp.exp2(rest * -_LOG2E)
        factor = lax.broadcast_in_dim(share, shape, [self.query_axis])
        p = weights.plain * factor
        return Weights(p, p if self.soft_cap is None else weights.sloped * factor)

    def gradient(self, weights: Weights, dp: jax.Array, delta: jax.Array) -> jax.Array:
        """Returns the gradient of the scores, still to be scaled."""
        return weights.sloped * (dp - lax.broadcast_in_dim(delta, dp.shape, [self.query_axis]))

    @property
    def _key_axis(self) -> int:
        return 1 - self.query_axis

    def _hidden(self, s: jax.Array, far: float, col: Any, row: Any, hides: Hides | None) -> jax.Array:
        """Puts `far` where a query does not see a key."""
        if hides is None and self.band.upper is None and self.band.lower is None and not self.ragged:
            return s
        cut = self._cuts(col, row, s.shape, hides)
        return lax.cond(cut, lambda x: self._masked(x, far, col, row, hides), lambda x: x, s)

    def _masked(self, s: jax.Array, hidden: float, col: Any, row: Any, hides: Hides | None) -> jax.Array:
        columns = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
        rows = plgpu.broadcasted_iota(jnp.int32, s.shape[:1], 0, layout=_VECTORS[0])
        # Bounds of the columns are vectors along the rows, two registers per thread; a matrix of differences would need
        # more.
        rows = rows + (col - row if self.query_axis else row - col)
        for offset, is_upper in ((self.band.upper, True), (self.band.lower, False)):
            if offset is not None:
                bound = lax.broadcast_in_dim(rows - offset if self.query_axis else rows + offset, s.shape, [0])
                s = jnp.where(columns <= bound if is_upper != bool(self.query_axis) else columns >= bound, s, hidden)
        if self.ragged:
            # Keys past the end are zeros, but their weights may be infinite.
            keys = lax.broadcast_in_dim(rows + row, s.shape, [0]) if self.query_axis else columns + col
            s = jnp.where(keys < self.band.kv_len, s, hidden)
        if hides is not None and hides.words:
            s = jnp.where(_bits(hides.words, columns) != 0, s, hidden)
        if hides is not None and hides.queries is not None:
            q_ids = self.of_queries(hides.queries, optimized=hides.optimized)
            q_ids = lax.broadcast_in_dim(q_ids, s.shape, [self.query_axis])
            kv_ids = load_with_layout(hides.keys, layout=_VECTORS[self._key_axis], optimized=hides.optimized)
            same = q_ids == lax.broadcast_in_dim(kv_ids, s.shape, [self._key_axis])
            s = jnp.where(same, s, hidden)
        return s

    def _cuts(self, col: Any, row: Any, shape: tuple[int, ...], hides: Hides | None) -> Any:
        """Returns whether an edge of the band or of a segment, or the end of the keys, runs through the tile."""
        keys, queries = shape[self._key_axis], shape[self.query_axis]
        cut = jnp.bool_(False) if hides is None else hides.cut
        if self.band.upper is not None:
            cut = cut | (col + (keys - 1) - row > self.band.upper)
        if self.band.lower is not None:
            cut = cut | (col - row - (queries - 1) < self.band.lower)
        if self.ragged:
            cut = cut | (col + keys > self.band.kv_len)
        return cut


def load_words(words: Any, batch: Any, col: Any, row: Any, shape: tuple[int, int]) -> tuple[jax.Array, ...]:
    """Loads the bits of a tile of rows from `row`, and columns from `col` on; none if there is no mask."""
    if words is None:
        return ()
    batch, first = batch if words.shape[0] > 1 else 0, lax.div(col, jnp.int32(BITS))
    vectors = (words.at[batch, first + n, pl.ds(row, shape[0])] for n in range(shape[1] // BITS))
    return tuple(load_with_layout(vector, layout=_VECTORS[0], optimized=False) for vector in vectors)


def facts_hide(facts: Any, cut: Any, batch: Any, col: Any, row: Any, shape: tuple[int, int]) -> Hides | None:
    """Returns what hides keys of a tile of keys by queries, read from global memory."""
    if not facts.known:
        return None
    ids = ()
    if facts.whole_ids:
        q_ids, kv_ids = (ref.at[batch] for ref in facts.whole_ids)
        ids = q_ids.at[pl.ds(row, shape[1])], kv_ids.at[pl.ds(col, shape[0])]
    return Hides(cut, *ids, optimized=False, words=load_words(facts.key_words, batch, row, col, shape))


def _bits(words: tuple[jax.Array, ...], columns: jax.Array) -> jax.Array:
    """Returns the bit of every element; which word a register needs is known to the compiler."""
    word = lax.broadcast_in_dim(words[0], columns.shape, [0])
    for n, other in enumerate(words[1:], 1):
        word = jnp.where(columns >= n * BITS, lax.broadcast_in_dim(other, columns.shape, [0]), word)
    return lax.shift_right_logical(word, columns & (BITS - 1)) & 1


def with_or_without_rest(consume: Callable[[Scores], None], scores: Scores, rest_ref: Any, lost_ref: Any) -> None:
    """Compiles `consume` twice and runs one copy, so that rows of usual size need no more instructions or registers."""
    lost = lost_ref[0] != 0
    pl.when(lost)(lambda: consume(dataclasses.replace(scores, rest=rest_ref)))
    pl.when(jnp.logical_not(lost))(lambda: consume(scores))
