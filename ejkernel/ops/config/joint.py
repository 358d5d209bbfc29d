"""Joint choices: what a selector does when its process is one of many that must run the same program."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ejkernel.ops.config import context
from ejkernel.ops.config.agreement import Agreement, Data, Question
from ejkernel.ops.config.asking import heuristic
from ejkernel.ops.config.policy import AutotunePolicy, policy_override
from ejkernel.ops.config.selection import ConfigNotFoundError
from ejkernel.ops.core.kernel import Invocation, Kernel
from ejkernel.ops.utils import classes
from ejkernel.ops.utils.serialize import ConfigEncodeError, decode_cfg, encode_cfg

if TYPE_CHECKING:
    from ejkernel.ops.config.selection import ConfigSelectorChain

Inv = Invocation[Any, Any]
AnyKernel = Kernel[Any, Any]

_GUESS: Data = {"tier": "heuristic", "cfg": None, "measured": False}


class JointTuningWarning(UserWarning):
    """Processes could not agree on what was measured."""


class _Agreed(NamedTuple):
    cfg: Any
    tier: str
    note: str
    missing: str = ""
    """Why there is no config, if the policy wants a stored one."""


class JointSelection:
    """The choices that a selector has made with the other processes."""

    def __init__(self, selector: ConfigSelectorChain) -> None:
        self._selector = selector
        self._agreed: dict[tuple[tuple[str, str, str], AutotunePolicy], _Agreed] = {}

    def known(self, inv: Inv, policy: AutotunePolicy) -> _Agreed | None:
        """The choice that was made for a call; what this process has found alone since does not count."""
        return self._agreed.get((inv.key, policy))

    def choose(self, agreement: Agreement, inv: Inv, kernel: AnyKernel, policy: AutotunePolicy) -> _Agreed:
        """The config that all processes run `inv` with.

        Raises:
          ConfigNotFoundError: The policy is `frozen` and nothing is stored; in every process alike.
          KeySequenceError: Another process asks for something else.
          DecisionError: The process that decides could not.
        """
        agreed = self.known(inv, policy) or self._choose(agreement, inv, kernel, policy)
        if agreed.missing:
            raise ConfigNotFoundError(agreed.missing)
        return agreed

    def _choose(self, agreement: Agreement, inv: Inv, kernel: AnyKernel, policy: AutotunePolicy) -> _Agreed:
        # Questions are numbered: the threads of a process ask one after the other.
        with agreement.lock:
            if (known := self.known(inv, policy)) is not None:
                return known
            held = self._held(inv, kernel, policy)
            question = agreement.ask(self._question("choose", agreement, inv, policy), held, policy.agree_s)
            decide = lambda: self._decide(agreement, question, inv, kernel, policy)
            if self._helps(agreement, question, kernel, policy):
                try:
                    self._measure(agreement, question, inv, kernel)
                except Exception as error:  # noqa: BLE001 - the others go on, and this process with them.
                    text = f"{inv.op_id}: this process could not help to tune: {type(error).__name__}: {error}"
                    warnings.warn(text, JointTuningWarning, 2)
            fallback = lambda: self._fallback(question, inv, kernel, policy)
            answer = agreement.answer(question, decide, fallback, policy.agree_s)
            agreed = self._take(agreement, question, inv, kernel, answer)
            self._agreed[inv.key, policy] = agreed
            return agreed

    def tune(self, agreement: Agreement, inv: Inv, kernel: AnyKernel, tuner: Any, configs: Any = None) -> Any:
        """Measures in every process; the outcome of the one that decides counts for all.

        Of `configs`, if given, nothing is remembered.

        Raises:
          DecisionError: The process that decides could not measure. If another one could not, only it raises.
        """
        policy = self._selector.effective_policy()
        with agreement.lock:
            kind = "tune" if configs is None else "tune configs"
            question = agreement.ask(self._question(kind, agreement, inv, policy), None, policy.agree_s)
            tuning: Any = None
            failure: BaseException | None = None
            try:
                tuning = self._measure(agreement, question, inv, kernel, tuner, configs)
            except BaseException as error:
                if not (agreement.decides(question) or isinstance(error, Exception)):
                    raise
                failure = error

            def decide() -> Data:
                if failure is not None:
                    raise failure
                measured = tuning.measurement is not None and configs is None
                return self._encoded("autotune", tuning.cfg, measured=measured)

            answer = agreement.answer(question, decide, lambda: _GUESS, policy.agree_s)
            agreed = self._take(agreement, question, inv, kernel, answer)
            if answer["measured"]:
                self._agreed = {place: choice for place, choice in self._agreed.items() if place[0] != inv.key}
        if failure is not None:
            # Only now: the others have an answer, and this process knows it too.
            raise failure
        return tuning if context.same_cfg(tuning.cfg, agreed.cfg) else replace(tuning, cfg=agreed.cfg)

    # --- Asking ---

    def _question(self, kind: str, agreement: Agreement, inv: Inv, policy: AutotunePolicy) -> Data:
        return {
            "kind": kind,
            "selector": agreement.ordinal(self._selector),
            "op_id": inv.op_id,
            # Not the device: hosts that differ a little still run one program.
            "call_key": inv.call_key,
            "autotune": policy.autotune,
            "sharded": policy.sharded,
            "signature": inv.signature,
        }

    def _held(self, inv: Inv, kernel: AnyKernel, policy: AutotunePolicy) -> Data | None:
        """What this process has for a call, in memory or on disk."""
        found = next((t for t in self._selector.stored(inv, kernel, policy) if t.cfg is not None), None)
        return None if found is None else self._encoded(found.name, found.cfg, measured=True)

    def _encoded(self, tier: str, cfg: Any, *, measured: bool) -> Data:
        try:
            return {"tier": tier, "cfg": encode_cfg(cfg), "measured": measured}
        except ConfigEncodeError as error:
            warnings.warn(f"{error} Other processes cannot be told; all take the guess.", JointTuningWarning, 2)
            return _GUESS

    # --- Deciding ---

    def _decide(
        self, agreement: Agreement, question: Question, inv: Inv, kernel: AnyKernel, policy: AutotunePolicy
    ) -> Data:
        holds = question.posts[agreement.index] or _first_held(question)
        if _is_shared(kernel, policy):
            agreement.insert(f"{question.number}/plan", {"tune": holds is None})
        if holds is not None:
            return holds
        if _is_shared(kernel, policy):
            tuning = self._measure(agreement, question, inv, kernel)
            return self._encoded("autotune", tuning.cfg, measured=tuning.measurement is not None)
        return self._on_miss(inv, kernel, policy)

    def _fallback(self, question: Question, inv: Inv, kernel: AnyKernel, policy: AutotunePolicy) -> Data:
        """What to do without the decider: nothing that takes long, the others do not wait."""
        if (holds := _first_held(question)) is not None:
            return holds
        return self._on_miss(inv, kernel, policy) if policy.autotune == "frozen" else _GUESS

    def _on_miss(self, inv: Inv, kernel: AnyKernel, policy: AutotunePolicy) -> Data:
        # What is measured may call other kernels, and nobody else does so now.
        with policy_override(agree=False):
            try:
                answer = self._selector.on_miss(inv, kernel, policy)
            except ConfigNotFoundError as error:
                # An answer like any other: callers go on where they can do without.
                return {**_GUESS, "tier": "frozen", "missing": str(error)}
        return self._encoded(answer.name, answer.cfg, measured=answer.name == "autotune")

    def _helps(self, agreement: Agreement, question: Question, kernel: AnyKernel, policy: AutotunePolicy) -> bool:
        """Whether this process takes part in a tuning that another one decides."""
        if not _is_shared(kernel, policy) or agreement.decides(question):
            return False
        decider = question.decider(agreement.count)
        plan = agreement.read(f"{question.number}/plan", agreement.patience(decider, policy.agree_s))
        return plan is not None and plan["tune"]

    def _measure(
        self,
        agreement: Agreement,
        question: Question,
        inv: Inv,
        kernel: AnyKernel,
        tuner: Any = None,
        configs: Any = None,
    ) -> Any:
        policy = self._selector.effective_policy()
        share = self._selector.shared_tuner(tuner, kernel, policy, agreement, question)
        with policy_override(agree=False):
            if configs is not None:
                return share.tune(inv, kernel, configs=configs)
            return self._selector.measured(inv, kernel, share, persist=agreement.decides(question))

    def _take(self, agreement: Agreement, question: Question, inv: Inv, kernel: AnyKernel, answer: Data) -> _Agreed:
        """The answer as this process uses it; what was measured goes into its memory, wherever it was measured."""
        note = f"agreed by {agreement.count} processes, decided by process {question.decider(agreement.count)}"
        if "missing" in answer:
            return _Agreed(None, answer["tier"], note, answer["missing"])
        guess = heuristic(inv, kernel)
        if answer["cfg"] is None:
            cfg = guess
        else:
            classes.remember(type(guess))  # Reading a config imports nothing, and this is what it may be.
            cfg = decode_cfg(answer["cfg"], kernel.cfg_type)
        if answer["measured"]:
            self._selector.adopt(inv, cfg)
        return _Agreed(cfg, answer["tier"], note)


def _first_held(question: Question) -> Data | None:
    return next((held for _, held in sorted(question.posts.items()) if held), None)


def _is_shared(kernel: AnyKernel, policy: AutotunePolicy) -> bool:
    """Whether all processes measure a call, not only the one that decides."""
    return policy.autotune == "on" and (policy.sharded or kernel.collective)
