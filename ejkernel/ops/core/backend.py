"""Backends: the ways to run an operation, each with its requirements for the device and the call."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from ejkernel.ops.core.kernel import Invocation, KernelDefinitionError
from ejkernel.ops.utils.canonical import distinct
from ejkernel.ops.utils.fingerprint import compute_capability, device_kind

Platform = Literal["triton", "mosaic", "cudnn", "pallas", "xla"]
"""What a config's `platform` may name: any of them, so that a new backend leaves the config class as it is."""
KINDS = {"triton": ("gpu",), "mosaic": ("gpu",), "cudnn": ("gpu",), "pallas": ("tpu",), "xla": ("cpu", "gpu", "tpu")}
"""The kinds of devices that each backend compiles for."""


@dataclass(frozen=True)
class Backend:
    """One way to run an operation.

    `source` holds its functions. It is the name of a module, which is imported when it is first needed, or any object.
    Arguments are those of the call, as `prepare` leaves them:

    - `forward(*args, params, **kwargs) -> (out, residuals)`;
    - `backward(residuals, out, dout, *args, params, **kwargs) -> grads`, one per positional argument;
    - `run(*args, params, **kwargs) -> out`, optional: the forward of a call that is not differentiated;
    - `unsupported(inv, *, backward) -> str | None`, optional: why it does not support a call;
    - `forward_space(inv)` and `backward_space(inv)`, optional: the params to choose from, the guess first.

    Attributes:
      platform: Its name: one of `triton`, `mosaic`, `cudnn`, `pallas`, `xla`.
      source: Where its functions are.
      fwd: The class of the forward's params; None if it has none.
      bwd: The class of the backward's params; None if it has none.
      capability: The least compute capability of an NVIDIA GPU.
      interpret: Whether it also runs in an interpreter on any device. Its functions then take `interpret=`.
      thorough: Whether tuning tries all of its params even if other backends are more promising.
    """

    platform: Platform
    source: Any
    fwd: type | None = None
    bwd: type | None = None
    capability: tuple[int, int] = (0, 0)
    interpret: bool = False
    thorough: bool = False

    def __post_init__(self) -> None:
        if self.platform not in KINDS:
            raise KernelDefinitionError(f"Backend: platform must be one of {', '.join(KINDS)}, got {self.platform!r}.")

    @cached_property
    def functions(self) -> Any:
        """The object with the functions; a module is imported now."""
        return importlib.import_module(self.source) if isinstance(self.source, str) else self.source

    def refusal(self, inv: Invocation[Any, Any], *, backward: bool, interpret: bool) -> str | None:
        """Why it does not support a call here; None if it does."""
        return self._unfit_device(interpret and self.interpret) or self._unfit_call(inv, backward)

    def _unfit_device(self, interpreted: bool) -> str | None:
        kind = device_kind()
        if interpreted:
            return None
        if kind not in KINDS[self.platform]:
            return f"{self.platform} needs a {KINDS[self.platform][0].upper()}, this is a {kind.upper()}"
        if self.capability > (have := compute_capability()):
            needs, has = (".".join(map(str, x)) for x in (self.capability, have))
            return f"{self.platform} needs an NVIDIA GPU of compute capability {needs} or more, this one has {has}"
        return None

    def _unfit_call(self, inv: Invocation[Any, Any], backward: bool) -> str | None:
        try:
            unsupported = getattr(self.functions, "unsupported", None)
            return None if unsupported is None else unsupported(inv, backward=backward)
        except ImportError as error:  # Of packages that JAX does not install, perhaps.
            return f"{self.platform} cannot be imported: {error}"

    def space(self, inv: Invocation[Any, Any], *, backward: bool) -> Sequence[Any]:
        """The params to choose from, the guess first."""
        found = getattr(self.functions, "backward_space" if backward else "forward_space", None)
        space = [None] if found is None else distinct(found(inv))
        if not space:
            raise KernelDefinitionError(f"{inv.op_id}[{self.platform}]: the space of params is empty; list the guess.")
        return space

    def checked(self, op_id: str, params: Any, *, backward: bool) -> Any:
        """`params`, if they are of the class that the backend takes."""
        name, wanted = ("bwd_params", self.bwd) if backward else ("fwd_params", self.fwd)
        if params is not None and (wanted is None or not isinstance(params, wanted)):
            takes = "None" if wanted is None else wanted.__name__
            raise ParamsTypeError(
                f"{op_id}: cfg.{name} must be {takes} for platform {self.platform!r}, got {type(params).__name__}."
            )
        return params


class ParamsTypeError(KernelDefinitionError):
    """A config holds params of another backend than the one it names."""
