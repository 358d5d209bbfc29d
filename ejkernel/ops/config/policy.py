"""Policies: what a selector does if no config is stored."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ejkernel.errors import EjkernelError
from ejkernel.ops.core import context
from ejkernel.ops.utils import env
from ejkernel.ops.utils.canonical import Identity

if TYPE_CHECKING:
    from ejkernel.ops.config.selection import ConfigSelectorChain

AutotuneMode = Literal["off", "on", "record", "frozen"]
StaleMode = Literal["use", "retune", "ignore"]

_ALLOWED = {"autotune": ("off", "on", "record", "frozen"), "stale": ("use", "retune", "ignore")}


class PolicyError(EjkernelError, ValueError):
    """A policy field has an unknown name or value."""


@dataclass(frozen=True)
class AutotunePolicy:
    """Policy of a selector.

    Attributes:
      autotune: On a miss, use the nearest tuned shape's config or guess (`"off"`, False), measure (`"on"`, True), note
        the miss and do as `"off"` (`"record"`), or raise (`"frozen"`).
      transfer: Whether a miss may use the config that was tuned for the nearest shape.
      stale: What to do with a stored config whose kernel or toolchain has changed since: use it, tune again, or
        ignore it. By default what `EJKERNEL_STALE` says, or use it.
      agree: Whether the processes of one program agree on a config; if False, each chooses alone.
      agree_s: How long to wait for a process that measures, in seconds; after that, all processes use the guess.
      sharded: Whether the candidates of a call are spread over the processes when all of them tune it.
    """

    autotune: AutotuneMode | bool = "off"
    transfer: bool = True
    stale: StaleMode = field(default_factory=lambda: env.read("EJKERNEL_STALE", "use"))  # pyright: ignore[reportAssignmentType]
    agree: bool = True
    agree_s: float = 120.0
    sharded: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.autotune, bool):
            object.__setattr__(self, "autotune", "on" if self.autotune else "off")
        for name, allowed in _ALLOWED.items():
            if getattr(self, name) not in allowed:
                raise PolicyError(
                    f"AutotunePolicy: {name} must be one of {', '.join(map(repr, allowed))}"
                    f"{' or a bool' if name == 'autotune' else ''}, got {getattr(self, name)!r}."
                )
        for name in ("transfer", "agree", "sharded"):
            if not isinstance(getattr(self, name), bool):
                raise PolicyError(f"AutotunePolicy: {name} must be True or False, got {getattr(self, name)!r}.")
        if not (isinstance(self.agree_s, (int, float)) and 0 < self.agree_s < float("inf")):
            raise PolicyError(f"AutotunePolicy: agree_s must be a finite number of seconds, got {self.agree_s!r}.")

    @classmethod
    def from_environment(cls) -> AutotunePolicy:
        """The policy that `EJKERNEL_AUTOTUNE` asks for."""
        return cls(autotune=env.read("EJKERNEL_AUTOTUNE", "off"))  # pyright: ignore[reportArgumentType]


def policy_override(selector: ConfigSelectorChain | None = None, /, **changes: Any) -> AbstractContextManager[None]:
    """Changes fields of the policy inside a `with` block, for one selector or for all of them."""
    known = [f.name for f in dataclasses.fields(AutotunePolicy)]
    for name in changes:
        if name not in known:
            raise PolicyError(f"policy_override: unknown field {name!r}; the fields are {', '.join(known)}.")
    AutotunePolicy(**changes)
    if selector is not None and not isinstance(getattr(selector, "policy", None), AutotunePolicy):
        raise PolicyError(
            f"policy_override: expected a ConfigSelectorChain or nothing, got {type(selector).__name__}. "
            "An executor's selector is its .chooser."
        )
    owner = None if selector is None else Identity(selector)
    return context.entered(override=context.Override(owner, tuple(sorted(changes.items()))))


def as_stored() -> AbstractContextManager[None]:
    """A context in which calls use what is stored for them, or their guess: nothing is tuned, checked or agreed on.

    Tunings and checks run in it. A kernel that they run may call others, and those the first one again, as a product
    whose gradients are products does: with a tuning inside of a tuning, each would wait for the other.
    """
    return policy_override(autotune="off", transfer=False, agree=False)


def effective_policy(selector: ConfigSelectorChain) -> AutotunePolicy:
    """The policy of `selector` with all overrides that are active here, the innermost last."""
    policy = selector.policy
    for override in context.overrides_of(selector):
        policy = dataclasses.replace(policy, **dict(override.changes))
    return policy
