"""Shardings that are part of the arrays' types: those of meshes with explicit axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, PartitionSpec, SingleDeviceSharding

Args = tuple[Any, ...]


class Split(NamedTuple):
    """How a call is split over the devices of a mesh.

    Attributes:
      in_specs: One entry for each positional argument.
      out_specs: Of the output.
      local: Whether each device can run its part alone; otherwise the compiler splits the call.
    """

    in_specs: tuple[PartitionSpec, ...]
    out_specs: Any
    local: bool = True


class Typed(NamedTuple):
    """The mesh and the specs in the types of arguments; an argument that is no array has an empty spec."""

    mesh: Any
    specs: tuple[PartitionSpec, ...]


def are_whole(args: Sequence[Any]) -> bool:
    """Whether arrays are each on one device, with no sharding in their types; quick, because every call asks."""
    try:
        # Not `sharding`, which is a property in Python: reading it takes three times as long.
        return all(x is None or type(x._sharding) is SingleDeviceSharding for x in args)
    except AttributeError:  # NumPy's, or traced.
        return False


def typed(args: Sequence[Any]) -> Typed | None:
    """The shardings in the types of arguments; None if there are none."""
    shardings = [jax.typeof(x).sharding if isinstance(x, jax.Array) else None for x in args]
    given = [s for s in shardings if s is not None and not s.mesh.empty and any(axis is not None for axis in s.spec)]
    if not given or AxisType.Explicit not in given[0].mesh.axis_types:
        return None
    specs = (PartitionSpec() if s is None else PartitionSpec(*s.spec) for s in shardings)
    return Typed(given[0].mesh, tuple(specs))


def automatic(call: Any, out_specs: Any) -> Any:
    """`call` with axes that the compiler handles; the output has these specs."""
    mesh = jax.sharding.get_abstract_mesh()
    # Inside of a shard_map over other axes of the mesh, these stay what they are.
    axes = tuple(name for name in mesh.axis_names if name not in mesh.manual_axes) if mesh.manual_axes else None
    return jax.sharding.auto_axes(call, axes=axes, out_sharding=out_specs)
