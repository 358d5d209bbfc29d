"""What a compiler says about one config of a call: run in a worker process of `clock`."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ejkernel.ops.config.asking import forward_of
from ejkernel.ops.config.policy import as_stored
from ejkernel.ops.core import dispatch
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.kernel import Invocation, Kernel
from ejkernel.ops.tuning import ahead, schedule
from ejkernel.ops.tuning.schedule import KernelSchedule
from ejkernel.ops.utils import targets

# In a warning; in a list of properties the same number may come once more.
_SPILLS = re.compile(r"spilled to local memory in function .*?, (\d+) bytes spill stores")
_REGISTERS = re.compile(r"Used (\d+) registers")
_NO_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the compiler said.

    Attributes:
      kernels: Kernels of our own in the program.
      temp_bytes: What the program needs beside arguments and results.
      bundles: On a TPU: those of all steps of its kernels; None if it has none.
      registers: On a GPU: the most that a thread has, if the compiler told.
      fault: Why it should not be used although it compiles: it spills.
    """

    kernels: int
    temp_bytes: int
    bundles: float | None = None
    registers: int | None = None
    fault: str | None = None


def report(name: str, kernel: Kernel[Any, Any], inv: Invocation[Any, Any], cfg: Any, folder: str) -> Report:
    """Compiles a config for the target of this name; libtpu writes its schedules into `folder`."""
    target, dumps = targets.find(name), Path(folder)
    for path in dumps.iterdir():
        path.unlink()
    options = None if target.platform == "tpu" else _NO_SPILLS
    with _output() as said, as_stored():
        program = ahead.compiled(inv, kernel, cfg, target, _device(name), options=options)
    if target.platform != "tpu":
        spilled = sum(map(int, _SPILLS.findall(said[0])))
        most = max(map(int, _REGISTERS.findall(said[0])), default=None)
        fault = f"spills {spilled} bytes" if spilled else None
        return Report(kernels=program.kernels, temp_bytes=program.temp_bytes, registers=most, fault=fault)
    with targets.compiling_for(target):
        needed = needed_steps(inv, kernel, cfg)
    found = schedule.read(dumps) if program.kernels else []
    return Report(
        kernels=program.kernels,
        temp_bytes=program.temp_bytes,
        bundles=total_bundles(found, needed) if found else None,
    )


@cache
def _device(name: str) -> Any:
    return targets.describe(targets.find(name))[0]


def total_bundles(kernels: Sequence[KernelSchedule], needed: int | None) -> float:
    """Rounds of the grid times what each costs, and the steps that compute times what they cost."""
    total = 0.0
    for kernel in kernels:
        rounds = kernel.iterations or needed or 1
        steps = rounds if needed is None else needed
        # A kernel may have several bodies of about the same size, of which a step runs one.
        body = sum(kernel.steps) / len(kernel.steps)
        total += rounds * (kernel.overhead if kernel.bodies else 0) + steps * body
    return total


def needed_steps(inv: Invocation[Any, Any], kernel: Kernel[Any, Any], cfg: Any) -> int | None:
    """How many steps of the grid compute something, as the backend says; None if all do."""
    owner = forward_of(kernel)
    platform = dispatch.forced_platform(owner, cfg) or inv.platform
    backends = {b.platform: b for b in getattr(owner, "backends", ())}
    count = getattr(backends[platform].functions, "needed_steps", None) if platform in backends else None
    if count is None:
        return None
    backward = isinstance(kernel, BackwardKernel)
    return count(inv, cfg.bwd_params if backward else cfg.fwd_params, backward=backward)


@contextlib.contextmanager
def _output() -> Iterator[list[str]]:
    """What C++ code writes to the standard output and error inside: `said[0]`, after the block."""
    said: list[str] = [""]
    with tempfile.TemporaryFile() as file:
        saved = [os.dup(1), os.dup(2)]
        sys.stdout.flush(), sys.stderr.flush()
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
        try:
            yield said
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            for number, copy in enumerate(saved, 1):
                os.dup2(copy, number)
                os.close(copy)
            file.seek(0)
            said[0] = file.read().decode(errors="replace")
