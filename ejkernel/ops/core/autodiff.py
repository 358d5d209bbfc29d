"""Three ways to write a gradient, one `jax.custom_vjp`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ejkernel import _compat
from ejkernel.errors import EjkernelError
from ejkernel.ops.core.call import Flat
from ejkernel.ops.utils import arguments

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Backward = Callable[[Any, Any, Args, Kwargs], Sequence[Any]]
"""(residuals, cotangent of the output, args, kwargs) -> one gradient per positional argument."""


class GradientError(EjkernelError, TypeError):
    """A kernel's gradient does not fit its arguments, or is needed where there is none."""


def checked_pair(owner: str, found: Any) -> tuple[Any, Any]:
    """What `fwd_with_residuals` returned; an array would be taken for its rows."""
    if not (isinstance(found, tuple) and len(found) == 2):
        raise GradientError(
            f"{owner}: fwd_with_residuals must return a pair, the output and what vjp needs (None if nothing), got "
            f"{type(found).__name__}."
        )
    for path, x in _leaves_with_paths(found[1]):
        if not (arguments.is_array(x) or isinstance(x, (bool, int, float, complex))):
            where = jax.tree_util.keystr(path)
            raise GradientError(
                f"{owner}: what fwd_with_residuals returns for vjp must be arrays, got a {type(x).__name__}"
                f"{f' at {where}' if where else ''}. vjp gets the config and the call's arguments anyway."
            )
    return found


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class Note:
    """Something static that the forward pass leaves for the backward pass among its residuals."""

    value: Any


def with_gradient(
    owner: str,
    primal: Callable[..., Any],
    forward: Callable[..., tuple[Any, Any]],
    backward: Backward,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Runs `primal(*args, **kwargs)`; when differentiated, `forward` and `backward` take its place."""
    arrays, statics = arguments.split(args)
    kw_arrays, kw_statics = arguments.split(kwargs)
    # Not the arrays themselves: what is made here stays with the equations, and their tracers must not.
    names = [jax.tree_util.keystr(path[:1]) for path, x in _leaves_with_paths(kwargs) if arguments.is_array(x)]

    def restore(arrays: list[Any], kw_arrays: list[Any]) -> tuple[Args, Kwargs]:
        return arguments.merge(arrays, statics), arguments.merge(kw_arrays, kw_statics)

    def plain(arrays: list[Any], kw_arrays: list[Any]) -> Any:
        args, kwargs = restore(arrays, kw_arrays)
        return _aligned(primal(*args, **kwargs))

    def fwd(arrays: list[Any], kw_arrays: list[Any]) -> tuple[Any, Any]:
        _refuse_keyword_gradients(owner, names, kw_arrays)
        arrays, kw_arrays = [x.value for x in arrays], [x.value for x in kw_arrays]
        args, kwargs_ = restore(arrays, kw_arrays)
        out, residuals = forward(*args, **kwargs_)
        return _aligned(out), (residuals, arrays, kw_arrays)

    def bwd(saved: Any, cotangent: Any) -> tuple[list[Any], list[Any]]:
        residuals, arrays, kw_arrays = saved
        args, kwargs = restore(arrays, kw_arrays)
        grads = backward(residuals, jax.tree.map(_instantiate, cotangent, is_leaf=_is_symbolic), args, kwargs)
        return _fit(owner, grads, args), [None] * len(kw_arrays)

    call = jax.custom_vjp(plain)
    # Symbolic zeros show which inputs are differentiated: a keyword array must not silently get a zero gradient.
    call.defvjp(fwd, bwd, symbolic_zeros=True)
    return call(arrays, kw_arrays)


def _aligned(out: Any) -> Any:
    """`out`, whose arrays all have the axis of a `jax.vmap` around the call first.

    JAX maps a program of a `jax.custom_vjp` once: the axes that it finds in the outputs of the primal, it takes for
    those of the forward, which runs in its place when the program is differentiated.
    """
    leaves, structure = jax.tree.flatten(out)
    return structure.unflatten(_first(*leaves) if any(map(_compat.shows_batch, leaves)) else leaves)


@jax.custom_batching.custom_vmap
def _first(*leaves: Any) -> tuple[Any, ...]:
    return leaves


@_first.def_vmap
def _first_of_batch(size: int, batched: list[bool], *leaves: Any) -> tuple[Any, Any]:
    every = jax.vmap(lambda *xs: xs, [0 if b else None for b in batched], axis_size=size)(*leaves)
    return _aligned(every), (True,) * len(leaves)


def with_gradient_of(run: Flat, other: Flat, first: int) -> Flat:
    """`run`, whose gradient is that of `other`: with respect to the `first` arrays, and others that are differentiated.

    Also to those of the first that are not: what is saved has to have one structure. JAX gives a backward that of the
    last forward of the same program, which another derivative may have run.
    """

    def plain(*arrays: Any) -> Any:
        return _aligned(run(*arrays))

    def fwd(*arrays: Any) -> tuple[Any, Any]:
        values = [x.value for x in arrays]
        moving = [i for i, x in enumerate(arrays) if (i < first and _is_real(x.value)) or x.perturbed]

        def of(*moved: Any) -> Any:
            given = dict(enumerate(values)) | dict(zip(moving, moved, strict=True))
            return other(*given.values())

        out, pull = jax.vjp(of, *(values[i] for i in moving))
        return _aligned(out), (pull, Note((moving, len(arrays))))

    def bwd(saved: Any, cotangents: Any) -> tuple[Any, ...]:
        pull, note = saved
        moving, count = note.value
        grads = pull(jax.tree.map(_instantiate, cotangents, is_leaf=_is_symbolic))
        found = dict(zip(moving, grads, strict=True))
        return tuple(found.get(i) for i in range(count))

    call = jax.custom_vjp(plain)
    call.defvjp(fwd, bwd, symbolic_zeros=True)
    return call


def _is_real(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _leaves_with_paths(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def _refuse_keyword_gradients(owner: str, names: list[str], kw_arrays: list[Any]) -> None:
    for name, x in zip(names, kw_arrays, strict=True):
        if x.perturbed and _is_real(x.value):
            raise GradientError(
                f"{owner}: keyword argument {name} is differentiated, but the kernel's own backward gives one gradient "
                "per positional argument. Pass it by position, or wrap it in jax.lax.stop_gradient."
            )


def _is_symbolic(x: Any) -> bool:
    return isinstance(x, SymbolicZero)


def _instantiate(x: Any) -> Any:
    return _compat.zeros_of(x.aval) if _is_symbolic(x) else x


def _fit(owner: str, grads: Sequence[Any], args: Args) -> list[Any]:
    """Gradients of the array leaves of `args`, in order, as `jax.custom_vjp` needs them; None is zero."""
    if not isinstance(grads, (tuple, list)) or len(grads) != len(args):
        got = f"{len(grads)} of them" if isinstance(grads, (tuple, list)) else f"a {type(grads).__name__}"
        raise GradientError(
            f"{owner}: the backward must return a tuple of {len(args)} gradients, one per positional argument, "
            f"got {got}."
        )
    fitted = []
    for position, (grad, arg) in enumerate(zip(grads, args, strict=True)):
        leaves, treedef = jax.tree.flatten(arg)
        try:
            grad_leaves = [None] * len(leaves) if grad is None else treedef.flatten_up_to(grad)
        except ValueError as error:
            raise GradientError(
                f"{owner}: the gradient of argument {position} has structure {jax.tree.structure(grad)}, "
                f"the argument has {treedef}."
            ) from error
        pairs = zip(grad_leaves, leaves, strict=True)
        fitted += [_fit_leaf(owner, position, g, x) for g, x in pairs if arguments.is_array(x)]
    return fitted


def _fit_leaf(owner: str, position: int, grad: Any, x: Any) -> Any:
    if grad is None or not jnp.issubdtype(x.dtype, jnp.inexact):
        return None
    grad = jnp.asarray(grad)
    if grad.shape != x.shape:
        raise GradientError(
            f"{owner}: the gradient of argument {position} has shape {grad.shape}, the argument has {x.shape}."
        )
    grad = grad.astype(x.dtype)
    extra = _compat.varying_axes(grad) - _compat.varying_axes(x)
    missing = _compat.varying_axes(x) - _compat.varying_axes(grad)
    if extra:
        # An argument that all devices share gets the sum of the devices' gradients.
        grad = jax.lax.psum(grad, tuple(sorted(extra, key=str)))
    return jax.lax.pcast(grad, tuple(sorted(missing, key=str)), to="varying") if missing else grad
