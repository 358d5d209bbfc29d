"""Tuning and checking gradients: a kernel's own backward is compared with the gradient of its reference."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.config.asking import heuristic, run_with
from ejkernel.ops.core import dispatch
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.kernel import Invocation, Kernel
from ejkernel.ops.tuning.truth import once
from ejkernel.ops.utils import arguments
from ejkernel.ops.utils.canonical import same_cfg

logger = logging.getLogger("ejkernel.tuning")

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Gradients = dict[str, Any]
"""By the index of the argument: only floating-point arrays have one."""


def prover(
    inv: Invocation[Any, Any],
    kernel: Kernel[Any, Any],
    args: Args,
    kwargs: Kwargs,
    mismatch: Callable[[Any, Any], str | None],
    refusal: Callable[[Any], str | None],
    *,
    by_guess: bool = False,
) -> Callable[[Any], str | None] | None:
    """A function that says why a config's output or gradients under `jax.grad` are wrong, or None.

    A backward that has its own configs runs with its guess: its inputs depend on the forward's config. If the right
    gradient is not known, because neither reference nor guess can be differentiated here, no config is rejected.
    `refusal` says why no call would run with a config, or None. `by_guess` does not use the reference.
    """
    guess, own = heuristic(inv, kernel), BackwardKernel.of(kernel)
    if _method(inv, kernel, guess) is None:
        return None

    def found(cfg: Any) -> tuple[Any, Gradients]:
        here, cfg_back = inv, cfg
        if own is not None:
            here = replace(inv, platform=_platform(inv, kernel, cfg), metadata={**inv.metadata, "forward_cfg": cfg})
            cfg_back = heuristic(replace(here, kernel=own, op_id=own.op_id), own)
        method = _method(here, kernel, cfg_back)
        if method is None:
            raise NotImplementedError(f"{inv.op_id}: no backward for {cfg_back!r}")

        def run(a: Args, k: Kwargs) -> tuple[Any, Gradients]:
            saved = _saved(inv, kernel, cfg, a, k)
            return saved[1], _fitted(method(*saved, a, k, cfg_back), a)

        return _jitted(run)(args, kwargs)

    def reference() -> tuple[Any, Gradients] | None:
        # On its own mesh, the gradient of a reference that communicates is summed over devices; the kernel's may not
        # be.
        return None if inv.axes else _true_pair(kernel, args, kwargs)

    def guessed() -> tuple[Any, Gradients] | None:
        return found(guess) if refusal(guess) is None else None

    @functools.cache
    def truth(of_guess: bool) -> tuple[Any, Gradients] | None:
        sources = [guessed] if by_guess else [reference] if of_guess else [reference, guessed]
        return _first_known(inv.op_id, sources)

    def prove(cfg: Any) -> str | None:
        if _method(inv, kernel, cfg) is None:
            return None  # JAX differentiates code that was already checked.
        is_guess = same_cfg(cfg, guess)
        if own is not None and is_guess:
            return None  # Checked when the backward is tuned; calls that are never differentiated do not need it.
        want = truth(is_guess)
        if want is None and (own is not None or is_guess):
            return None
        got = found(cfg)  # Even if there is nothing to compare it with, it must run.
        if want is None:
            return None
        for what, one, other in zip(("output under grad", "gradient"), got, want, strict=True):
            if (reason := mismatch(one, other)) is not None:
                return f"{what}: {reason}"
        return None

    return prove


def _first_known(owner: str, sources: Sequence[Callable[[], Any]]) -> Any:
    """The first answer that can be computed; a warning if all fail."""
    errors = []
    for source in sources:
        try:
            if (answer := source()) is not None:
                return jax.block_until_ready(answer)
        except Exception as error:  # noqa: BLE001 - the next one may work.
            errors.append(f"{type(error).__name__}: {error}")
    if errors:
        logger.warning("%s: gradients of configs are compared with nothing: %s", owner, "; ".join(errors))
    return None


def backward(
    inv: Invocation[Any, Any], forward: Kernel[Any, Any], args: Args, kwargs: Kwargs
) -> tuple[Callable[[Any], Callable[..., Any]], Any, Callable[[], Gradients] | None]:
    """A backward that is tuned separately: functions of `(saved, args, kwargs)`, the saved values, right gradients.

    The right gradients are computed on first use; None if they are not known.
    """
    cfg = inv.metadata.get("forward_cfg")
    cfg = heuristic(inv, forward) if cfg is None else cfg
    saved = _jitted(lambda a, k: _saved(inv, forward, cfg, a, k))(args, kwargs)

    def make_fn(cfg: Any) -> Callable[..., Any]:
        method = _method(inv, forward, cfg)
        if method is None:
            raise NotImplementedError(f"{inv.op_id}: no backward for {cfg!r}")
        return lambda saved, a, k: _fitted(method(*saved, a, k, cfg), a)

    def truth() -> Gradients:
        pair = _true_pair(forward, args, kwargs)
        assert pair is not None
        return pair[1]

    return make_fn, saved, None if getattr(forward, "reference", None) is None else truth


def under_gradient(inv: Invocation[Any, Any], kernel: Kernel[Any, Any], cfg: Any) -> Callable[..., Any] | None:
    """The function that runs under `jax.grad` with a config; None if JAX differentiates the ordinary one.

    It returns the output and the gradients; or the residuals, for a backward that has its own configs.
    """
    method = _method(inv, kernel, cfg)
    if method is None:
        return None
    own = BackwardKernel.of(kernel)

    def run(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        residuals, out, dout = _saved(inv, kernel, cfg, args, kwargs)
        return out, residuals if own is not None else _fitted(method(residuals, out, dout, args, kwargs, cfg), args)

    return run


def normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Normal numbers of any floating-point dtype."""
    if jnp.issubdtype(dtype, jnp.complexfloating) or jnp.finfo(dtype).bits >= 16:
        return jax.random.normal(key, shape, dtype)
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)


def _jitted(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn(args, kwargs)` compiled as one program, static leaves as they are."""

    def call(*tree: Any) -> Any:
        run, arrays = arguments.on_arrays(fn, tree)
        return jax.jit(run)(*arrays)

    return call


def _saved(inv: Invocation[Any, Any], kernel: Kernel[Any, Any], cfg: Any, args: Args, kwargs: Kwargs) -> Any:
    """(residuals, out, cotangent) of the forward; the cotangent is normal, like a real one."""
    platform = _platform(inv, kernel, cfg)
    forward = dispatch.find(kernel, "fwd_with_residuals", inv.context, platform)
    if forward is not None and dispatch.find(kernel, "vjp", inv.context, platform) is not None:
        out, residuals = forward(*args, cfg=cfg, **kwargs)
    else:
        out, residuals = run_with(kernel, inv, cfg, args, kwargs), None
    return residuals, out, _cotangent(out)


def _cotangent(out: Any) -> Any:
    leaves, treedef = jax.tree.flatten(out)
    keys = jax.random.split(jax.random.key(1), max(len(leaves), 1))
    pairs = zip(leaves, keys[: len(leaves)], strict=True)
    zero = lambda x: np.zeros(x.shape, jax.dtypes.float0)
    return treedef.unflatten(
        [normal(k, x.shape, x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else zero(x) for x, k in pairs]
    )


def _platform(inv: Invocation[Any, Any], kernel: Kernel[Any, Any], cfg: Any) -> str:
    named = dispatch.forced_platform(kernel, cfg) or inv.platform
    return named if named is not None else next(dispatch.implementations(kernel, inv.context))[0]


def _method(inv: Invocation[Any, Any], kernel: Kernel[Any, Any], cfg: Any) -> Callable[..., Any] | None:
    """`(residuals, out, dout, args, kwargs, cfg) -> gradients`, for any style that the kernel is written in."""
    platform = _platform(inv, kernel, cfg)
    vjp = dispatch.find(kernel, "vjp", inv.context, platform)
    if vjp is not None and dispatch.find(kernel, "fwd_with_residuals", inv.context, platform) is not None:
        return lambda residuals, out, dout, a, k, cfg: vjp(residuals, out, dout, *a, cfg=cfg, **k)
    own = getattr(kernel, "custom_vjp", None)
    if own is None:
        return None

    def custom(residuals: Any, out: Any, dout: Any, a: Args, k: Kwargs, cfg: Any) -> Any:
        return own(a, cfg, k, tuple(dout) if isinstance(dout, (tuple, list)) else (dout,))

    return custom


def _true_pair(kernel: Kernel[Any, Any], args: Args, kwargs: Kwargs) -> tuple[Any, Gradients] | None:
    """The reference's output and own gradients, for the cotangent that `_saved` makes; None without a reference."""
    reference = getattr(kernel, "reference", None)
    if reference is None:
        return None

    def pair(args: Args, kwargs: Kwargs) -> tuple[Any, Gradients]:
        leaves, treedef = jax.tree.flatten(args)
        places = {place: i for i, place in enumerate(_places(args)) if _has_gradient(leaves[i])}

        def run(chosen: Gradients) -> Any:
            merged = list(leaves)
            for place, x in chosen.items():
                merged[places[place]] = x
            return reference(*treedef.unflatten(merged), **kwargs)

        out, pull = jax.vjp(run, {place: leaves[i] for place, i in places.items()})
        return out, pull(_cotangent(out))[0]

    return once(pair, args, kwargs)


def _places(args: Args) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(args)[0]]


def _has_gradient(x: Any) -> bool:
    return arguments.is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)


def _fitted(grads: Any, args: Args) -> Gradients:
    """The gradients that a backward returned, in the arguments' dtypes, None as zeros."""
    found: list[Any] = []
    for grad, arg in zip(grads, args, strict=True):
        leaves, treedef = jax.tree.flatten(arg)
        found += [None] * len(leaves) if grad is None else treedef.flatten_up_to(grad)
    triples = zip(_places(args), found, jax.tree.leaves(args), strict=True)
    return {
        place: jnp.zeros_like(x) if grad is None else jnp.asarray(grad).astype(x.dtype)
        for place, grad, x in triples
        if _has_gradient(x)
    }
