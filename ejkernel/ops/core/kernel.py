"""What an operation is (`Kernel`) and what one call of it is (`Invocation`)."""

from __future__ import annotations

import contextlib
import inspect
import re
import threading
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic

import jax
from jax.core import Tracer

from ejkernel import _compat
from ejkernel.errors import EjkernelError
from ejkernel.ops.core.refusals import REFUSED, InputsWanted
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.utils import arguments, fingerprint
from ejkernel.ops.utils.services import services

PROGRAMS = "_ejkernel_programs"
"""Attribute of a kernel instance under which executors keep its compiled programs."""


class Links(dict[Any, Any]):
    """Where executors find the programs of a kernel; `latest()` is the one of the latest eager call."""

    __slots__ = ("latest",)
    latest: Callable[[], Any]


# Bound here, because every call looks it up.
_trace_state, _EAGER = _compat.trace_state, _compat.EAGER
_HEX16 = re.compile(r"[0-9a-f]{16}")
_SIMPLE = frozenset({str, bytes, bool, int, float, complex, type(None), type})


class _Tracing(threading.local):
    active = False


tracing = _Tracing()
"""`active` while a kernel of this thread is being traced: attributes that it sets then do not count as a change."""


class KernelDefinitionError(EjkernelError, TypeError):
    """A kernel class lacks something that ejkernel needs of it."""


class Kernel(Generic[Cfg, Out]):
    """An operation: how to run it, which configs it may take, and a first guess.

    Subclasses write `run(*args, cfg, **kwargs)` (or `run_xla`, `run_triton`, ...) and `heuristic_cfg(inv)`; all else
    is optional: `config_space(inv)` for tuning, `custom_vjp` or `fwd_with_residuals` with `vjp` for gradients,
    `reference` and `example_inputs` for checking and tuning, `supports` and `prepare` for arguments. Every method
    that depends on the platform may carry its name as a suffix: see `ejkernel.ops.core.dispatch`.

    A kernel is a value: instances of one class with equal simple attributes share their compiled programs, so creating
    one at each call is cheap. Assigning an attribute makes it another kernel for later calls; a change in place, or one
    that a method makes while it is traced, does not. A function that you jitted before keeps the kernel as it was, like
    everything that it closes over.
    """

    _ejkernel_programs: Links
    version: str = "0"
    key_builder: Callable[[Invocation[Cfg, Out]], str] | None = None
    jit: bool = True
    """False runs eager calls without jit, for kernels that must see concrete values."""
    collective: bool = False
    """True for kernels that communicate over the axes of a mesh: their keys hold its size, and all processes tune them
    together."""
    leading_batch: bool = False
    """True if `run` takes arrays with one more axis in front of each, and maps over it: it then gets a batch as it is.
    For anything else write `run_batched(*args, cfg, in_axes, **kwargs)`."""
    record_integers: bool = False
    """True keeps small concrete integer arrays (group sizes, page tables) when calls are recorded."""

    def __init__(self, name: str | None = None, *, op_id: str | None = None) -> None:
        if name is not None and op_id is not None and name != op_id:
            raise KernelDefinitionError(
                f"{type(self).__name__}: name={name!r} and op_id={op_id!r} differ; they are one thing."
            )
        name = op_id if name is None else name
        if name is not None and not (isinstance(name, str) and name):
            raise KernelDefinitionError(
                f"{type(self).__name__}: name must be a text that is not empty, or None for the class's, got {name!r}."
            )
        self._op_id = name

    @property
    def op_id(self) -> str:
        """Identity of the operation in keys, labels and stores; by default `module.Class`."""
        # A subclass may leave out super().__init__().
        return getattr(self, "_op_id", None) or fingerprint.qualified_name(type(self))

    @property
    def name(self) -> str:
        """The same as `op_id`."""
        return self.op_id

    def prepare(self, /, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Brings arguments into canonical form, before anything else looks at them."""
        return args, kwargs

    def supports(self, inv: Invocation[Cfg, Out], platform: str) -> bool | str:
        """Whether the backend named `platform` supports `inv`; a text means no and gives the reason."""
        return True

    def transfers(self, inv: Invocation[Cfg, Out], cfg: Any) -> bool:
        """Whether a config that was tuned for another shape may be used for `inv`, which is not tuned.

        A kernel that knows something of this shape, such as which backend is slow for it, says no.
        """
        return True

    def heuristic_cfg(self, inv: Invocation[Cfg, Out]) -> Cfg:
        """The config to use when nothing better is known."""
        raise KernelDefinitionError(f"{type(self).__name__} must define heuristic_cfg(self, inv).")

    def config_space(self, inv: Invocation[Cfg, Out]) -> Iterable[Cfg]:
        """The configs that tuning may try."""
        if type(self).candidate_cfgs is Kernel.candidate_cfgs:
            return [self.heuristic_cfg(inv)]
        return self.candidate_cfgs(inv)

    def candidate_cfgs(self, inv: Invocation[Cfg, Out]) -> Iterable[Cfg]:
        """Another name of `config_space`; override either."""
        if type(self).config_space is Kernel.config_space:
            return [self.heuristic_cfg(inv)]
        return self.config_space(inv)

    def describe_keywords(self, inv: Invocation[Cfg, Out]) -> Mapping[str, Any]:
        """The static keywords of a call as its caller writes them, for messages; never part of a key.

        A kernel whose `prepare` changes its keywords returns here what they were.
        """
        is_static = lambda value: value is not None and not any(map(arguments.is_array, jax.tree.leaves(value)))
        return {name: value for name, value in inv.abstract_kwargs.items() if is_static(value)}

    def __call__(self, /, *args: Any, cfg: Cfg | None = None, **kwargs: Any) -> Out:
        # What every call pays for: most are eager, by position, and like the one before. This much of `Executor.run` is
        # written out here, because every Python frame takes a twentieth of a small call's time.
        try:
            latest = self._ejkernel_programs.latest
            program = latest()
            executor = services.executor
            # Equal is not enough: C(1) == C(1.0).
            if kwargs or program.cfg is not cfg or program.owner is not executor or _trace_state.value is not _EAGER:
                program = None
        except AttributeError:
            program = None
        if program is not None:
            try:
                return program.call(*args)
            except InputsWanted:
                pass
            except REFUSED as error:
                with contextlib.suppress(InputsWanted):
                    return program.recover(error, args, kwargs)
        return services.run(self, cfg, args, kwargs)

    @property
    def cfg_type(self) -> Any:
        """The config class, from the type argument of `Kernel[Cfg, Out]`; None if it is not given."""
        for cls in type(self).__mro__:
            for base in getattr(cls, "__orig_bases__", ()):
                origin, given = typing.get_origin(base), typing.get_args(base)
                generic = isinstance(origin, type) and issubclass(origin, Kernel)
                if generic and given and not isinstance(given[0], typing.TypeVar):
                    return given[0]
        return None

    def state(self) -> tuple[Any, ...] | None:
        """What makes two instances of the class interchangeable; None if an attribute is not a simple value."""
        if _has_slots(type(self)):
            return None
        cached = {k for k, v in _members(type(self)) if isinstance(v, cached_property)}
        attributes = [(k, type(v), v) for k, v in sorted(vars(self).items()) if k != PROGRAMS and k not in cached]
        if not all(kind in _SIMPLE for _, kind, _ in attributes):
            return None
        return tuple((k, kind, arguments.scalar_key(v)) for k, kind, v in attributes)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self._changed()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self._changed()

    def _changed(self) -> None:
        if PROGRAMS in self.__dict__ and not tracing.active:
            del self.__dict__[PROGRAMS]

    def __getstate__(self) -> Any:
        """Compiled programs are not copied or pickled with a kernel."""
        state = super().__getstate__()
        drop = lambda attributes: {k: v for k, v in attributes.items() if k != PROGRAMS} if attributes else attributes
        return (drop(state[0]), *state[1:]) if isinstance(state, tuple) else drop(state)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.op_id!r}>"


@dataclass(frozen=True, eq=False, kw_only=True)
class Invocation(Generic[Cfg, Out]):
    """One call of a kernel: its arguments after `prepare`, and what identifies it."""

    kernel: Kernel[Cfg, Out] | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    op_id: str = ""
    batch_axes: Any = None
    override_cfg: Cfg | None = None
    stamp: bool = True
    context: str | None = None
    axes: Mapping[str, int] | None = None
    """Sizes of the mesh axes around the call, for kernels that communicate over them."""
    platform: str | None = None
    """The platform being tried; not part of the key, because the backend is a parameter like any other."""

    def __post_init__(self) -> None:
        if not self.op_id:
            if self.kernel is None:
                raise KernelDefinitionError("Invocation needs kernel= or op_id=.")
            object.__setattr__(self, "op_id", self.kernel.op_id)
        if not isinstance(self.args, (tuple, list)):  # An array would be taken for its rows.
            raise KernelDefinitionError(
                f"{self.op_id}: an Invocation's args must be a tuple, got {type(self.args).__name__}. Write args=(x,)."
            )
        object.__setattr__(self, "args", tuple(self.args))

    @cached_property
    def abstract_args(self) -> tuple[Any, ...]:
        """`args` with ShapeDtypeStructs in place of arrays."""
        return fingerprint.abstractify(self.args)

    @cached_property
    def abstract_kwargs(self) -> dict[str, Any]:
        """`kwargs` with ShapeDtypeStructs in place of arrays."""
        return fingerprint.abstractify(dict(self.kwargs))

    @cached_property
    def device_fingerprint(self) -> str:
        """The kind of device the call runs on."""
        return fingerprint.device_fingerprint()

    @cached_property
    def signature(self) -> dict[str, Any]:
        """Everything that `call_key` is a hash of, readable and JSON-able."""
        version = self.kernel.version if self.kernel is not None else "0"
        where = {"batch_axes": self.batch_axes, "context": self.context, "axes": self.axes}
        return fingerprint.signature(self.op_id, version, self.args, self.kwargs, **where)

    @cached_property
    def call_key(self) -> str:
        """16 hex digits, the same in every process and on every host."""
        build = None if self.kernel is None else key_builder_of(self.kernel)
        if build is None:
            return fingerprint.short_hash(self.signature)
        key = build(self)
        if not isinstance(key, str):
            raise KernelDefinitionError(f"{self.op_id}: key_builder must return a string, got {key!r}.")
        return key if _HEX16.fullmatch(key) else fingerprint.short_hash(key)

    @property
    def key(self) -> tuple[str, str, str]:
        """The key of this call's configs: device, operation, call key."""
        return self.device_fingerprint, self.op_id, self.call_key

    @property
    def is_abstract(self) -> bool:
        """Whether there are only shapes and dtypes, no data to measure with."""
        return any(map(arguments.has_no_data, jax.tree.leaves((self.args, dict(self.kwargs)))))

    @property
    def is_symbolic(self) -> bool:
        """Whether some dimensions are unknown, as in `jax.export` of symbolic shapes: nothing can be measured then."""
        arrays, _ = arguments.split((self.abstract_args, self.abstract_kwargs))
        return any(map(_compat.is_symbolic, arrays))


def has_own_gradient(kernel: Kernel[Any, Any]) -> bool:
    """Whether a kernel has a gradient of its own in any backend."""
    return any(name == "custom_vjp" or name.startswith("fwd_with_residuals") for name in dir(kernel))


def runs_as_operation(kernel: Kernel[Any, Any]) -> bool:
    """Whether a call is jitted as one JAX operation, or is part of its caller's trace.

    It is part of the caller's trace if the kernel needs concrete values, or if it has its own gradient and holds traced
    values: these would be gone when its backward is traced.
    """
    if not kernel.jit or kernel.state() is not None or not has_own_gradient(kernel):
        return kernel.jit
    return not holds_tracers(kernel)


def holds_tracers(kernel: Kernel[Any, Any]) -> bool:
    """Whether an attribute of a kernel is traced, or a pytree with something traced in it."""
    return any(_any_tracer(value) for name, value in vars(kernel).items() if name != PROGRAMS)


def _any_tracer(value: Any) -> bool:
    try:
        leaves = jax.tree.leaves(value)
    except ValueError:  # A dict whose keys cannot be sorted is not a pytree.
        return False
    return any(isinstance(x, Tracer) for x in leaves)


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    for base in cls.__mro__:
        yield from vars(base).items()


def _has_slots(cls: type) -> bool:
    """Whether instances hold attributes outside their `__dict__`."""
    return any(inspect.ismemberdescriptor(member) for _, member in _members(cls))


def key_builder_of(kernel: Kernel[Any, Any]) -> Callable[[Invocation[Any, Any]], str] | None:
    """`kernel.key_builder` as a function of the call, also if a plain function is in the class body."""
    found = inspect.getattr_static(kernel, "key_builder", None)
    if inspect.isfunction(found):
        parameters = inspect.signature(found).parameters.values()
        if sum(p.default is p.empty for p in parameters) == 1:
            return found
    return kernel.key_builder
