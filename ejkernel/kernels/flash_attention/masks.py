"""What every backend does to a tile of scores, written once: positions, masks, dropout, sinks."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.flash_attention.arguments import Rules

Array = jax.Array


def may_see(rows: Any, cols: Any, rules: Rules) -> Any:
    """Which of the queries at `rows` see the keys at `cols`, which broadcast together; None if all do."""
    seen = None
    if rules.upper is not None:
        seen = cols <= rows + rules.upper
    if rules.lower is not None:
        inside = cols >= rows + rules.lower
        seen = inside if seen is None else seen & inside
    return seen


def kept(seed: Any, head: Any, rows: Any, cols: Any, prob: float) -> Any:
    """Which weights dropout keeps: a hash of where a weight is, so that every tiling drops the same ones.

    `head` counts heads over the batch. All are integers that broadcast together.
    """
    u32 = lambda x: jnp.asarray(x).astype(jnp.uint32)
    line = _mixed(u32(seed) + u32(head) * jnp.uint32(0x9E3779B9))
    line = _mixed(line ^ (u32(rows) * jnp.uint32(0x85EBCA6B)))
    bits = _mixed(line + u32(cols) * jnp.uint32(0xC2B2AE35))
    return bits >= jnp.uint32(min(round(prob * 2**32), 2**32 - 1))


def _mixed(x: Any) -> Any:
    """Every bit of the result depends on every bit of `x`."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


class LogSum(NamedTuple):
    """The logarithm of the sum of exp(logit) of each row: its rounded value, and the rounding error.

    Softmax does not change when all logits of a row move by the same amount, but float32 cannot hold both a large
    amount and the logarithm of the sum: at a million its spacing is 1/16, at a billion 64. Weights that are rebuilt
    from `lse` alone are exp(rest) times too large.
    """

    lse: Any
    """+inf for rows that see nothing: their weights are then zero."""
    rest: Any


def log_sum(top: Any, total: Any) -> LogSum:
    """The log-sum-exp of rows whose largest logit is `top` and whose sum of exp(logit - top) is `total`."""
    empty = total == 0
    # Not of +inf, whose difference to itself is nan, for which programs may be searched (checkify, jax_debug_nans).
    sums = rounded(jnp.where(empty, 0.0, top), jnp.log(jnp.where(empty, 1.0, total)))
    return LogSum(jnp.where(empty, jnp.inf, sums.lse), sums.rest)


def rounded(large: Any, small: Any) -> LogSum:
    """The sum of two numbers and the error of that, if the first is the larger one; of +inf there is no error."""
    both = large + small
    return LogSum(both, jnp.where(both == jnp.inf, 0.0, (large - both) + small))


def with_sinks(out: Array, sums: LogSum, aux: Array | None) -> tuple[Array, LogSum]:
    """Output and log-sum-exp of a softmax that also had the sinks `aux` among its logits.

    `out` is [batch, q, heads, dim], the sums [batch, heads, q].
    """
    if aux is None:
        return out, sums
    aux = aux.astype(sums.lse.dtype)
    top = aux.max(axis=1)
    # A sink of -inf is none, and a row that sees nothing else still sees nothing.
    shift = jnp.where(jnp.isneginf(top), 0.0, top)
    sink = LogSum(*(x[None, :, None] for x in log_sum(top, jnp.exp(aux - shift[:, None]).sum(axis=1))))
    lead = (sums.lse - sink.lse) + (sums.rest - sink.rest)
    lead = jnp.where(sums.lse == jnp.inf, -jnp.inf, jnp.where(sink.lse == jnp.inf, jnp.inf, lead))
    lse, rest = (jnp.where(lead > 0, x, y) for x, y in zip(sums, sink, strict=True))
    share = jax.nn.sigmoid(lead).swapaxes(1, 2)[..., None]
    total = rounded(lse, rest + jnp.log1p(jnp.exp(-jnp.abs(lead))))
    return (out.astype(lse.dtype) * share).astype(out.dtype), total


def sinks_gradient(sums: LogSum, delta: Array, aux: Array) -> Array:
    """Gradient of the sinks; `delta` is the sum of output times its gradient per row, [batch, heads, q]."""
    lse, rest = (x[:, :, None, :] for x in sums)
    weights = jnp.exp((aux.astype(lse.dtype)[None, :, :, None] - lse) - rest)
    return -jnp.sum(weights * delta[:, :, None, :], axis=(0, 3)).astype(aux.dtype)


def unlost(dout: Array, delta: Array, rest: Array) -> tuple[Array, Array]:
    """`dout` and `delta` for a backward that rebuilds weights from the log-sum-exp without `rest`.

    All gradients are products of a row's weights with one of the two, so the factor that is missing in the weights can
    be applied to these instead.
    """
    share = jnp.exp(-rest)
    return (dout.astype(share.dtype) * share.swapaxes(1, 2)[..., None]).astype(dout.dtype), delta * share


def row_products(out: Array, dout: Array, dtype: Any) -> Array:
    """The sum of output times its gradient per row, as [batch, heads, q]."""
    return jnp.sum(out.astype(dtype) * dout.astype(dtype), axis=-1).swapaxes(1, 2)


def accumulator(dtype: Any) -> Any:
    """The dtype of sums: float32, or float64 for float64 arguments."""
    return jnp.promote_types(dtype, jnp.float32)


class Spans(NamedTuple):
    """Which blocks of keys a block of queries needs, in numbers of blocks; those from `clear` on are not masked."""

    start: Any
    clear: Any
    clear_end: Any
    end: Any
    blocks: int

    def loops(self) -> list[tuple[Any, Any, bool]]:
        """(from, to, whether masked), in order, without those that are known to be empty."""
        loops = [(self.start, self.clear, True), (self.clear, self.clear_end, False), (self.clear_end, self.end, True)]
        return [(lo, hi, masked) for lo, hi, masked in loops if lo is not hi and not _known_empty(lo, hi)]


def _known_empty(lo: Any, hi: Any) -> bool:
    return isinstance(lo, int) and isinstance(hi, int) and lo >= hi


def spans(first: Any, rows: int, cols: int, length: int, lower: int | None, upper: int | None) -> Spans:
    """Blocks of `cols` keys, of `length` in all, for queries `first` to `first + rows`; `first` is an int32."""
    blocks = max(-(-length // cols), 1)
    last = first + (rows - 1)
    start = 0 if lower is None else jnp.minimum(_blocks(first + lower, cols), blocks)
    end = blocks if upper is None else jnp.clip(_blocks(last + upper + cols, cols), start, blocks)
    clear = start if lower is None else jnp.clip(_blocks(last + lower + (cols - 1), cols), start, end)
    # Blocks after `whole` reach past the end of the sequence.
    whole = length // cols
    clear_end = whole if upper is None else jnp.minimum(_blocks(first + upper + 1, cols), whole)
    clear_end = clear_end if lower is None and upper is None else jnp.clip(clear_end, clear, end)
    return Spans(start, clear, clear_end, end, blocks)


def _blocks(place: Array, block: int) -> Array:
    """The block that index `place` is in; 0 for indices before the first."""
    return jax.lax.div(jnp.maximum(place, 0), jnp.int32(block))
