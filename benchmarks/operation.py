"""An operation against its peers, every backend and the tuned choice, in one run.

    python -m benchmarks.operation flash_attention                # the workloads of this device
    python -m benchmarks.operation flash_attention --workloads 0,2 --rounds 30
    python -m benchmarks.operation rms_norm --tune                # first `ejkernel tune rms_norm --suite`

The tuned choice is what a plain call gets: from the store, else from the packs, else the guess; `untuned` is the guess.
Calls of a workload run interleaved in random order, so that whatever else the machine does hits all alike; a figure is
the median over rounds. Operations and bytes are what the workload says that a call needs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib
import random
import statistics
from functools import partial

import jax
import jax.numpy as jnp

from ejkernel import cli
from ejkernel.cli import operations
from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, default_executor, device_fingerprint, device_kind
from ejkernel.ops.core.dispatch import UnsupportedCallError
from ejkernel.ops.tuning import timers


def contenders(kernel, workload):
    """Name -> function of the positional arguments."""
    kwargs = dict(workload.kwargs)
    plain = Executor(ConfigSelectorChain(cache=ConfigCache()))
    found = dict(importlib.import_module(f"benchmarks.peers.{kernel.op_id}").peers(workload))
    for backend in kernel.backends:
        fixed = {"cfg": kernel.cfg_type(platform=backend.platform), "platform": backend.platform}
        found[backend.platform] = lambda *args, fixed=fixed: plain(kernel, *args, **fixed, **kwargs)
    found["untuned"] = lambda *args: plain(kernel, *args, **kwargs)
    found["tuned"] = lambda *args: default_executor()(kernel, *args, **kwargs)
    return found


def compiled(fn, args, backward):
    """The program of a contender; or why there is none."""
    moving = [i for i, x in enumerate(args) if x is not None and jnp.issubdtype(x.dtype, jnp.inexact)]

    def both(args, dout):
        run = lambda *moved: fn(*(dict(enumerate(args)) | dict(zip(moving, moved, strict=True))).values())
        out, pull = jax.vjp(run, *(args[i] for i in moving))
        return out, pull(dout)

    try:
        dout = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), jax.eval_shape(fn, *args)) if backward else None
        run = both if backward else lambda args, dout: fn(*args)
        return partial(jax.jit(run).lower(args, dout).compile(), args, dout)
    except UnsupportedCallError as error:
        return f"refused: {error}"
    except jax.errors.JaxRuntimeError as error:
        return f"failed: {str(error)[:80]}"


def measure(calls, timer, rounds):
    """Name -> median seconds, of interleaved samples."""
    samples = {name: [] for name in calls}
    names, rng = list(calls), random.Random(0)
    for _ in range(rounds):
        rng.shuffle(names)
        for name, seconds in zip(names, timer.measure([calls[name] for name in names]), strict=True):
            samples[name].append(seconds)
    return {name: statistics.median(times) for name, times in samples.items()}


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


def table(kernel, workloads, rounds):
    timer = timers.choose(exclusive=True)
    device = jax.local_devices()[0].device_kind
    print(f"{kernel.op_id} on {device}, {device_fingerprint()}, JAX {jax.__version__}, {timer.name}, {rounds} rounds")
    for backward in (False, True):
        unit, name = rate_unit(workloads[0], backward)
        header = ["workload", *contenders(kernel, workloads[0]), "tuned / best other"]
        print(f"\n{'Forward and backward' if backward else 'Forward'}, {name} (temporary memory):\n")
        print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
        for workload in workloads:
            print(line(kernel, workload, backward, timer, rounds, unit), flush=True)


def rate_unit(workload, backward):
    kind = "FLOP/s" if workload.flops else "B/s"
    return (1e9, f"G{kind}") if workload.device == "cpu" else (1e12, f"T{kind}")


def line(kernel, workload, backward, timer, rounds, unit):
    args, _ = workload.inputs()
    own = {backend.platform for backend in kernel.backends} | {"tuned", "untuned"}
    with concurrent.futures.ThreadPoolExecutor(1 if workload.device == "cpu" else 14) as pool:
        jobs = {n: pool.submit(compiled, f, args, backward) for n, f in contenders(kernel, workload).items()}
    programs = {name: job.result() for name, job in jobs.items()}
    running = {name: found for name, found in programs.items() if not isinstance(found, str)}
    for name, call in list(running.items()):
        try:
            jax.block_until_ready(call())
        except jax.errors.JaxRuntimeError as error:
            programs[name] = f"failed: {str(error)[:80]}"
            del running[name]
    seconds = measure(running, timer, rounds)
    work = workload.flops or workload.bytes
    work += (workload.backward_flops or workload.backward_bytes) if backward else 0
    cells = []
    for name, found in programs.items():
        if isinstance(found, str):
            cells.append(found.partition(":")[0])
        else:
            memory = found.func.memory_analysis().temp_size_in_bytes
            cells.append(f"{work / seconds[name] / unit:,.2f} ({memory / 2**20:,.0f} MiB)")
    others = [seconds[name] for name in seconds if name not in own or name == "cudnn"]
    ratio = f"{min(others) / seconds['tuned']:.3f}" if others else "-"
    return f"| {workload} | {' | '.join(cells)} | {ratio} |"


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
    table(kernel, workloads, options.rounds)


if __name__ == "__main__":
    main()
