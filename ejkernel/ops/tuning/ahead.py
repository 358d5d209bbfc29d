"""Compiling one config of a call for a device that is not here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from ejkernel.ops.config.asking import forward_of, heuristic, on_its_platform, run_with
from ejkernel.ops.core import dispatch
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.kernel import Invocation, Kernel
from ejkernel.ops.utils import arguments
from ejkernel.ops.utils.targets import Target, compiling_for

_KERNELS = re.compile(r"custom_call @\"?(tpu_custom_call|mosaic_gpu\w*|__gpu\$xla\.gpu\.triton)")


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A compiled program.

    Attributes:
      kernels: How many kernels of our own it has: none, if XLA runs it.
      temp_bytes: What it needs beside its arguments and results.
      argument_bytes: Its arguments.
      output_bytes: Its results.
    """

    kernels: int
    temp_bytes: int
    argument_bytes: int
    output_bytes: int


def compiled(
    inv: Invocation[Any, Any],
    kernel: Kernel[Any, Any],
    cfg: Any,
    target: Target,
    device: Any,
    *,
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """Compiles a call, forward or backward, with one config; `device` is one of the target's.

    Raises whatever the kernel or the compiler does.
    """
    with compiling_for(target, device):
        fn, trees = program(inv, kernel, cfg)
        return compile_program(fn, trees, device, options)


def compile_program(
    fn: Callable[..., Any], trees: tuple[Any, ...], device: Any, options: Mapping[str, Any] | None = None
) -> Compiled:
    """Compiles `fn(*trees)`, inside `compiling_for`, with options of the compiler."""
    arrays, statics = arguments.split(trees)
    here = SingleDeviceSharding(device)
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) for x in arrays]
    lowered = jax.jit(lambda arrays: fn(*arguments.merge(arrays, statics))).lower(placed)
    memory: Any = lowered.compile(compiler_options=dict(options or {})).memory_analysis()
    return Compiled(
        kernels=len(_KERNELS.findall(lowered.as_text())),
        temp_bytes=memory.temp_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
    )


def program(
    inv: Invocation[Any, Any], kernel: Kernel[Any, Any], cfg: Any
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What a config runs for a call, as a function and its abstract arguments."""
    args, kwargs = inv.abstract_args, dict(inv.abstract_kwargs)
    if not isinstance(kernel, BackwardKernel):
        return lambda a, k: run_with(kernel, inv, cfg, a, k), (args, kwargs)
    forward = forward_of(kernel)
    platform = dispatch.forced_platform(forward, cfg) or inv.platform
    # What the backward is given: by the guess's forward, because residuals mean the same in all backends.
    first = on_its_platform(replace(inv, kernel=forward, op_id=forward.op_id, platform=None), forward)
    guess = heuristic(first, forward)
    before = dispatch.forced_platform(forward, guess) or first.platform

    def find(method: str, where: str | None) -> Callable[..., Any]:
        found = dispatch.find(forward, method, inv.context, where or "xla")
        assert found is not None, f"{forward.op_id} has no {method}"
        return found

    saved = _types(lambda a, k: find("fwd_with_residuals", before)(*a, cfg=guess, **k), args, kwargs)
    run = lambda s, o, d, a, k: find("vjp", platform)(s, o, d, *a, cfg=cfg, **k)
    out, residuals = saved
    return run, (residuals, out, out, args, kwargs)


def _types(fn: Callable[..., Any], *trees: Any) -> Any:
    arrays, statics = arguments.split(trees)
    return jax.eval_shape(lambda arrays: fn(*arguments.merge(arrays, statics)), arrays)
