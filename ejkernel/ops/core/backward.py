"""The backward of a kernel as a separate kernel: chosen, tuned, stored and labelled separately from the forward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ejkernel.ops.core import dispatch
from ejkernel.ops.core.kernel import Invocation, Kernel


class BackwardKernel(Kernel[Any, Any]):
    """`<op_id>.vjp`, with the arguments of the forward call as its signature."""

    def __init__(self, forward: Kernel[Any, Any]) -> None:
        super().__init__(op_id=f"{forward.op_id}.vjp")
        self.forward = forward
        self.version = forward.version

    @staticmethod
    def of(kernel: Kernel[Any, Any]) -> BackwardKernel | None:
        """The backward of `kernel`, if it has configs of its own."""
        own = any(name.startswith(("heuristic_cfg_vjp", "config_space_vjp")) for name in dir(kernel))
        return BackwardKernel(kernel) if own else None

    def supports(self, inv: Invocation[Any, Any], platform: str) -> bool | str:
        """The forward kernel's answer."""
        return self.forward.supports(inv, platform)

    def transfers(self, inv: Invocation[Any, Any], cfg: Any) -> bool:
        """The forward kernel's answer."""
        return self.forward.transfers(inv, cfg)

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> Any:
        """`heuristic_cfg_vjp` of the forward kernel, else its `heuristic_cfg`."""
        own = dispatch.method_of(self.forward, "heuristic_cfg_vjp", inv)
        return dispatch.guess(self.forward, inv) if own is None else own(inv)

    def config_space(self, inv: Invocation[Any, Any]) -> Iterable[Any]:
        """`config_space_vjp` of the forward kernel, else only the guess."""
        space = dispatch.method_of(self.forward, "config_space_vjp", inv)
        return [self.heuristic_cfg(inv)] if space is None else space(inv)

    def describe_keywords(self, inv: Invocation[Any, Any]) -> Mapping[str, Any]:
        """The forward kernel's answer."""
        return self.forward.describe_keywords(inv)

    def covered_by(self, cfg: Any, inv: Invocation[Any, Any], platform: str) -> Any:
        """The backward's config that a forward's `cfg` contains (`cfg_vjp`); if None, it has to be chosen.

        `platform` is the forward's. A config that neither it nor the platform that the config names can run is not
        used.
        """
        take = getattr(self.forward, "cfg_vjp", None)
        own = None if take is None else take(cfg)
        if own is None:
            return None
        platform = dispatch.forced_platform(self.forward, own) or platform
        return own if dispatch.refusal(self, replace(inv, platform=platform), platform) is None else None
