"""What the Hopper kernels have in common: how they are launched, and the layout of their shared memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.hopper.chip import CONSUMER_REGISTERS, PRODUCER_REGISTERS
from ejkernel.kernels.hopper.cluster import cluster_options

SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # What the matrix units read, in 16 bits.


def swizzle_of(columns: int) -> tuple[Any, Any]:
    """Returns the tiling and the widest swizzle for this many columns of 16-bit elements, a multiple of 16."""
    width = next(width for width in (64, 32, 16) if columns % width == 0)
    return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width)


def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns shared memory for tiles of 16-bit elements that the matrix units read."""
    return plgpu.SMEM(shape, dtype, transforms=swizzle_of(shape[-1]))


def launch(
    body: Callable[..., None],
    *arrays: Any,
    out_type: Any,
    blocks: int,
    cluster: int,
    consumers: int,
    scratch: Mapping[str, Any],
    interpret: Any,
) -> Any:
    """Runs `body` in `blocks` blocks of `consumers` warpgroups and a producer, and returns what it wrote.

    `arrays` may be trees of them, None among them.
    """
    leaves, tree = jax.tree.flatten(arrays)
    return plgpu.kernel(
        functools.partial(_call, body, tree),
        out_type=out_type,
        grid=(blocks,),
        grid_names=("block",),
        **cluster_options(cluster),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,  # The kernels have their own.
            reduction_scratch_bytes=0,  # They reduce within a warpgroup only.
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=interpret,
    )(*leaves)


def _call(body: Callable[..., None], tree: Any, *refs: Any, **scratch: Any) -> None:
    """Calls `body` with the references to the arrays as they were given, then with the others."""
    count = tree.num_leaves
    body(*jax.tree.unflatten(tree, refs[:count]), *refs[count:], **scratch)


def as_producer(consumers: int) -> None:
    """Gives the registers of this warpgroup to the `consumers` others, as far as loading does not need them."""
    plgpu.set_max_registers(PRODUCER_REGISTERS[consumers], action="decrease")


def as_consumer(consumers: int) -> None:
    """Takes as many registers as each of `consumers` warpgroups can have."""
    plgpu.set_max_registers(CONSUMER_REGISTERS[consumers], action="increase")
