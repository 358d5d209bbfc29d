"""One selection for a whole batch: `jax.vmap` and `jax.pmap` of a kernel's call."""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from ejkernel.errors import EjkernelError
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.execution.executor import Executor, default_executor
from ejkernel.ops.execution.program import Program, bounded
from ejkernel.ops.utils import arguments
from ejkernel.ops.utils.canonical import canonical

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Run = Callable[..., Any]


class BatchArgumentError(EjkernelError, TypeError):
    """What was given is not an executor and a kernel, or does not fit the call."""


def vmap_with_config(
    executor: Executor | Kernel[Cfg, Out],
    kernel: Kernel[Cfg, Out] | None = None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    *,
    axis_name: Any = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
    cfg: Cfg | None = None,
) -> Callable[..., Out]:
    """`jax.vmap` of a kernel's call, compiled, with one selection: for the batch, from shapes only.

    `vmap_with_config(executor, kernel, ...)`, or `vmap_with_config(kernel, ...)` for the default executor. Keyword
    arguments of the function that it returns are not mapped.

    Args:
      executor: Which executor runs the kernel; or the kernel.
      kernel: What to run.
      in_axes: As in `jax.vmap`: an int, None, or a tuple or list with one entry per positional argument, nested for
        pytrees.
      out_axes: As in `jax.vmap`.
      axis_name: For collectives inside the kernel.
      axis_size: Of the batch, if no argument shows it.
      spmd_axis_name: As in `jax.vmap`.
      cfg: An explicit config; nothing is selected then.
    """
    chosen, found = _parties("vmap_with_config", executor, kernel)
    cfg = copy.deepcopy(cfg)  # A copy, so that changes before the first call do not matter.
    axes = {"in_axes": _axes(in_axes), "out_axes": out_axes}
    options = {**axes, "axis_name": axis_name, "axis_size": axis_size, "spmd_axis_name": spmd_axis_name}
    jax.vmap(_parties, **options)  # Wrong axes are refused here and not at the first call.

    def program(run: Run) -> Program:
        trace = lambda args, kwargs: jax.vmap(lambda *args: run(*args, **kwargs), **options)(*args)
        return Program(found, trace)

    key = _Key(("vmap", canonical(options), canonical(cfg)))
    return lambda *args, **kwargs: chosen.run_mapped(found, cfg, key, program, args, kwargs)


def pmap_with_config(
    executor: Executor | Kernel[Cfg, Out],
    kernel: Kernel[Cfg, Out] | None = None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    *,
    axis_name: Any = None,
    axis_size: int | None = None,
    devices: Any = None,
    cfg: Cfg | None = None,
) -> Callable[..., Out]:
    """`jax.pmap` of a kernel's call, with one selection: for what one device gets, from shapes only.

    Both call forms, `in_axes` and keyword arguments are as in `vmap_with_config`.

    Args:
      executor: Which executor runs the kernel; or the kernel.
      kernel: What to run.
      in_axes: As in `vmap_with_config`.
      out_axes: As in `jax.pmap`.
      axis_name: For collectives inside the kernel.
      axis_size: As in `jax.pmap`.
      devices: As in `jax.pmap`.
      cfg: An explicit config.
    """
    chosen, found = _parties("pmap_with_config", executor, kernel)
    cfg = copy.deepcopy(cfg)
    options = {"out_axes": out_axes, "axis_name": axis_name, "axis_size": axis_size, "devices": devices}
    jax.pmap(_parties, in_axes=_axes(in_axes), **options)
    key = _Key(("pmap", canonical({**options, "in_axes": in_axes}), canonical(cfg)))
    make = lambda run: _Pmapped(found.op_id, run, _axes(in_axes), options)
    return lambda *args, **kwargs: chosen.run_mapped(found, cfg, key, make, args, kwargs)


class _Key:
    """A key whose hash is computed once, not at every call."""

    __slots__ = ("_hash", "_value")

    def __init__(self, value: Hashable) -> None:
        self._value = value
        self._hash = hash(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._value == other._value

    def __hash__(self) -> int:
        return self._hash


class _Pmapped:
    """`jax.pmap` of a call, one for each set of static values: JAX finds compiled programs by their function."""

    def __init__(self, name: str, run: Run, in_axes: Any, options: dict[str, Any]) -> None:
        self._name = name
        self._run = run
        self._in_axes = in_axes
        self._options = options
        self._mapped: dict[Any, Callable[..., Any]] = {}

    def __call__(self, args: Args, kwargs: Kwargs) -> Any:
        """Runs the call on all devices."""
        leaves, treedef = jax.tree.flatten((args, kwargs))
        axes = self._flat_axes(args, kwargs)
        # Only what is not mapped may be static: the rest has an axis for the devices.
        given = tuple(axis is not None or arguments.is_array(x) for x, axis in zip(leaves, axes, strict=True))
        statics = arguments.Statics(treedef, given, tuple(itertools.compress(leaves, map(operator.not_, given))))
        key = arguments.static_key(self._name, statics)
        if key not in self._mapped:
            # One array per argument: with trees, `jax.pmap` confuses axes and leaves if there are as many of both (seen
            # with JAX 0.10.2 and 0.12.0).
            run = lambda *arrays: self._merged(arrays, statics)
            in_axes = tuple(itertools.compress(axes, given))
            bounded(self._mapped, key, jax.pmap(run, in_axes=in_axes, **self._options))
        try:
            return self._mapped[key](*itertools.compress(leaves, given))
        except ValueError:
            # For axes that are missing or of different sizes, the errors of `jax.vmap` say more than those of
            # `jax.pmap`.
            shown = jax.tree.map(lambda x: x if arguments.is_array(x) else np.asarray(0), args)
            jax.eval_shape(jax.vmap(lambda *_: (), in_axes=self._in_axes), *shown)
            raise

    def _merged(self, arrays: Args, statics: arguments.Statics) -> Any:
        args, kwargs = arguments.merge(arrays, statics)
        return self._run(*args, **kwargs)

    def _flat_axes(self, args: Args, kwargs: Kwargs) -> list[int | None]:
        """The axis of each leaf of the arguments; keyword arguments have none."""
        if isinstance(self._in_axes, tuple) and len(self._in_axes) != len(args):
            raise BatchArgumentError(
                f"{self._name}: pmap_with_config's in_axes must have one entry per positional argument, got "
                f"{len(self._in_axes)} entries, {self._in_axes!r}, for {len(args)} arguments."
            )
        axes: list[int | None] = []
        add = lambda axis, part: axes.extend([axis] * jax.tree.structure(part).num_leaves)
        try:
            jax.tree.map(add, (self._in_axes, None), (args, kwargs), is_leaf=lambda x: x is None)
        except ValueError:
            jax.vmap(lambda *_: (), in_axes=self._in_axes)(*args)  # Its error says which part does not fit.
            raise
        return axes


def _parties(
    name: str, executor: Executor | Kernel[Any, Any], kernel: Kernel[Any, Any] | None
) -> tuple[Executor, Kernel[Any, Any]]:
    if isinstance(executor, Kernel) and kernel is None:
        return default_executor(), executor
    if not isinstance(executor, Executor) or not isinstance(kernel, Kernel):
        raise BatchArgumentError(
            f"{name}: give an executor and a kernel, or a kernel alone, and axes by keyword; got "
            f"{type(executor).__name__} and {type(kernel).__name__}."
        )
    return executor, kernel


def _axes(in_axes: Any) -> Any:
    return tuple(in_axes) if isinstance(in_axes, list) else in_axes
