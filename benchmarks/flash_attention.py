"""Flash attention against `jax.nn.dot_product_attention`, every implementation and the tuned choice, in one run.

    python -m benchmarks.flash_attention                        # this CPU, against jax.nn
    python -m benchmarks.flash_attention --gpu                  # an H200: the rows of the design, device time by CUPTI
    python -m benchmarks.flash_attention --tune ejkernel/packs/<device>.json   # tunes the rows, writes a pack

The tuned choice is what a plain call gets: from the store, else from the packs, else the guess. Calls of a row run
interleaved in random order, so that whatever else the machine does hits all alike; a figure is the median over rounds.
Forward counts 4·B·H·T²·D operations, half of it when causal; forward and backward count 3.5 times that.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import random
import statistics
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from ejkernel.modules import FlashAttention, FlashAttentionConfig, flash_attention
from ejkernel.ops import Autotuner, ConfigSelectorChain, device_fingerprint
from ejkernel.ops.config import packs
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.dispatch import UnsupportedCallError
from ejkernel.ops.execution import timers
from ejkernel.ops.execution.pipeline import backward_invocation, invocation, prepared


@dataclass(frozen=True)
class Row:
    batch: int
    length: int
    heads: int
    kv_heads: int
    dim: int
    causal: bool
    dtype: str

    @property
    def flops(self):
        return 4 * self.batch * self.heads * self.length**2 * self.dim / (2 if self.causal else 1)

    def __str__(self):
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads} ({self.kv_heads})"
        return f"{self.batch}, {self.length}, {heads}, {self.dim}, {'causal' if self.causal else 'full'}, {self.dtype}"

    def arrays(self, seed=0):
        """Query, key, value and the gradient of the output."""
        q, kv = [(self.batch, self.length, heads, self.dim) for heads in (self.heads, self.kv_heads)]
        keys = jax.random.split(jax.random.key(seed), 4)
        return [jax.random.normal(k, s, jnp.dtype(self.dtype)) for k, s in zip(keys, (q, kv, kv, q), strict=True)]


CPU_ROWS = [
    Row(1, 4096, 8, 8, 64, True, "float32"),
    Row(1, 4096, 8, 8, 64, False, "float32"),
    Row(4, 1024, 16, 16, 64, True, "float32"),
    Row(1, 2048, 16, 4, 128, True, "float32"),
    Row(1, 2048, 8, 8, 64, True, "bfloat16"),
]
GPU_ROWS = [
    Row(4, 4096, 16, 16, 128, True, "bfloat16"),
    Row(4, 4096, 16, 16, 128, False, "bfloat16"),
    Row(1, 16384, 16, 16, 128, True, "bfloat16"),
    Row(8, 2048, 32, 8, 64, True, "bfloat16"),
    Row(16, 1024, 16, 16, 128, True, "bfloat16"),
    Row(2, 8192, 16, 16, 64, True, "bfloat16"),
    Row(2, 8192, 8, 8, 256, True, "bfloat16"),
]
PLATFORMS = {"cpu": ("xla",), "gpu": ("cudnn", "mosaic", "triton", "xla")}


def contenders(row, kind):
    """Name -> function of (query, key, value)."""
    found = {"jax.nn": partial(jax.nn.dot_product_attention, is_causal=row.causal, implementation="xla")}
    for platform in PLATFORMS[kind]:
        cfg = FlashAttentionConfig(platform=platform)
        found[platform] = lambda q, k, v, cfg=cfg: flash_attention(q, k, v, causal=row.causal, cfg=cfg)
    found["tuned"] = lambda q, k, v: flash_attention(q, k, v, causal=row.causal)
    return found


def compiled(fn, arrays, backward):
    """The program of a contender; or why there is none."""
    *qkv, dout = arrays

    def both(q, k, v, dout):
        out, pull = jax.vjp(fn, q, k, v)
        return out, pull(dout)

    try:
        return jax.jit(both if backward else lambda q, k, v, dout: fn(q, k, v)).lower(*qkv, dout).compile()
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


def matmul_rate(timer, dtype):
    """Operations a second of one large product: the machine's ceiling."""
    size = 2048 if jax.default_backend() == "cpu" else 8192
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.dtype(dtype))
    product = jax.jit(lambda x: x @ x)
    jax.block_until_ready(product(x))
    return 2 * size**3 / statistics.median(timer.measure([partial(product, x)])[0] for _ in range(9))


def report(rows, kind, rounds):
    timer = timers.choose(exclusive=True)
    rates = {dtype: matmul_rate(timer, dtype) for dtype in sorted({row.dtype for row in rows})}
    device = jax.local_devices()[0].device_kind
    print(f"{device}, {device_fingerprint()}, JAX {jax.__version__}, timer {timer.name}, {rounds} rounds\n")
    unit, name = (1e9, "GFLOP/s") if kind == "cpu" else (1e12, "TFLOP/s")
    for dtype, rate in rates.items():
        print(f"{dtype} product: {rate / unit:,.0f} {name}", end="  ")
    programs = compiled_rows(rows, kind)
    for backward in (False, True):
        print(f"\n\n{'Forward and backward' if backward else 'Forward'}, {name} (temporary memory):\n")
        header = ["batch, length, heads (kv), dim", *contenders(rows[0], kind), "tuned / jax.nn"]
        header += ["tuned / cuDNN"] if kind == "gpu" else ["tuned / product"]
        print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
        for row in rows:
            line(row, kind, backward, programs[row, backward], timer, rounds, rates[row.dtype], unit)


def compiled_rows(rows, kind):
    """(row, backward) -> name -> program; all before anything is timed."""
    with concurrent.futures.ThreadPoolExecutor(1 if kind == "cpu" else 14) as pool:
        jobs = {
            (row, backward, name): pool.submit(compiled, fn, row.arrays(), backward)
            for backward in (False, True)
            for row in rows
            for name, fn in contenders(row, kind).items()
        }
    found = {}
    for (row, backward, name), job in jobs.items():
        found.setdefault((row, backward), {})[name] = job.result()
    return found


def line(row, kind, backward, programs, timer, rounds, ceiling, unit):
    arrays, flops = row.arrays(), row.flops * (3.5 if backward else 1)
    running = {name: partial(found, *arrays) for name, found in programs.items() if not isinstance(found, str)}
    for name, call in list(running.items()):
        try:
            jax.block_until_ready(call())
        except jax.errors.JaxRuntimeError as error:
            programs[name] = f"failed: {str(error)[:80]}"
            del running[name]
    seconds = measure(running, timer, rounds)
    cells = []
    for name, found in programs.items():
        if isinstance(found, str):
            cells.append(found.partition(":")[0])
        else:
            memory = found.memory_analysis().temp_size_in_bytes
            cells.append(f"{flops / seconds[name] / unit:,.0f} ({memory / 2**20:,.0f} MiB)")
    speed = lambda other: f"{seconds[other] / seconds['tuned']:.3f}" if other in seconds else "-"
    last = speed("cudnn") if kind == "gpu" else f"{flops / seconds['tuned'] / ceiling:.0%}"
    print(f"| {row} | {' | '.join(cells)} | {speed('jax.nn')} | {last} |", flush=True)


def check(rows):
    """The tuned choice of each row against the float32 reference, where heads of the last batch share a key head."""

    def programs(row):
        group = row.heads // row.kv_heads
        part = lambda x: x[-1:, :, : group if x.shape[2] == row.heads else 1]
        *qkv, _ = row.arrays(seed=1)
        fn = partial(flash_attention, causal=row.causal)
        tuned = jax.jit(lambda *qkv: part(fn(*qkv))).lower(*qkv).compile()
        reference = jax.jit(lambda *qkv: fn(*map(part, qkv), platform="reference")).lower(*qkv).compile()
        return partial(tuned, *qkv), partial(reference, *qkv)

    with concurrent.futures.ThreadPoolExecutor(len(rows)) as pool:
        compiled = list(pool.map(programs, rows))
    # Not in threads: cuDNN's first run fails if another thread uses the device at that moment.
    for row, both in zip(rows, compiled, strict=True):
        got, want = (jax.block_until_ready(run()).astype(jnp.float32) for run in both)
        found = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
        assert found < (1e-5 if row.dtype == "float32" else 2e-2), f"{row}: relative error {found:.1e}"


def tune(rows, target, budget_s):
    """Tunes forward and backward of the rows in a store of its own, and writes the finished ones as a pack.

    Run it again for those that were not finished within their budget: it goes on where it stopped.
    """
    store = PersistentCache(f"{target}.store", packs=())
    chain, kernel = ConfigSelectorChain(persistent=store), FlashAttention()
    # On a GPU in a process of its own: a kernel that never ends costs its timeout, not the rest.
    isolation = "thread" if jax.default_backend() == "cpu" else "process"
    tuner = Autotuner(budget_s=budget_s, isolation=isolation, run_s=20.0)
    keep = lambda: packs.write(target, [entry for entry in store.entries() if entry.complete])
    for row in rows:
        args, kwargs = prepared(kernel, tuple(row.arrays()[:3]), {"causal": True} if row.causal else {})
        inv = replace(invocation(kernel, args, kwargs), args=args, kwargs=kwargs)
        forward = chain.tune(inv, kernel, tuner=tuner)
        keep()
        print(f"{row}: {forward.summary()}", flush=True)
        backward = BackwardKernel(kernel)
        inv = backward_invocation(backward, invocation(kernel, args, kwargs))
        inv = replace(inv, platform=forward.cfg.platform, metadata={"forward_cfg": forward.cfg})
        print(f"{row}, backward: {chain.tune(inv, backward, tuner=tuner).summary()}", flush=True)
        keep()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="the rows for an H200")
    parser.add_argument("--tune", metavar="PACK", help="tune the rows and write a pack, instead of the table")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for tuning one call")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--rows", help="numbers of rows, such as 0,2")
    options = parser.parse_args()
    rows = GPU_ROWS if options.gpu else CPU_ROWS
    rows = [rows[int(i)] for i in options.rows.split(",")] if options.rows else rows
    if options.tune:
        return tune(rows, options.tune, options.budget)
    check(rows)
    return report(rows, "gpu" if options.gpu else "cpu", options.rounds)


if __name__ == "__main__":
    main()
