"""What a kernel says about a call: its guess, its candidates, whether a config may be used, what runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from ejkernel.ops.core import dispatch
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.batched import BatchedKernel
from ejkernel.ops.core.kernel import Invocation, Kernel, KernelDefinitionError
from ejkernel.ops.utils import arguments, classes
from ejkernel.ops.utils.canonical import same_cfg
from ejkernel.ops.utils.fingerprint import qualified_name


def heuristic(inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Any:
    """The kernel's own guess for a call, by the variant for its platform and context.

    Raises:
      KernelDefinitionError: It is no config.
    """
    guess = dispatch.guess(kernel, inv)
    declared = classes.of_hint(forward_of(kernel).cfg_type)
    # A subclass may have configs of another class, but a missing return or a missing () is a mistake.
    if (guess is None or isinstance(guess, type)) and declared and not isinstance(guess, declared):
        wanted = " or ".join(map(qualified_name, declared))
        raise KernelDefinitionError(
            f"{inv.op_id}: heuristic_cfg of {qualified_name(type(source_of(kernel)))} must return a {wanted}, got "
            f"{guess!r:.200}."
        )
    return guess


def candidates(inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Any:
    """What tuning may try, by the variant of `config_space` or `candidate_cfgs` for the call's platform.

    If both are overridden, that of the most derived class is used.
    """
    if isinstance(kernel, BatchedKernel):
        return candidates(kernel.asked(inv), kernel.inner)
    methods = [dispatch.method_of(kernel, name, inv) for name in ("config_space", "candidate_cfgs")]
    bases = (Kernel.config_space, Kernel.candidate_cfgs)
    own = [method for method in methods if method is not None and getattr(method, "__func__", method) not in bases]
    if not own:
        return [heuristic(inv, kernel)]
    method = min(own, key=partial(_depth, type(kernel)))
    return as_space(method(inv), f"{inv.op_id}: {getattr(method, '__name__', 'config_space')}")


def as_space(space: Any, where: str) -> Any:
    """The candidates that a kernel or a caller gave, checked.

    Raises:
      KernelDefinitionError: It is not a space of configs.
    """
    if isinstance(space, Iterable) and not isinstance(space, str | bytes):
        return space
    raise KernelDefinitionError(
        f"{where} must give configs: a list, a generator, or axes {{name: values}}; got {space!r:.200}."
    )


def _depth(cls: type, method: Callable[..., Any]) -> int:
    """How many classes precede the one that defines `method`; -1 if it was set on the instance."""
    name = getattr(method, "__name__", "")
    return next((depth for depth, base in enumerate(cls.__mro__) if name in vars(base)), -1)


def accepts(inv: Invocation[Any, Any], kernel: Kernel[Any, Any], cfg: Any) -> bool:
    """Whether a config of another shape may be used for `inv`: it is a candidate, of a backend that supports it."""
    return refusal(inv, kernel, cfg) is None and _in_space(candidates(inv, kernel), cfg)


def refusal(inv: Invocation[Any, Any], kernel: Kernel[Any, Any], cfg: Any) -> str | None:
    """Why a call cannot run with a config that names an unsupported platform; None if it can."""
    platform = dispatch.forced_platform(kernel, cfg)
    reason = None if platform is None else dispatch.refusal(kernel, replace(inv, platform=platform), platform)
    return None if reason is None else f"{platform}: {reason}"


def is_candidate(inv: Invocation[Any, Any], kernel: Kernel[Any, Any], cfg: Any) -> bool:
    """Whether tuning `inv` could choose `cfg`; the guess is always a candidate."""
    return accepts(inv, kernel, cfg) or same_cfg(cfg, heuristic(inv, kernel))


def leaves_no_choice(inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> bool:
    """Whether the guess is the only possible config for `inv`, and cannot be measured either.

    That is so for a kernel that needs concrete values, which a compiled program does not have, for an abstract call
    with integers, which only the kernel's `example_inputs` could supply, and for a kernel without configs, whose guess
    is None.
    """
    owner, guess = source_of(kernel), heuristic(inv, kernel)
    made_up = inv.is_abstract and getattr(owner, "example_inputs", None) is None
    unknown = made_up and any(map(_has_unknown_integers, jax.tree.leaves((inv.args, dict(inv.kwargs)))))
    if owner.jit and guess is not None and not unknown:
        return False
    space = candidates(inv, kernel)
    if isinstance(space, Mapping):
        return _in_space(space, guess) and all(callable(values) or len(list(values)) == 1 for values in space.values())
    return all(same_cfg(cfg, guess) for cfg in space)


def _has_unknown_integers(x: Any) -> bool:
    return arguments.has_no_data(x) and not jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)


def _in_space(space: Any, cfg: Any) -> bool:
    if not isinstance(space, Mapping):
        return any(same_cfg(cfg, candidate) for candidate in space)
    from ejkernel.ops.utils.records import get

    conditions = [value for value in space.values() if callable(value)]
    axes = {name: values for name, values in space.items() if not callable(values)}
    try:
        on_axes = all(any(same_cfg(get(cfg, name), value) for value in values) for name, values in axes.items())
    except (AttributeError, LookupError, TypeError):  # A config of another class: it lacks a field.
        return False
    return on_axes and all(condition(cfg) for condition in conditions)


def forward_of(kernel: Kernel[Any, Any]) -> Kernel[Any, Any]:
    """The kernel whose methods run: that of the forward, for a backward."""
    return kernel.forward if isinstance(kernel, BackwardKernel) else kernel


def source_of(kernel: Kernel[Any, Any]) -> Kernel[Any, Any]:
    """The kernel whose source a measurement depends on."""
    kernel = forward_of(kernel)
    while isinstance(kernel, BatchedKernel):
        kernel = kernel.inner
    return kernel


def source_line(inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> str:
    """Where the code of a kernel that runs a call is written: `file:line`."""
    _, run = next(dispatch.implementations(source_of(kernel), inv.context))
    code = getattr(inspect.unwrap(run), "__code__", None)
    return type(source_of(kernel)).__module__ if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def on_its_platform(inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Invocation[Any, Any]:
    """The call with the platform of the backend that would run it, on which guess and candidates may depend.

    Raises:
      UnsupportedCallError: No backend supports it.
    """
    if inv.platform is not None:
        return inv
    reasons: dict[str, str] = {}
    for platform, _ in dispatch.implementations(forward_of(kernel), inv.context):
        here = replace(inv, platform=platform)
        if (reason := dispatch.refusal(forward_of(kernel), here, platform)) is None:
            return here
        reasons[platform] = reason
    raise dispatch.UnsupportedCallError(inv, reasons)


def run_with(
    kernel: Kernel[Any, Any], inv: Invocation[Any, Any], cfg: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Runs the backend that `cfg` and the call's platform name, without choosing, labels or gradients."""
    platform = dispatch.forced_platform(kernel, cfg) or inv.platform
    if platform is None:
        platform, run = next(dispatch.implementations(kernel, inv.context))
    else:
        run = dispatch.forced_implementation(kernel, inv.context, platform)
    return run(*args, cfg=cfg, **kwargs)
