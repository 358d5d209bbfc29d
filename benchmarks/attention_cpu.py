"""Attention on a CPU beside `jax.nn.dot_product_attention`, untuned: short and odd shapes, and a few long ones.

    python -m benchmarks.attention_cpu --rounds 15
    python -m benchmarks.attention_cpu --clock process      # on a machine that is not quiet

No store and no pack is read. float32; medians over rounds in which all take turns; ratios are JAX's time over ours.
Gradients are those of query, key and value, together with the output.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import time
from functools import partial

import jax

from ejkernel.modules import FlashAttention
from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor

SAMPLE_S = 0.03
SHAPES = (
    # batch, queries, keys, heads, key heads, head dim, causal
    *((8, 197, 197, 12, 12, 64, False), (8, 256, 256, 12, 12, 64, False), (2, 64, 64, 2, 2, 32, False)),
    *((8, 1, 2048, 12, 12, 64, False), (1, 1, 4096, 32, 8, 128, False), (4, 128, 128, 12, 12, 64, True)),
    *((1, 512, 512, 8, 8, 64, True), (16, 50, 50, 8, 8, 64, False), (2, 300, 300, 8, 2, 80, True)),
    *((4, 77, 77, 12, 12, 64, True), (32, 32, 32, 4, 4, 32, False), (2, 577, 577, 12, 12, 64, False)),
    # Long ones.
    *((1, 1024, 1024, 4, 4, 64, True), (2, 1024, 1024, 12, 12, 64, True), (1, 2048, 2048, 8, 8, 64, False)),
    # Few queries, but more than one.
    *((1, 8, 512, 16, 16, 64, False), (8, 16, 512, 8, 8, 64, False), (8, 4, 4096, 8, 8, 64, False)),
    *((1, 4, 4096, 32, 8, 128, False),),
    # Short ones in larger batches.
    *((8, 197, 197, 12, 12, 64, True), (128, 77, 77, 8, 8, 64, True), (16, 197, 256, 8, 8, 80, False)),
    *((16, 257, 257, 16, 16, 80, False), (32, 256, 256, 16, 16, 64, False), (64, 197, 197, 12, 12, 64, False)),
    *((128, 128, 128, 12, 12, 64, False), (16, 384, 384, 12, 12, 64, False)),
)


def calls(shape):
    """Name -> forward, and forward with gradients, ready to run."""
    batch, q_len, kv_len, heads, kv_heads, dim, causal = shape
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = ((q_len, heads), (kv_len, kv_heads), (kv_len, kv_heads), (q_len, heads))
    *args, dout = (jax.random.normal(key, (batch, *size, dim)) for key, size in zip(keys, sizes, strict=True))
    plain, kernel = Executor(ConfigSelectorChain(cache=ConfigCache())), FlashAttention()
    functions = {
        "jax.nn": lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=causal),
        "ours": lambda q, k, v: plain(kernel, q, k, v, causal=causal),
    }
    for name, fn in functions.items():
        forward = jax.jit(fn)
        both = jax.jit(partial(with_gradients, fn))
        yield name, "forward", lambda run=forward: run(*args)
        yield name, "gradients", lambda run=both: run(dout, *args)


def with_gradients(fn, dout, *args):
    out, pull = jax.vjp(fn, *args)
    return out, pull(dout)


def measure(ready, rounds, now):
    """Median seconds of each call."""

    def sample(call, count):
        begun = now()
        for _ in range(count):
            out = call()
        jax.block_until_ready(out)
        return (now() - begun) / count

    counts, times = {}, {}
    for name, what, call in ready:
        jax.block_until_ready(call())
        counts[name, what] = max(1, int(SAMPLE_S / sample(call, 2)))
    for _ in range(rounds):
        for name, what, call in random.sample(ready, len(ready)):
            times.setdefault((name, what), []).append(sample(call, counts[name, what]))
    return {key: statistics.median(found) for key, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", default="wall", choices=["wall", "process"], help="process: for a busy machine")
    options = parser.parse_args()
    now = time.perf_counter if options.clock == "wall" else time.process_time
    print(f"{platform.machine()}, JAX {jax.__version__}, {options.rounds} rounds,", end=" ")
    print("wall time.\n" if options.clock == "wall" else "time of all threads.\n")
    print("| batch, queries, keys, heads, key heads, dim | jax.nn forward, ms | ours | jax.nn gradients, ms | ours |")
    print("|---|---|---|---|---|")
    for shape in SHAPES:
        found = measure(list(calls(shape)), options.rounds, now)
        shown = f"{', '.join(map(str, shape[:-1]))}{', causal' if shape[-1] else ''}"
        cells = [
            cell
            for what in ("forward", "gradients")
            for cell in (f"{1e3 * found['jax.nn', what]:.2f}", f"{found['jax.nn', what] / found['ours', what]:.2f}")
        ]
        print(f"| {shown} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
