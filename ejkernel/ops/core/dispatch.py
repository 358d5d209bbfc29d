"""Which method of a kernel runs a call on this device, in this context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ejkernel import _compat
from ejkernel.errors import EjkernelError
from ejkernel.ops.core.kernel import Invocation, Kernel, KernelDefinitionError
from ejkernel.ops.utils.fingerprint import device_kind, get_device_platform

PLATFORMS = {"gpu": ("triton", "mosaic", "cudnn", "xla"), "tpu": ("pallas", "xla"), "cpu": ("xla",)}
ALL_PLATFORMS = ("triton", "mosaic", "cudnn", "pallas", "xla")


class UnsupportedCallError(EjkernelError, NotImplementedError):
    """No backend of a kernel supports a call; the message lists each with its reason."""

    def __init__(self, inv: Invocation[Any, Any], reasons: Mapping[str, str]) -> None:
        lines = [f"  {platform}: {reason}" for platform, reason in reasons.items()]
        shapes = ", ".join(_shape(x) for x in inv.abstract_args)
        super().__init__("\n".join([f"{inv.op_id}: no backend supports ({shapes}).", *lines]))
        self.reasons = dict(reasons)


def _shape(x: Any) -> str:
    """`float32[4,2]`; what is no array as it is."""
    return f"{x.dtype}[{','.join(map(str, x.shape))}]" if hasattr(x, "shape") and hasattr(x, "dtype") else str(x)


class PlatformError(EjkernelError, ValueError):
    """A config names a backend that does not exist or that the kernel does not have."""


def current_context() -> str | None:
    """`"shard_map"` inside `jax.shard_map`, else None."""
    return "shard_map" if _compat.inside_shard_map() else None


def find(kernel: Kernel[Any, Any], method: str, context: str | None, platform: str) -> Callable[..., Any] | None:
    """The most specific variant of `method`: context and platform, context, platform, device kind, plain."""
    suffixes = (*_specific(context, platform), f"_{device_kind()}", "")
    return _first(kernel, method, suffixes)


def method_of(kernel: Kernel[Any, Any], method: str, inv: Invocation[Any, Any]) -> Callable[..., Any] | None:
    """The variant of `method` for the platform and the context of a call."""
    return find(kernel, method, inv.context, inv.platform or get_device_platform())


def guess(kernel: Kernel[Any, Any], inv: Invocation[Any, Any]) -> Any:
    """The kernel's own guess for a call."""
    found = method_of(kernel, "heuristic_cfg", inv)
    assert found is not None, "the base class has one"
    return found(inv)


def _specific(context: str | None, platform: str) -> tuple[str, ...]:
    return (f"_{context}_{platform}", f"_{context}", f"_{platform}") if context else (f"_{platform}",)


def _first(kernel: Kernel[Any, Any], method: str, suffixes: tuple[str, ...]) -> Callable[..., Any] | None:
    return next((found for s in suffixes if (found := getattr(kernel, method + s, None)) is not None), None)


def implementations(kernel: Kernel[Any, Any], context: str | None) -> Iterator[tuple[str, Callable[..., Any]]]:
    """(platform, run method) in the order in which they are tried when the config names none.

    Methods for this hardware come first, then `run_xla`, which works everywhere, then plain `run`.
    """
    kind, preferred = device_kind(), get_device_platform()
    found: list[tuple[str, Callable[..., Any]]] = []
    for platform in PLATFORMS[kind]:
        if platform == "xla" and kind != "cpu" and (run := _first(kernel, "run", (f"_{kind}",))):
            found.append((preferred, run))
        if run := _first(kernel, "run", _specific(context, platform)):
            found.append((platform, run))
    if run := _first(kernel, "run", (f"_{kind}", "")):
        found.append((preferred, run))
    if not found:
        raise KernelDefinitionError(
            f"{kernel.op_id}: {type(kernel).__name__} implements none of "
            f"{', '.join(f'run_{p}' for p in PLATFORMS[kind])}, run."
        )
    seen: list[Callable[..., Any]] = []
    for platform, run in found:
        if run not in seen:
            seen.append(run)
            yield platform, run


def forced_platform(kernel: Kernel[Any, Any], cfg: Any) -> str | None:
    """The platform that `cfg` names, if it names one."""
    platform = cfg.get("platform") if isinstance(cfg, Mapping) else getattr(cfg, "platform", None)
    platform = getattr(platform, "value", platform)
    if platform in (None, "auto"):
        return None
    if platform not in ALL_PLATFORMS:
        allowed = ", ".join(repr(p) for p in ALL_PLATFORMS)
        raise PlatformError(f"{kernel.op_id}: cfg.platform is {platform!r}, allowed are {allowed}, 'auto' and None.")
    return platform


def forced_implementation(kernel: Kernel[Any, Any], context: str | None, platform: str) -> Callable[..., Any]:
    """The run method for a platform that the config names."""
    run = find(kernel, "run", context, platform)
    if run is None:
        have = sorted(p for p in ALL_PLATFORMS if hasattr(kernel, f"run_{p}"))
        raise PlatformError(f"{kernel.op_id}: cfg.platform is {platform!r}, but the kernel implements only {have}.")
    return run


def refusal(kernel: Kernel[Any, Any], inv: Invocation[Any, Any], platform: str) -> str | None:
    """Why the backend named `platform` does not support `inv`; None if it does."""
    try:
        answer = kernel.supports(inv, platform)
    except NotImplementedError as error:
        return str(error) or "not implemented"
    if isinstance(answer, str):
        return answer or "not supported"
    if answer is True:
        return None
    if answer is False:
        return "not supported"
    raise KernelDefinitionError(
        f"{kernel.op_id}: supports(inv, {platform!r}) returned {answer!r}; return True, False or a reason in words."
    )
