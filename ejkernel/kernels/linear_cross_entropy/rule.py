"""The loss of rows of logits and its derivative; the vocabulary may be spread over a mesh axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel import _compat
from ejkernel.kernels.manual_axes import Axes

Array = jax.Array


class Rows(NamedTuple):
    """What is known of each row.

    Attributes:
      loss: Its loss, not yet multiplied by anything.
      log_sum_exp: Of its logits.
      correct: Whether the label has the largest logit.
    """

    loss: Array
    log_sum_exp: Array
    correct: Array


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The kind of loss: `lse - (1 - s) logit[label] - s mean(logits) + z lse²`.

    Attributes:
      ignore_index: The label of rows that do not count.
      label_smoothing: The s above.
      z_loss: The z above.
      logits_soft_cap: The c of `c tanh(logits / c)`, which takes the place of the logits.
      axis_name: The mesh axis over which the vocabulary is spread.
      batch_axis_name: The mesh axes over which rows are spread, for sums and means over all of them.
    """

    ignore_index: int | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    logits_soft_cap: float | None = None
    axis_name: Any = None
    batch_axis_name: Any = None

    def counts(self, labels: Array) -> Array:
        """Whether a row counts."""
        return jnp.ones(labels.shape, bool) if self.ignore_index is None else labels != self.ignore_index

    def rows(self, raw: Array, bias: Array | None, labels: Array) -> Rows:
        """The rows of a chunk of logits before bias and cap; a label outside of the vocabulary makes a loss nan."""
        logits = self._logits(raw, bias)
        top = self._most(jnp.max(logits, axis=1))
        # Minus infinity everywhere would give nan, where the sum is zero.
        shift = jnp.where(jnp.isfinite(top), top, 0.0)
        inside, local = self._local(labels, raw.shape[1])
        picked = jnp.take_along_axis(logits, local[:, None], axis=1, mode="clip")[:, 0]
        parts = [jnp.sum(jnp.exp(logits - shift[:, None]), axis=1), jnp.where(inside, picked, 0.0)]
        if self.label_smoothing:
            parts.append(jnp.sum(logits, axis=1))
        # The sums that cross the mesh go together.
        total, own, *rest = self._sum(jnp.stack(parts))
        lse = shift + jnp.log(total)
        loss = lse - (1 - self.label_smoothing) * own
        if self.label_smoothing:
            loss -= self.label_smoothing / self._vocabulary(raw) * rest[0]
        if self.z_loss:
            loss += self.z_loss * lse * lse
        known = (labels >= 0) & (labels < self._vocabulary(raw))
        loss = jnp.where(known, loss, jnp.nan)
        return Rows(jnp.where(self.counts(labels), loss, 0.0), lse, known & (own >= top))

    def derivative(self, raw: Array, bias: Array | None, labels: Array, lse: Array, factor: Array) -> Array:
        """That of `sum(factor · loss)` with respect to `raw`, in float32."""
        logits = self._logits(raw, bias)
        inside, local = self._local(labels, raw.shape[1])
        hot = (lax.broadcasted_iota(jnp.int32, raw.shape, 1) == local[:, None]) & inside[:, None]
        known = (labels >= 0) & (labels < self._vocabulary(raw))
        factor = jnp.where(self.counts(labels), jnp.where(known, factor, jnp.nan), 0.0)
        share = factor * (1 + 2 * self.z_loss * lse) if self.z_loss else factor
        out = jnp.exp(logits - lse[:, None]) * share[:, None]
        out -= jnp.where(hot, ((1 - self.label_smoothing) * factor)[:, None], 0.0)
        if self.label_smoothing:
            out -= (self.label_smoothing / self._vocabulary(raw) * factor)[:, None]
        if self.logits_soft_cap is not None:
            out *= 1 - jnp.square(logits / self.logits_soft_cap)
        return out

    def _logits(self, raw: Array, bias: Array | None) -> Array:
        wide = jnp.promote_types(raw.dtype, jnp.float32)
        logits = raw.astype(wide)
        if bias is not None:
            logits += bias.astype(wide)
        cap = self.logits_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def _local(self, labels: Array, width: int) -> tuple[Array, Array]:
        """Whether a label is in this device's part of the vocabulary, and where."""
        first = 0 if self.axis_name is None else lax.axis_index(self.axis_name) * width
        local = labels.astype(jnp.int32) - first
        return (local >= 0) & (local < width), local

    def _vocabulary(self, raw: Array) -> int:
        return raw.shape[1] * (1 if self.axis_name is None else lax.axis_size(self.axis_name))

    def _most(self, x: Array) -> Array:
        return x if self.axis_name is None else lax.pmax(x, self.axis_name)

    def _sum(self, x: Array) -> Array:
        return x if self.axis_name is None else lax.psum(x, self.axis_name)

    def total(self, x: Array) -> Array:
        """The sum over the rows of all devices."""
        return x if self.batch_axis_name is None else lax.psum(x, self.batch_axis_name)

    def cotangent(self, dout: Array, *, reduced: bool) -> Array:
        """The cotangent of a loss that several devices hold.

        Where JAX does not track what varies (`check_vma=False`), each of them is given a part of it.
        """
        names = (*_names(self.axis_name), *(_names(self.batch_axis_name) if reduced else ()))
        untracked = tuple(n for n in names if n not in _compat.varying_axes(lax.axis_index(n)))
        return lax.psum(dout, untracked) if untracked else dout

    def without_vocabulary(self, axes: Axes) -> Axes:
        """Those of the mesh axes over which losses vary."""
        return axes - frozenset(_names(self.axis_name))


def _names(axis: Any) -> tuple[Any, ...]:
    return () if axis is None else tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
