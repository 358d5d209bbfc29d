"""A problem: what is tuned, on which data, and what its right answer is."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.errors import EjkernelError
from ejkernel.ops.config.selection import candidates, heuristic, run_with
from ejkernel.ops.core import dispatch
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.kernel import Invocation, Kernel
from ejkernel.ops.execution import proving
from ejkernel.ops.utils import arguments

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class TuningInputsError(EjkernelError, TypeError):
    """A call has no data to be tuned on, and none can be made up for it."""


@dataclass
class Problem:
    """Functions of `(*args, **kwargs)`, one a config, that should all compute the same."""

    name: str
    make_fn: Callable[[Any], Callable[..., Any]]
    args: Args
    kwargs: Kwargs
    space: Any
    guess: Any = None
    truth: Callable[[], Any] | None = None
    """The right answer; None takes the guess's."""
    mismatch: Callable[[Any, Any], str | None] = proving.mismatch
    prove_gradient: Callable[[Any], str | None] | None = field(default=None)
    """Why a config's gradient is wrong, for kernels whose backward takes the forward's config."""


def from_call(inv: Invocation[Any, Any], kernel: Kernel[Any, Any], configs: Any = None) -> Problem:
    """The problem of one call, forward or backward."""
    args, kwargs = concrete_inputs(inv, kernel)
    space = configs if configs is not None else candidates(inv, kernel)
    guess = heuristic(inv, kernel)
    if isinstance(kernel, BackwardKernel):
        return _backward(inv, kernel, args, kwargs, space, guess)
    return Problem(
        name=inv.op_id,
        make_fn=lambda cfg: lambda *a, **k: run_with(kernel, inv, cfg, a, k),
        args=args,
        kwargs=kwargs,
        space=space,
        guess=guess,
        truth=_reference(kernel, args, kwargs),
        mismatch=_mismatch_of(kernel),
        prove_gradient=_gradient_prover(inv, kernel, args, kwargs, guess),
    )


# --- Data ---


def concrete_inputs(inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> tuple[Args, Kwargs]:
    """The call's own arguments, or legal ones of the same shapes if it is abstract."""
    if not inv.is_abstract:
        return inv.args, dict(inv.kwargs)
    # The same data in every process that tunes the same call.
    key = jax.random.key(zlib.crc32(inv.call_key.encode()))
    owner = kernel.forward if isinstance(kernel, BackwardKernel) else kernel
    if (make := getattr(owner, "example_inputs", None)) is not None:
        args, kwargs = make(inv, key)
        return tuple(args), dict(kwargs)
    return materialise(inv.op_id, (inv.args, dict(inv.kwargs)), key)


def materialise(owner: str, tree: Any, key: jax.Array) -> Any:
    """`tree` with normal floats in place of abstract arrays; integers have a meaning that nobody here knows."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    keys = jax.random.split(key, max(len(paths), 1))
    return treedef.unflatten([_made(owner, path, x, k) for (path, x), k in zip(paths, keys[: len(paths)], strict=True)])


def _made(owner: str, path: Any, x: Any, key: jax.Array) -> Any:
    if not isinstance(x, jax.ShapeDtypeStruct):
        return x
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return _normal(key, x.shape, x.dtype)
    raise TuningInputsError(
        f"{owner}: cannot tune an abstract call: argument {jax.tree_util.keystr(path[1:])} is "
        f"{x.dtype}{list(x.shape)}, and only the kernel knows which integers are legal. Define on the kernel\n"
        "    def example_inputs(self, inv, key):\n"
        "        return args, kwargs  # concrete arrays with the shapes of inv.args and inv.kwargs\n"
        "or call it once outside of jit, where its own arguments are used."
    )


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if jnp.finfo(dtype).bits >= 16 or jnp.issubdtype(dtype, jnp.complexfloating):
        return jax.random.normal(key, shape, dtype)
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)


# --- Right answers ---


def _mismatch_of(kernel: Kernel[Any, Any]) -> Callable[[Any, Any], str | None]:
    own = getattr(kernel, "mismatch", None)
    tolerance = getattr(kernel, "tolerance", None)
    return own if own is not None else lambda got, want: proving.mismatch(got, want, tolerance)


def _reference(kernel: Kernel[Any, Any], args: Args, kwargs: Kwargs) -> Callable[[], Any] | None:
    reference = getattr(kernel, "reference", None)
    return None if reference is None else lambda: reference(*args, **kwargs)


def _gradient_prover(
    inv: Invocation[Any, Any], kernel: Kernel[Any, Any], args: Args, kwargs: Kwargs, guess: Any
) -> Callable[[Any], str | None] | None:
    """For a backward that takes the forward's config: a config may win only if its gradient is right too."""
    if BackwardKernel.of(kernel) is not None or _backward_method(inv, kernel, guess) is None:
        return None

    def gradients(cfg: Any) -> Any:
        method = _backward_method(inv, kernel, cfg)
        assert method is not None
        return _jitted(lambda a, k: _real(method(*_saved(inv, kernel, cfg, a, k), a, k, cfg), a))(args, kwargs)

    def prove(cfg: Any) -> str | None:
        want = _true_gradients(kernel, args, kwargs) or gradients(guess)
        reason = _mismatch_of(kernel)(gradients(cfg), want)
        return None if reason is None else f"gradient: {reason}"

    return prove


def _backward(
    inv: Invocation[Any, Any], kernel: BackwardKernel, args: Args, kwargs: Kwargs, space: Any, guess: Any
) -> Problem:
    forward = inv.metadata.get("forward_cfg")
    forward = heuristic(inv, kernel.forward) if forward is None else forward
    saved = _jitted(lambda a, k: _saved(inv, kernel.forward, forward, a, k))(args, kwargs)
    want = _true_gradients(kernel.forward, args, kwargs)

    def make_fn(cfg: Any) -> Callable[..., Any]:
        method = _backward_method(inv, kernel.forward, cfg)
        if method is None:
            raise NotImplementedError(f"{inv.op_id}: no backward for {cfg!r}")
        return lambda saved, a, k: _real(method(*saved, a, k, cfg), a)

    return Problem(
        name=inv.op_id,
        make_fn=make_fn,
        args=(saved, args, kwargs),
        kwargs={},
        space=space,
        guess=guess,
        truth=None if want is None else lambda: want,
        mismatch=_mismatch_of(kernel.forward),
    )


def _jitted(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn(args, kwargs)` compiled as one program, static leaves as they are."""

    def call(*tree: Any) -> Any:
        arrays, statics = arguments.split(tree)
        return jax.jit(lambda arrays: fn(*arguments.merge(arrays, statics)))(arrays)

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
    return treedef.unflatten(
        [_normal(k, x.shape, x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else _float0(x) for x, k in pairs]
    )


def _float0(x: Any) -> np.ndarray:
    return np.zeros(x.shape, jax.dtypes.float0)


def _platform(inv: Invocation[Any, Any], kernel: Kernel[Any, Any], cfg: Any) -> str:
    named = dispatch.forced_platform(kernel, cfg) or inv.platform
    return named if named is not None else next(dispatch.implementations(kernel, inv.context))[0]


def _backward_method(inv: Invocation[Any, Any], kernel: Kernel[Any, Any], cfg: Any) -> Callable[..., Any] | None:
    """`(residuals, out, dout, args, kwargs, cfg) -> gradients`, from whichever style the kernel is written in."""
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


def _true_gradients(kernel: Kernel[Any, Any], args: Args, kwargs: Kwargs) -> list[Any] | None:
    """The reference's own gradients, for the cotangent that `_saved` makes; None without a reference."""
    reference = getattr(kernel, "reference", None)
    if reference is None:
        return None
    real = [i for i, arg in enumerate(args) if _is_real(arg)]

    def run(*chosen: Any) -> Any:
        merged = list(args)
        for i, x in zip(real, chosen, strict=True):
            merged[i] = x
        return reference(*merged, **kwargs)

    out, pull = jax.vjp(run, *(args[i] for i in real))
    found = dict(zip(real, pull(_cotangent(out)), strict=True))
    return [found.get(i) for i in range(len(args))]


def _is_real(arg: Any) -> bool:
    """Whether an argument is all floating-point arrays, so that it has a gradient of its own shape."""
    leaves = jax.tree.leaves(arg)
    return bool(leaves) and all(arguments.is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves)


def _real(grads: Any, args: Args) -> list[Any]:
    """Gradients of the arguments that have one, as arrays of the argument's dtype; None for the others."""
    return [_filled(grad, arg) if _is_real(arg) else None for grad, arg in zip(grads, args, strict=True)]


def _filled(grad: Any, arg: Any) -> Any:
    leaves, treedef = jax.tree.flatten(arg)
    found = [None] * len(leaves) if grad is None else treedef.flatten_up_to(grad)
    pairs = zip(found, leaves, strict=True)
    return treedef.unflatten([jnp.zeros_like(x) if g is None else jnp.asarray(g).astype(x.dtype) for g, x in pairs])
