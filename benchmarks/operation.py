"""An operation against its peers, every backend and the tuned choice, in one run.

    python -m benchmarks.operation flash_attention                # the workloads of this device
    python -m benchmarks.operation flash_attention --workloads 0,2 --rounds 30
    python -m benchmarks.operation rms_norm --tune                # first `ejkernel tune rms_norm --suite`

`tuned`, where it differs from `untuned`, is what a plain call gets: from the store, else from the packs. Operations and
bytes are what the workload says that a call needs. `python -m benchmarks.h200` has more, for one kind of GPU.
"""

from __future__ import annotations

import argparse
import importlib
from functools import partial

import jax
import jax.numpy as jnp

from benchmarks import figures
from benchmarks.figures import Contender, Goal, Row
from benchmarks.ways import ways
from ejkernel import cli
from ejkernel.cli import operations
from ejkernel.ops import default_executor, device_kind


def row(kernel, workload, backward):
    """A workload as a row: peers, backends, the guess, the tuned choice."""
    peers = importlib.import_module(f"benchmarks.peers.{kernel.op_id}").peers(workload)
    own = ways(kernel, workload, [b.platform for b in kernel.backends], dry=False)
    found = peers | {name: partial(fn, **workload.kwargs) for name, fn in own.items()}
    work, unit = (workload.flops, "FLOP/s") if workload.flops else (workload.bytes, "B/s")
    work += (workload.backward_flops or workload.backward_bytes) if backward else 0

    def inputs():
        args, _ = workload.inputs()
        return args, jax.tree.map(jnp.ones_like, own["xla"](*args, **workload.kwargs)) if backward else None

    run = _both if backward else lambda fn, args, dout: fn(*args)
    return Row(
        table=f"{kernel.op_id}, {'forward and backward' if backward else 'forward'}",
        name=workload.name,
        inputs=inputs,
        contenders={n: Contender(partial(run, fn), same=n != "dense") for n, fn in found.items()},
        goals=(Goal(1.0, (*peers, "cudnn"), "tuned" if "tuned" in found else "untuned"),),
        work=work,
        unit=("G" if workload.device == "cpu" else "T") + unit,
    )


def _both(fn, args, dout):
    """The results of a call, and the gradients of what has some."""
    moving = [i for i, x in enumerate(args) if x is not None and jnp.issubdtype(x.dtype, jnp.inexact)]
    put = lambda moved: (dict(enumerate(args)) | dict(zip(moving, moved, strict=True))).values()
    out, pull = jax.vjp(lambda *moved: fn(*put(moved)), *(args[i] for i in moving))
    return out, pull(dout)


def check(kernel, workload):
    """The tuned choice against the reference, in float32."""
    args, kwargs = workload.inputs(seed=1)
    got = default_executor()(kernel, *args, **kwargs)
    prepared, statics = kernel.prepare(*args, **kwargs)
    wide = [x if x is None or not jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32) for x in prepared]
    want = jax.jit(lambda *args: kernel.reference(*args, **statics))(*wide)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        error = float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b))
        assert error < (1e-4 if a.dtype == jnp.float32 else 2e-2), f"{workload}: relative error {error:.1e}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operation", help="such as flash_attention")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--workloads", help="numbers of workloads, such as 0,2")
    parser.add_argument("--tune", action="store_true", help="tune what is not decided yet, as `ejkernel tune --suite`")
    options = parser.parse_args()
    if options.tune:
        try:
            cli.main(["tune", options.operation, "--suite"])
        except SystemExit as done:
            if done.code:
                raise
    kernel = operations.make(options.operation)
    workloads = kernel.workloads(device_kind())
    workloads = [workloads[int(i)] for i in options.workloads.split(",")] if options.workloads else workloads
    if not workloads:
        parser.error(f"{options.operation} has no workloads for a {device_kind()}")
    for workload in workloads:
        check(kernel, workload)
    print(figures.heading(options.rounds), flush=True)
    rows = [row(kernel, workload, backward) for backward in (False, True) for workload in workloads]
    found = []
    # One after the other: a whole table at once would need much memory for programs, and a CPU compiles on all cores.
    for each in rows:
        figures.run([each], found.append, rounds=options.rounds, threads=1 if device_kind() == "cpu" else 14)
        print(figures.tables(found[-1:]), flush=True)
    print(f"\n{figures.tables(found)}")


if __name__ == "__main__":
    main()
