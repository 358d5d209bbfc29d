"""How well and how fast real kernels are tuned: `python benchmarks/tuning.py [--gpu] [--tunings N] [--out FILE]`.

On the CPU, 12 candidates do the same work over and over, each 10 % more often than the one before, so the truth is
known: how often was the best one picked, and how much slower was the pick? On a GPU (`--gpu`), block sizes of a matrix
product in Pallas for Triton are tuned from scratch again and again: do the tunings agree, and what does it cost to
follow one that does not? A last race among all winners tells.
"""

import argparse
import os
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ejkernel.ops import Autotuner, Invocation, Kernel
from ejkernel.ops.execution.tuning import Tuning, TuningError

# --- CPU: candidates whose order is known ---


@dataclass(frozen=True)
class Loops:
    loops: int


class Steps(Kernel[Loops, jax.Array]):
    """`x`, after useless work; candidates are 10 % apart and come in no order."""

    space = tuple(Loops(round(1500 * 1.1**i)) for i in (7, 2, 10, 5, 0, 8, 3, 11, 6, 1, 9, 4))

    def run(self, x, *, cfg):
        wasted = jax.lax.fori_loop(0, cfg.loops, lambda _, y: jnp.tanh(y) + 0.1, x)
        return x + 0 * wasted

    def heuristic_cfg(self, inv):
        return self.space[3]

    def config_space(self, inv):
        return self.space


def in_turn(kernel, x, runs):
    """What most tuners do: one candidate after the other, the lowest mean of a few runs wins."""
    means = {}
    for cfg in kernel.space:
        run = jax.jit(lambda x, cfg=cfg: kernel.run(x, cfg=cfg))
        jax.block_until_ready(run(x))
        times = []
        for _ in range(runs):
            start = time.perf_counter()
            jax.block_until_ready(run(x))
            times.append(time.perf_counter() - start)
        means[cfg] = statistics.fmean(times)
    return min(means, key=means.__getitem__)


def cpu(tunings: int, isolation: str) -> list[str]:
    kernel, x = Steps(), jnp.linspace(0.1, 1, 1024)
    best = min(kernel.space, key=lambda cfg: cfg.loops)
    inv = Invocation(kernel=kernel, args=(x,))
    rules = {
        "ejkernel": lambda i: Autotuner(seed=i, progress=False, isolation=isolation).tune(inv, kernel).cfg,
        "3 runs each, mean": lambda i: in_turn(kernel, x, 3),
        "10 runs each, mean": lambda i: in_turn(kernel, x, 10),
    }
    picked, seconds = {name: [] for name in rules}, {name: [] for name in rules}
    for i in range(tunings):
        for name, rule in rules.items():
            start = time.perf_counter()
            picked[name].append(rule(i))
            seconds[name].append(time.perf_counter() - start)
        print(f"{i + 1} of {tunings}: {picked['ejkernel'][-1]} in {seconds['ejkernel'][-1]:.1f} s", flush=True)
    rows = ["| rule | best picked | mean slowdown | worst | seconds per tuning |", "|---|---|---|---|---|"]
    for name, found in picked.items():
        slower = [cfg.loops / best.loops - 1 for cfg in found]
        rows.append(
            f"| {name} | {found.count(best)} of {tunings} | {statistics.fmean(slower):.2%} | {max(slower):.1%} "
            f"| {statistics.median(seconds[name]):.2f} |"
        )
    return ["12 candidates, each 10 % slower than the one before; compilation included in the time.", "", *rows]


# --- GPU: a product whose best block sizes nobody knows ---

SIZE = 4096


@dataclass(frozen=True)
class Blocks:
    m: int = 128
    n: int = 128
    k: int = 32
    warps: int = 4
    stages: int = 3


class Product(Kernel[Blocks, jax.Array]):
    """A matrix product in Pallas, compiled by Triton."""

    def run(self, a, b, *, cfg):
        (m, k), n = a.shape, b.shape[1]
        return pl.pallas_call(
            self.body(cfg, k),
            out_shape=jax.ShapeDtypeStruct((m, n), a.dtype),
            grid=(m // cfg.m, n // cfg.n),
            in_specs=[pl.BlockSpec((cfg.m, k), lambda i, j: (i, 0)), pl.BlockSpec((k, cfg.n), lambda i, j: (0, j))],
            out_specs=pl.BlockSpec((cfg.m, cfg.n), lambda i, j: (i, j)),
            compiler_params=plgpu.CompilerParams(num_warps=cfg.warps, num_stages=cfg.stages),
            interpret=jax.default_backend() == "cpu",
        )(a, b)

    def body(self, cfg, k):
        def kernel(a_ref, b_ref, out_ref):
            def step(i, total):
                at = pl.ds(i * cfg.k, cfg.k)
                return total + jax.lax.dot(a_ref[:, at], b_ref[at, :], preferred_element_type=jnp.float32)

            total = jax.lax.fori_loop(0, k // cfg.k, step, jnp.zeros((cfg.m, cfg.n), jnp.float32))
            out_ref[...] = total.astype(out_ref.dtype)

        return kernel

    def reference(self, a, b):
        return jax.lax.dot(a, b, preferred_element_type=jnp.float32).astype(a.dtype)

    def heuristic_cfg(self, inv):
        return Blocks()

    def config_space(self, inv):
        return {"m": (64, 128), "n": (64, 128, 256), "k": (32, 64), "warps": (4, 8), "stages": (3, 4)}


@dataclass(frozen=True)
class Splits:
    splits: int = 1
    transposed: bool = False


class XlaProduct(Product):
    """The same by XLA, cut along the inner dimension: for where Triton cannot be used."""

    def run(self, a, b, *, cfg):
        parts = zip(jnp.split(a, cfg.splits, 1), jnp.split(b, cfg.splits, 0), strict=True)
        dot = lambda x, y: jax.lax.dot(x, y, preferred_element_type=jnp.float32)
        total = sum((dot(y.T, x.T).T if cfg.transposed else dot(x, y)) for x, y in parts)
        return total.astype(a.dtype)

    def heuristic_cfg(self, inv):
        return Splits()

    def config_space(self, inv):
        return {"splits": (1, 2, 4, 8, 16), "transposed": (False, True)}


def gpu(tunings: int, isolation: str) -> list[str]:
    a, b = jax.random.normal(jax.random.key(0), (2, SIZE, SIZE), jnp.bfloat16)
    try:
        return repeated(Product(), (a, b), tunings, isolation)
    except TuningError as error:
        print(f"Triton cannot be used here: {error}", file=sys.stderr)
        table = repeated(XlaProduct(), (a, b), tunings, isolation)
        return ["Triton could not be used; the product is XLA's, cut in pieces.", "", *table]


def repeated(kernel, args, tunings: int, isolation: str) -> list[str]:
    inv = Invocation(kernel=kernel, args=args)
    found: list[Tuning] = []
    for i in range(tunings):
        found.append(Autotuner(seed=i, progress=False, isolation=isolation).tune(inv, kernel))
        print(f"{i + 1} of {tunings}: {found[-1].summary()}", flush=True)
    rows = ["| tuning | seconds | rounds | winner | milliseconds [95 %] | over the guess | candidates |"]
    rows += ["|---|---|---|---|---|---|---|"]
    for i, t in enumerate(found):
        gain = "" if t.speedup is None else f"{t.speedup.value:.3f} [{t.speedup.low:.3f}, {t.speedup.high:.3f}]"
        counts = ", ".join(f"{n} {status}" for status, n in t.counts().items())
        rows.append(f"| {i + 1} | {t.seconds:.1f} | {t.rounds} | `{t.cfg}` | {t.measurement} | {gain} | {counts} |")
    winners = Counter(t.cfg for t in found)
    favourite, times = winners.most_common(1)[0]
    lines = [
        f"Timer {found[0].timer}, isolation {isolation}, {len(found[0].candidates)} candidates.",
        "",
        *rows,
        "",
        f"- {times} of {tunings} tunings chose `{favourite}`; {len(winners)} different winners.",
        f"- Median {statistics.median(t.seconds for t in found):.1f} s per tuning.",
    ]
    if len(winners) > 1:
        lines += playoff(kernel, inv, winners, isolation)
    return lines


def playoff(kernel, inv, winners: Counter, isolation: str) -> list[str]:
    """All winners against each other, at length: what following the wrong one costs."""
    judge = Autotuner(progress=False, isolation=isolation, num_iters=64)
    last = judge.tune(inv, kernel, configs=list(winners))
    times = {c.cfg: c.measurement.median_ms for c in last.candidates if c.measurement is not None and c.cfg in winners}
    best = min(times.values())
    cost = np.average([times[cfg] / best - 1 for cfg in times], weights=[winners[cfg] for cfg in times])
    ranked = "; ".join(
        f"`{cfg}` {ms:.4g} ms ({winners[cfg]}x)" for cfg, ms in sorted(times.items(), key=lambda p: p[1])
    )
    return [f"- Raced against each other: {ranked}. Mean slowdown of a winner over the best of them: {cost:.2%}."]


# --- Both ---


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="tune a matrix product on the GPU instead")
    parser.add_argument("--tunings", type=int, help="how many, 20 by default, 10 on the GPU")
    parser.add_argument("--isolation", choices=["thread", "process"], default="thread")
    parser.add_argument("--out", type=Path, help="write the table to this file as well")
    options = parser.parse_args()
    tunings = options.tunings or (10 if options.gpu else 20)
    before = os.getloadavg()[0]
    table = (gpu if options.gpu else cpu)(tunings, options.isolation)
    device = jax.devices()[0]
    head = [
        f"# Tuning {f'a bf16 {SIZE}³ matrix product' if options.gpu else 'twelve steps'} on {device.device_kind}",
        "",
        f"`python benchmarks/tuning.py{' --gpu' if options.gpu else ''} --tunings {tunings} --isolation "
        f"{options.isolation}` on {date.today()}; JAX {jax.__version__}, Python {sys.version.split()[0]}; host with "
        f"{os.cpu_count()} cores at a load of {before:.1f} before and {os.getloadavg()[0]:.1f} after.",
        "",
    ]
    text = "\n".join([*head, *table]) + "\n"
    if options.out is not None:
        options.out.write_text(text)
    print(f"\n{text}", end="")


if __name__ == "__main__":
    # Under its own name, so that worker processes find the kernels.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from benchmarks import tuning

    tuning.main()
