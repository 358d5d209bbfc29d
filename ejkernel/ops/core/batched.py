"""A batch of calls as a separate kernel: chosen, tuned, stored and labelled separately from a single call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel._compat import Axis
from ejkernel.ops.core import dispatch
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.kernel import Invocation, Kernel, key_builder_of
from ejkernel.ops.utils import arguments
from ejkernel.ops.utils.fingerprint import get_device_platform, stable_json

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@dataclass(frozen=True)
class Batch:
    """One `jax.vmap` around a call.

    Attributes:
      axis: What is mapped over.
      dims: Where each array of the call has it, in the order of `arguments.split((args, kwargs))`; None if it has none.
    """

    axis: Axis
    dims: tuple[int | None, ...]

    def vmap(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` of a single call's arrays as a function of the batch's."""
        return self.axis.vmap(fn, self.dims)

    def leading(self, arrays: Sequence[Any], *, everywhere: bool = False) -> list[Any]:
        """The arrays with the batch axis first, where they have it, or all of them."""
        rest = lambda x: jnp.broadcast_to(x, (self.axis.size, *x.shape)) if everywhere else x
        return [rest(x) if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(arrays, self.dims, strict=True)]

    def single(self, arrays: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """The arrays of one call of the batch."""
        shape = lambda x, d: x.shape if d is None else x.shape[:d] + x.shape[d + 1 :]
        return [jax.ShapeDtypeStruct(shape(x, d), x.dtype) for x, d in zip(arrays, self.dims, strict=True)]

    def whole(self, arrays: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """The arrays of the batch, given those of one call."""
        shape = lambda x, d: x.shape if d is None else (*x.shape[:d], self.axis.size, *x.shape[d:])
        return [jax.ShapeDtypeStruct(shape(x, d), x.dtype) for x, d in zip(arrays, self.dims, strict=True)]


class BatchedKernel(Kernel[Any, Any]):
    """A kernel under `jax.vmap`: its op id, the batch's arguments, and where these have the batch axis.

    The methods of a kernel that runs batches itself get the batch; those of any other kernel get one call of it.
    """

    def __init__(self, single: Kernel[Any, Any], batch: Batch) -> None:
        super().__init__(op_id=single.op_id)
        self.inner = single
        self.batch = batch
        self.version = single.version
        self.collective = single.collective

    @property
    def cfg_type(self) -> Any:
        """The kernel's own."""
        return self.inner.cfg_type

    @property
    def key_builder(self) -> Callable[[Invocation[Any, Any]], str] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The kernel's own key for one call, and what the batch adds to it."""
        build = key_builder_of(self.inner)
        if build is None:
            return None
        return lambda inv: stable_json([build(self._one_of(inv)), self.batch.axis.size, list(self.batch.dims)])

    def invocation(self, inv: Invocation[Any, Any]) -> Invocation[Any, Any]:
        """The batch of calls like `inv`."""
        arrays, statics = arguments.split((inv.abstract_args, inv.abstract_kwargs))
        args, kwargs = arguments.merge(self.batch.whole(arrays), statics)
        return replace(inv, kernel=self, args=args, kwargs=kwargs, batch_axes=self._batch_axes(statics))

    def _batch_axes(self, statics: arguments.Statics) -> Any:
        """As in `jax.vmap`, one entry per argument; of several `jax.vmap`, a tuple of these, innermost first."""
        levels = self._levels(statics)
        return levels[0] if len(levels) == 1 else levels

    def _levels(self, statics: arguments.Statics) -> tuple[Any, ...]:
        args, kwargs = arguments.merge([_Dim(d) for d in self.batch.dims], statics)
        axes: tuple[Any, ...] = tuple(map(_axes_of, args))
        if any(d is not None for d in jax.tree.leaves(list(map(_axes_of, kwargs.values())))):
            axes = (*axes, {name: _axes_of(x) for name, x in kwargs.items()})
        return (*(self.inner._levels(statics) if isinstance(self.inner, BatchedKernel) else ()), axes)

    # --- What the kernel says about a call ---

    def asked(self, inv: Invocation[Any, Any]) -> Invocation[Any, Any]:
        """The call that the kernel's methods get: the batch if it runs batches itself, else one call."""
        return replace(inv, kernel=self._inner_of(inv)) if self._is_native(inv) else self._one_of(inv)

    def _inner_of(self, inv: Invocation[Any, Any]) -> Kernel[Any, Any]:
        """The kernel, or its backward if `inv` is one of the batch's: the two may support different calls."""
        return BackwardKernel(self.inner) if isinstance(inv.kernel, BackwardKernel) else self.inner

    def _is_native(self, inv: Invocation[Any, Any]) -> bool:
        return native(self.inner, inv.context, inv.platform or get_device_platform()) is not None

    def _one_of(self, inv: Invocation[Any, Any]) -> Invocation[Any, Any]:
        arrays, statics = arguments.split((inv.args, dict(inv.kwargs)))
        args, kwargs = arguments.merge(self.batch.single(arrays), statics)
        axes = self.inner._batch_axes(statics) if isinstance(self.inner, BatchedKernel) else None
        return replace(inv, kernel=self._inner_of(inv), args=args, kwargs=kwargs, batch_axes=axes)

    def supports(self, inv: Invocation[Any, Any], platform: str) -> bool | str:
        """The kernel's own answer."""
        return self.inner.supports(self.asked(inv), platform)

    def transfers(self, inv: Invocation[Any, Any], cfg: Any) -> bool:
        """The kernel's own answer."""
        return self.inner.transfers(self.asked(inv), cfg)

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> Any:
        """The kernel's own guess."""
        return dispatch.guess(self.inner, self.asked(inv))

    def config_space(self, inv: Invocation[Any, Any]) -> Any:
        """The kernel's own candidates."""
        return self.inner.config_space(self.asked(inv))

    def describe_keywords(self, inv: Invocation[Any, Any]) -> Mapping[str, Any]:
        """Those of one call of the batch."""
        return self.inner.describe_keywords(self._one_of(inv))

    # --- Methods, for the whole batch ---

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self.inner, name)
        if name.startswith("run_batched"):
            raise AttributeError(name)
        if name.startswith(("heuristic_cfg_", "config_space_", "candidate_cfgs_")):
            return lambda inv: found(self.asked(inv))
        if name == "run" or name.startswith("run_"):
            return self._runner(found, name.rpartition("_")[2])
        kinds = {"fwd_with_residuals": self._forward, "vjp": self._vjp, "custom_vjp": self._custom_vjp}
        kinds |= {"reference": self._vmapped, "example_inputs": self._examples}
        kind = next((kind for kind in kinds if name == kind or name.startswith(f"{kind}_")), None)
        return found if kind is None else kinds[kind](found)

    def __dir__(self) -> Iterable[str]:
        return {*super().__dir__(), *dir(self.inner)}

    def _vmapped(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, cfg: Any = None, **kwargs: Any) -> Any:
            given = {} if cfg is None else {"cfg": cfg}
            single, arrays = arguments.on_arrays(lambda a, k: method(*a, **given, **k), (args, kwargs))
            return self.batch.vmap(single)(*arrays)

        return run

    _forward = _vmapped

    def _runner(self, method: Callable[..., Any], platform: str) -> Callable[..., Any]:
        whole = native(self.inner, None, platform)
        return self._vmapped(method) if whole is None else self.natively(whole)

    def natively(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method for batches; arrays have the batch axis first, and it is told which arguments have one."""

        def run(*args: Any, cfg: Any, **kwargs: Any) -> Any:
            arrays, statics = arguments.split((args, kwargs))
            args, kwargs = arguments.merge(self.batch.leading(arrays, everywhere=self.inner.leading_batch), statics)
            axes = replace(self.batch, dims=tuple(None if d is None else 0 for d in self.batch.dims))
            return method(*args, cfg=cfg, in_axes=BatchedKernel(self.inner, axes)._batch_axes(statics), **kwargs)

        return run

    def _vjp(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(residuals: Any, out: Any, dout: Any, /, *args: Any, cfg: Any, **kwargs: Any) -> Any:
            single = lambda saved, args, kwargs: tuple(method(*saved, *args, cfg=cfg, **kwargs))
            return self._gradients(single, (residuals, out, dout), args, kwargs)

        return run

    def _custom_vjp(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(primals: Args, cfg: Any, kwargs: Kwargs, cotangents: Any) -> Any:
            single = lambda saved, args, kwargs: tuple(method(args, cfg, kwargs, saved))
            return self._gradients(single, cotangents, primals, kwargs)

        return run

    def _gradients(self, single: Callable[..., Any], saved: Any, args: Args, kwargs: Kwargs) -> tuple[Any, ...]:
        """Gradients of the batch's arguments: an argument that all calls share gets the sum of theirs."""
        arrays, statics = arguments.split((args, kwargs))
        leading = lambda saved, *arrays: single(saved, *arguments.merge(arrays, statics))
        found = self.batch.axis.vmap(leading, (0, *self.batch.dims))(saved, *arrays)
        dims = arguments.merge(map(_Dim, self.batch.dims), statics)[0]
        none = lambda g: g is None  # No gradient, of an argument or of a leaf of it.
        return tuple(jax.tree.map(_whole_gradient, g, d, is_leaf=none) for g, d in zip(found, dims, strict=True))

    def _examples(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Valid data for a batch: that of as many calls, unless the kernel's methods get the batch."""

        def make(inv: Invocation[Any, Any], key: jax.Array) -> tuple[Args, Kwargs]:
            if self._is_native(inv):
                return method(self.asked(inv), key)
            keys = jax.random.split(key, self.batch.axis.size)
            made = [arguments.split(method(self.asked(inv), key)) for key in keys]
            stacked = [
                columns[0] if d is None else jnp.stack(columns, d)
                for d, *columns in zip(self.batch.dims, *(arrays for arrays, _ in made), strict=True)
            ]
            args, kwargs = arguments.merge(stacked, made[0][1])
            return tuple(args), dict(kwargs)

        return make


@dataclass(frozen=True)
class _Dim:
    """The position of the batch axis, as a leaf of a pytree; None if there is none."""

    value: int | None


def _axes_of(tree: Any) -> Any:
    """One axis for all arrays of an argument, or one each."""
    dims = tuple(x.value for x in jax.tree.leaves(tree) if isinstance(x, _Dim))
    return (dims or (None,))[0] if len(set(dims)) <= 1 else dims


def _whole_gradient(grad: Any, dim: Any) -> Any:
    if grad is None or not isinstance(dim, _Dim) or grad.dtype == jax.dtypes.float0:
        return grad
    return grad.sum(0) if dim.value is None else jnp.moveaxis(grad, 0, dim.value)


def native(kernel: Kernel[Any, Any], context: str | None, platform: str) -> Callable[..., Any] | None:
    """How a kernel runs a batch by itself: `run_batched`, or `run` if that takes leading batch axes."""
    if isinstance(kernel, BatchedKernel):
        return None
    if not kernel.leading_batch:
        return dispatch.find(kernel, "run_batched", context, platform)
    run = dispatch.forced_implementation(kernel, context, platform)

    def leading(*args: Any, cfg: Any, in_axes: Any, **kwargs: Any) -> Any:
        return run(*args, cfg=cfg, **kwargs)

    return leading


def stacked(kernel: Kernel[Any, Any], batches: Iterable[Batch]) -> Kernel[Any, Any]:
    """A kernel under several `jax.vmap`, innermost first."""
    for batch in batches:
        kernel = BatchedKernel(kernel, batch)
    return kernel


def batches_around(kernel: Kernel[Any, Any]) -> list[Batch]:
    """The `jax.vmap` that a kernel is under, innermost first."""
    return [*batches_around(kernel.inner), kernel.batch] if isinstance(kernel, BatchedKernel) else []
