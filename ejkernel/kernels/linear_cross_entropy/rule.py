"""The loss of rows of logits and its derivative; the vocabulary may be spread over a mesh axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel import _compat
from ejkernel.errors import EjkernelError
from ejkernel.kernels.manual_axes import Axes

Array = jax.Array


class AxisNameError(EjkernelError, NameError):
    """No mesh axis of this name is there to sum over."""


class Rows(NamedTuple):
    """What is known of each row.

    Attributes:
      loss: Its loss, 0 if it does not count.
      log_sum_exp: Of its logits.
      correct: Whether the label has the largest logit.
    """

    loss: Array
    log_sum_exp: Array
    correct: Array


class Sums(NamedTuple):
    """What a row's loss is made of.

    Attributes:
      top: The largest logit.
      exponentials: The sum of `exp(logit - top)`.
      label: The label's logit; 0 if another device has it.
      match: The same, as it was among those of which the top is the largest; minus infinity if another device has it.
      logits: The sum of all, where smoothing needs it.
    """

    top: Array
    exponentials: Array
    label: Array
    match: Array
    logits: Array | None


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

    def __post_init__(self) -> None:
        for argument in ("axis_name", "batch_axis_name"):
            if missing := [name for name in _names(getattr(self, argument)) if not _is_bound(name)]:
                raise AxisNameError(
                    f"linear_cross_entropy: {argument} must name mesh axes of a jax.shard_map around the call, "
                    f"or be None outside of one, got {missing[0]!r}."
                )
        if both := [name for name in _names(self.axis_name) if name in _names(self.batch_axis_name)]:
            raise AxisNameError(
                "linear_cross_entropy: axis_name and batch_axis_name must name different mesh axes, "
                f"got {both[0]!r} in both."
            )

    # --- Rows ---

    def rows(self, raw: Array, bias: Array | None, labels: Array) -> Rows:
        """The rows of a chunk of logits before bias and cap; a label outside of the vocabulary makes a loss nan."""
        return self._finished(self._sums(raw, bias, labels), labels, self.vocabulary(raw))

    def rows_and_derivative(self, raw: Array, bias: Array | None, labels: Array, factor: Array) -> tuple[Rows, Array]:
        """The rows, and the derivative of `sum(factor · loss)` with respect to `raw`, in its dtype."""
        rows = self.rows(raw, bias, labels)
        hot = self._hot(raw, labels)
        lse, factor = rows.log_sum_exp[:, None], self.counted(factor, labels, raw)[:, None]
        return rows, self.slope(self.logits(raw, bias), hot, lse, factor, self.vocabulary(raw)).astype(raw.dtype)

    def logits(self, raw: Array, bias: Array | None) -> Array:
        """In float32, with bias and cap."""
        wide = jnp.promote_types(raw.dtype, jnp.float32)
        logits = raw.astype(wide)
        if bias is not None:
            logits += bias.astype(wide)
        cap = self.logits_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def slope(self, logits: Array, hot: Array, lse: Array, factor: Array, vocabulary: int) -> Array:
        """The derivative of each logit before the cap, given which is the label's."""
        share = factor * (1 + 2 * self.z_loss * lse) if self.z_loss else factor
        out = jnp.exp(logits - lse) * share - jnp.where(hot, (1 - self.label_smoothing) * factor, 0.0)
        if self.label_smoothing:
            out -= self.label_smoothing / vocabulary * factor
        if self.logits_soft_cap is not None:
            out *= 1 - jnp.square(logits / self.logits_soft_cap)
        return out

    def _sums(self, raw: Array, bias: Array | None, labels: Array) -> Sums:
        """Of this device's vocabulary."""
        logits = self.logits(raw, bias)
        top = jnp.max(logits, axis=1)
        exponentials = jnp.sum(jnp.exp(logits - _finite(top)[:, None]), axis=1)
        inside, local = self._local(labels, raw.shape[1])
        # Of what is in memory: taken from the float32 logits, it would have all of them written there.
        picked = jnp.take_along_axis(raw, local[:, None], axis=1, mode="clip")[:, 0]
        picked = self.logits(picked, None if bias is None else jnp.take(bias, local, mode="clip"))
        # Not of what is in memory: XLA may not have rounded yet what it took the largest of.
        match = jnp.max(jnp.where(self._hot(raw, labels), logits, -jnp.inf), axis=1)
        return Sums(top, exponentials, jnp.where(inside, picked, 0.0), match, self._if_smooth(logits))

    def _if_smooth(self, logits: Array) -> Array | None:
        return jnp.sum(logits, axis=1) if self.label_smoothing else None

    def _finished(self, sums: Sums, labels: Array, vocabulary: int) -> Rows:
        top, match = sums.top, sums.match
        if self.axis_name is not None:
            top, match = lax.pmax(jnp.stack([top, match]), self.axis_name)
        parts = [sums.exponentials, sums.label, *([] if sums.logits is None else [sums.logits])]
        if self.axis_name is not None:
            parts[0] *= jnp.exp(sums.top - _finite(top))
            # The sums that cross the mesh go together.
            parts = list(lax.psum(jnp.stack(parts), self.axis_name))
        lse = _finite(top) + jnp.log(parts[0])
        loss = lse - (1 - self.label_smoothing) * parts[1]
        if self.label_smoothing:
            loss -= self.label_smoothing / vocabulary * parts[2]
        if self.z_loss:
            loss += self.z_loss * lse * lse
        known = _known(labels, vocabulary)
        loss = jnp.where(self.counts(labels), jnp.where(known, loss, jnp.nan), 0.0)
        return Rows(loss, lse, known & (match >= top))

    # --- Labels ---

    def counts(self, labels: Array) -> Array:
        """Whether a row counts; all do if labels are of a dtype that does not have `ignore_index`."""
        dtype = jnp.iinfo(labels.dtype)
        if self.ignore_index is None or not dtype.min <= self.ignore_index <= dtype.max:
            return jnp.ones(labels.shape, bool)
        return labels != self.ignore_index

    def count(self, labels: Array) -> Array:
        """How many rows count; 1 if none does, whose mean is then 0."""
        return jnp.maximum(self.total(jnp.sum(self.counts(labels))), 1)

    def counted(self, factor: Array, labels: Array, raw: Array) -> Array:
        """The factor of each row: 0 where it does not count, nan where its label is not in the vocabulary."""
        known = _known(labels, self.vocabulary(raw))
        return jnp.where(self.counts(labels), jnp.where(known, factor, jnp.nan), 0.0)

    def _local(self, labels: Array, width: int) -> tuple[Array, Array]:
        """Whether a label is in this device's part of the vocabulary, and where."""
        first = 0 if self.axis_name is None else lax.axis_index(self.axis_name) * width
        local = labels.astype(jnp.int32) - first
        return (local >= 0) & (local < width), local

    def _hot(self, raw: Array, labels: Array) -> Array:
        """Which column of this device is the label's."""
        inside, local = self._local(labels, raw.shape[1])
        return (lax.broadcasted_iota(jnp.int32, raw.shape, 1) == local[:, None]) & inside[:, None]

    # --- Devices ---

    def vocabulary(self, raw: Array) -> int:
        """The size of the vocabulary of all devices."""
        return raw.shape[1] * (1 if self.axis_name is None else lax.axis_size(self.axis_name))

    def total(self, x: Array) -> Array:
        """The sum over the rows of all devices."""
        return x if self.batch_axis_name is None else lax.psum(x, self.batch_axis_name)

    def outputs(self, rows: Rows, labels: Array, reduction: str, stats: bool) -> Any:
        """What a call returns: the loss, and with `stats` a pair of it and the rest that is known of rows."""
        loss, *rest = (a.reshape(labels.shape) for a in rows)
        if reduction != "none":
            loss = self.total(jnp.sum(loss)) / (self.count(labels) if reduction == "mean" else 1)
        return (loss, tuple(rest)) if stats else loss

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


def _finite(x: Array) -> Array:
    """Minus infinity in all logits of a row would give nan in place of a sum of zero."""
    return jnp.where(jnp.isfinite(x), x, 0.0)


def _known(labels: Array, vocabulary: int) -> Array:
    """Whether labels are in the vocabulary; its size may be more than a label of few bits can be compared with."""
    return (labels >= 0) & (labels <= min(vocabulary - 1, jnp.iinfo(labels.dtype).max))


def _names(axis: Any) -> tuple[Any, ...]:
    return () if axis is None else tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)


def _is_bound(name: Any) -> bool:
    try:
        lax.axis_size(name)
    except (NameError, ValueError, TypeError):  # The others are for what is no name, as a number or a list.
        return False
    return True
