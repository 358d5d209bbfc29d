"""A compiler as a clock: ranking the candidates of a call for a device that is not here.

Every candidate is compiled for the target in a worker process. What does not compile is dropped, and on GPUs what
spills registers. A TPU's compiler says which bundle of instructions starts in which cycle, so its candidates are ranked
by the bundles of all steps of their kernels. A GPU's compiler says no such thing: the first candidate that is left, in
the order of the kernel's own space, is taken.
"""

from __future__ import annotations

import concurrent.futures
import os
import queue
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import jax

from ejkernel.errors import EjkernelError
from ejkernel.ops.config.asking import candidates, heuristic, on_its_platform
from ejkernel.ops.core.kernel import Invocation, Kernel
from ejkernel.ops.tuning import compiling
from ejkernel.ops.tuning.compiling import Report
from ejkernel.ops.tuning.keywords import written_keywords
from ejkernel.ops.tuning.schedule import dump_flags
from ejkernel.ops.tuning.search.space import Space
from ejkernel.ops.tuning.workers.process import JobError, ProcessWorker
from ejkernel.ops.utils.canonical import same_cfg
from ejkernel.ops.utils.targets import TPU_ENVIRONMENT, Target, compiling_for

Clock = Literal["schedule", "order"]


class RankingError(EjkernelError, RuntimeError):
    """No candidate of a call can be compiled for a target."""


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """One candidate.

    Attributes:
      cfg: The config.
      report: What the compiler says; None if it did not compile.
      reason: Why it is dropped; None if it is not.
      is_guess: Whether it is the kernel's own guess.
    """

    cfg: Any
    report: Report | None
    reason: str | None = None
    is_guess: bool = False

    @property
    def bundles(self) -> float | None:
        """Those of all steps; None if it has no kernel with a schedule."""
        return None if self.report is None or self.reason is not None else self.report.bundles


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The candidates of a call, the best first, then those that were dropped."""

    clock: Clock
    candidates: tuple[Ranked, ...] = field(default=())
    keywords: Mapping[str, str] = field(default_factory=dict)
    """The static keywords of the call, each as text."""

    @property
    def cfg(self) -> Any:
        """The best config."""
        return self.candidates[0].cfg

    def statistics(self) -> dict[str, Any]:
        """As an entry keeps it."""
        from ejkernel.ops.utils.serialize import encode_cfg

        rows = []
        for place, each in enumerate(self.candidates):
            status = "dropped" if each.reason is not None else "winner" if place == 0 else "ranked"
            row: dict[str, Any] = {"cfg": encode_cfg(each.cfg), "status": status, "guess": each.is_guess}
            row |= {} if each.bundles is None else {"bundles": round(each.bundles)}
            row |= {} if each.report is None else {"temp_bytes": each.report.temp_bytes}
            rows.append(row | ({} if each.reason is None else {"reason": each.reason}))
        note = {} if self.clock == "schedule" else {"note": "no schedule: the guess's order, without what spills"}
        return {"clock": self.clock, **note, "keywords": dict(self.keywords), "candidates": rows}


def order(found: Sequence[Ranked], clock: Clock) -> Ranking:
    """The candidates by their bundles, the guess first among equals; without a schedule in the order given.

    A program without kernels of ours has no schedule to read, so it comes after those that have one. If the guess is
    such a program, nothing says that another one is faster: then there is no schedule to rank by.
    """
    good = [each for each in found if each.reason is None]
    if any(each.is_guess and each.bundles is None for each in good):
        clock = "order"
    if clock == "schedule":
        good.sort(key=lambda each: (each.bundles is None, each.bundles or 0.0, not each.is_guess))
    return Ranking(clock=clock, candidates=(*good, *(each for each in found if each.reason is not None)))


class Compilers:
    """Worker processes that compile for one target; they end with the block."""

    def __init__(self, target: Target, *, jobs: int = 2, compile_s: float = 120.0) -> None:
        self._target, self._compile_s = target, compile_s
        self._folder = Path(tempfile.mkdtemp(prefix="ejkernel-schedules-"))
        self._pool = concurrent.futures.ThreadPoolExecutor(jobs)
        self._free: queue.SimpleQueue[tuple[ProcessWorker, Path]] = queue.SimpleQueue()
        self._workers = [self._worker(self._folder / str(n)) for n in range(jobs)]
        for worker in self._workers:
            self._free.put(worker)

    def _worker(self, folder: Path) -> tuple[ProcessWorker, Path]:
        folder.mkdir()
        # Before libtpu and Mosaic are loaded: they read these once.
        env = {**TPU_ENVIRONMENT, "JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": dump_flags(folder)}
        return ProcessWorker(env={**env, "MOSAIC_GPU_DUMP_PTXAS": "1"}), folder

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        for worker, _ in self._workers:
            worker.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def rank(
        self,
        inv: Invocation[Any, Any],
        kernel: Kernel[Any, Any],
        *,
        most: int | None = None,
        told: Callable[[Ranked], None] = lambda _: None,
    ) -> Ranking:
        """Compiles all candidates of a call, or the first ones, and ranks them.

        Raises:
          RankingError: None of them compiles.
        """
        with compiling_for(self._target):
            inv = on_its_platform(_without_data(inv), kernel)
            guess = heuristic(inv, kernel)
            cfgs = self._listed(inv, kernel, guess)[:most]
        compiled = lambda cfg: self._one(inv, kernel, cfg, is_guess=cfg is guess)
        found = []
        for each in self._pool.map(compiled, cfgs):
            told(each)
            found.append(each)
        clock: Clock = "schedule" if self._target.platform == "tpu" else "order"
        ranking = order(found, clock)
        if ranking.candidates[0].reason is not None:
            raise RankingError(
                f"{inv.op_id}: none of {len(found)} configs compiles for {self._target.name}; the guess: "
                f"{found[0].reason}"
            )
        return replace(ranking, keywords=written_keywords(inv, kernel))

    def _listed(self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any], guess: Any) -> list[Any]:
        """The guess, then the other candidates that a compiler can say something about: kernels of ours."""
        space = candidates(inv, kernel)
        listed = list(Space.of(space, guess)) if isinstance(space, Mapping) else list(space)
        ours = [cfg for cfg in listed if getattr(cfg, "platform", None) != "xla" and not same_cfg(cfg, guess)]
        return [guess, *ours]

    def _one(self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any], cfg: Any, *, is_guess: bool) -> Ranked:
        worker, folder = self._free.get()
        try:
            job = (self._target.name, kernel, inv, cfg, os.fspath(folder))
            report = worker.run(compiling.report, *job, limit_s=self._compile_s)
        except JobError as error:
            return Ranked(cfg=cfg, report=None, reason=_short(str(error)), is_guess=is_guess)
        finally:
            self._free.put((worker, folder))
        return Ranked(cfg=cfg, report=report, reason=report.fault, is_guess=is_guess)


def _without_data(inv: Invocation[Any, Any]) -> Invocation[Any, Any]:
    bare = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") and hasattr(x, "dtype") else x
    args, kwargs = jax.tree.map(bare, (inv.args, dict(inv.kwargs)))
    return replace(inv, args=args, kwargs=kwargs, metadata=dict(inv.metadata))


def _short(text: str) -> str:
    """The last line that says something: before it are the frames of a traceback."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("---")]
    told = [line for line in lines if "Error" in line or "exceed" in line or "RESOURCE" in line or "CANCELLED" in line]
    return (told or lines or [text])[-1][:300]
