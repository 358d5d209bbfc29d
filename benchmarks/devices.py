"""What choosing together costs: time to agreement of several processes, and batches against plain `jax.vmap`.

Run: python benchmarks/devices.py [--out FILE]
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import jax
import jax.numpy as jnp

from ejkernel.ops import ConfigSelectorChain, Executor, Kernel, vmap_with_config

CALLS = 100


@dataclass(frozen=True)
class Cfg:
    block: int = 128


class Product(Kernel[Cfg, jax.Array]):
    def run(self, x, y, *, cfg):
        return jnp.sin(x) * y

    def heuristic_cfg(self, inv):
        return Cfg()


# --- Agreement ---


def agree(index, count, port):
    """One process: chooses for 100 calls, all of them new, and tells how long each took."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", count, index)
    executor, kernel = Executor(ConfigSelectorChain()), Product()
    choose = lambda n: executor.choose_config(kernel, *(jax.ShapeDtypeStruct((n, 8), jnp.float32),) * 2)
    choose(CALLS + 1)  # Once, so that nobody waits for imports and for the others to start.
    times = []
    for n in range(1, CALLS + 1):
        start = time.perf_counter()
        choose(n)
        times.append(time.perf_counter() - start)
    print(json.dumps({"total_s": sum(times), "median_ms": 1e3 * statistics.median(times)}), flush=True)


def agreement_row(count):
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    command = [sys.executable, __file__, "--agree"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen([*command, f"{i},{count},{port}"], stdout=subprocess.PIPE, text=True, env=env)
        for i in range(count)
    ]
    told = [json.loads(p.communicate(timeout=300)[0].splitlines()[-1]) for p in started]
    return max(each["total_s"] for each in told), max(each["median_ms"] for each in told)


def alone_row():
    executor, kernel = Executor(ConfigSelectorChain()), Product()
    choose = lambda n: executor.choose_config(kernel, *(jax.ShapeDtypeStruct((n, 8), jnp.float32),) * 2)
    choose(CALLS + 1)
    start = time.perf_counter()
    for n in range(1, CALLS + 1):
        choose(n)
    total = time.perf_counter() - start
    return total, 1e3 * total / CALLS


# --- Batches ---


def interleaved(functions, samples=41, calls=50):
    """Median seconds a call of each, measured in turns."""
    times = [[] for _ in functions]
    for f in functions:
        jax.block_until_ready(f())
    for _ in range(samples):
        for k, f in enumerate(functions):
            start = time.perf_counter()
            for _ in range(calls):
                f()
            times[k].append((time.perf_counter() - start) / calls)
    return [statistics.median(t) for t in times]


def batch_rows():
    executor, kernel = Executor(ConfigSelectorChain()), Product()
    f = lambda x, y: jnp.sin(x) * y
    for shape in ((8, 16), (64, 256)):
        x = jnp.ones(shape)
        ours = vmap_with_config(executor, kernel, in_axes=0)
        made = lambda x=x: vmap_with_config(executor, kernel, in_axes=0)(x, x)
        functions = [jax.vmap(f), jax.jit(jax.vmap(f)), ours]
        times = interleaved([*(lambda g=g, x=x: g(x, x) for g in functions), made])
        yield str(shape), *(1e6 * t for t in times)


def report(agreements, batches):
    yield f"# Choosing together, {date.today()}\n"
    yield f"`python benchmarks/devices.py` · cpu · {platform.machine()} · Python {platform.python_version()} · JAX"
    yield f"{jax.__version__} · {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}.\n"
    yield f"Time to agreement on the configs of {CALLS} calls, all new, autotune off; the slowest process.\n"
    yield "| processes | all calls, s | one call, median ms |\n|---|---|---|"
    for count, (total, median) in agreements:
        yield f"| {count} | {total:.2f} | {median:.2f} |"
    yield "\nA batch of a small kernel, eagerly; µs a call, medians of samples taken in turns.\n"
    yield (
        "| shape | jax.vmap | jax.jit(jax.vmap) | vmap_with_config | / jax.vmap | / jax.jit(jax.vmap) | "
        "made anew at each call |\n|---|---|---|---|---|---|---|"
    )
    for shape, vmapped, jitted, ours, made in batches:
        yield (
            f"| {shape} | {vmapped:.1f} | {jitted:.2f} | {ours:.2f} | {ours / vmapped:.2f} | {ours / jitted:.2f} | "
            f"{made:.2f} |"
        )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--agree", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.agree:
        agree(*map(int, given.agree.split(",")))
        return
    agreements = [("1", alone_row()), ("2", agreement_row(2)), ("4", agreement_row(4))]
    text = "\n".join(report(agreements, batch_rows()))
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
