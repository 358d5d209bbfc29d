"""What the Pallas kernels do with one tile of scores, queries by keys, and how they cut a call into tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.flash_attention import masks
from ejkernel.kernels.flash_attention.arguments import Extras, Rules
from ejkernel.kernels.pallas_call import pallas_call

Array = jax.Array


MAX_ELEMENTS = 1 << 31
"""Of a bias or a mask: kernels count theirs in 32 bits."""


class Side(NamedTuple):
    """Queries or keys of a tile, a column or a row: where they are, and their segments and positions in these."""

    places: Any
    ids: Any = None
    positions: Any = None


def unsupported(query: Any, extras: Extras, rules: Rules) -> str | None:
    """Why the Pallas kernels do not support a call; None if they do."""
    for name in ("bias", "mask"):
        found = getattr(extras, name)
        if found is not None and found.size >= MAX_ELEMENTS:
            return f"this kernel takes a {name} of less than 2**31 elements, got {found.size}"
    if query.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"this kernel takes float32, bfloat16 and float16, got {query.dtype}"
    if not rules.normalize or rules.logits_dtype != "float32":
        return "this kernel normalises its output and keeps logits in float32"
    return None if extras.bias is None else _unsupported_bias(extras.bias)


def _unsupported_bias(bias: Any) -> str | None:
    if bias.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"this kernel takes a bias of float32, bfloat16 or float16, got {bias.dtype}"
    if bias.shape[3] == 1:
        return "this kernel has no gradient of a bias that is the same for all keys"
    return None


def dot(a: Any, b: Any, contract: tuple[int, int], rules: Rules) -> Any:
    """Product of two tiles over the given axes, summed in float32."""
    dims = (((contract[0],), (contract[1],)), ((), ()))
    # Of 16 bits each product is exact, and Mosaic refuses to be asked for more, also by JAX's default.
    precision = rules.precision if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def scores(q: Any, k: Any, seen: Any, rules: Rules, bias: Any = None) -> tuple[Any, Any]:
    """Logits of a tile, and the slope of the soft cap at each; `seen` is a mask or None."""
    s = dot(q, k, (1, 1), rules) * rules.scale
    slope: Any = 1.0
    if rules.soft_cap is not None:
        t = jnp.tanh(s / rules.soft_cap)
        s, slope = rules.soft_cap * t, 1.0 - t * t
    if bias is not None:
        s = s + bias.astype(jnp.float32)
    return (s if seen is None else jnp.where(seen, s, -jnp.inf)), slope


def seen(rows: Side, cols: Side, kv_len: int, rules: Rules, mask: Any = None) -> Any:
    """Which queries see which keys in a tile; one side is a column, the other a row."""
    found = cols.places < kv_len
    at = (rows.places, cols.places) if rows.positions is None else (rows.positions, cols.positions)
    inside = masks.may_see(*at, rules)
    found = found if inside is None else found & inside
    found = found if rows.ids is None else found & (rows.ids == cols.ids)
    return found if mask is None else found & (mask if mask.dtype == jnp.bool_ else mask.astype(jnp.int32) != 0)


def accumulate(carry: Any, s: Any, v: Any, drop: Callable[[Any], Any], rules: Rules) -> Any:
    """Output, maximum and sum (columns) with one more tile of keys."""
    o, m, l = carry
    m_new = jnp.maximum(m, jnp.max(s, axis=1, keepdims=True))
    # A row of which nothing was seen yet has a maximum of -inf, and -inf - -inf is not a number.
    shift = jnp.where(m_new == -jnp.inf, 0.0, m_new)
    p = jnp.exp(s - shift)
    alpha = jnp.exp(m - shift)
    l = l * alpha + jnp.sum(p, axis=1, keepdims=True)
    return o * alpha + dot(drop(p).astype(v.dtype), v, (1, 0), rules), m_new, l


def finished(carry: Any) -> tuple[Any, masks.LogSum]:
    """Output and log-sum-exp (columns)."""
    o, m, l = carry
    return o / jnp.where(l == 0, 1.0, l), masks.log_sum(m, l)


def weights(s: Any, slope: Any, lse: Any, delta: Any, dout: Any, v: Any, drop: Any, rules: Rules) -> tuple[Any, Any]:
    """Weights of a tile after dropout, and the gradient of its products; `lse` and `delta` are columns."""
    p = jnp.exp(s - lse)
    dp = drop(dot(dout, v, (1, 1), rules))
    return drop(p), p * (dp - delta) * slope


def dropper(seed: Any, head: Any, rows: Any, cols: Any, rules: Rules) -> Callable[[Any], Any]:
    """The function that drops weights of a tile; it does nothing if the call has no dropout."""
    prob = rules.dropout_prob
    if not prob:
        return lambda x: x
    keep = masks.kept(seed, head, rows, cols, prob)
    return lambda x: jnp.where(keep, x / (1.0 - prob), 0.0)


def places(first: Any, count: int, axis: int) -> Any:
    """`first` to `first + count` as a column (axis 0) or a row (axis 1)."""
    shape = (count, 1) if axis == 0 else (1, count)
    return first + lax.broadcasted_iota(jnp.int32, shape, axis)


# --- Around the kernels ---


def heads_first(x: Array, block: int, dim: int | None = None, fill: float = 0.0) -> Array:
    """[batch, length, heads, ...] as [batch, heads, length, ...], padded to blocks and to a last axis of `dim`."""
    missing = max(-(-x.shape[1] // block), 1) * block - x.shape[1]
    widths = [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)]
    if dim is not None:
        widths[-1] = (0, dim - x.shape[-1])
    if any(high for _, high in widths):
        x = jnp.pad(x, widths, constant_values=jnp.asarray(fill, x.dtype))
    return x.swapaxes(1, 2)


def call(
    kernel: Callable[..., None],
    inputs: dict[str, tuple[Array, Any]],
    outputs: list[tuple[Any, Any]],
    scalars: dict[str, Array] | None = None,
    **options: Any,
) -> list[Array]:
    """`pl.pallas_call` of a kernel that takes a dict of input references and its output references.

    Args:
      kernel: `kernel(inputs, *outputs, *scratch)`.
      inputs: Array and BlockSpec of each.
      outputs: (shape, dtype) and BlockSpec of each.
      scalars: Of a TPU kernel: what is in scalar memory before anything is loaded; index maps get it, too.
      **options: As for `pl.pallas_call`.
    """
    scalars = scalars or {}
    names, arrays = [*scalars, *inputs], [*scalars.values(), *(x for x, _ in inputs.values())]
    specs: dict[str, Any] = {
        "in_specs": [spec for _, spec in inputs.values()],
        "out_specs": [spec for _, spec in outputs],
    }
    if scalars:
        specs |= {name: options.pop(name) for name in ("grid", "scratch_shapes")}
        options["grid_spec"] = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=len(scalars), **specs)
    else:
        options |= specs
    return pallas_call(
        lambda *refs: kernel(dict(zip(names, refs, strict=False)), *refs[len(names) :]),
        out_shape=[jax.ShapeDtypeStruct(*shape) for shape, _ in outputs],
        **options,
    )(*arrays)
