"""Calls kernels like JAX functions, and says what it would do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from ejkernel.errors import EjkernelError
from ejkernel.ops import registry
from ejkernel.ops.config import selection
from ejkernel.ops.config.context import hashable
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.config.selection import ConfigSelectorChain, Selection
from ejkernel.ops.core import dispatch
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.kernel import PROGRAMS, Invocation, Kernel, KernelDefinitionError
from ejkernel.ops.execution.pipeline import (
    Args,
    Attempt,
    Choose,
    Fixed,
    InputsWanted,
    Kwargs,
    Pipeline,
    any_tracer,
    backward_invocation,
    invocation,
    prepared,
)
from ejkernel.ops.execution.pipeline import ConfigChooser as ConfigChooser
from ejkernel.ops.execution.program import Program, StaticFound
from ejkernel.ops.utils import arguments
from ejkernel.ops.utils.meta import DEFAULT_PREFIX


class ChooserError(EjkernelError, TypeError):
    """What was given to choose configs cannot choose."""


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

    An eager call is one jitted call: JAX's own dispatch finds the compiled program, and everything else happens while
    tracing, once for each distinct call.
    """

    def __init__(self, chooser: ConfigChooser | None = None, *, stamp_prefix: str = DEFAULT_PREFIX) -> None:
        if chooser is not None and not callable(getattr(chooser, "choose", None)):
            raise ChooserError(f"Executor: a chooser needs choose(inv, kernel), got {type(chooser).__name__}.")
        self.chooser: ConfigChooser = chooser if chooser is not None else ConfigSelectorChain()
        self._pipeline = Pipeline(self.chooser, stamp_prefix)
        self._tables: dict[Hashable, dict[Hashable, Program]] = {}

    def __call__(self, kernel: Kernel[Any, Any], /, *args: Any, cfg: Any = None, **kwargs: Any) -> Any:
        """Runs `kernel` on the arguments, with `cfg` or with the config that the chooser gives."""
        try:
            program = kernel.__dict__[PROGRAMS][self][cfg]
        except (KeyError, TypeError, AttributeError):
            program = self._program(kernel, cfg)
        try:
            return program.call(*args, **kwargs)
        except InputsWanted:
            pass
        except (StaticFound, TypeError) as error:
            try:
                return program.recover(error, args, kwargs)
            except InputsWanted:
                pass
        return self._pipeline.with_inputs(kernel, args, kwargs, lambda: _call(program, args, kwargs))

    def compile(self, kernel: Kernel[Any, Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """A jitted function of arguments like these, compiled, with the configs they get now for good."""
        cfg, vjp_cfg = self.choose_config(kernel, *args, **kwargs), None
        if (backward := BackwardKernel.of(kernel)) is not None:
            inv = backward_invocation(backward, self._abstract_invocation(kernel, args, kwargs))
            vjp_cfg = self.chooser.choose(inv, backward)
        program = Program(kernel, partial(self._pipeline.run, Fixed(kernel, cfg, vjp_cfg)))
        program.compile(args, kwargs)
        return lambda *args, **kwargs: _call(program, args, kwargs)

    def choose_config(self, kernel: Kernel[Any, Any], /, *args: Any, **kwargs: Any) -> Any:
        """The config that a call would get; the call itself is not run, and arguments may be abstract."""
        inv = self._abstract_invocation(kernel, args, kwargs)
        concrete = not Invocation(kernel=kernel, args=args, kwargs=kwargs).is_abstract
        if concrete and self._pipeline.needs_inputs(inv):
            args, kwargs = prepared(kernel, args, kwargs)
            inv = replace(inv, args=args, kwargs=kwargs)
        return self._first_attempt(inv).cfg

    def explain(self, kernel: Kernel[Any, Any], /, *args: Any, **kwargs: Any) -> Explanation:
        """Which tier would answer a call, with which key, and what the other tiers hold; nothing is tuned."""
        asked: list[Selection] = []

        def choose(inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Any:
            if isinstance(self.chooser, ConfigSelectorChain):
                asked.append(self.chooser.explain(inv, kernel))
            else:
                cfg, name = self.chooser.choose(inv, kernel), type(self.chooser).__name__
                asked.append(Selection(inv, cfg, name, (), AutotunePolicy()))
            return asked[-1].cfg

        attempt = self._first_attempt(self._abstract_invocation(kernel, args, kwargs), choose)
        return Explanation(asked[-1], attempt.platform, getattr(attempt.run, "__name__", repr(attempt.run)))

    def _first_attempt(self, inv: Invocation[Any, Any], choose: Choose | None = None) -> Attempt:
        reasons: dict[str, str] = {}
        for attempt in self._pipeline.attempts(inv, reasons, choose):
            return attempt
        raise dispatch.UnsupportedCallError(inv, reasons)

    def _abstract_invocation(self, kernel: Kernel[Any, Any], args: Args, kwargs: Kwargs) -> Invocation[Any, Any]:
        arrays, statics = arguments.split((args, kwargs))
        found: list[Invocation[Any, Any]] = []

        def trace(arrays: list[Any]) -> tuple[()]:
            found.append(invocation(kernel, *prepared(kernel, *arguments.merge(arrays, statics))))
            return ()

        jax.eval_shape(trace, arrays)
        return found[0]

    def _program(self, kernel: Kernel[Any, Any], cfg: Any) -> Program:
        if not isinstance(kernel, Kernel):
            raise KernelDefinitionError(f"Executor: expected a Kernel instance, got {kernel!r}.")
        state = kernel.state()
        tables = kernel.__dict__.setdefault(PROGRAMS, {})
        if self not in tables:
            # Interchangeable instances share one table.
            tables[self] = {} if state is None else self._tables.setdefault((type(kernel), state), {})
        key = hashable(cfg)
        program = tables[self].get(key)
        if program is None:
            before = partial(_record_data, kernel) if kernel.record_integers else None
            program = Program(kernel, partial(self._trace, state, Fixed(kernel, cfg)), before)
        return tables[self].setdefault(key, program)

    def _trace(self, state: Any, fixed: Fixed, args: Args, kwargs: Kwargs) -> Any:
        if fixed.kernel.state() != state:
            raise KernelDefinitionError(
                f"{fixed.kernel.op_id}: attributes changed after the first call. Kernels are values: make a new one."
            )
        return self._pipeline.run(fixed, args, kwargs)


def _call(program: Program, args: Args, kwargs: Kwargs) -> Any:
    try:
        return program.call(*args, **kwargs)
    except (StaticFound, TypeError) as error:
        return program.recover(error, args, kwargs)


def _record_data(kernel: Kernel[Any, Any], args: Args, kwargs: Kwargs) -> None:
    """Records an eager call with its small integers, before tracing takes them away."""
    if not any_tracer(args, kwargs):
        args, kwargs = prepared(kernel, args, kwargs)
        registry.note_traced(kernel, Invocation(kernel=kernel, args=args, kwargs=kwargs))


def _new_tuner() -> Any:
    from ejkernel.ops.execution.tuner import Autotuner

    return Autotuner()


selection.default_tuner = _new_tuner

_default: Executor | None = None
_default_lock = threading.Lock()


def default_executor() -> Executor:
    """The executor behind `kernel(...)` and `ejkernel.modules`: one a process, made at first use."""
    global _default
    if _default is None:
        with _default_lock:
            if _default is None:
                policy = AutotunePolicy.from_environment()
                _default = Executor(ConfigSelectorChain(persistent=PersistentCache(), policy=policy))
    return _default


def call_by_default(kernel: Kernel[Any, Any], /, *args: Any, **kwargs: Any) -> Any:
    """Runs a kernel through the default executor."""
    return (_default or default_executor())(kernel, *args, **kwargs)


def set_default_executor(executor: Executor | None) -> None:
    """Replaces the default executor; None has a new one made at next use."""
    global _default
    if executor is not None and not isinstance(executor, Executor):
        raise ChooserError(f"set_default_executor: expected an Executor, got {type(executor).__name__}.")
    with _default_lock:
        _default = executor
