"""What is tuned of a call's gradient: its backward, or calls of other operations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops.config.asking import heuristic, on_its_platform
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.kernel import Invocation, Kernel, has_own_gradient
from ejkernel.ops.execution.executor import Executor, set_default_executor
from ejkernel.ops.execution.pipeline import backward_invocation
from ejkernel.ops.utils.services import services

Call = Invocation[Any, Any]


def calls_of(kernel: Kernel[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], forward: Call) -> list[Call]:
    """The calls that are tuned for the gradient of `forward`, which is `kernel` with `args` and `kwargs`."""
    own = BackwardKernel.of(kernel)
    if own is not None:
        backward = backward_invocation(own, on_its_platform(forward, kernel))
        return [replace(backward, args=forward.args, kwargs=forward.kwargs)]
    return _of_others(kernel, args, kwargs, forward) if has_own_gradient(kernel) else []


class _Asked:
    """A chooser that guesses, and notes who asked."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str], Call] = {}

    def choose(self, inv: Call, kernel: Kernel[Any, Any]) -> Any:
        abstract = {"args": inv.abstract_args, "kwargs": inv.abstract_kwargs, "platform": None}
        self.calls[inv.op_id, inv.call_key] = replace(inv, kernel=kernel, **abstract)
        return heuristic(inv, kernel)


def _of_others(kernel: Kernel[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], forward: Call) -> list[Call]:
    """The calls of other operations that the gradient of a call makes; nothing is run."""
    asked, default = _Asked(), services.executor
    moving = [i for i, x in enumerate(args) if x is not None and jnp.issubdtype(x.dtype, jnp.inexact)]
    traced = {name: x for name, x in kwargs.items() if isinstance(x, jax.ShapeDtypeStruct)}

    def gradients(args: Any, arrays: Any) -> Any:
        put = lambda moved: [*(moved[moving.index(i)] if i in moving else x for i, x in enumerate(args))]
        run = lambda *moved: kernel(*put(moved), **{**kwargs, **arrays})
        out, pull = jax.vjp(run, *(args[i] for i in moving))
        return pull(jax.tree.map(jnp.zeros_like, out))

    # An executor that has traced nothing yet: it asks for every call.
    set_default_executor(Executor(asked))
    try:
        jax.eval_shape(gradients, args, traced)
    finally:
        set_default_executor(default)
    return [inv for key, inv in asked.calls.items() if key != (forward.op_id, forward.call_key)]
