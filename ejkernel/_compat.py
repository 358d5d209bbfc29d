"""The only place that knows how JAX 0.10, 0.11 and 0.12 differ."""

import sys
from typing import Any

import jax
from jax._src import pmap as _pmap

# --- Manual axes (shard_map, pmap) ---


def varying_axes(x: Any) -> frozenset[Any]:
    """Mesh axes over which `x` may differ inside shard_map; empty elsewhere and where JAX does not track it."""
    aval = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)
    return manual.varying if manual is not None else getattr(aval, "vma", frozenset())


def inside_shard_map() -> bool:
    """Whether the code being traced is the body of a `jax.shard_map`; the body of a pmap is not."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes:
        return False
    # pmap is written with shard_map now, and only the stack tells the two apart: one mesh axis, all manual.
    return len(mesh.axis_names) > 1 or not _called_from(_pmap.__file__)


def _called_from(filename: str) -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == filename:
            return True
        frame = frame.f_back
    return False


# --- Timing ---


def cupti() -> Any | None:
    """The extension that times CUDA kernels (`_cupti_init`, `_cupti_get_timings`); None without JAX's CUDA plugin."""
    try:
        from jax._src.lib import mosaic_gpu
    except ImportError:
        return None
    return getattr(mosaic_gpu, "_mosaic_gpu_ext", None)
