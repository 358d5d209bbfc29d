"""Runs kernels: prepare, select, differentiate, label, run, record; all of it while tracing, none of it per call."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax

from ejkernel.errors import EjkernelError
from ejkernel.ops import registry
from ejkernel.ops.config.context import hashable
from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.config.selection import ConfigSelectorChain, Selection, heuristic
from ejkernel.ops.core import autodiff, dispatch
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.kernel import Invocation, Kernel, KernelDefinitionError
from ejkernel.ops.utils import arguments
from ejkernel.ops.utils.fingerprint import abstractify
from ejkernel.ops.utils.meta import DEFAULT_PREFIX, label_scope

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class ConfigChooser(Protocol):
    """Anything that chooses configs."""

    def choose(self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Any:
        """The config to run `inv` with."""
        ...


class ChooserError(EjkernelError, TypeError):
    """What was given to choose configs cannot choose."""


class _StaticFound(Exception):  # noqa: N818 - control flow: never reaches a user
    """While tracing: an argument is a Python scalar, which is static here and an array to `jax.jit`."""


class _InputsWanted(Exception):  # noqa: N818 - control flow: never reaches a user
    """While tracing: the config will be measured, so the call's own data is wanted if there is any."""


@dataclass(frozen=True)
class _Frozen:
    """What is fixed about a call before it is traced."""

    kernel: Kernel[Any, Any]
    cfg: Any = None
    vjp_cfg: Any = None


@dataclass(frozen=True)
class Attempt:
    """One implementation that may serve a call, with the config that it would get."""

    inv: Invocation[Any, Any]
    platform: str
    run: Callable[..., Any]
    cfg: Any


@dataclass(frozen=True)
class Explanation:
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


class Executor:
    """Calls kernels like JAX functions.

    An eager call is one jitted call: JAX's own dispatch finds the compiled program, and everything else here happens
    while tracing, once for each distinct call.
    """

    def __init__(self, chooser: ConfigChooser | None = None, *, stamp_prefix: str = DEFAULT_PREFIX) -> None:
        if chooser is not None and not callable(getattr(chooser, "choose", None)):
            raise ChooserError(f"Executor: a chooser needs choose(inv, kernel), got {type(chooser).__name__}.")
        self.chooser: ConfigChooser = chooser if chooser is not None else ConfigSelectorChain()
        self.stamp_prefix = stamp_prefix
        self._calls: dict[Hashable, Callable[..., Any]] = {}
        self._checked_calls: dict[Hashable, Callable[..., Any]] = {}
        self._local = threading.local()

    # --- Calling ---

    def __call__(self, kernel: Kernel[Any, Any], /, *args: Any, cfg: Any = None, **kwargs: Any) -> Any:
        """Runs `kernel` on the arguments, with `cfg` or with the config that the chooser gives."""
        key = kernel if cfg is None else (kernel, cfg)
        try:
            call = self._calls.get(key)
        except TypeError:
            key = (kernel, hashable(cfg))
            call = self._calls.get(key)
        if call is None:
            call = self._new_call(key, _Frozen(kernel, cfg))
        # Optimistic: let JAX flatten the arguments and find out while tracing if some of them are static.
        try:
            return call(*args, **kwargs)
        except _StaticFound:
            pass
        except _InputsWanted:
            return self._with_inputs(call, kernel, args, kwargs)
        except TypeError:
            if all(map(arguments.is_array, jax.tree.leaves((args, kwargs)))):
                raise
        call = self._calls[key] = partial(self._checked, key, _Frozen(kernel, cfg))
        return call(*args, **kwargs)

    def compile(self, kernel: Kernel[Any, Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """A jitted function of arguments like these, compiled, with the configs they get now for good."""
        inv = self._abstract_invocation(kernel, args, kwargs)
        backward = BackwardKernel.of(kernel)
        vjp_cfg = None if backward is None else self.chooser.choose(_backward_invocation(backward, inv), backward)
        frozen = _Frozen(kernel, self.choose_config(kernel, *args, **kwargs), vjp_cfg)
        arrays, statics = arguments.split((args, kwargs))
        key = ("compiled", kernel, hashable(frozen.cfg), hashable(vjp_cfg))
        fixed = partial(self._checked, key, frozen)
        if kernel.jit:
            self._checked_call(key, frozen, statics).lower(arrays).compile()
        return fixed

    def _new_call(self, key: Hashable, frozen: _Frozen) -> Callable[..., Any]:
        kernel = frozen.kernel
        if not isinstance(kernel, Kernel):
            raise KernelDefinitionError(f"Executor: expected a Kernel instance, got {kernel!r}.")

        def call(*args: Any, **kwargs: Any) -> Any:
            if any(_looks_static(x) for x in jax.tree.leaves((args, kwargs))):
                raise _StaticFound
            return self._trace(frozen, args, kwargs)

        if not kernel.jit:
            return self._calls.setdefault(key, partial(self._trace_eagerly, frozen))
        jitted = jax.jit(_named(call, kernel))
        if kernel.record_integers:
            jitted = partial(self._record_then_call, kernel, jitted)
        return self._calls.setdefault(key, jitted)

    def _checked(self, key: Hashable, frozen: _Frozen, /, *args: Any, **kwargs: Any) -> Any:
        """Calls with the static leaves taken out first, for arguments that are not all arrays."""
        kernel = frozen.kernel
        if kernel.record_integers:
            self._record_concrete(kernel, args, kwargs)
        arrays, statics = arguments.split((args, kwargs))
        call = self._checked_call(key, frozen, statics)
        try:
            return call(arrays)
        except _InputsWanted:
            return self._with_inputs(lambda *a, **k: call(arrays), kernel, args, kwargs)

    def _checked_call(self, key: Hashable, frozen: _Frozen, statics: arguments.Statics) -> Any:
        full_key = (key, arguments.static_key(frozen.kernel.op_id, statics))
        call = self._checked_calls.get(full_key)
        if call is None:

            def traced(arrays: list[Any]) -> Any:
                args, kwargs = arguments.merge(arrays, statics)
                return self._trace(frozen, args, kwargs)

            call = jax.jit(_named(traced, frozen.kernel)) if frozen.kernel.jit else traced
            if len(self._checked_calls) >= _MAX_STATIC_VARIANTS:
                self._checked_calls.clear()
            self._checked_calls[full_key] = call
        return call

    def _with_inputs(self, call: Callable[..., Any], kernel: Kernel[Any, Any], args: Args, kwargs: Kwargs) -> Any:
        """Calls again, with the data that tuning will use within reach of the trace, if there is any."""
        tracing = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((args, kwargs)))
        self._local.inputs = ((), {}, False) if tracing else (*_prepared(kernel, args, kwargs), True)
        try:
            return call(*args, **kwargs)
        finally:
            self._local.inputs = None

    def _record_then_call(self, kernel: Kernel[Any, Any], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._record_concrete(kernel, args, kwargs)
        return call(*args, **kwargs)

    def _record_concrete(self, kernel: Kernel[Any, Any], args: Args, kwargs: Kwargs) -> None:
        if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((args, kwargs))):
            args, kwargs = _prepared(kernel, args, kwargs)
            registry.note_traced(kernel, Invocation(kernel=kernel, args=args, kwargs=kwargs))

    # --- Asking ---

    def choose_config(self, kernel: Kernel[Any, Any], /, *args: Any, **kwargs: Any) -> Any:
        """The config that a call would get; the call itself is not run, and arguments may be abstract."""
        inv = self._abstract_invocation(kernel, args, kwargs)
        if self._needs_inputs(inv, kernel) and not Invocation(kernel=kernel, args=args, kwargs=kwargs).is_abstract:
            args, kwargs = _prepared(kernel, args, kwargs)
            inv = replace(inv, args=args, kwargs=kwargs)
        return self._first_attempt(inv).cfg

    def explain(self, kernel: Kernel[Any, Any], /, *args: Any, **kwargs: Any) -> Explanation:
        """Which tier would answer a call, with which key, and what the other tiers hold; nothing is tuned."""
        inv = self._abstract_invocation(kernel, args, kwargs)
        ask = getattr(self.chooser, "explain", None)

        def choose(inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Any:
            nonlocal selection
            if ask is not None:
                selection = ask(inv, kernel)
            else:
                name = type(self.chooser).__name__
                selection = Selection(inv, self.chooser.choose(inv, kernel), name, (), AutotunePolicy())
            return selection.cfg

        selection: Selection | None = None
        attempt = self._first_attempt(inv, choose)
        assert selection is not None
        return Explanation(selection, attempt.platform, getattr(attempt.run, "__name__", repr(attempt.run)))

    def _first_attempt(self, inv: Invocation[Any, Any], choose: Callable[..., Any] | None = None) -> Attempt:
        reasons: dict[str, str] = {}
        for attempt in self._attempts(inv, reasons, choose or self.chooser.choose):
            return attempt
        raise dispatch.UnsupportedCallError(inv, reasons)

    def _needs_inputs(self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> bool:
        ask = getattr(self.chooser, "needs_inputs", None)
        return ask is not None and ask(inv, kernel)

    def _abstract_invocation(self, kernel: Kernel[Any, Any], args: Args, kwargs: Kwargs) -> Invocation[Any, Any]:
        arrays, statics = arguments.split((args, kwargs))
        found: list[Invocation[Any, Any]] = []

        def trace(arrays: list[Any]) -> tuple[()]:
            found.append(_invocation(kernel, *_prepared(kernel, *arguments.merge(arrays, statics))))
            return ()

        jax.eval_shape(trace, arrays)
        return found[0]

    # --- Tracing ---

    def _trace_eagerly(self, frozen: _Frozen, *args: Any, **kwargs: Any) -> Any:
        """For kernels that opt out of jit: everything at every call, on the values themselves."""
        self._local.inputs = (*_prepared(frozen.kernel, args, kwargs), True)
        try:
            return self._trace(frozen, args, kwargs)
        finally:
            self._local.inputs = None

    def _trace(self, frozen: _Frozen, args: Args, kwargs: Kwargs) -> Any:
        kernel = frozen.kernel
        args, kwargs = _prepared(kernel, args, kwargs)
        inv = replace(_invocation(kernel, args, kwargs), override_cfg=frozen.cfg)
        registry.note_traced(kernel, inv)
        # Taken, not read: a kernel may call other kernels, and these inputs are not theirs.
        inputs, self._local.inputs = getattr(self._local, "inputs", None), None
        if inputs is None and self._needs_inputs(inv, kernel):
            raise _InputsWanted
        if inputs is not None and inputs[2]:
            inv = replace(inv, args=inputs[0], kwargs=inputs[1])
        reasons: dict[str, str] = {}
        for attempt in self._attempts(inv, reasons, self.chooser.choose):
            try:
                return self._differentiable(frozen, attempt, args, kwargs)
            except NotImplementedError as error:
                reasons[attempt.platform] = str(error) or "not implemented"
        raise dispatch.UnsupportedCallError(inv, reasons)

    def _attempts(
        self, inv: Invocation[Any, Any], reasons: dict[str, str], choose: Callable[..., Any]
    ) -> Iterator[Attempt]:
        """The implementations that may serve `inv`, best first; `reasons` collects why the others may not."""
        kernel = inv.kernel
        assert kernel is not None
        forced = dispatch.forced_platform(kernel, inv.override_cfg)
        if forced is not None:
            yield from self._attempt(inv, forced, inv.override_cfg, reasons)
            return
        for platform, run in dispatch.implementations(kernel, inv.context):
            on_platform = replace(inv, platform=platform)
            if (reason := dispatch.refusal(kernel, on_platform, platform)) is not None:
                reasons[platform] = reason
                continue
            cfg = inv.override_cfg if inv.override_cfg is not None else choose(on_platform, kernel)
            named = dispatch.forced_platform(kernel, cfg)
            if named not in (None, platform):
                yield from self._attempt(inv, named, cfg, reasons)
                # The chosen backend cannot serve after all: go on with this platform's guess.
                cfg = heuristic(on_platform, kernel)
                if dispatch.forced_platform(kernel, cfg) not in (None, platform):
                    continue
            yield Attempt(on_platform, platform, run, cfg)

    def _attempt(
        self, inv: Invocation[Any, Any], platform: str, cfg: Any, reasons: dict[str, str]
    ) -> Iterable[Attempt]:
        assert inv.kernel is not None
        run = dispatch.forced_implementation(inv.kernel, inv.context, platform)
        on_platform = replace(inv, platform=platform)
        if (reason := dispatch.refusal(inv.kernel, on_platform, platform)) is not None:
            reasons[platform] = reason
            return ()
        return (Attempt(on_platform, platform, run, cfg),)

    # --- Differentiating ---

    def _differentiable(self, frozen: _Frozen, attempt: Attempt, args: Args, kwargs: Kwargs) -> Any:
        kernel = frozen.kernel
        primal = partial(self._labelled, attempt, attempt.run)
        if _residual_pair(kernel, attempt) is not None:
            forward = partial(self._forward_with_residuals, frozen, attempt)
            backward = partial(self._vjp, frozen)
        elif hasattr(kernel, "custom_vjp"):
            forward = lambda *a, **k: (primal(*a, **k), autodiff.Note(attempt))
            backward = partial(self._custom_vjp, frozen)
        else:
            return primal(*args, **kwargs)
        return autodiff.with_gradient(kernel.op_id, primal, forward, backward, args, kwargs)

    def _labelled(self, attempt: Attempt, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with label_scope(attempt.inv, self.stamp_prefix):
            return method(*args, cfg=attempt.cfg, **kwargs)

    def _forward_with_residuals(self, frozen: _Frozen, first: Attempt, *args: Any, **kwargs: Any) -> Any:
        reasons: dict[str, str] = {}
        later = (a for a in self._attempts(first.inv, {}, self.chooser.choose) if a.platform != first.platform)
        for attempt in itertools.chain([first], later):
            pair = _residual_pair(frozen.kernel, attempt)
            if pair is None:
                continue
            try:
                out, residuals = self._labelled(attempt, pair[0], *args, **kwargs)
            except NotImplementedError as error:
                reasons[attempt.platform] = str(error) or "not implemented"
            else:
                return out, (residuals, out, autodiff.Note(attempt))
        raise dispatch.UnsupportedCallError(first.inv, reasons)

    def _vjp(self, frozen: _Frozen, saved: Any, cotangent: Any, args: Args, kwargs: Kwargs) -> Any:
        residuals, out, note = saved
        attempt = self._backward_attempt(frozen, note.value)
        pair = _residual_pair(frozen.kernel, attempt)
        if pair is None:
            raise KernelDefinitionError(
                f"{attempt.inv.op_id}: the backward's config names platform {attempt.platform!r}, for which the kernel "
                "has no fwd_with_residuals and vjp."
            )
        return self._labelled(attempt, partial(pair[1], residuals, out, cotangent), *args, **kwargs)

    def _custom_vjp(self, frozen: _Frozen, note: Any, cotangent: Any, args: Args, kwargs: Kwargs) -> Any:
        attempt = self._backward_attempt(frozen, note.value)
        cotangents = tuple(cotangent) if isinstance(cotangent, (tuple, list)) else (cotangent,)
        with label_scope(attempt.inv, self.stamp_prefix):
            return frozen.kernel.custom_vjp(args, attempt.cfg, kwargs, cotangents)  # pyright: ignore[reportAttributeAccessIssue]

    def _backward_attempt(self, frozen: _Frozen, forward: Attempt) -> Attempt:
        """The forward's attempt, or one with the backward's own config and label if the kernel has them."""
        backward = BackwardKernel.of(frozen.kernel)
        if backward is None:
            return forward
        inv = _backward_invocation(backward, forward.inv)
        registry.note_traced(backward, inv)
        cfg = frozen.vjp_cfg if frozen.vjp_cfg is not None else self.chooser.choose(inv, backward)
        platform = dispatch.forced_platform(frozen.kernel, cfg) or forward.platform
        return Attempt(inv, platform, forward.run, cfg)


_MAX_STATIC_VARIANTS = 4096
"""A static value that changes at every call must not fill the memory; JAX's own caches have this size too."""


def _residual_pair(kernel: Kernel[Any, Any], attempt: Attempt) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """`fwd_with_residuals` and `vjp` for the platform of an attempt, if the kernel has both."""
    forward, vjp = (
        dispatch.find(kernel, method, attempt.inv.context, attempt.platform) for method in ("fwd_with_residuals", "vjp")
    )
    return None if forward is None or vjp is None else (forward, vjp)


def _backward_invocation(backward: BackwardKernel, inv: Invocation[Any, Any]) -> Invocation[Any, Any]:
    return replace(
        inv,
        kernel=backward,
        op_id=backward.op_id,
        args=inv.abstract_args,
        kwargs=inv.abstract_kwargs,
        override_cfg=None,
    )


def _invocation(kernel: Kernel[Any, Any], args: Args, kwargs: Kwargs) -> Invocation[Any, Any]:
    return Invocation(
        kernel=kernel, args=abstractify(args), kwargs=abstractify(kwargs), context=dispatch.current_context()
    )


def _prepared(kernel: Kernel[Any, Any], args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    prepared = kernel.prepare(*args, **kwargs)
    if not (isinstance(prepared, tuple) and len(prepared) == 2 and isinstance(prepared[1], dict)):
        raise KernelDefinitionError(
            f"{kernel.op_id}: prepare must return (args, kwargs), a sequence and a dict, got {type(prepared).__name__}."
        )
    return tuple(prepared[0]), prepared[1]


def _looks_static(x: Any) -> bool:
    """Whether a traced leaf may have been a Python scalar: weakly typed, or a bool, which never is."""
    if not arguments.is_array(x):
        return True
    aval = jax.typeof(x)
    return aval.shape == () and (getattr(aval, "weak_type", False) or aval.dtype == bool)


def _named(fn: Callable[..., Any], kernel: Kernel[Any, Any]) -> Callable[..., Any]:
    fn.__name__ = fn.__qualname__ = re.sub(r"\W", "_", kernel.op_id)
    return fn


_default: Executor | None = None
_default_lock = threading.Lock()


def default_executor() -> Executor:
    """The executor behind `kernel(...)` and `ejkernel.modules`: one a process, made at first use."""
    global _default
    if _default is None:
        with _default_lock:
            if _default is None:
                _default = Executor(ConfigSelectorChain(policy=AutotunePolicy.from_environment()))
    return _default


def set_default_executor(executor: Executor | None) -> None:
    """Replaces the default executor; None has a new one made at next use."""
    global _default
    if executor is not None and not isinstance(executor, Executor):
        raise ChooserError(f"set_default_executor: expected an Executor, got {type(executor).__name__}.")
    with _default_lock:
        _default = executor
