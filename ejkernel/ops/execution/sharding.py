"""Calls under `jax.shard_map`: each device runs the kernel on its shard, with the config chosen for the shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ejkernel.errors import EjkernelError
from ejkernel.ops.utils import arguments

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class ShardingArgumentError(EjkernelError, ValueError):
    """`mesh`, `in_specs` and `out_specs` do not fit together, or do not fit the call."""


def shard_mapped(fn: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`jax.shard_map` of `fn`, for arguments that may be sharded in any way; `in_specs` has one entry per argument."""
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    if AxisType.Explicit not in mesh.axis_types:
        return mapped
    # Here shardings are part of the types, and shard_map does not reshard its arguments.
    spec = lambda x: isinstance(x, PartitionSpec)
    place = lambda spec, tree: jax.tree.map(lambda x: jax.reshard(x, NamedSharding(mesh, _typed(spec, mesh))), tree)
    return lambda *args: mapped(*jax.tree.map(place, in_specs, args, is_leaf=spec))


def _typed(spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """What of a spec may be part of a type: the axes that are explicit."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))

    def kept(entry: Any) -> Any:
        names = entry if isinstance(entry, tuple) else (entry,)
        return tuple(name for name in names if kinds.get(name) is AxisType.Explicit) or None

    return PartitionSpec(*map(kept, spec))


def sharded_call(run: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[[Args, Kwargs], Any]:
    """`run` on the shards of its positional arguments; keyword arguments are whole on every device."""

    def call(args: Args, kwargs: Kwargs) -> Any:
        specs = specs_of(in_specs, len(args))
        arrays, statics = arguments.split(args)
        kw_arrays, kw_statics = arguments.split(kwargs)
        shown = arguments.merge(arrays, statics._replace(values=(None,) * len(statics.values)))

        def local(shown: Args, kw_arrays: list[Any]) -> Any:
            args = arguments.merge(jax.tree.leaves(shown), statics)
            return run(*args, **arguments.merge(kw_arrays, kw_statics))

        return shard_mapped(local, mesh, (specs, PartitionSpec()), out_specs)(shown, kw_arrays)

    return call


def specs_of(in_specs: Any, count: int) -> tuple[Any, ...]:
    """One entry for each of `count` positional arguments."""
    if isinstance(in_specs, PartitionSpec):
        return (in_specs,) * count
    if not isinstance(in_specs, (tuple, list)) or len(in_specs) != count:
        raise ShardingArgumentError(
            f"in_specs must be a PartitionSpec, or a tuple with one entry for each of the {count} positional "
            f"arguments, got {in_specs!r}."
        )
    return tuple(in_specs)


def check(mesh: Any, in_specs: Any, out_specs: Any) -> None:
    """Raises an error for arguments that do not fit."""
    if mesh is None:
        raise ShardingArgumentError("in_specs and out_specs need mesh=, a jax.sharding.Mesh; got mesh=None.")
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise ShardingArgumentError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}.")
    if in_specs is None or out_specs is None:
        missing = "in_specs" if in_specs is None else "out_specs"
        raise ShardingArgumentError(f"mesh= needs in_specs= and out_specs=, {missing} is missing.")
    unknown = {
        name
        for spec in jax.tree.leaves((in_specs, out_specs), is_leaf=lambda x: isinstance(x, PartitionSpec))
        for entry in (spec if isinstance(spec, PartitionSpec) else ())
        for name in (entry if isinstance(entry, tuple) else (entry,))
        if isinstance(name, str) and name not in mesh.axis_names
    }
    if unknown:
        raise ShardingArgumentError(f"the specs name axes {sorted(unknown)}, the mesh has {mesh.axis_names}.")
