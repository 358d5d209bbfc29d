"""Tunes flash attention on this machine's device, prints what became of every candidate, and remembers the winner.

A second run answers from the store at once.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from ejkernel.modules import FlashAttention, flash_attention
from ejkernel.ops import Autotuner, benchmark, default_executor, device_fingerprint, device_kind

SHAPES = {
    "cpu": (1, 1024, 4, 64, "float32"),
    "gpu": (4, 4096, 16, 128, "bfloat16"),
    "tpu": (2, 4096, 8, 128, "bfloat16"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=60, help="seconds that measuring may take")
    budget_s = parser.parse_args().budget
    console, executor, kernel = Console(), default_executor(), FlashAttention()
    batch, length, heads, dim, dtype = SHAPES[device_kind()]
    x = jax.ShapeDtypeStruct((batch, length, heads, dim), jnp.dtype(dtype))
    console.print(f"flash_attention on {device_fingerprint()}: {dtype}{list(x.shape)}, causal\n")

    start = time.perf_counter()
    found = executor.explain(kernel, x, x, x, causal=True)
    if found.tier in ("memory", "persistent"):
        elapsed = 1e3 * (time.perf_counter() - start)
        console.print(f"The store had it ({elapsed:.0f} ms, nothing was measured):\n\n{found}", markup=False)
        console.print("\nWith another EJKERNEL_CACHE_DIR it is measured anew.", markup=False)
        return

    tuning = executor.chooser.tune(found.selection.inv, kernel, tuner=Autotuner(budget_s=budget_s))
    console.print(table(tuning))
    console.print(tuning.summary().splitlines()[0], markup=False, highlight=False)
    if tuning.measurement is None:
        console.print(f"Nothing was measured in {budget_s:.0f} s: the guess serves. Give it more time with --budget.")
        return
    won_by_guess = any(c.guess and c.status == "winner" for c in tuning.candidates)
    if won_by_guess:
        console.print("The guess stays: nothing was surely faster.", markup=False)
    elif tuning.speedup is not None:
        gain = tuning.speedup
        console.print(
            f"{gain.value:.2f} times as fast as the guess, [{gain.low:.2f}, {gain.high:.2f}] at 95 %", markup=False
        )
    console.print(f"{times_as_fast_as_plain_jax(x):.2f} times as fast as plain JAX, jax.nn.dot_product_attention")
    console.print(f"\nKept in {executor.chooser.persistent.path}; run this again.", markup=False, soft_wrap=True)


def table(tuning):
    """Every candidate, the winner first. Those that left early were timed in other rounds: their fate counts."""
    headers = ("config", "time, ms", "95 % interval", "what became of it")
    rows = Table(*headers, box=None, header_style="bold", padding=(0, 2, 0, 0))
    for c in tuning.ranked():
        m, style = c.measurement, "bold green" if c.status == "winner" else None
        params = c.cfg.fwd_params
        name = f"{c.cfg.platform} {getattr(params, 'q_blocksize', '')} x {getattr(params, 'kv_blocksize', '')}"
        fate = c.reason.splitlines()[0] if c.reason else c.status
        rows.add_row(
            (name if params else c.cfg.platform) + (", guess" if c.guess else ""),
            f"{m.median_ms:.4g}" if m else "-",
            f"{m.low_ms:.3g} to {m.high_ms:.3g}" if m and m.low_ms is not None else "-",
            f"{c.status}: {fate}" if c.status in ("failed", "wrong") else fate,
            style=style,
        )
    return rows


def times_as_fast_as_plain_jax(x):
    """How the tuned call does against JAX's own formulation, both jitted, in turns."""
    q, k, v = (jax.random.normal(key, x.shape, x.dtype) for key in jax.random.split(jax.random.key(0), 3))
    plain = jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True))
    tuned = jax.jit(lambda q, k, v: flash_attention(q, k, v, causal=True))
    pairs = [[benchmark(f, q, k, v, num_warmup=1, num_iters=2) for f in (plain, tuned)] for _ in range(9)]
    return statistics.median(plain_ms / tuned_ms for plain_ms, tuned_ms in pairs)


if __name__ == "__main__":
    main()
