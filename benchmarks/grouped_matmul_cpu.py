"""Grouped products on a CPU beside one dense product of as many operations and `lax.ragged_dot`, in one run.

python benchmarks/grouped_matmul_cpu.py --rows 4096 --groups 16 --k 512 --n 1024 --rounds 9 --kept-memory

The gradient of the weights is as large as all of them, that of the dense product as one. `--kept-memory` has the C
library keep what is freed, as a long-running program's allocator does: else each call of the former pays for new pages,
which the system fills with zeros.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import platform
import statistics
import sys
import time

import jax
import jax.numpy as jnp

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from ejkernel.kernels.grouped_matmul.workloads import DISTRIBUTIONS, draw_group_sizes
from ejkernel.modules import grouped_matmul

KEPT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}


def calls(options, distribution):
    """Name -> forward, and forward with both gradients, ready to run."""
    keys = jax.random.split(jax.random.key(0), 2)
    lhs = jax.random.normal(keys[0], (options.rows, options.k))
    rhs = jax.random.normal(keys[1], (options.groups, options.k, options.n))
    sizes = jnp.asarray(draw_group_sizes(options.rows, options.groups, distribution))
    functions = {
        "ours": (lambda a, b: grouped_matmul(a, b, sizes), rhs),
        "lax": (lambda a, b: jax.lax.ragged_dot(a, b, sizes), rhs),
        "dense": (lambda a, b: a @ b, rhs[0]),
    }
    ones = jnp.ones((options.rows, options.n))
    for name, (fn, weights) in functions.items():
        forward = jax.jit(fn)
        both = jax.jit(lambda a, b, fn=fn: jax.vjp(fn, a, b)[1](ones))
        yield name, "forward", lambda fn=forward, w=weights: fn(lhs, w)
        yield name, "with gradients", lambda both=both, fn=forward, w=weights: (fn(lhs, w), both(lhs, w))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("rows", 4096), ("groups", 16), ("k", 512), ("n", 1024), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--distributions", nargs="+", default=["even", "uneven"], choices=DISTRIBUTIONS)
    parser.add_argument("--clock", default="wall", choices=["wall", "process"], help="process: for a busy machine")
    parser.add_argument("--kept-memory", action="store_true", help="the C library keeps what is freed")
    options = parser.parse_args()
    if options.kept_memory and not KEPT.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEPT})
    now = time.perf_counter if options.clock == "wall" else time.process_time
    print(f"{platform.machine()}, JAX {jax.__version__}, float32, {options.rows} rows, {options.groups} groups,")
    print(f"{options.k} to {options.n}, medians of {options.rounds} rounds (one of lax), ratios to the dense one,")
    print(f"{'wall time' if options.clock == 'wall' else 'time of all threads'},", end=" ")
    print(f"freed memory {'kept' if options.kept_memory else 'handled as by default'}.\n")
    print("| groups | pass | dense, ms | ours | `lax.ragged_dot` |\n|---|---|---|---|---|")
    for distribution in options.distributions:
        ready = list(calls(options, distribution))
        times: dict[tuple[str, str], list[float]] = {}
        for _, _, call in ready:
            jax.block_until_ready(call())
        for i in range(options.rounds):
            for name, what, call in ready:
                if name == "lax" and i > 0:
                    continue  # Seconds for one call.
                begun = now()
                jax.block_until_ready(call())
                times.setdefault((name, what), []).append(now() - begun)
        found = {key: statistics.median(values) for key, values in times.items()}
        for what in ("forward", "with gradients"):
            dense = found["dense", what]
            ours, lax = (found[name, what] / dense for name in ("ours", "lax"))
            print(f"| {distribution} | {what} | {1e3 * dense:.1f} | {ours:.2f} | {lax:.1f} |", flush=True)


if __name__ == "__main__":
    main()
