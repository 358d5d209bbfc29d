"""Our Hopper attention kernels against cuDNN: checks numbers, then times, in one run.

    python benchmarks/hopper_attention.py --out results.md
    python benchmarks/hopper_attention.py --sweep --rounds 15 --rows 0,3

Device time by CUPTI. Candidates run interleaved in random order, so that clocks and temperature hit all alike; the
figure is the median over the rounds. Errors are relative to float32 on the same fresh random data, for two heads.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import math
import pathlib
import random
import statistics
import sys
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from ejkernel.kernels.flash_attention import config as cfgs
from ejkernel.kernels.flash_attention import mosaic, mosaic_bwd


@dataclasses.dataclass(frozen=True)
class Row:
    batch: int
    length: int
    heads: int
    kv_heads: int
    dim: int
    causal: bool
    dtype: str = "bfloat16"

    @property
    def flops(self) -> float:
        return 4 * self.batch * self.heads * self.length**2 * self.dim / (2 if self.causal else 1)

    def __str__(self) -> str:
        kv = "" if self.kv_heads == self.heads else f" ({self.kv_heads})"
        return f"{self.batch}, {self.length}, {self.heads}{kv}, {self.dim}, {'causal' if self.causal else 'full'}"


ROWS = [
    Row(4, 4096, 16, 16, 128, True),
    Row(4, 4096, 16, 16, 128, False),
    Row(1, 16384, 16, 16, 128, True),
    Row(8, 2048, 32, 8, 64, True),
    Row(16, 1024, 16, 16, 128, True),
    Row(2, 8192, 16, 16, 64, True),
    Row(2, 8192, 8, 8, 256, True),
]


def inputs(row: Row, seed: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(seed), 4)
    shape = (row.batch, row.length, row.heads, row.dim)
    kv_shape = (row.batch, row.length, row.kv_heads, row.dim)
    shapes = (shape, kv_shape, kv_shape, shape)
    return tuple(jax.random.normal(key, shape, jnp.dtype(row.dtype)) for key, shape in zip(keys, shapes, strict=True))


@functools.partial(jax.jit, static_argnames="causal")
def reference(q, k, v, *, causal):
    """Attention of one batch entry in float32, a slice of queries at a time."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    length, chunk = q.shape[0], min(q.shape[0], 1024)

    @jax.checkpoint
    def part(start):
        rows = jax.lax.dynamic_slice_in_dim(q, start, chunk)
        s = jnp.einsum("qhd,khd->hqk", rows, k, precision="highest") * q.shape[-1] ** -0.5
        if causal:
            seen = jnp.arange(length)[None] <= start + jnp.arange(chunk)[:, None]
            s = jnp.where(seen, s, -jnp.inf)
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(s, axis=-1), v, precision="highest")

    return jax.lax.map(part, jnp.arange(0, length, chunk)).reshape(q.shape)


def cudnn(row: Row, q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=row.causal, implementation="cudnn")


def cudnn_gradients(row: Row, q, k, v, dout):
    out, pull = jax.vjp(functools.partial(cudnn, row), q, k, v)
    return out, *pull(dout)


def ours(row: Row, cfg, q, k, v):
    return mosaic.flash_attention_forward(q, k, v, upper=0 if row.causal else None, cfg=cfg)[0]


def our_gradients(row: Row, cfg, bwd_cfg, q, k, v, dout):
    upper = 0 if row.causal else None
    out, lse = mosaic.flash_attention_forward(q, k, v, upper=upper, cfg=cfg)
    return out, *mosaic_bwd.flash_attention_backward(q, k, v, out, lse, dout, upper=upper, cfg=bwd_cfg)


def relative_error(out, ref) -> float:
    out, ref = (np.asarray(x, np.float64) for x in (out, ref))
    return float(np.linalg.norm(out - ref) / np.linalg.norm(ref))


def device_ms(call, args) -> float:
    """Runs `call` once and returns the time its kernels took."""
    from jax.experimental.mosaic.gpu import profiler

    return profiler.Cupti(finalize=False).measure(call)(*args)[1]


def race(calls: dict[str, object], args, rounds: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            samples[name].append(device_ms(calls[name], args))
    return samples


def forward_candidates(row: Row, sweep: bool) -> dict[str, cfgs.MosaicFwdConfig]:
    if not sweep:
        return {"ours": cfgs.default_forward(row.dim)}
    return {str(i): cfg for i, cfg in enumerate(cfgs.forward_space(row.dim))}


def bench_forward(row: Row, options, seed: int) -> list[str]:
    q, k, v, _ = inputs(row, seed)
    group = row.heads // row.kv_heads
    kv_pick = [0, row.kv_heads - 1]
    q_pick = [kv * group + min(1, group - 1) for kv in kv_pick]
    last = row.batch - 1
    ref = reference(q[last][:, np.array(q_pick)], k[last][:, np.array(kv_pick)], v[last][:, np.array(kv_pick)],
                    causal=row.causal)
    calls, errors = {}, {}
    candidates = {"cuDNN": None} | forward_candidates(row, options.sweep)
    for name, cfg in candidates.items():
        fn = functools.partial(cudnn, row) if cfg is None else functools.partial(ours, row, cfg)
        try:
            began = time.time()
            call = jax.jit(fn).lower(q, k, v).compile()
            out = call(q, k, v)
            errors[name] = relative_error(out[last][:, np.array(q_pick)], ref)
            calls[name] = call
            print(f"  {name}: error {errors[name]:.2e}, compiled and run in {time.time() - began:.1f} s", flush=True)
        except Exception as error:  # noqa: BLE001 - a candidate that fails is a result
            print(f"  {name} {cfg}: FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
            if options.verbose:
                traceback.print_exc()
    samples = race(calls, (q, k, v), options.rounds)
    lines = []
    base = statistics.median(samples["cuDNN"])
    for name in sorted(samples, key=lambda n: statistics.median(samples[n])):
        ms = statistics.median(samples[name])
        spread = 100 * (np.quantile(samples[name], 0.75) - np.quantile(samples[name], 0.25)) / ms
        cfg = candidates[name]
        lines.append(
            f"| {row} | {name} | {row.flops / ms / 1e9:.0f} | {base / ms:.3f} | {ms:.4f} | {spread:.1f} % | "
            f"{errors[name]:.2e} | {describe(cfg)} |"
        )
        print(lines[-1], flush=True)
    return lines


def describe(cfg) -> str:
    if cfg is None:
        return ""
    return ", ".join(f"{f.name}={getattr(cfg, f.name)}" for f in dataclasses.fields(cfg))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="all", help="comma-separated indices of the table's rows")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--sweep", action="store_true", help="time the whole config space, not the default alone")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    picked = range(len(ROWS)) if options.rows == "all" else [int(i) for i in options.rows.split(",")]
    seed = time.time_ns() % 2**31
    random.seed(seed)
    lines = [
        f"JAX {jax.__version__}, {jax.devices()[0].device_kind}, seed {seed}, {options.rounds} rounds",
        "",
        "| batch, length, heads (kv), dim, mask | what | TFLOP/s | of cuDNN | ms | quartile spread | error | config |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for i in picked:
        print(f"row {i}: {ROWS[i]}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            lines += bench_forward(ROWS[i], options, seed + i)
        if options.out:
            options.out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
