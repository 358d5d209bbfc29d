"""Joint choices: how a selector chooses if its process is one of many that must run the same program."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ejkernel.ops.config.asking import heuristic
from ejkernel.ops.config.policy import AutotunePolicy, policy_override
from ejkernel.ops.config.selection import ConfigNotFoundError
from ejkernel.ops.core.kernel import Invocation, Kernel
from ejkernel.ops.processes.agreement import Agreement, Data, DecisionError
from ejkernel.ops.utils import classes
from ejkernel.ops.utils.canonical import same_cfg
from ejkernel.ops.utils.fingerprint import device_kind, short_hash
from ejkernel.ops.utils.serialize import ConfigEncodeError, decode_cfg, encode_cfg

if TYPE_CHECKING:
    from ejkernel.ops.config.selection import ConfigSelectorChain

Inv = Invocation[Any, Any]
AnyKernel = Kernel[Any, Any]


class JointTuningWarning(UserWarning):
    """Processes could not agree on what was measured."""


class Agreed(NamedTuple):
    """What all processes run a call with."""

    cfg: Any
    tier: str
    note: str


class JointSelection:
    """How a selector chooses together with the other processes.

    A call has one config, whichever selector asks for it: processes may create their selectors in different order.
    """

    def __init__(self, selector: ConfigSelectorChain, agreement: Agreement) -> None:
        self._selector = selector
        self._all = agreement

    def known(self, inv: Inv, kernel: AnyKernel, policy: AutotunePolicy) -> Agreed | None:
        """The choice that was made for a call; configs that this process alone has found since do not count."""
        return self._all.tuned.get(_place(inv, kernel)) or self._all.known.get(_place(inv, kernel, policy))

    def choose(self, inv: Inv, kernel: AnyKernel, policy: AutotunePolicy) -> Agreed:
        """The config that all processes run `inv` with.

        Raises:
          ConfigNotFoundError: The policy is `frozen`, and no process that asked has a config stored.
          DecisionError: The process that measured failed.
        """
        place = _place(inv, kernel, policy)
        with self._all.alone(place):
            agreed = self.known(inv, kernel, policy)
            if agreed is None:
                agreed = self._take(inv, kernel, self._choice(place, inv, kernel, policy))
                self._all.remember(place, agreed)
            return agreed

    def _choice(self, place: str, inv: Inv, kernel: AnyKernel, policy: AutotunePolicy) -> Data:
        first = self._all.read(f"{place}/first")
        held = self._held(inv, kernel, policy) if first is None or "cfg" not in first else None
        if first is None and held is not None:
            first = self._all.insert(f"{place}/first", held)
        elif first is None:
            opening = lambda together: self._opening(together, inv, kernel, policy)
            wait_s = policy.agree_s if kernel.collective and policy.autotune == "on" else None
            first = self._all.first(place, opening, wait_s)
        if "cfg" in first:
            return first
        if held is not None:
            # It still counts while another process measures.
            return _checked(self._all.insert(f"{place}/value", held))
        if "missing" not in first:
            return self._measured(place, first, inv, kernel, policy)
        found = self._all.read(f"{place}/value")
        if found is None:
            raise ConfigNotFoundError(first["missing"])
        return found

    def _opening(self, together: bool, inv: Inv, kernel: AnyKernel, policy: AutotunePolicy) -> Data:
        """The first value if no process has a config: the claim to measure, or what the policy says."""
        if policy.autotune == "on":
            return self._claim(together)
        try:
            return self._on_miss(inv, kernel, policy)
        except ConfigNotFoundError as error:
            # Nothing is inserted: a later process may have a config, and one that needs none continues.
            return {"missing": str(error)}

    def _measured(self, place: str, claim: Data, inv: Inv, kernel: AnyKernel, policy: AutotunePolicy) -> Data:
        """The result of the process that has claimed a call; the guess, if it does not answer in time."""
        value = f"{place}/value"
        found = self._all.read(value)
        if found is None and self._claims(claim):
            try:
                found = self._all.insert(value, self._outcome(place, claim, inv, kernel, policy))
            except BaseException as error:
                found = self._all.insert(value, self._failed(error))
                if "error" in found or not isinstance(error, Exception):
                    raise
        elif found is None:
            self._help(place, claim, inv, kernel, policy)
            found = self._all.read(value, policy.agree_s)
        if found is None:
            late = f"process {claim['claimer']}, which measures, has not answered within {policy.agree_s:g} s"
            warnings.warn(f"{inv.op_id}: {late}. All take the guess in this job.", JointTuningWarning, 2)
            found = self._all.insert(value, self._encoded("heuristic", None))
        return _checked(found)

    def _outcome(self, place: str, claim: Data, inv: Inv, kernel: AnyKernel, policy: AutotunePolicy) -> Data:
        if not _is_shared(kernel, policy, claim):
            return self._on_miss(inv, kernel, policy)
        tuning = self._measure(place, claim, inv, kernel)
        return self._encoded("autotune", tuning.cfg, measured=tuning.measurement is not None)

    def _help(self, place: str, claim: Data, inv: Inv, kernel: AnyKernel, policy: AutotunePolicy) -> None:
        """Takes part in a tuning that another process has claimed, if all do."""
        if not _is_shared(kernel, policy, claim):
            return
        try:
            self._measure(place, claim, inv, kernel)
        except Exception as error:  # noqa: BLE001 - the others continue, and this process with them.
            text = f"{inv.op_id}: this process could not help to tune: {type(error).__name__}: {error}"
            warnings.warn(text, JointTuningWarning, 2)

    def tune(self, inv: Inv, kernel: AnyKernel, tuner: Any, configs: Any = None) -> Any:
        """Measures in every process that calls it; the result of the first one counts for all.

        If all processes have come, it replaces what they had agreed on. Otherwise it counts like a config that one of
        them has stored. If `configs` are given, the result is not stored.

        Raises:
          DecisionError: The first process failed to measure. If another one fails, only that one raises.
        """
        policy = self._selector.effective_policy()
        base = _place(inv, kernel, "tune" if configs is None else "configs")
        with self._all.alone(base):
            place = self._next_tuning(base)
            wait_s = policy.agree_s if kernel.collective else None if policy.sharded else 0.0
            claim = self._all.first(place, self._claim, wait_s)
            tuning: Any = None
            failure: BaseException | None = None
            try:
                tuning = self._measure(place, claim, inv, kernel, tuner, configs)
                measured = tuning.measurement is not None and configs is None
                mine = self._encoded("autotune", tuning.cfg, measured=measured)
            except BaseException as error:
                if not (self._claims(claim) or isinstance(error, Exception)):
                    raise
                failure, mine = error, self._failed(error)
            found = None if self._claims(claim) else self._all.read(f"{place}/value", policy.agree_s)
            if found is None:
                joint = claim["together"] or self._all.have_all_come(place)
                found = self._all.insert(f"{place}/value", {**mine, "joint": joint})
            agreed = None if "error" in found else self._take(inv, kernel, found)
            if agreed is not None and found["joint"] and found["measured"]:
                self._all.tuned[_place(inv, kernel)] = agreed
        if failure is not None:
            # Raised only now: the others have an answer, and this process has it too.
            raise failure
        cfg = agreed.cfg if agreed is not None else _checked(found)
        return tuning if same_cfg(tuning.cfg, cfg) else replace(tuning, cfg=cfg)

    def _next_tuning(self, base: str) -> str:
        """The place of the first tuning of a call that is not finished."""
        number = self._all.tunings.get(base, 0)
        while self._all.read(f"{base}/{number}/value") is not None:
            number += 1
        self._all.tunings[base] = number
        return f"{base}/{number}"

    # --- What this process has, and finds ---

    def _claim(self, together: bool) -> Data:
        return {"claimer": self._all.index, "together": together}

    def _claims(self, claim: Data) -> bool:
        return claim["claimer"] == self._all.index

    def _held(self, inv: Inv, kernel: AnyKernel, policy: AutotunePolicy) -> Data | None:
        """What this process has for a call, in memory or on disk."""
        found = next((t for t in self._selector.stored(inv, kernel, policy) if t.cfg is not None), None)
        return None if found is None else self._encoded(found.name, found.cfg, measured=True)

    def _on_miss(self, inv: Inv, kernel: AnyKernel, policy: AutotunePolicy) -> Data:
        # A measured kernel may call other kernels, and no other process does so now.
        with policy_override(agree=False):
            answer = self._selector.on_miss(inv, kernel, policy)
        return self._encoded(answer.name, answer.cfg, measured=answer.name == "autotune")

    def _measure(
        self, place: str, claim: Data, inv: Inv, kernel: AnyKernel, tuner: Any = None, configs: Any = None
    ) -> Any:
        policy = self._selector.effective_policy()
        share = self._selector.shared_tuner(tuner, kernel, policy, self._all, place, claim)
        with policy_override(agree=False):
            if configs is not None:
                return share.tune(inv, kernel, configs=configs)
            return self._selector.measured(inv, kernel, share, persist=self._claims(claim))

    def _encoded(self, tier: str, cfg: Any, *, measured: bool = False) -> Data:
        answer: Data = {"tier": tier, "cfg": None, "measured": measured, "process": self._all.index}
        if cfg is None:
            return answer
        try:
            return {**answer, "cfg": encode_cfg(cfg)}
        except ConfigEncodeError as error:
            warnings.warn(f"{error} Other processes cannot be told; all take the guess.", JointTuningWarning, 2)
            return {**answer, "tier": "heuristic", "measured": False}

    def _failed(self, error: BaseException) -> Data:
        return {"error": f"{type(error).__name__}: {error}", "process": self._all.index}

    def _take(self, inv: Inv, kernel: AnyKernel, answer: Data) -> Agreed:
        """The answer as this process uses it; a measured config goes into its memory, wherever it was measured."""
        cfg = heuristic(inv, kernel)
        if answer["cfg"] is not None:
            classes.remember(type(cfg))  # Reading a config imports nothing, so the allowed classes are passed.
            cfg = decode_cfg(answer["cfg"], kernel.cfg_type)
        if answer["measured"]:
            self._selector.adopt(inv, cfg)
        return Agreed(cfg, answer["tier"], f"agreed by {self._all.count} processes, from process {answer['process']}")


def _checked(found: Data) -> Data:
    """An answer that is not a failure."""
    if "error" in found:
        raise DecisionError(f"process {found['process']}, which measured for all, failed: {found['error']}")
    return found


def _place(inv: Inv, kernel: AnyKernel, what: AutotunePolicy | str = "") -> str:
    """The place at which a call is agreed on, for one policy or for any.

    The device is not in it, only its kind: slightly different hosts still run one program.
    """
    if isinstance(what, AutotunePolicy):
        what = f"{'off' if what.autotune == 'record' else what.autotune} {what.transfer} {what.stale}"
    cfg_type = getattr(kernel.cfg_type, "__qualname__", "")
    return short_hash([what, device_kind(), inv.op_id, inv.call_key, cfg_type])


def _is_shared(kernel: AnyKernel, policy: AutotunePolicy, claim: Data) -> bool:
    """Whether all processes measure a call, not only the one that has claimed it."""
    return kernel.collective or (policy.sharded and claim["together"])
