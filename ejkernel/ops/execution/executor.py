"""Calls kernels like JAX functions, and says what it would do."""

from __future__ import annotations

import contextlib
import copy
import inspect
import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any, Generic, NamedTuple

import jax

from ejkernel import _compat
from ejkernel.errors import EjkernelError
from ejkernel.ops import registry
from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.config.selection import ConfigSelectorChain, Selection
from ejkernel.ops.core import context, dispatch
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.batched import Batch
from ejkernel.ops.core.context import is_frozen
from ejkernel.ops.core.kernel import (
    PROGRAMS,
    Invocation,
    Kernel,
    KernelDefinitionError,
    Links,
    has_own_gradient,
    runs_as_operation,
    tracing,
)
from ejkernel.ops.core.refusals import REFUSED, InputsWanted
from ejkernel.ops.core.types import Cfg, Out
from ejkernel.ops.execution.pipeline import (
    Args,
    Attempt,
    Choose,
    Fixed,
    Kwargs,
    Pipeline,
    any_tracer,
    invocation,
    known,
    prepared,
)
from ejkernel.ops.execution.pipeline import ConfigChooser as ConfigChooser
from ejkernel.ops.execution.program import Program, bounded
from ejkernel.ops.utils import arguments, env
from ejkernel.ops.utils.canonical import canonical
from ejkernel.ops.utils.fingerprint import device_fingerprint, is_here
from ejkernel.ops.utils.meta import DEFAULT_PREFIX
from ejkernel.ops.utils.services import services

# Bound here, because every call looks it up.
_trace_state, _EAGER = _compat.trace_state, _compat.EAGER
_NONE: Kwargs = {}
_MISSING: Any = None
_SHARDING = frozenset({"mesh", "in_specs", "out_specs"})
_keywords: weakref.WeakKeyDictionary[type, frozenset[str]] = weakref.WeakKeyDictionary()


class ChooserError(EjkernelError, TypeError):
    """The given chooser cannot choose configs."""


class Explanation(NamedTuple):
    """Why a call gets its config."""

    selection: Selection
    platform: str
    method: str

    @property
    def cfg(self) -> Any:
        """The config."""
        return self.selection.cfg

    @property
    def tier(self) -> str:
        """The tier that answered."""
        return self.selection.tier

    @property
    def key(self) -> tuple[str, str, str]:
        """Device, op id and call key."""
        return self.selection.inv.key

    def __str__(self) -> str:
        return f"{self.selection}\n   runs {self.method} on platform {self.platform}"


class CompiledCall(Generic[Out]):
    """A jitted function of a kernel's arguments, its configs fixed."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def __call__(self, /, *args: Any, **kwargs: Any) -> Out:
        return self._program(args, kwargs)

    def trace(self, /, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """As `trace` of a jitted function; arguments may be abstract."""
        return self._program.staged(args, kwargs)

    def lower(self, /, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """As `lower` of a jitted function; the program takes the arguments that are arrays."""
        return self.trace(*args, **kwargs).lower()


class _Table(dict[Hashable, Program]):
    """The programs of one kernel by their fixed config; owned by an executor; kernels only refer to it weakly."""

    __slots__ = ("__weakref__", "latest")


class _Token:
    """The key of a kernel that shares its programs with no other, until one of its attributes changes."""


class Executor:
    """Calls kernels like JAX functions.

    An eager call is one jitted call: JAX's own dispatch finds the compiled program, and everything else happens while
    tracing, once for each distinct call.
    """

    def __init__(self, chooser: ConfigChooser | None = None, *, stamp_prefix: str = DEFAULT_PREFIX) -> None:
        if chooser is not None and not callable(getattr(chooser, "choose", None)):
            raise ChooserError(f"Executor: a chooser needs choose(inv, kernel), got {type(chooser).__name__}.")
        if not stamp_prefix:
            raise ChooserError("Executor: stamp_prefix must not be empty; EJKERNEL_OPS_STAMP=none leaves labels out.")
        self.chooser: ConfigChooser = chooser if chooser is not None else _default_selector()
        self._pipeline = Pipeline(self.chooser, stamp_prefix)
        self._shared: dict[Hashable, _Table] = {}
        self._own: weakref.WeakKeyDictionary[_Token, _Table] = weakref.WeakKeyDictionary()
        self._key = object()

    @property
    def stamp_prefix(self) -> str:
        """What the labels of its calls begin with."""
        return self._pipeline.stamp_prefix

    def __call__(self, kernel: Kernel[Cfg, Out], /, *args: Any, cfg: Cfg | None = None, **kwargs: Any) -> Out:
        """Runs `kernel` on the arguments, with `cfg` or with the config that the chooser gives.

        With `mesh=`, under `jax.shard_map`: `in_specs=` is one PartitionSpec, or one entry per positional argument, and
        `out_specs=` is for the output; keyword arguments are whole on every device. The config is chosen for a shard.
        """
        # As in `Kernel.__call__`: the program of the latest call, if that is like this one.
        try:
            latest = kernel._ejkernel_programs.latest
            program = latest()
            if kwargs or program.cfg is not cfg or program.owner is not self or _trace_state.value is not _EAGER:
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
        return self.run(kernel, cfg, args, kwargs)

    def run(self, kernel: Kernel[Any, Any], cfg: Any, args: Args, kwargs: Kwargs) -> Any:
        """`executor(kernel, *args, cfg=cfg, **kwargs)`, for callers that have arguments in these forms already."""
        # What every call pays for: most are eager, and like the one before.
        given = kwargs
        try:
            latest = kernel._ejkernel_programs.latest
            program = latest()
            call = program.call
            if kwargs:
                scalars, call = program.repeat
                if len(scalars) == len(kwargs):
                    for name, x in kwargs.items():
                        if scalars.get(name, scalars) is not x:
                            break
                    else:
                        given = _NONE
                if given:
                    call = program.ways[tuple(kwargs)]
            # Equal is not enough: C(1) == C(1.0).
            if program.cfg is not cfg or program.owner is not self or _trace_state.value is not _EAGER:
                program = None
        except (AttributeError, KeyError):
            program = call = _MISSING
        if program is None:
            if _asks_to_shard(kernel, kwargs):
                return self._sharded(kernel, cfg, args, kwargs)
            program = self._program_of(kernel, cfg, args, kwargs)
            call, given = program.way(kwargs), kwargs
        try:
            # Passing on even no keywords takes time.
            return call(*args, **given) if given else call(*args)
        except InputsWanted:
            pass
        except REFUSED as error:
            try:
                return program.recover(error, args, kwargs)
            except InputsWanted:
                pass
        if _shows_batch(args, kwargs):
            # The batch is measured, so a single call's config is not needed. If `prepare` drops what is batched, data
            # is needed; it is requested below.
            with contextlib.suppress(InputsWanted):
                return self._run_here(kernel, cfg, args, kwargs)
        return self._pipeline.with_inputs(known(kernel, args, kwargs), lambda: program(args, kwargs))

    def run_mapped(
        self,
        kernel: Kernel[Any, Any],
        cfg: Any,
        key: Hashable,
        make: Callable[[Callable[..., Any]], Any],
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        """Runs a kernel inside a transformation: `make(run)` is made once for each `key`, which holds the config."""
        try:
            program = kernel._ejkernel_programs[self._key]()[key]
        except (KeyError, TypeError, AttributeError):
            table = self._table(kernel)
            run = self._runner(kernel, table, cfg)
            program = table.get(key) or bounded(table, key, make(lambda *args, **kwargs: run(args, kwargs)))
        try:
            return program(args, kwargs)
        except InputsWanted:
            # Its shards have their data inside the transformation only.
            return self._pipeline.with_inputs(((), {}), lambda: program(args, kwargs))

    def _sharded(self, kernel: Kernel[Any, Any], cfg: Any, args: Args, kwargs: Kwargs) -> Any:
        from ejkernel.ops.execution import sharding

        mesh, in_specs, out_specs = (kwargs.pop(name, None) for name in ("mesh", "in_specs", "out_specs"))
        sharding.check(mesh, in_specs, out_specs)
        make = lambda run: Program(kernel, sharding.sharded_call(run, mesh, in_specs, out_specs))
        key = ("shard_map", mesh, canonical((in_specs, out_specs, cfg)))
        return self.run_mapped(kernel, cfg, key, make, args, kwargs)

    def compile(
        self, kernel: Kernel[Cfg, Out], /, *args: Any, cfg: Cfg | None = None, **kwargs: Any
    ) -> CompiledCall[Out]:
        """A compiled function for arguments like these; it keeps the configs that they get now."""
        _refuse_to_shard(kernel, kwargs, "compile")
        attempt = self._first_attempt(self._invocation_to_choose(kernel, args, kwargs, cfg))
        abstract = Invocation(kernel=kernel, args=args, kwargs=kwargs).is_abstract
        data = None if abstract else lambda: prepared(kernel, args, kwargs)
        backward = self._pipeline.backward_attempt(Fixed(kernel), attempt, data)
        if backward.error is not None:
            raise backward.error
        vjp_cfg = None if BackwardKernel.of(kernel) is None else backward.cfg
        program = Program(kernel, partial(self._pipeline.run, Fixed(kernel, attempt.cfg, vjp_cfg)))
        program.compile(args, kwargs)
        return CompiledCall(program)

    def choose_config(self, kernel: Kernel[Cfg, Any], /, *args: Any, cfg: Cfg | None = None, **kwargs: Any) -> Cfg:
        """The config that a call would get; the call itself is not run, and arguments may be abstract."""
        _refuse_to_shard(kernel, kwargs, "choose_config")
        return self._first_attempt(self._invocation_to_choose(kernel, args, kwargs, cfg)).cfg

    def explain(self, kernel: Kernel[Any, Any], /, *args: Any, cfg: Any = None, **kwargs: Any) -> Explanation:
        """Which tier would answer a call, with which key, and what the other tiers hold; nothing is tuned."""
        _refuse_to_shard(kernel, kwargs, "explain")
        return self.explain_call(self._abstract_invocation(kernel, args, kwargs, cfg))

    def explain_call(self, inv: Invocation[Any, Any]) -> Explanation:
        """Like `explain`, for a call that was recorded or found in a program."""
        kernel = inv.kernel
        assert kernel is not None
        asked: list[Selection] = []

        def choose(inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Any:
            if isinstance(self.chooser, ConfigSelectorChain):
                asked.append(self.chooser.explain(inv, kernel))
            else:
                cfg, name = self.chooser.choose(inv, kernel), type(self.chooser).__name__
                asked.append(Selection(inv, cfg, name, (), AutotunePolicy()))
            return asked[-1].cfg

        attempt = self._first_attempt(inv, choose)
        if not asked:
            choose(attempt.inv, kernel)
        return Explanation(asked[-1], attempt.platform, getattr(attempt.run, "__name__", repr(attempt.run)))

    def _first_attempt(self, inv: Invocation[Any, Any], choose: Choose | None = None) -> Attempt:
        reasons: dict[str, str] = {}
        for attempt in self._pipeline.attempts(inv, reasons, choose):
            if attempt.error is not None:
                raise attempt.error
            return attempt
        raise dispatch.UnsupportedCallError(inv, reasons)

    def _invocation_to_choose(
        self, kernel: Kernel[Any, Any], args: Args, kwargs: Kwargs, cfg: Any
    ) -> Invocation[Any, Any]:
        """The call with its data, if it has any and choosing would measure."""
        inv = self._abstract_invocation(kernel, args, kwargs, cfg)
        concrete = not Invocation(kernel=kernel, args=args, kwargs=kwargs).is_abstract
        if concrete and self._pipeline.needs_inputs(inv):
            args, kwargs = prepared(kernel, args, kwargs)
            inv = replace(inv, args=args, kwargs=kwargs)
        return inv

    def _abstract_invocation(
        self, kernel: Kernel[Any, Any], args: Args, kwargs: Kwargs, cfg: Any
    ) -> Invocation[Any, Any]:
        _check_kernel(kernel)
        arrays, statics = arguments.split((args, kwargs))
        found: list[Invocation[Any, Any]] = []

        def trace(arrays: list[Any]) -> tuple[()]:
            found.append(invocation(kernel, *prepared(kernel, *arguments.merge(arrays, statics))))
            return ()

        jax.eval_shape(trace, arrays)
        return replace(found[0], override_cfg=cfg)

    # --- Programs ---

    def _program_of(self, kernel: Kernel[Any, Any], cfg: Any, args: Args, kwargs: Kwargs) -> Program:
        """What runs a call; found by the config itself where that is possible."""
        _check_kernel(kernel)
        # First of all: if it is changed by another thread meanwhile, these links are no longer its own.
        links = kernel.__dict__.setdefault(PROGRAMS, Links())
        final = _trace_state.value is _EAGER
        # Inside a jitted call batches cannot be seen, and once it is differentiated it is too late to choose.
        if not final and (batches := _differentiated_batches(kernel, args, kwargs)):
            return self._program(kernel, cfg, batches)
        if not final and not is_here():
            return self._program(kernel, cfg)
        try:
            program = links[self._key]()[cfg, final]
        except (KeyError, TypeError):
            program = None
        if program is None or program.cfg is not cfg:
            program = self._program(kernel, cfg, final=final)
            if not is_frozen(cfg):
                return program
            program.cfg = cfg
            table = self._table(kernel)
            table.pop((cfg, final), None)
            bounded(table, (cfg, final), program)
        if final:
            links.latest = weakref.ref(program)
        return program

    def _program(
        self, kernel: Kernel[Any, Any], cfg: Any, batches: tuple[Batch, ...] = (), *, final: bool = False
    ) -> Program:
        _check_kernel(kernel)
        table = self._table(kernel)
        # A program that is compiled ahead has the configs of its target, whichever device it was traced for before.
        target = None if final or is_here() else device_fingerprint()
        key = (batches, final, target, canonical(cfg))
        program = table.get(key)
        if program is None:
            before = partial(_record_data, _holder(kernel)) if kernel.record_integers else None
            trace = self._runner(kernel, table, cfg, batches, final)
            program = bounded(table, key, Program(kernel, trace, cfg=cfg, owner=self, before=before))
        return program

    def _runner(
        self,
        kernel: Kernel[Any, Any],
        table: _Table,
        cfg: Any,
        batches: tuple[Batch, ...] = (),
        final: bool = False,
    ) -> Callable[[Args, Kwargs], Any]:
        """The function that traces a call of `kernel` with `cfg`, for one example of `batches` if there are any."""
        # A copy if it could change: the program belongs to the config as it was given.
        fixed_cfg = cfg if is_frozen(cfg) else copy.deepcopy(cfg)
        return partial(self._trace, kernel.state(), _holder(kernel), weakref.ref(table), fixed_cfg, batches, final)

    def _table(self, kernel: Kernel[Any, Any]) -> _Table:
        """Where the programs of a kernel are; interchangeable instances share it."""
        links = kernel.__dict__.setdefault(PROGRAMS, Links())
        state = kernel.state()
        if state is None:
            # Assigning an attribute drops the token, and with it the table.
            token = links.setdefault(_Token, _Token())
            table = self._own.get(token)
            if table is None:
                table = bounded(self._own, token, _Table())
        else:
            key = (type(kernel), state)
            table = self._shared.get(key)
            if table is None:
                table = bounded(self._shared, key, _Table())
        table.latest = weakref.ref(kernel)
        for dead in [key for key, link in links.items() if key is not _Token and link() is None]:
            del links[dead]
        links[self._key] = weakref.ref(table)
        return table

    def _trace(
        self,
        state: Any,
        holder: Callable[[], Any],
        table: Callable[[], Any],
        cfg: Any,
        batches: tuple[Batch, ...],
        final: bool,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        """Traces with an instance that has not changed since its program was made."""
        kernel, programs = holder(), table()
        if kernel.state() != state and programs is not None:
            latest = programs.latest()
            kernel = latest if latest is not None and latest.state() == state else kernel
        if kernel.state() is None and has_own_gradient(kernel):
            # The programs hold equations, which hold the kernel for their gradient. A copy is used, so that the kernel
            # and its programs are freed when nothing else refers to it.
            kernel = copy.copy(kernel)
        return self._run_here(kernel, cfg, args, kwargs, batches, final)

    def _run_here(
        self,
        kernel: Kernel[Any, Any],
        cfg: Any,
        args: Args,
        kwargs: Kwargs,
        batches: tuple[Batch, ...] = (),
        final: bool = False,
    ) -> Any:
        outer, tracing.active = tracing.active, True
        try:
            return self._pipeline.run(Fixed(kernel, cfg), args, kwargs, batches, final=final)
        finally:
            tracing.active = outer


def _asks_to_shard(kernel: Kernel[Any, Any], kwargs: Kwargs) -> bool:
    """Whether a call is to be wrapped in `shard_map`; a keyword that the kernel's own methods name is theirs."""
    return not _SHARDING.isdisjoint(kwargs) and not (_SHARDING & set(kwargs)) <= _named_keywords(type(kernel))


def _named_keywords(cls: type) -> frozenset[str]:
    found = _keywords.get(cls)
    if found is None:
        methods = [getattr(cls, name) for name in dir(cls) if name == "prepare" or name.startswith("run")]
        functions = filter(inspect.isfunction, methods)
        found = _keywords[cls] = frozenset(name for f in functions for name in inspect.signature(f).parameters)
    return found


def _refuse_to_shard(kernel: Kernel[Any, Any], kwargs: Kwargs, what: str) -> None:
    if _asks_to_shard(kernel, kwargs):
        from ejkernel.ops.execution.sharding import ShardingArgumentError

        raise ShardingArgumentError(
            f"{kernel.op_id}: {what} takes no {', '.join(sorted(_SHARDING & set(kwargs)))}: only a call does. Use "
            "jax.jit of the call, or ask for the arguments of one shard."
        )


def _shows_batch(args: Args, kwargs: Kwargs) -> bool:
    return any(map(_compat.shows_batch, jax.tree.leaves((args, kwargs))))


def _differentiated_batches(kernel: Kernel[Any, Any], args: Args, kwargs: Kwargs) -> tuple[Batch, ...]:
    """The batches around a call, innermost first, if inside one of them it is differentiated."""
    if not _compat.is_transforming():
        return ()
    arrays, _ = arguments.split((args, kwargs))
    if not (_compat.differentiates_batch(arrays) and runs_as_operation(kernel)):
        return ()
    return tuple(Batch(axis, tuple(dims)) for axis, dims in _compat.visible_batches(arrays)[0])


def _check_kernel(kernel: Any) -> None:
    if not isinstance(kernel, Kernel):
        way = f" Write {kernel.__name__}()." if isinstance(kernel, type) and issubclass(kernel, Kernel) else ""
        raise KernelDefinitionError(f"Executor: expected a Kernel instance, got {kernel!r}.{way}")


def _holder(kernel: Kernel[Any, Any]) -> Callable[[], Any]:
    """A reference to a kernel; weak if no other kernel shares its programs, so that they do not keep it alive."""
    return weakref.ref(kernel) if kernel.state() is None else lambda: kernel


def _record_data(holder: Callable[[], Any], args: Args, kwargs: Kwargs) -> None:
    """Records an eager call with its small integers, which tracing would hide."""
    if env.recording() and not any_tracer(args, kwargs):
        kernel = holder()
        args, kwargs = prepared(kernel, args, kwargs)
        registry.note_traced(kernel, Invocation(kernel=kernel, args=args, kwargs=kwargs))


_default: Executor | None = None
_default_lock = threading.Lock()


def default_executor() -> Executor:
    """The executor behind `kernel(...)` and `ejkernel.modules`; one per process, made at first use."""
    global _default
    if _default is None:
        with _default_lock:
            if _default is None:
                _default = Executor()
                services.executor, services.run = _default, _default.run
    return _default


def _default_selector() -> ConfigSelectorChain:
    """Memory, the default store with its packs, and the policy of the environment."""
    from ejkernel.ops.store.persistent import PersistentCache

    return ConfigSelectorChain(persistent=PersistentCache())


def run_by_default(kernel: Kernel[Any, Any], cfg: Any, args: Args, kwargs: Kwargs) -> Any:
    """Runs a kernel through the default executor; in place of it until there is one."""
    return default_executor().run(kernel, cfg, args, kwargs)


def set_default_executor(executor: Executor | None) -> None:
    """Replaces the default executor; with None, a new one is made at the next use."""
    global _default
    if executor is not None and not isinstance(executor, Executor):
        raise ChooserError(f"set_default_executor: expected an Executor, got {type(executor).__name__}.")
    with _default_lock:
        _default = executor
        services.executor, services.run = executor, run_by_default if executor is None else executor.run
    context.invalidate()
