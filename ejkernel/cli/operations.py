"""Which operations are installed: those of `ejkernel.modules`, and those that packages register."""

from __future__ import annotations

import importlib.metadata
import inspect
from typing import Any

from ejkernel.errors import EjkernelError
from ejkernel.ops.core.kernel import Kernel
from ejkernel.ops.offline import specs

ENTRY_POINTS = "ejkernel.kernels"


class OperationError(EjkernelError, LookupError):
    """No operation has this name."""


def installed() -> dict[str, str]:
    """Operations by name, each as `module:Class`.

    A package registers its own with entry points of the group `ejkernel.kernels`: `my_op = "my_pkg.kernels:MyKernel"`.
    """
    return dict(sorted({**announced(), **own()}.items()))


def own() -> dict[str, str]:
    """Operations of `ejkernel.modules`."""
    from ejkernel import modules

    found = [value for value in vars(modules).values() if inspect.isclass(value) and issubclass(value, Kernel)]
    return {cls().op_id: f"{cls.__module__}:{cls.__qualname__}" for cls in found}


def announced() -> dict[str, str]:
    """Operations of other packages."""
    return {p.name: p.value for p in importlib.metadata.entry_points(group=ENTRY_POINTS)}


def make(name: str) -> Kernel[Any, Any]:
    """The kernel that an installed operation's name, or `module:Kernel`, stands for.

    Raises:
      OperationError: There is no such operation.
    """
    if ":" not in name:
        known = installed()
        if name not in known:
            raise OperationError(
                f"OP: {name!r} is not an installed operation. Known are {', '.join(known)}; others are written as "
                "module:Kernel."
            )
        name = known[name]
    made = specs.find(name, "kernel")
    kernel = _called(name, made) if isinstance(made, type) else made
    if not isinstance(kernel, Kernel):
        raise OperationError(f"{name}: not a Kernel, but {type(kernel).__name__}.")
    return kernel


def _called(name: str, cls: Any) -> Any:
    try:
        return cls()
    except TypeError as error:
        raise OperationError(
            f"{name}: cannot be made without arguments ({error}). Name an instance of it instead: module:instance."
        ) from error


def complete(incomplete: str) -> list[str]:
    """Names for the shell that begin with what was typed."""
    return [name for name in installed() if name.startswith(incomplete)]
