"""Tunes flash attention on this machine's device, prints what became of every candidate, and remembers the winner.

A second run answers from the store at once.
"""

import argparse
import time

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from ejkernel.modules import FlashAttention
from ejkernel.ops import Autotuner, default_executor, device_fingerprint, device_kind

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
    if tuning.speedup is not None:
        gain = tuning.speedup
        console.print(
            f"{gain.value:.2f} times as fast as the guess, [{gain.low:.2f}, {gain.high:.2f}] at 95 %", markup=False
        )
    console.print(f"\nKept in {executor.chooser.persistent.path}; run this again.", markup=False, soft_wrap=True)


def table(tuning):
    rows = Table("config", "time, ms", "95 % interval", "", box=None, header_style="bold")
    key = lambda c: (c.measurement is None, c.measurement.median_ms if c.measurement else 0)
    for c in sorted(tuning.candidates, key=key):
        m, style = c.measurement, "bold green" if c.status == "winner" else None
        times = (f"{m.median_ms:.3f}", f"{m.low_ms:.3f} to {m.high_ms:.3f}") if m else ("-", "-")
        params = c.cfg.fwd_params
        name = f"{c.cfg.platform} {getattr(params, 'q_blocksize', '')} x {getattr(params, 'kv_blocksize', '')}"
        rows.add_row(name if params else c.cfg.platform, *times, c.status, style=style)
    return rows


if __name__ == "__main__":
    main()
