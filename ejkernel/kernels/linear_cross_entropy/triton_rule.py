"""The loss of rows of logits and its derivative in one kernel, in Pallas' Triton dialect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ejkernel.kernels.linear_cross_entropy.rule import Rows, Rule, Sums
from ejkernel.kernels.pallas_call import pallas_call

Array = jax.Array
CACHED_COLUMNS = 1 << 16
"""Rows that are longer have a multiprocessor for themselves, so that those at work together fit into the cache."""
PARTS = 4
"""Elements that a lane takes at a time: one of five exponentials rescales, where it would be one of two."""
LEAST = -1e30
"""In place of minus infinity, which minus itself is nan."""
MOST_ELEMENTS = 1 << 31


@dataclass(frozen=True, kw_only=True)
class TritonRule(Rule):
    """The same; only the sums and the slope are computed by kernels."""

    interpret: bool = False

    def rows_and_derivative(self, raw: Array, bias: Array | None, labels: Array, factor: Array) -> tuple[Rows, Array]:
        """As `Rule`'s; the derivative takes the place of `raw`."""
        if raw.size >= MOST_ELEMENTS:
            return super().rows_and_derivative(raw, bias, labels, factor)
        sums, slope = self._call(raw, bias, labels, self.counted(factor, labels, raw))
        return self._finished(sums, labels, raw.shape[1]), slope

    def _sums(self, raw: Array, bias: Array | None, labels: Array) -> Sums:
        return super()._sums(raw, bias, labels) if raw.size >= MOST_ELEMENTS else self._call(raw, bias, labels, None)[0]

    def _call(self, raw: Array, bias: Any, labels: Array, factor: Any) -> tuple[Sums, Any]:
        count, width = raw.shape
        warps = 32 if width > CACHED_COLUMNS else 16 if width >= 4096 else 4
        each = jax.ShapeDtypeStruct((count,), jnp.float32)
        names = ["top", "exponentials", "label", *(["logits"] if self.label_smoothing else [])]
        types = dict.fromkeys(names, each) | (
            {} if factor is None else {"slope": jax.ShapeDtypeStruct(raw.shape, raw.dtype)}
        )
        # A label of another value than a column's is like none.
        given = {"raw": raw, "labels": labels.astype(jnp.int32), "bias": bias, "factor": factor}
        given = {name: a for name, a in given.items() if a is not None}
        run = pallas_call(
            lambda *refs: _kernel(dict(zip([*given, *types], refs, strict=True)), self, width, 32 * 8 * warps),
            list(types.values()),
            grid=(count,),
            interpret=self.interpret,
            compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
            input_output_aliases={} if factor is None else {0: len(types) - 1},
        )
        outs = dict(zip(types, run(*given.values()), strict=True))
        sums = Sums(outs["top"], outs["exponentials"], outs["label"], outs["label"], outs.get("logits"))
        return sums, outs.get("slope")


def _kernel(refs: dict[str, Any], rule: TritonRule, width: int, lanes: int) -> None:
    """One row: its sums, then, if there is a factor, its derivative."""
    row = pl.program_id(0)

    def columns(index: Any) -> tuple[Array, Array]:
        column = index * lanes + jnp.arange(lanes)
        return column, column < width

    def fetch(step: Any, parts: int) -> list[Array]:
        places = (columns(step * parts + i) for i in range(parts))
        return [plgpu.load(refs["raw"].at[row, column], mask=inside, other=0.0) for column, inside in places]

    def logits(raw: Array, column: Array, inside: Array) -> Array:
        bias = plgpu.load(refs["bias"].at[column], mask=inside, other=0.0) if "bias" in refs else None
        return rule.logits(raw, bias)

    def add(step: Any, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        top, total, *plain = carry
        places = [columns(step * PARTS + i) for i in range(PARTS)]
        parts = [(at[1], logits(raw, *at)) for raw, at in zip(fetch(step, PARTS), places, strict=True)]
        values = [jnp.where(inside, value, -jnp.inf) for inside, value in parts]
        most = top
        for value in values:
            most = jnp.maximum(most, value)
        total = total * jnp.exp(top - most) + sum(jnp.exp(value - most) for value in values)
        if plain:
            plain = [plain[0] + sum(jnp.where(inside, value, 0.0) for inside, value in parts)]
        return most, total, *plain

    zeros = jnp.zeros(lanes, jnp.float32)
    start = (zeros + LEAST, zeros, *([zeros] if rule.label_smoothing else []))
    top, total, *plain = lax.fori_loop(0, pl.cdiv(width, PARTS * lanes), add, start)
    # The label's logit comes before the sums over the row, where warps wait for each other: none of them may have put
    # the derivative in its place.
    label = plgpu.load(refs["labels"].at[row])
    near = jnp.clip(label, 0, width - 1)
    bias = plgpu.load(refs["bias"].at[near]) if "bias" in refs else None
    own = rule.logits(plgpu.load(refs["raw"].at[row, near]), bias)
    most = jnp.max(top)
    total = jnp.sum(total * jnp.exp(top - most))
    for name, value in zip(
        ("top", "exponentials", "label", "logits"), (most, total, own, *map(jnp.sum, plain)), strict=False
    ):
        plgpu.store(refs[name].at[row], value)
    if "factor" not in refs:
        return
    lse, factor = most + jnp.log(total), plgpu.load(refs["factor"].at[row])

    # Loads come before stores, which they may not overtake, because both are of the same array; with many lanes there
    # are registers for fewer of them. From the end: what was read last is most likely still in the cache.
    parts = PARTS if lanes <= 4096 else PARTS // 2
    steps = pl.cdiv(width, parts * lanes)

    def differentiate(i: Any, carry: None) -> None:
        step = steps - 1 - i
        for index, raw in enumerate(fetch(step, parts)):
            column, inside = columns(step * parts + index)
            slope = rule.slope(logits(raw, column, inside), column == label, lse, factor, width)
            plgpu.store(refs["slope"].at[row, column], slope.astype(refs["slope"].dtype), mask=inside)

    lax.fori_loop(0, steps, differentiate, None)
