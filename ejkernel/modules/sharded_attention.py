"""Flash attention under `jax.shard_map`: batch and heads are sharded, so no communication is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ejkernel.kernels.flash_attention.arguments import canonical
from ejkernel.kernels.flash_attention.checks import AttentionArgumentError
from ejkernel.ops.execution.sharding import shard_mapped

Array = jax.Array
Axis = Any
"""An entry of a PartitionSpec: None, a mesh axis, or several."""


def sharded(
    call: Callable[[tuple[Any, ...], dict[str, Any], Any], Array],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    cfg: Any,
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
) -> Array:
    """`call(args, kwargs, cfg)` with query, key and value sharded by `in_specs`, other arguments to match."""
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise AttentionArgumentError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}.")
    specs = _specs(in_specs, mesh)
    # The whole call is made canonical first: cumulative lengths and sinks get their final shapes before they are split.
    options = {name: x for name, x in kwargs.items() if name in ("platform", "log_sum")}
    statics = {name: x for name, x in kwargs.items() if name not in options}
    qkv, extras, rules = canonical(*args, **statics)
    batch, heads = _axes(specs, qkv)
    arrays = {name: x for name, x in extras._asdict().items() if x is not None}
    arrays_specs = {name: _spec_of(name, x, batch, heads) for name, x in arrays.items()}

    def local(qkv: tuple[Any, ...], arrays: dict[str, Any]) -> Array:
        arrays = dict(arrays)
        bias, aux = arrays.pop("bias", None), arrays.pop("softmax_aux", None)
        if "dropout_seed" in arrays:
            arrays["dropout_seed"] = _seed_here(arrays["dropout_seed"], (*_names(batch), *_names(heads)))
        return call((*qkv, bias, aux), {"rules": rules, **arrays, **options}, cfg)

    out = specs[0] if out_specs is None else out_specs
    return shard_mapped(local, mesh, (specs, arrays_specs), out)(qkv, arrays)


def _specs(in_specs: Any, mesh: Mesh) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
    if isinstance(in_specs, PartitionSpec):
        in_specs = (in_specs,) * 3
    good = isinstance(in_specs, (tuple, list)) and len(in_specs) == 3
    if not good or not all(isinstance(spec, PartitionSpec) for spec in in_specs):
        raise AttentionArgumentError(
            f"in_specs must be a PartitionSpec, or three for query, key and value, with mesh; got {in_specs!r}."
        )
    query, key, value = (PartitionSpec(*spec, *(None,) * (4 - len(spec))) for spec in in_specs)
    for name, spec in (("query", query), ("key", key), ("value", value)):
        if len(spec) != 4:
            raise AttentionArgumentError(f"in_specs: {spec} of {name} has more than four entries.")
        for axis in (x for entry in spec for x in _names(entry)):
            if axis not in mesh.axis_names:
                raise AttentionArgumentError(f"in_specs: {name} names axis {axis!r}, the mesh has {mesh.axis_names}.")
    return query, key, value


def _axes(specs: tuple[PartitionSpec, ...], qkv: tuple[Any, ...]) -> tuple[Axis, Axis]:
    """Mesh axes of batch and heads."""
    query, key, value = specs
    for name, spec in (("query", query), ("key", key), ("value", value)):
        if _names(spec[1]) or _names(spec[3]):
            raise AttentionArgumentError(
                f"in_specs: {spec} shards the sequence or the head dim of {name}; only batch and heads can be sharded."
            )
        if _names(spec[0]) != _names(query[0]):
            raise AttentionArgumentError(
                f"in_specs: batch is sharded by {query[0]!r} in query and {spec[0]!r} in {name}."
            )
    kv_heads = qkv[1].shape[2]
    if key != value or (_names(key[2]) != _names(query[2]) and (kv_heads > 1 or _names(key[2]))):
        raise AttentionArgumentError(
            f"in_specs: heads are sharded by {query[2]!r} in query, {key[2]!r} in key and {value[2]!r} in value. They "
            "must agree; only a single key head may be whole on every device."
        )
    return query[0], query[2]


def runs_alone(specs: tuple[PartitionSpec, ...], args: tuple[Any, ...]) -> bool:
    """Whether arrays with these specs need no communication: only batch and heads are sharded, all alike."""
    filled = tuple(PartitionSpec(*spec, *(None,) * (4 - len(spec))) for spec in specs)
    try:
        _axes(filled, args)
    except AttentionArgumentError:
        return False
    return True


def _names(entry: Axis) -> tuple[str, ...]:
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)


def _spec_of(name: str, x: Any, batch: Axis, heads: Axis) -> PartitionSpec:
    if name == "dropout_seed":
        return PartitionSpec()
    if name == "softmax_aux":
        return PartitionSpec(heads, None)
    if name in ("bias", "mask"):
        return PartitionSpec(batch if x.shape[0] > 1 else None, heads if x.shape[1] > 1 else None, None, None)
    return PartitionSpec(batch, None)


def _seed_here(seed: Array, axes: tuple[str, ...]) -> Array:
    """A different seed on every device; otherwise shards would drop the same weights."""
    if not axes:
        return seed
    return seed + jax.lax.axis_index(axes).astype(jnp.uint32) * jnp.uint32(0x9E3779B1)
