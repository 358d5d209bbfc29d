"""One selection for a whole batch: `jax.vmap` and `jax.pmap` of a kernel's call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from typing import Any

import jax

from ejkernel.errors import EjkernelError
from ejkernel.ops.config.context import identity
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.execution.executor import Executor, default_executor
from ejkernel.ops.execution.program import Program, bounded
from ejkernel.ops.utils import arguments

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Run = Callable[..., Any]


class BatchArgumentError(EjkernelError, TypeError):
    """What was given is not an executor and a kernel, or does not fit the call."""


def vmap_with_config(
    executor: Executor | Kernel[Any, Any],
    kernel: Kernel[Any, Any] | None = None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    *,
    axis_name: Any = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
    cfg: Any = None,
) -> Callable[..., Any]:
    """`jax.vmap` of a kernel's call, compiled, with one selection: for the batch, on shapes alone.

    `vmap_with_config(executor, kernel, ...)`, or `vmap_with_config(kernel, ...)` for the default executor. Keyword
    arguments of the function that it returns are not mapped.

    Args:
      executor: Which executor runs the kernel; or the kernel.
      kernel: What to run.
      in_axes: As in `jax.vmap`: an int, None, a tuple or list with one entry a positional argument, nested for pytrees.
      out_axes: As in `jax.vmap`.
      axis_name: For collectives inside of the kernel.
      axis_size: Of the batch, where no argument shows it.
      spmd_axis_name: As in `jax.vmap`.
      cfg: An explicit config; nothing is selected then.
    """
    chosen, kernel = _parties("vmap_with_config", executor, kernel)
    cfg = copy.deepcopy(cfg)  # The one that was given, whatever becomes of it until the first call.
    axes = {"in_axes": _axes(in_axes), "out_axes": out_axes}
    options = {**axes, "axis_name": axis_name, "axis_size": axis_size, "spmd_axis_name": spmd_axis_name}
    jax.vmap(_parties, **options)  # Wrong axes are refused here and not at the first call.

    def program(run: Run) -> Program:
        trace = lambda args, kwargs: jax.vmap(lambda *args: run(*args, **kwargs), **options)(*args)
        return Program(kernel, trace)

    key = _Key(("vmap", identity(options), identity(cfg)))
    return lambda *args, **kwargs: chosen.run_mapped(kernel, cfg, key, program, args, kwargs)


def pmap_with_config(
    executor: Executor | Kernel[Any, Any],
    kernel: Kernel[Any, Any] | None = None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    *,
    axis_name: Any = None,
    axis_size: int | None = None,
    devices: Any = None,
    cfg: Any = None,
) -> Callable[..., Any]:
    """`jax.pmap` of a kernel's call, with one selection: for what one device gets, on shapes alone.

    Both call forms, `in_axes` and keyword arguments are as in `vmap_with_config`.

    Args:
      executor: Which executor runs the kernel; or the kernel.
      kernel: What to run.
      in_axes: As in `vmap_with_config`.
      out_axes: As in `jax.pmap`.
      axis_name: For collectives inside of the kernel.
      axis_size: As in `jax.pmap`.
      devices: As in `jax.pmap`.
      cfg: An explicit config.
    """
    chosen, kernel = _parties("pmap_with_config", executor, kernel)
    cfg = copy.deepcopy(cfg)
    options = {"out_axes": out_axes, "axis_name": axis_name, "axis_size": axis_size, "devices": devices}
    jax.pmap(_parties, in_axes=_axes(in_axes), **options)
    key = _Key(("pmap", identity({**options, "in_axes": in_axes}), identity(cfg)))
    make = lambda run: _Pmapped(kernel.op_id, run, _axes(in_axes), options)
    return lambda *args, **kwargs: chosen.run_mapped(kernel, cfg, key, make, args, kwargs)


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
    """`jax.pmap` of a call, one for each set of static values: JAX knows compiled programs by their function."""

    cfg = None

    def __init__(self, name: str, run: Run, in_axes: Any, options: dict[str, Any]) -> None:
        self._name = name
        self._run = run
        self._in_axes = in_axes
        self._options = options
        self._mapped: dict[Any, Callable[..., Any]] = {}

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the call on all devices."""
        axes = self._axes(len(args))
        # Only what is not mapped may be static: the rest has an axis for the devices.
        bound = {i for i, x in enumerate(args) if axes[i] is None and not _all_arrays(x)}
        arrays, statics = arguments.split((kwargs, {i: args[i] for i in bound}))
        key = (arguments.static_key(self._name, statics), len(args))
        if key not in self._mapped:
            run = lambda arrays, *rest: self._merged(arrays, statics, rest)
            left = tuple(axis for i, axis in enumerate(axes) if i not in bound)
            bounded(self._mapped, key, jax.pmap(run, in_axes=(None, *left), **self._options))
        left = {i: x for i, x in enumerate(args) if i not in bound}
        try:
            return self._mapped[key](arrays, *left.values())
        except ValueError:
            # Of axes that are missing or of different sizes, `jax.vmap` tells more than `jax.pmap`.
            jax.eval_shape(jax.vmap(lambda *_: (), in_axes=tuple(axes[i] for i in left)), *left.values())
            raise

    def _merged(self, arrays: list[Any], statics: arguments.Statics, rest: Args) -> Any:
        kwargs, bound = arguments.merge(arrays, statics)
        mapped = iter(rest)
        args = [bound[i] if i in bound else next(mapped) for i in range(len(rest) + len(bound))]
        return self._run(*args, **kwargs)

    def _axes(self, count: int) -> tuple[Any, ...]:
        if not isinstance(self._in_axes, tuple):
            return (self._in_axes,) * count
        if len(self._in_axes) != count:
            raise BatchArgumentError(
                f"{self._name}: pmap_with_config's in_axes must have one entry a positional argument, got "
                f"{len(self._in_axes)} entries, {self._in_axes!r}, for {count} arguments."
            )
        return self._in_axes

    def recover(self, error: Exception, args: Args, kwargs: Kwargs) -> Any:
        """There is no other way to call it."""
        raise error


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


def _all_arrays(x: Any) -> bool:
    return all(map(arguments.is_array, jax.tree.leaves(x)))
