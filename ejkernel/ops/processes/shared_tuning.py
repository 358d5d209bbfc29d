"""Tuning by all processes of a program: candidates spread over them, or each measured by all at once."""

from __future__ import annotations

import itertools
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import jax

from ejkernel.errors import EjkernelError
from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.core.kernel import Invocation, Kernel
from ejkernel.ops.processes.agreement import Agreement, Data
from ejkernel.ops.processes.joint import JointTuningWarning
from ejkernel.ops.tuning import search
from ejkernel.ops.tuning.autotuner import Autotuner
from ejkernel.ops.tuning.bench import Bench, Built, Rejected, seconds_of
from ejkernel.ops.tuning.history import History
from ejkernel.ops.tuning.outcome import Tuning
from ejkernel.ops.tuning.problem import Outline, outline
from ejkernel.ops.tuning.search.space import MAX_LISTED
from ejkernel.ops.tuning.session import Session, TuningError
from ejkernel.ops.tuning.timers import Call
from ejkernel.ops.utils.serialize import decode_cfg, encode_cfg

CALLS = 7
"""Calls behind one sample of a kernel that communicates."""
BUILD_AT_ONCE = 16
"""Candidates of a kernel that communicates that are compiled before processes compare."""


class PeerLostError(EjkernelError, RuntimeError):
    """A process that takes part in a tuning does not answer."""


def share(
    tuner: Any, kernel: Kernel[Any, Any], policy: AutotunePolicy, agreement: Agreement, name: str, claim: Data
) -> Any:
    """The tuner to use instead of `tuner` when all processes measure; tuners that are not ours are not replaced."""
    if not isinstance(tuner, Autotuner):
        return tuner
    meeting, together = Meeting(agreement, name, policy.agree_s), claim["together"]
    if kernel.collective:
        return TogetherTuner(tuner, meeting, together)
    return ShardedTuner(tuner, meeting, claim["claimer"]) if policy.sharded and together else tuner


@dataclass(frozen=True)
class Meeting:
    """Exchanges values between the processes that tune one call."""

    agreement: Agreement
    name: str
    timeout_s: float

    def exchange(self, step: str, value: Any) -> dict[int, Any]:
        """Values of all processes that came, this one's included."""
        # In a list: no value at all means that a process has not come.
        self.agreement.insert(f"{self.name}/{step}/{self.agreement.index}", [value])
        others = self.agreement.gather(f"{self.name}/{step}", self.timeout_s)
        return {self.agreement.index: value, **{process: found[0] for process, found in others.items() if found}}

    def leave(self, step: str) -> None:
        """Tells the processes that wait at a step that this one will not come."""
        self.agreement.insert(f"{self.name}/{step}/{self.agreement.index}", [])


# --- Candidates spread over the processes ---


@dataclass(frozen=True)
class ShardedTuner:
    """Each process races its share of the candidates; the one that decides then races the winners."""

    tuner: Autotuner
    meeting: Meeting
    decider: int
    """The process that has claimed the call."""

    def tune(self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any], *, configs: Any = None, **_: Any) -> Tuning:
        """The result of the final in the process that decides, that of its own share in the others."""
        agreement, what = self.meeting.agreement, outline(inv, kernel, configs)
        listed = list(itertools.islice(search.Space.of(what.space, what.guess), MAX_LISTED))
        share = lambda process: listed[process :: agreement.count]
        try:
            mine = self._race(inv, kernel, what, share(agreement.index))
        except BaseException:
            self.meeting.leave("share")
            raise
        winners = self._winners(kernel, mine)
        if agreement.index != self.decider:
            return mine
        missing = [cfg for p in range(agreement.count) if p not in winners for cfg in share(p)]
        final = [cfg for cfg in winners.values() if cfg is not None]
        return self._race(inv, kernel, what, [*final, *missing])

    def _race(
        self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any], what: Outline, configs: Sequence[Any]
    ) -> Tuning:
        try:
            return self.tuner.tune(inv, kernel, configs=[what.guess, *configs])
        except TuningError:
            # None of this share works; other processes may have one that does.
            return _unmeasured(what)

    def _winners(self, kernel: Kernel[Any, Any], mine: Tuning) -> dict[int, Any]:
        found = self.meeting.exchange("share", None if mine.measurement is None else encode_cfg(mine.cfg))
        return {p: None if data is None else decode_cfg(data, kernel.cfg_type) for p, data in found.items()}


# --- Every candidate measured by all ---


@dataclass(frozen=True)
class TogetherTuner:
    """All processes run every candidate at the same time, as a kernel that communicates needs."""

    tuner: Autotuner
    meeting: Meeting
    together: bool
    """Whether all processes have come."""

    def tune(self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any], *, configs: Any = None, **_: Any) -> Tuning:
        """The same outcome in every process; only a guess if one of them did not come, or was lost."""
        what = outline(inv, kernel, configs)
        if not self.together:
            return self._guess(inv, what, f"not all have come within {self.meeting.timeout_s:g} s.")
        # All processes must do the same: a time budget would end at different candidates, and hosts differ in cores.
        effort = replace(self.tuner.effort(), budget_s=None, build_at_once=BUILD_AT_ONCE)
        steps = Steps(self.meeting)

        def run(stop: threading.Event) -> Tuning:
            bench = lambda: TogetherBench(self._bench(inv, kernel), steps)
            return Session(effort, what, bench, History(), threading.Event()).run()

        try:
            return self.tuner.outside(run)
        except PeerLostError as error:
            return self._guess(inv, what, str(error))
        except BaseException:
            steps.leave()
            raise

    def _guess(self, inv: Invocation[Any, Any], what: Outline, reason: str) -> Tuning:
        text = f"{inv.op_id}: it communicates, so all processes must measure it, and {reason} The guess is used."
        warnings.warn(text, JointTuningWarning, 2)
        return _unmeasured(what)

    def _bench(self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Bench:
        return self.tuner.bench_of(inv, kernel, timer=CountedClock())


class CountedClock:
    """The host's clock around each of a fixed number of calls: all processes must make equally many."""

    name: ClassVar[str] = "wall"
    device_time: ClassVar[bool] = False

    def measure(self, calls: Sequence[Call]) -> list[float]:
        """The lower quartile, as of any wall clock on a busy host."""
        return [sorted(self._time(call) for _ in range(CALLS))[(CALLS - 1) // 4] for call in calls]

    def _time(self, call: Call) -> float:
        start = time.perf_counter()
        jax.block_until_ready(call())
        return time.perf_counter() - start


class Steps:
    """Steps that either all processes do or none: none may run a kernel that communicates if another has stopped."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._done = 0

    def together(self, value: Any) -> list[Any]:
        """The values of all processes.

        Raises:
          PeerLostError: One did not come in time; raised in every process, also in those that come later.
        """
        everybody, step = range(self._meeting.agreement.count), self._step()
        found = self._meeting.exchange(step, value)
        # The first verdict counts: one process may time out while another sees that all have come.
        verdict = self._meeting.agreement.insert(f"{self._meeting.name}/{step}/verdict", _lost(found, everybody))
        if verdict:
            raise PeerLostError(f"processes {verdict} have left the tuning.")
        if _lost(found, everybody):
            found = self._meeting.exchange(step, value)  # Another process has seen that all have come.
        self._done += 1
        return [found[process] for process in everybody]

    def leave(self) -> None:
        """Ends the tuning for all processes, at the step they wait at."""
        self._meeting.leave(self._step())

    def _step(self) -> str:
        return f"bench/{self._done}"


def _lost(found: dict[int, Any], everybody: Sequence[int]) -> list[int]:
    return [process for process in everybody if process not in found]


class TogetherBench:
    """A bench that combines the results of all processes: the longest time, and a failure if any process had one."""

    def __init__(self, bench: Bench, steps: Steps) -> None:
        self._bench = bench
        self._all = steps.together
        self.timer = bench.timer
        self.forget = bench.forget
        self.close = bench.close
        self.set_truth = bench.set_truth

    def build(self, candidates: Sequence[tuple[int, Any]]) -> list[Built | Rejected]:
        """Candidates that compile everywhere."""
        mine = self._bench.build(candidates)
        found = self._all([_as_data(result) for result in mine])
        together = zip(mine, zip(*found, strict=True), strict=True)
        return [_any_rejected(everywhere) or result for result, everywhere in together]

    def prove(self, number: int) -> Rejected | None:
        """Whether a candidate is right everywhere."""
        return _any_rejected(self._all(_as_data(self._bench.prove(number))))

    def prove_gradient(self, cfg: Any) -> Rejected | None:
        """Whether a config's gradient is right everywhere."""
        return _any_rejected(self._all(_as_data(self._bench.prove_gradient(cfg))))

    def measure(self, order: Sequence[int]) -> dict[int, float | Rejected]:
        """One sample each: the slowest process's."""
        mine = self._bench.measure(order)
        counts = lambda x: x if isinstance(x, Rejected) else seconds_of(x)
        found = self._all([_as_data(counts(mine[number])) for number in order])
        together = zip(order, zip(*found, strict=True), strict=True)
        return {number: _any_rejected(everywhere) or max(everywhere) for number, everywhere in together}


def _as_data(result: Built | Rejected | float | None) -> Any:
    return asdict(result) if isinstance(result, (Built, Rejected)) else result


def _any_rejected(everywhere: Sequence[Any]) -> Rejected | None:
    for process, data in enumerate(everywhere):
        if isinstance(data, dict) and "outcome" in data:
            return Rejected(data["outcome"], f"on process {process}: {data['reason']}")
    return None


def _unmeasured(what: Outline) -> Tuning:
    """The guess, for when nothing could be measured."""
    facts: dict[str, Any] = {"candidates": (), "rounds": 0, "seconds": 0.0}
    return Tuning(cfg=what.guess, complete=False, measurement=None, speedup=None, timer="", **facts)
