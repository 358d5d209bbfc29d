"""Which keys a query sees by its sequence: segment ids, and cumulative lengths of packed sequences as such ids."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.flash_attention.bands import Causal
from ejkernel.kernels.flash_attention.checks import AttentionArgumentError, array
from ejkernel.ops.utils.promotion import usual_promotion

Array = jax.Array


def segments(q_ids: Any, kv_ids: Any, is_packed: bool, batch: int, q_len: int, kv_len: int) -> tuple[Any, Any]:
    """Segment ids of queries and keys as the call gives them."""
    if q_ids is None and kv_ids is None:
        return None, None
    if is_packed:
        raise AttentionArgumentError("give q_segment_ids and kv_segment_ids, or cum_seqlens_q and cum_seqlens_k.")
    if (q_ids is None or kv_ids is None) and q_len != kv_len:
        raise AttentionArgumentError(
            f"q_segment_ids and kv_segment_ids are both needed when the lengths differ (query {q_len}, key {kv_len})."
        )
    q_ids, kv_ids = kv_ids if q_ids is None else q_ids, q_ids if kv_ids is None else kv_ids
    return _ids("q_segment_ids", q_ids, (batch, q_len)), _ids("kv_segment_ids", kv_ids, (batch, kv_len))


def _ids(name: str, x: Any, shape: tuple[int, int]) -> Any:
    x = array(name, x)
    if x.shape != shape or not jnp.issubdtype(x.dtype, jnp.integer):
        raise AttentionArgumentError(f"{name} must be integers of shape {shape}, got {x.dtype}{list(x.shape)}.")
    return x


def in_32_bits(q_ids: Array, kv_ids: Array) -> tuple[Array, Array]:
    """Ids as Pallas' kernels read them. Those of 64 bits are replaced by their ranks, which are equal where ids are."""
    if max(x.dtype.itemsize for x in (q_ids, kv_ids)) <= 4:
        return q_ids, kv_ids
    ordered = jnp.sort(jnp.concatenate([q_ids, kv_ids], axis=1), axis=1)
    rank = lambda ids: jax.vmap(jnp.searchsorted)(ordered, ids).astype(jnp.int32)
    return rank(q_ids), rank(kv_ids)


@usual_promotion()
def packed(
    cum_q: Any, cum_k: Any, causal: Causal, batch: int, q_len: int, kv_len: int
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Segment ids and positions inside segments, from cumulative lengths.

    Positions are left out if queries and keys are packed alike: then the index in the whole array is enough.
    """
    alike = cum_q is None or cum_k is None
    if alike and q_len != kv_len:
        raise AttentionArgumentError(
            f"cum_seqlens_q and cum_seqlens_k are both needed when the lengths differ (query {q_len}, key {kv_len})."
        )
    cum_q = cum_k if cum_q is None else cum_q
    cum_q = _cumulative("cum_seqlens_q", cum_q, batch)
    if alike:
        ids = _segment_of(cum_q, q_len)
        # Queries after the last sequence see nothing.
        return (jnp.where(ids < cum_q.shape[1] - 1, ids, -1), jnp.where(ids < cum_q.shape[1] - 1, ids, -2)), (
            None,
            None,
        )
    cum_k = _cumulative("cum_seqlens_k", cum_k, batch)
    if cum_k.shape != cum_q.shape:
        raise AttentionArgumentError(
            f"cum_seqlens_q and cum_seqlens_k count the same sequences, got shapes {cum_q.shape} and {cum_k.shape}."
        )
    count = cum_q.shape[1] - 1
    q_ids, kv_ids = _segment_of(cum_q, q_len), _segment_of(cum_k, kv_len)
    start_q, start_k = _of_segment(cum_q[:, :-1], q_ids), _of_segment(cum_k[:, :-1], kv_ids)
    q_positions, kv_positions = jnp.arange(q_len)[None] - start_q, jnp.arange(kv_len)[None] - start_k
    if isinstance(causal, str):
        longer = (cum_k[:, 1:] - cum_k[:, :-1]) - (cum_q[:, 1:] - cum_q[:, :-1])
        q_positions = q_positions + _of_segment(longer, q_ids)
    segments = jnp.where(q_ids < count, q_ids, -1), jnp.where(kv_ids < count, kv_ids, -2)
    return segments, (q_positions.astype(jnp.int32), kv_positions.astype(jnp.int32))


def _cumulative(name: str, x: Any, batch: int) -> Any:
    x = array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer) or x.ndim not in (1, 2) or x.shape[-1] < 2:
        raise AttentionArgumentError(
            f"{name} must be integers [sequences + 1] or [batch, sequences + 1] that start with 0, got "
            f"{x.dtype}{list(x.shape)}."
        )
    if x.ndim == 2 and x.shape[0] != batch:
        raise AttentionArgumentError(f"{name} has batch {x.shape[0]}, query has {batch}.")
    return jnp.broadcast_to(x.astype(jnp.int32), (batch, x.shape[-1]))


def _segment_of(cumulative: Array, length: int) -> Array:
    """[batch, length]: the sequence that each index belongs to; the number of sequences if none."""
    place = jnp.arange(length)
    return jax.vmap(lambda ends: jnp.searchsorted(ends, place, side="right"))(cumulative[:, 1:]).astype(jnp.int32)


def _of_segment(values: Array, ids: Array) -> Array:
    return jnp.take_along_axis(values, jnp.minimum(ids, values.shape[1] - 1), axis=1)
