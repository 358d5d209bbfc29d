"""An operation as a list of backends: support checks, configs, dispatch and gradients are derived from the list."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ejkernel.errors import EjkernelError
from ejkernel.ops.core import dispatch, explicit
from ejkernel.ops.core.backend import Backend
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.explicit import Split
from ejkernel.ops.core.kernel import Invocation, Kernel, KernelDefinitionError
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.core.workload import Workload
from ejkernel.ops.utils import arguments
from ejkernel.ops.utils.fingerprint import device_kind
from ejkernel.ops.utils.promotion import usual_promotion

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class OperationArgumentError(EjkernelError, ValueError):
    """An argument that all operations share (`cfg`, `platform`, `mesh`) does not fit the operation."""


class Operation(Kernel[Cfg, Out]):
    """A kernel whose ways to run are listed in `backends`, the most promising first.

    The config class is a frozen dataclass with `fwd_params`, `platform` and, for a `DifferentiableOperation`,
    `bwd_params`. A subclass writes `arguments`, which checks the arguments of a call, and `reference`. JAX
    differentiates the backends' code, unless the subclass has a `custom_vjp`, or `vjp` with `fwd_with_residuals`.

    Args:
      name: The op id; by default that of the class, `class MyOp(Operation[Cfg, Out], op_id="my_op")`.
      interpret: Run backends that can be interpreted in an interpreter, to test them on a CPU.
    """

    backends: ClassVar[tuple[Backend, ...]] = ()
    source_modules: ClassVar[tuple[str, ...]] = ()
    """Names of the modules that are part of the operation's source hash: those of its backends."""
    workload_module: ClassVar[str | None] = None
    """Name of a module with `WORKLOADS`, the named calls of tests, benchmarks and packs."""

    _class_op_id: ClassVar[str | None] = None
    _by_backend: ClassVar[tuple[str, ...]] = ("run",)
    """Methods that each backend has one of: `<method>_on` runs it by a given one."""
    _cfg_fields: ClassVar[tuple[str, ...]] = ("fwd_params", "platform")

    def __init__(self, name: str | None = None, *, interpret: bool = False) -> None:
        super().__init__(name or self._class_op_id)
        self.interpret = interpret
        self._check_cfg_type()

    def __init_subclass__(cls, *, op_id: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._class_op_id = op_id or cls._class_op_id
        sources = (b.source if isinstance(b.source, str) else getattr(b.source, "__name__", "") for b in cls.backends)
        cls.source_modules = tuple(sources)
        for backend, method in itertools.product(cls.__dict__.get("backends", ()), cls._by_backend):
            _bind(cls, method, backend)
        if inspect.isfunction(own := cls.__dict__.get("reference")):
            cls.reference = usual_promotion()(own if _takes_platform(own) else _dropping_platform(own))

    def _check_cfg_type(self) -> None:
        cls, cfg_type = type(self).__name__, self.cfg_type
        if cfg_type is None:
            raise KernelDefinitionError(
                f"{self.op_id}: the config class is not known; write class {cls}(Operation[Config, Output])."
            )
        missing = [name for name in self._cfg_fields if name not in getattr(cfg_type, "__dataclass_fields__", ())]
        if missing:
            fields = "the field" if len(missing) == 1 else "the fields"
            raise KernelDefinitionError(
                f"{self.op_id}: the config class {cfg_type.__name__} needs {fields} {', '.join(missing)}, as a frozen "
                "dataclass in which None is the default of each."
            )

    @classmethod
    def workloads(cls, device: str | None = None) -> list[Workload]:
        """The named calls of this operation; those of one kind of device, if it is given."""
        if cls.workload_module is None:
            return []
        found = getattr(importlib.import_module(cls.workload_module), "WORKLOADS", None)
        if found is None:
            raise KernelDefinitionError(
                f"{cls._class_op_id or cls.__name__}: workload_module is {cls.workload_module!r}, which has no "
                "WORKLOADS, a tuple of ejkernel.ops.core.workload.Workload."
            )
        return [w for w in found if device in (None, w.device)]

    # --- Arguments ---

    def prepare(self, /, *args: Any, platform: str | None = None, **kwargs: Any) -> tuple[Args, Kwargs]:
        """What `arguments` makes of them, and the platform if the call asks for one."""
        args, kwargs = self.arguments(*map(_unwrapped, args), **kwargs)
        return args, kwargs if platform is None else {**kwargs, "platform": platform}

    def arguments(self, /, *args: Any, **kwargs: Any) -> tuple[Args, Kwargs]:
        """Checks the arguments of a call and brings them into the form that all backends take."""
        return args, kwargs

    # --- What supports a call ---

    def supports(self, inv: Invocation[Any, Any], platform: str) -> bool | str:
        """Whether the backend named `platform` supports the call, or its backward if `inv` is one."""
        asked = inv.kwargs.get("platform")
        reason = self._refusal(self.backend(platform), inv, isinstance(inv.kernel, BackwardKernel))
        if asked not in (None, platform):
            here = "" if reason else f"; without platform={asked!r} it runs by {platform}"
            return f"the call asks for platform={asked!r}{self._absent(asked, inv)}{here}"
        return True if reason is None else reason

    def _absent(self, asked: str, inv: Invocation[Any, Any]) -> str:
        """Why a call does not get the backend that it asks for, if devices of this kind never try it."""
        backend = self.backend(asked)
        if asked in dispatch.PLATFORMS[device_kind()]:
            return ""  # It is listed beside this one, with its own reason.
        reason = self._refusal(backend, inv, isinstance(inv.kernel, BackwardKernel))
        return f", but {reason or f'interpreted backends are chosen by cfg= with platform={asked!r}'}"

    def backend(self, platform: str) -> Backend:
        """The backend of this name."""
        found = next((b for b in self.backends if b.platform == platform), None)
        if found is None:
            have = ", ".join(b.platform for b in self.backends)
            raise OperationArgumentError(f"{self.op_id}: has no platform {platform!r}, only {have}.")
        return found

    def _refusal(self, backend: Backend, inv: Invocation[Any, Any], backward: bool) -> str | None:
        return backend.refusal(inv, backward=backward, interpret=self.interpret)

    def ranked(self, inv: Invocation[Any, Any], *, backward: bool) -> Sequence[Backend]:
        """The backends, the most promising for this call first; an untuned call uses the first that supports it."""
        return self.backends

    def serving(self, inv: Invocation[Any, Any], *, backward: bool = False) -> list[Backend]:
        """The backends that support a call, the most promising first."""
        asked = inv.kwargs.get("platform")
        order = list(self.ranked(inv, backward=backward))
        if self.interpret:
            # Only if it is the one being tried: interpreted code is never the fastest.
            order = [b for b in order if not b.interpret or b.platform == inv.platform]
            order.sort(key=lambda b: b.platform != inv.platform)
        return [b for b in order if asked in (None, b.platform) and self._refusal(b, inv, backward) is None]

    # --- Configs ---

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> Cfg:
        """The guess of the most promising backend that supports the call."""
        return self._cfgs(inv, self._first(inv, backward=False), backward=False)[0]

    def cfg_on(self, platform: str, inv: Invocation[Any, Any], *, backward: bool = False) -> Cfg:
        """The guess of one backend."""
        return self._cfgs(inv, self.backend(platform), backward=backward)[0]

    def config_space(self, inv: Invocation[Any, Any]) -> list[Cfg]:
        """The params of every backend that supports the call."""
        return self._space(inv, backward=False)

    def _first(self, inv: Invocation[Any, Any], *, backward: bool) -> Backend:
        return next(iter(self.serving(inv, backward=backward)), self.backends[-1])

    def _space(self, inv: Invocation[Any, Any], *, backward: bool) -> list[Cfg]:
        """All params of the most promising backend, fewer of the others, so that a tuner can try all of them."""
        serving = self.serving(inv, backward=backward) or [self.backends[-1]]
        found: list[Cfg] = []
        for place, backend in enumerate(serving):
            cfgs = self._cfgs(inv, backend, backward=backward)
            found += cfgs if backend.thorough else cfgs[:: max(len(cfgs) * place // 6, 1)]
        return found

    def _cfgs(self, inv: Invocation[Any, Any], backend: Backend, *, backward: bool) -> list[Cfg]:
        name = "bwd_params" if backward else "fwd_params"
        make = self.cfg_type
        return [
            make(**{name: params, "platform": backend.platform}) for params in backend.space(inv, backward=backward)
        ]

    # --- Running ---

    def run_on(self, backend: Backend, /, *args: Any, cfg: Cfg, **kwargs: Any) -> Out:
        """Runs a call that is not differentiated, or whose gradient JAX takes."""
        run = getattr(backend.functions, "run", None)
        if run is None:
            return self._forward(backend, args, kwargs, cfg)[0]
        return run(*args, params=self._params(backend, cfg), **self._options(backend), **_without_platform(kwargs))

    def _forward(self, backend: Backend, args: Args, kwargs: Kwargs, cfg: Any) -> tuple[Any, Any]:
        options = {**self._options(backend), **_without_platform(kwargs)}
        forward = getattr(backend.functions, "forward", None)
        if forward is None:
            where = getattr(backend.functions, "__name__", type(backend.functions).__name__)
            raise KernelDefinitionError(f"{self.op_id}[{backend.platform}]: {where} has no function forward.")
        found = forward(*args, params=self._params(backend, cfg), **options)
        if not isinstance(found, tuple) or len(found) != 2:
            raise KernelDefinitionError(
                f"{self.op_id}[{backend.platform}]: forward must return a pair, the output and what the backward needs "
                f"(None if nothing), got {type(found).__name__}."
            )
        return found

    def _params(self, backend: Backend, cfg: Any, *, backward: bool = False) -> Any:
        params = cfg.bwd_params if backward else cfg.fwd_params
        return backend.checked(self.op_id, params, backward=backward)

    def _options(self, backend: Backend) -> dict[str, bool]:
        return {"interpret": self.interpret} if backend.interpret else {}

    # --- Calling ---

    def call(
        self,
        args: Args,
        kwargs: Kwargs,
        *,
        cfg: Cfg | None = None,
        platform: str | None = None,
        mesh: Any = None,
        in_specs: Any = None,
        out_specs: Any = None,
    ) -> Out:
        """The call that an operation's public function makes, with the arguments that all operations share."""
        if cfg is not None and not isinstance(cfg, self.cfg_type):
            raise OperationArgumentError(
                f"{self.op_id}: cfg must be a {self.cfg_type.__name__}, got {type(cfg).__name__}."
            )
        if (named := self._agreed_platform(platform, cfg)) is not None:
            kwargs = {**kwargs, "platform": named}
        if cfg is not None:
            kwargs = {**kwargs, "cfg": cfg}
        if mesh is not None or in_specs is not None or out_specs is not None:
            specs = _completed(in_specs, args)
            kwargs = {**kwargs, "mesh": mesh, "in_specs": specs, "out_specs": out_specs}
        elif not explicit.are_whole(args) and (found := explicit.typed(args)) is not None:
            return self._call_typed(args, kwargs, found)
        return self(*args, **kwargs)

    def nested(self, operation: Any, args: Args, kwargs: Kwargs, cfg: Any, params: Any) -> Any:
        """A call of another operation that is part of this one: chosen and tuned separately, unless `params` are given.

        `kwargs` should have the platform, if the call asks for one; `cfg` is the config of the call.
        """
        kernel = operation(interpret=self.interpret)
        if params is not None or self.interpret:  # In the interpreter the platform is not chosen but given.
            kwargs = {**kwargs, "cfg": kernel.cfg_type(fwd_params=params, platform=cfg.platform)}
        return kernel(*args, **kwargs)

    def split(self, args: Args, kwargs: Kwargs, specs: Sequence[PartitionSpec]) -> Split | None:
        """How a call is split whose arguments have these specs in their types; None leaves them as they are."""
        return None

    def _call_typed(self, args: Args, kwargs: Kwargs, found: explicit.Typed) -> Out:
        """A call whose arguments have shardings in their types: by its own kernels on each device, if it can be."""
        split = self.split(args, kwargs, found.specs)
        if split is None:
            return self(*args, **kwargs)
        if split.local:
            specs = {"in_specs": split.in_specs, "out_specs": split.out_specs}
            return self(*args, **kwargs, mesh=found.mesh, **specs)
        call, arrays = arguments.on_arrays(lambda args, kwargs: self(*args, **kwargs), (args, kwargs))
        return explicit.automatic(call, split.out_specs)(*arrays)

    def _agreed_platform(self, platform: str | None, cfg: Any) -> str | None:
        if platform is not None:
            self.backend(platform)
        named = None if cfg is None else dispatch.forced_platform(self, cfg)
        if platform is not None and named is not None and platform != named:
            raise OperationArgumentError(f"{self.op_id}: platform is {platform!r} and cfg.platform is {named!r}.")
        return platform if platform is not None else named


class DifferentiableOperation(Operation[Cfg, Out]):
    """An operation whose backends have their own backward, chosen and tuned separately from the forward.

    JAX differentiates the forward of a backend that has none. Residuals must have the same meaning in all backends: any
    backward may follow any forward.
    """

    _by_backend = ("run", "fwd_with_residuals", "vjp")
    _cfg_fields = ("fwd_params", "bwd_params", "platform")

    def heuristic_cfg_vjp(self, inv: Invocation[Any, Any]) -> Cfg:
        """The forward's own backend if its backward supports the call, else the most promising one that does."""
        serving = self.serving(inv, backward=True)
        same = next((b for b in serving if b.platform == inv.platform), None)
        return self._cfgs(inv, same or self._first(inv, backward=True), backward=True)[0]

    def config_space_vjp(self, inv: Invocation[Any, Any]) -> list[Cfg]:
        """The params of every backend whose backward supports the call."""
        return self._space(inv, backward=True)

    def cfg_vjp(self, cfg: Any) -> Any:
        """The backward's part of a config that has one."""
        return None if cfg.bwd_params is None else replace(cfg, fwd_params=None)

    def fwd_with_residuals_on(self, backend: Backend, /, *args: Any, cfg: Cfg, **kwargs: Any) -> tuple[Any, Any]:
        """The forward of a call that is differentiated."""
        return self._forward(backend, args, kwargs, cfg)

    def vjp_on(
        self, backend: Backend, residuals: Any, out: Any, dout: Any, /, *args: Any, cfg: Cfg, **kwargs: Any
    ) -> tuple[Any, ...]:
        """The gradients, one per positional argument."""
        params, backward = self._params(backend, cfg, backward=True), getattr(backend.functions, "backward", None)
        if backward is None:
            return self._differentiated(backend, dout, args, kwargs)
        options = {**self._options(backend), **_without_platform(kwargs)}
        return backward(residuals, out, dout, *args, params=params, **options)

    def _differentiated(self, backend: Backend, dout: Any, args: Args, kwargs: Kwargs) -> tuple[Any, ...]:
        """The gradient that JAX derives from the forward with its guess; for backends that XLA compiles."""
        moving = [i for i, x in enumerate(args) if x is not None and jnp.issubdtype(x.dtype, jnp.inexact)]

        def run(*moved: Any) -> Any:
            given = dict(enumerate(args)) | dict(zip(moving, moved, strict=True))
            options = {**self._options(backend), **_without_platform(kwargs)}
            return backend.functions.forward(*given.values(), params=None, **options)[0]

        grads = jax.vjp(run, *(args[i] for i in moving))[1](dout)
        found = dict(zip(moving, grads, strict=True))
        return tuple(found.get(i) for i in range(len(args)))


class RowOperation(DifferentiableOperation[Cfg, Out]):
    """One that works on rows, the last axis of its first argument: what has its shape, outputs too, lies like it."""

    def split(self, args: Args, kwargs: Kwargs, specs: Sequence[PartitionSpec]) -> Split:
        """Rows may lie on any device; a row on several is for the compiler."""
        rows = PartitionSpec(*specs[0], *(None,) * (args[0].ndim - len(specs[0])))
        like_rows = lambda x: x is not None and x.shape == args[0].shape
        return Split(tuple(rows if like_rows(x) else PartitionSpec() for x in args), rows, local=rows[-1] is None)


def _bind(cls: type[Operation[Any, Any]], method: str, backend: Backend) -> None:
    """Adds `<method>_<platform>`, by which kernels are dispatched, unless the class defines it."""
    name = f"{method}_{backend.platform}"
    if name in cls.__dict__:
        return

    @usual_promotion()
    def bound(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, f"{method}_on")(backend, *args, **kwargs)

    bound.__name__, bound.__qualname__ = name, f"{cls.__qualname__}.{name}"
    bound.__doc__ = f"`{method}` by the backend {backend.platform!r}."
    setattr(cls, name, bound)


def _completed(in_specs: Any, args: Args) -> Any:
    """`in_specs` for all of `args`: optional ones at the end that are not given need no spec."""
    if not isinstance(in_specs, (tuple, list)) or isinstance(in_specs, PartitionSpec):
        return in_specs
    rest = args[len(in_specs) :]
    return (*in_specs, *(PartitionSpec() for _ in rest)) if all(x is None for x in rest) else in_specs


def _unwrapped(x: Any) -> Any:
    """The array of an object that stands for one, as a parameter of Flax NNX does."""
    return jnp.asarray(x) if hasattr(x, "__jax_array__") and not isinstance(x, jax.Array) else x


def _takes_platform(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters
    return "platform" in parameters or any(p.kind == p.VAR_KEYWORD for p in parameters.values())


def _dropping_platform(reference: Callable[..., Any]) -> Callable[..., Any]:
    """What is right does not depend on the platform that a call asks for."""

    @functools.wraps(reference)
    def wrapped(self: Any, *args: Any, platform: str | None = None, **kwargs: Any) -> Any:
        return reference(self, *args, **kwargs)

    return wrapped


def _without_platform(kwargs: Kwargs) -> Kwargs:
    return {name: x for name, x in kwargs.items() if name != "platform"}
