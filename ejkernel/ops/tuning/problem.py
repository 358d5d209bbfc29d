"""A problem: what is tuned, on which data, and the right answer."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.errors import EjkernelError
from ejkernel.ops.config.asking import as_space, candidates, forward_of, heuristic, refusal, run_with
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.kernel import Invocation, Kernel, KernelDefinitionError
from ejkernel.ops.core.meshed import on_mesh
from ejkernel.ops.tuning import comparison, gradients
from ejkernel.ops.tuning.truth import once
from ejkernel.ops.utils import arguments

_MAX_NOISY = 1 << 24
"""Constants with more elements stay as they are: noise is made on the host."""

UNDER_GRADIENT = "under grad: "
"""The beginnings of reasons that concern a gradient, or its residuals."""

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class TuningInputsError(EjkernelError, TypeError):
    """A call has no data to be tuned on, and none can be generated for it."""


@dataclass(frozen=True)
class Outline:
    """The part of a problem that choosing candidates needs: no data, so it is cheap."""

    name: str
    space: Any
    guess: Any
    has_truth: bool = False
    """Whether the right answer is known; otherwise the guess's output is used."""


@dataclass(frozen=True)
class Problem:
    """Functions of `(*args, **kwargs)`, one per config, that should all compute the same."""

    name: str
    make_fn: Callable[[Any], Callable[..., Any]]
    args: Args
    kwargs: Kwargs
    truth: Callable[[], Any] | None = None
    """The right answer; if None, the guess's output is used."""
    mismatch: Callable[[Any, Any], str | None] = comparison.mismatch
    prove_gradient: Callable[[Any], str | None] | None = None
    """Why a config is wrong under `jax.grad`, for kernels with their own gradient."""
    reference: Callable[..., Any] | None = None
    """The function that computes the right answer from the arguments, if the kernel has one."""


def outline(inv: Invocation[Any, Any], kernel: Kernel[Any, Any], configs: Any = None) -> Outline:
    """The outline of one call's problem.

    Raises:
      TuningInputsError: The call is abstract, and valid data for it, or even its shapes, are not known.
    """
    owner = forward_of(kernel)
    if inv.is_symbolic:
        raise TuningInputsError(
            f"{inv.op_id}: a call with symbolic dimensions cannot be tuned: there are no arrays of unknown size to "
            "measure with. Tune it for the sizes that matter."
        )
    if inv.is_abstract and getattr(owner, "example_inputs", None) is None:
        _refuse_integers(inv.op_id, (inv.args, dict(inv.kwargs)), backward=isinstance(kernel, BackwardKernel))
    comparison.check_tolerance(getattr(owner, "tolerance", None), owner.op_id)
    space = as_space(configs, f"{inv.op_id}: configs") if configs is not None else candidates(inv, kernel)
    return Outline(inv.op_id, space, heuristic(inv, kernel), getattr(owner, "reference", None) is not None)


def from_call(
    inv: Invocation[Any, Any], kernel: Kernel[Any, Any], *, as_given: bool = False, whole: bool = False
) -> Problem:
    """The problem of one call, forward or backward.

    Args:
      inv: The call.
      kernel: Whose call it is.
      as_given: Use its data without adding noise.
      whole: Its functions give what runs under `jax.grad` as well, so that one program checks a config completely; the
        right answer is the guess's.
    """
    args, kwargs = concrete_inputs(inv, kernel)
    if not as_given:
        args, kwargs = with_noise((args, kwargs), seed=zlib.crc32(inv.call_key.encode()))
    refused = partial(refusal, inv, kernel)  # From the kernel itself, not from the meshed one.
    if inv.axes:
        kernel, place = on_mesh(kernel, inv.axes)
        put = lambda x: place(x) if arguments.is_array(x) else x
        args, kwargs = jax.tree.map(put, (args, kwargs))
    mismatch = _mismatch_of(forward_of(kernel))
    if isinstance(kernel, BackwardKernel):
        make_fn, saved, truth = gradients.backward(inv, kernel.forward, args, kwargs)
        return Problem(inv.op_id, make_fn, (saved, args, kwargs), {}, None if whole else truth, mismatch)

    def runner(cfg: Any) -> Callable[..., Any]:
        def run(*a: Any, **k: Any) -> Any:
            if (reason := refused(cfg)) is not None:
                raise NotImplementedError(reason)
            return run_with(kernel, inv, cfg, a, k)

        return run

    prove_gradient = gradients.prover(inv, kernel, args, kwargs, mismatch, refused, by_guess=whole)
    if whole:
        make_fn = lambda cfg: _both(runner(cfg), gradients.under_gradient(inv, kernel, cfg))
        compare = _mismatch_of_both(kernel, mismatch)
        return Problem(inv.op_id, make_fn, args, kwargs, mismatch=compare, prove_gradient=prove_gradient)
    return Problem(
        inv.op_id,
        runner,
        args,
        kwargs,
        _reference(kernel, args, kwargs),
        mismatch,
        prove_gradient,
        getattr(kernel, "reference", None),
    )


def from_cases(inv: Invocation[Any, Any], kernel: Kernel[Any, Any], names: Sequence[str]) -> dict[str, Problem]:
    """The problems of one call on several data sets, those of the kernel's `example_cases` with these names.

    Raises:
      TuningInputsError: The kernel has no such data, or data of other shapes than the call's.
    """
    owner = forward_of(kernel)
    make = getattr(owner, "example_cases", None)
    found = {} if make is None else make(inv, _key_of(inv))
    if missing := [name for name in names if name not in found]:
        has = f"it has {', '.join(found)}" if found else "it has no example_cases"
        raise TuningInputsError(f"{inv.op_id}: no case is named {', '.join(missing)}; {has}.")
    problems = {}
    for name in names:
        args, kwargs = found[name]
        for a, b in zip(jax.tree.leaves((args, kwargs)), jax.tree.leaves((inv.args, dict(inv.kwargs))), strict=True):
            if arguments.is_array(a) and (a.shape, a.dtype) != (b.shape, b.dtype):
                raise TuningInputsError(
                    f"{inv.op_id}: case {name!r} has {a.dtype}{list(a.shape)} where the call has "
                    f"{b.dtype}{list(b.shape)}."
                )
        problems[name] = from_call(replace(inv, args=tuple(args), kwargs=dict(kwargs)), kernel)
    return problems


def _key_of(inv: Invocation[Any, Any]) -> jax.Array:
    """The same data in every process that tunes the same call."""
    return jax.random.key(zlib.crc32(inv.call_key.encode()))


def _both(run: Callable[..., Any], under_gradient: Callable[..., Any] | None) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return run(*args, **kwargs), None if under_gradient is None else under_gradient(*args, **kwargs)

    return both


def _mismatch_of_both(
    kernel: Kernel[Any, Any], mismatch: Callable[[Any, Any], str | None]
) -> Callable[[Any, Any], str | None]:
    # A kernel's own comparison knows outputs and gradients; of residuals only its tolerance says something.
    of_saved = mismatch
    if BackwardKernel.of(kernel) is not None:
        of_saved = partial(comparison.mismatch, tolerance=getattr(kernel, "tolerance", None))

    def compare(got: Any, want: Any) -> str | None:
        if (reason := mismatch(got[0], want[0])) is not None:
            return reason
        if got[1] is None or want[1] is None:
            reason = comparison.mismatch(got[1], want[1])
        else:
            reason = mismatch(got[1][0], want[1][0]) or of_saved(got[1][1], want[1][1])
        return None if reason is None else f"{UNDER_GRADIENT}{reason}"

    return compare


def _mismatch_of(kernel: Kernel[Any, Any]) -> Callable[[Any, Any], str | None]:
    own = getattr(kernel, "mismatch", None)
    tolerance = getattr(kernel, "tolerance", None)
    if own is None:
        return lambda got, want: comparison.mismatch(got, want, tolerance)

    def judge(got: Any, want: Any) -> str | None:
        reason = own(got, want)
        if reason is None or isinstance(reason, str):
            return reason
        raise KernelDefinitionError(
            f"{kernel.op_id}: mismatch(got, want) must return how the two differ, in words, or None; got "
            f"{reason!r:.200}."
        )

    return judge


def _reference(kernel: Kernel[Any, Any], args: Args, kwargs: Kwargs) -> Callable[[], Any] | None:
    reference = getattr(kernel, "reference", None)
    return None if reference is None else lambda: once(lambda a, k: reference(*a, **k), args, kwargs)


# --- Data ---


def concrete_inputs(inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> tuple[Args, Kwargs]:
    """The call's own arguments, or valid ones of the same shapes if it is abstract."""
    if not inv.is_abstract:
        return inv.args, dict(inv.kwargs)
    key = _key_of(inv)
    if (make := getattr(forward_of(kernel), "example_inputs", None)) is not None:
        found = make(inv, key)
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping)):
            raise TuningInputsError(
                f"{inv.op_id}: example_inputs must return (args, kwargs), a tuple and a dict, got {found!r:.200}."
            )
        return tuple(found[0]), dict(found[1])
    return materialise(inv.op_id, (inv.args, dict(inv.kwargs)), key)


def with_noise(tree: Any, *, seed: int) -> Any:
    """`tree` with a little noise on floats that are all the same: a constant would hide a mix-up of two tiles."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten([_noisy(x, (seed, i)) if _is_constant(x) else x for i, x in enumerate(leaves)])


def _is_constant(x: Any) -> bool:
    if not (arguments.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating) and 1 < x.size <= _MAX_NOISY):
        return False
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return False
    value = np.asarray(x)
    return bool((value == value.flat[0]).all()) and math.isfinite(float(value.flat[0]))


def _noisy(x: Any, seed: tuple[int, int]) -> Any:
    """Moves values up to a tenth of their size towards zero, so that no dtype overflows; zeros get up to a tenth."""
    noise = np.random.default_rng(seed).random(x.shape, np.float32) / 10
    value = np.asarray(x)
    wide = value.astype(np.promote_types(np.float32, value.dtype) if value.dtype.itemsize > 4 else np.float32)
    noisy = np.where(wide == 0, noise, wide * (1 - noise)).astype(value.dtype)
    if not isinstance(x, jax.Array):
        return noisy
    return jax.device_put(noisy, x.sharding) if x.committed else jnp.asarray(noisy)


def materialise(owner: str, tree: Any, key: jax.Array) -> Any:
    """`tree` with normal floats in place of abstract arrays; integers have a meaning that is not known here."""
    _refuse_integers(owner, tree)
    leaves, treedef = jax.tree.flatten(tree)
    keys = jax.random.split(key, max(len(leaves), 1))
    return treedef.unflatten(
        [
            gradients.normal(k, x.shape, x.dtype) if arguments.has_no_data(x) else x
            for x, k in zip(leaves, keys[: len(leaves)], strict=True)
        ]
    )


def _refuse_integers(owner: str, tree: Any, *, backward: bool = False) -> None:
    # A backward is traced without its data, even if the call has data.
    known = "compile it with the executor's `compile`" if backward else "call it once outside jit and vmap"
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if arguments.has_no_data(x) and not jnp.issubdtype(x.dtype, jnp.inexact):
            raise TuningInputsError(
                f"{owner}: cannot tune an abstract call: argument {jax.tree_util.keystr(path[1:])} is "
                f"{x.dtype}{list(x.shape)}, and only the kernel knows which integers are legal. Define on the kernel\n"
                "    def example_inputs(self, inv, key):\n"
                "        return args, kwargs  # concrete arrays with the shapes of inv.args and inv.kwargs\n"
                f"or {known}, where its own arguments are used."
            )
