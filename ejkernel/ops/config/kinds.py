"""Which config class a kernel takes, and which kernel an op id belongs to."""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from ejkernel.errors import EjkernelError
from ejkernel.ops.config.asking import candidates, forward_of, heuristic, source_of
from ejkernel.ops.core.kernel import Invocation, Kernel
from ejkernel.ops.utils import classes
from ejkernel.ops.utils.fingerprint import qualified_name

_LISTED = 4096
"""Candidates that are looked at for their class."""

_owners: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()
_lock = threading.Lock()


class ConfigClassError(EjkernelError, TypeError):
    """A call was given a config of another class than its kernel takes."""


class ConfigClassWarning(UserWarning):
    """A config of another class than the kernel's was found for a call, or two kernels share one op id."""


def check_explicit(inv: Invocation[Any, Any], kernel: Kernel[Any, Any], cfg: Any) -> None:
    """Refuses a config that was given to a call and is of another class than the kernel's.

    Raises:
      ConfigClassError: It is.
    """
    if (wanted := misfit(inv, kernel, cfg)) is not None:
        raise ConfigClassError(
            f"{inv.op_id}: cfg must be a {wanted}, got {cfg!r:.200} of class {qualified_name(type(cfg))}."
        )


def misfit(inv: Invocation[Any, Any], kernel: Kernel[Any, Any], cfg: Any) -> str | None:
    """A text that says which class the kernel takes, if `cfg` is of another; None if it fits or is unknown.

    A kernel says it with the type argument of `Kernel[Cfg, Out]`, with its guess, and with its candidates.
    """
    declared = classes.of_hint(forward_of(kernel).cfg_type)
    if isinstance(cfg, declared) or any(isinstance(cfg, kind) for kind in _shown(inv, kernel)):
        return None
    return " or ".join(dict.fromkeys(map(qualified_name, (*declared, *_shown(inv, kernel))))) or None


def _shown(inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Iterator[type]:
    """The classes of the kernel's guess for a call, and of its candidates."""
    try:
        listed = itertools.chain([heuristic(inv, kernel)], _listed(inv, kernel))
        yield from (type(cfg) for cfg in listed if cfg is not None)
    except Exception:  # noqa: BLE001 - a kernel that cannot guess for this call says nothing about its configs.
        return


def _listed(inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Iterator[Any]:
    space = candidates(inv, kernel)
    yield from () if isinstance(space, Mapping) else itertools.islice(space, _LISTED)


# --- Names ---


def is_renamed(stored: str, cls: type) -> bool:
    """Whether a config that was stored as class `stored` may be read as `cls`: it is that, or it was renamed since.

    A class that still exists, or is in another package, is a different one.
    """
    if stored == classes.name_of(cls):
        return True
    if (there := classes.find(stored)) is not None:
        return issubclass(there, cls)
    packages = {module.partition(".")[0] for module in (stored.partition(":")[0], cls.__module__)}
    return len(packages) == 1 or "__main__" in packages


def note_owner(kernel: Kernel[Any, Any]) -> None:
    """Notes which kernel has this op id; warns if an unrelated kernel has it too: the two share all configs."""
    kernel = source_of(kernel)
    cls = type(kernel)
    with _lock:
        other = _owners.setdefault(kernel.op_id, cls)
        if other is cls or _are_related(cls, other):
            return
        _owners[kernel.op_id] = cls
    warnings.warn(
        f"{kernel.op_id}: {qualified_name(cls)} and {qualified_name(other)} are two kernels with one op id, and what "
        "is tuned for one is looked up for the other. Give one of them another name.",
        ConfigClassWarning,
        stacklevel=2,
    )


def _are_related(cls: type, other: type) -> bool:
    """Whether two classes are variants of one kernel, because both inherit its `run`, or one is a newer definition."""
    common = set(cls.__mro__) & set(other.__mro__)
    inherits = any(name == "run" or name.startswith("run_") for base in common for name in vars(base))
    return inherits or classes.name_of(cls) == classes.name_of(other)


def forget_owners() -> None:
    """Forgets whose op ids were seen."""
    with _lock:
        _owners.clear()
