"""Our Hopper attention kernels against cuDNN: checks numbers, then times, in one run.

    python benchmarks/hopper_attention.py --out results.md
    python benchmarks/hopper_attention.py --sweep --rounds 8 --rows 0,3

Device time by CUPTI. Candidates of a row run interleaved in random order, so that clocks and temperature hit all
alike; the figure is the median over the rounds. Errors are relative to float32 on the same fresh random data, for the
heads that share one key head. `--sweep` times the whole config space instead of a few hand-picked configs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from ejkernel.kernels.flash_attention import config as configs
from ejkernel.kernels.flash_attention import mosaic, mosaic_bwd, mosaic_support


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
        """Of the forward pass; forward and backward together count 3.5 times that."""
        return 4 * self.batch * self.heads * self.length**2 * self.dim / (2 if self.causal else 1)

    @property
    def upper(self) -> int | None:
        return 0 if self.causal else None

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
    """Returns fresh random q, k, v and the gradient of the output."""
    keys = jax.random.split(jax.random.key(seed), 4)
    shape = (row.batch, row.length, row.heads, row.dim)
    kv_shape = (row.batch, row.length, row.kv_heads, row.dim)
    shapes = (shape, kv_shape, kv_shape, shape)
    return tuple(jax.random.normal(key, shape, jnp.dtype(row.dtype)) for key, shape in zip(keys, shapes, strict=True))


def cudnn(row: Row, q, k, v):
    return (jax.nn.dot_product_attention(q, k, v, is_causal=row.causal, implementation="cudnn"),)


def cudnn_gradients(row: Row, q, k, v, dout):
    (out,), pull = jax.vjp(functools.partial(cudnn, row), q, k, v)
    return out, *pull((dout,))


def ours(row: Row, cfg, q, k, v):
    return mosaic.flash_attention_forward(q, k, v, upper=row.upper, cfg=cfg)[:1]


def our_gradients(row: Row, cfg, bwd_cfg, q, k, v, dout):
    out, *sums = mosaic.flash_attention_forward(q, k, v, upper=row.upper, cfg=cfg)
    return out, *mosaic_bwd.flash_attention_backward(q, k, v, out, *sums, dout, upper=row.upper, cfg=bwd_cfg)


# Tuning the float32 products of a reference that runs once would take longer than all the rest.
UNTUNED = {"xla_gpu_autotune_level": 0}


@functools.partial(jax.jit, static_argnames="causal", compiler_options=UNTUNED)
def reference(q, k, v, dout, *, causal):
    """Output and gradients in float32 of queries `[T, H, D]` that share one key head, a slice of queries at a time."""
    q, k, v, dout = (x.astype(jnp.float32) for x in (q, k, v, dout))
    length, chunk = q.shape[0], min(q.shape[0], 1024)

    @jax.checkpoint
    def part(rows, start, k, v):
        s = jnp.einsum("qhd,kd->hqk", rows, k[:, 0], precision="highest") * q.shape[-1] ** -0.5
        if causal:
            s = jnp.where(jnp.arange(length)[None] <= start + jnp.arange(chunk)[:, None], s, -jnp.inf)
        return jnp.einsum("hqk,kd->qhd", jax.nn.softmax(s, axis=-1), v[:, 0], precision="highest")

    def attention(q, k, v):
        chunks = q.reshape(-1, chunk, *q.shape[1:])
        starts = jnp.arange(0, length, chunk)
        return jax.lax.map(lambda x: part(x[0], x[1], k, v), (chunks, starts)).reshape(q.shape)

    out, pull = jax.vjp(attention, q, k, v)
    return out, *pull(dout)


def relative_error(out, ref) -> float:
    out, ref = (np.asarray(x, np.float64) for x in (out, ref))
    return float(np.linalg.norm(out - ref) / np.linalg.norm(ref))


def device_ms(call, args) -> float:
    """Runs `call` twice and returns the time the kernels of the second run took."""
    from jax.experimental.mosaic.gpu import profiler

    return profiler.Cupti(finalize=False).measure(call)(*args)[1]


def race(calls: dict[str, Any], args, rounds: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            samples[name].append(device_ms(calls[name], args))
    return samples


def forward_candidates(row: Row, sweep: bool) -> dict[str, Callable]:
    first = configs.default_forward(row.dim, full=not row.causal)
    if sweep:
        picked = {describe(cfg): cfg for cfg in configs.forward_space(row.dim)}
    else:
        picked = {"ours": first, "ours, other clusters": dataclasses.replace(first, cluster=3 - first.cluster)}
    return {"cuDNN": functools.partial(cudnn, row)} | {
        name: functools.partial(ours, row, cfg) for name, cfg in picked.items()
    }


def gradient_candidates(row: Row, sweep: bool) -> dict[str, Callable]:
    calls: dict[str, Callable] = {"cuDNN": functools.partial(cudnn_gradients, row)}
    if mosaic_support.unsupported_backward(row.dim) is not None:
        return calls
    forward = configs.default_forward(row.dim, full=not row.causal)
    first = configs.default_backward(row.dim, full=not row.causal)
    picked = {"ours": first, "ours, other clusters": dataclasses.replace(first, cluster=3 - first.cluster)}
    if sweep:
        picked = {describe(cfg): cfg for cfg in configs.backward_space(row.dim)}
    return calls | {name: functools.partial(our_gradients, row, forward, cfg) for name, cfg in picked.items()}


def describe(cfg) -> str:
    return " ".join(f"{f.name}={getattr(cfg, f.name)}" for f in dataclasses.fields(cfg))


@dataclasses.dataclass(frozen=True)
class Table:
    """A row's candidates as they are compiled, in threads; they run later and one by one.

    cuDNN's first run fails, or takes the process along, when another thread uses the device at that moment.
    """

    row: Row
    gradients: bool
    jobs: dict[str, concurrent.futures.Future]
    reference: concurrent.futures.Future

    @property
    def title(self) -> str:
        return "forward + backward" if self.gradients else "forward"

    @property
    def flops(self) -> float:
        return self.row.flops * (3.5 if self.gradients else 1)


def build(pool, row: Row, gradients: bool, sweep: bool) -> Table:
    shapes = jax.eval_shape(functools.partial(inputs, row), 0)
    candidates = (gradient_candidates if gradients else forward_candidates)(row, sweep)

    def compiled(fn, args, **statics):
        return fn.lower(*args, **statics).compile()

    args = shapes if gradients else shapes[:3]
    return Table(
        row,
        gradients,
        {name: pool.submit(compiled, jax.jit(fn), args) for name, fn in candidates.items()},
        pool.submit(compiled, reference, jax.eval_shape(functools.partial(shared, row), *shapes), causal=row.causal),
    )


def shared(row: Row, q, k, v, *of_queries):
    """Of the last batch, what belongs to the first key head."""
    group, last = row.heads // row.kv_heads, row.batch - 1
    queries = [x[last, :, :group] for x in (q, *of_queries)]
    return queries[0], k[last, :, :1], v[last, :, :1], *queries[1:]


def check(table: Table, args) -> tuple[dict[str, Any], dict[str, str]]:
    """Runs every candidate once: those that ran, and their errors."""
    q, k, v, dout = args
    want_out, *want_grads = table.reference.result()(*shared(table.row, q, k, v, dout))
    calls, errors = {}, {}
    for name, job in table.jobs.items():
        try:
            call = job.result()
            out, *grads = call(*(args if table.gradients else args[:3]))
            pairs = [(shared(table.row, out, k, v)[0], want_out)]
            if grads:
                pairs += zip(shared(table.row, *grads), want_grads, strict=True)
            calls[name], errors[name] = call, " ".join(f"{relative_error(a, b):.2e}" for a, b in pairs)
        except Exception as error:  # noqa: BLE001 - a candidate that fails is a result
            print(f"{table.row}: {name} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
    return calls, errors


def report(table: Table, seed: int, rounds: int) -> list[str]:
    args = inputs(table.row, seed)
    calls, errors = check(table, args)
    samples = race(calls, args if table.gradients else args[:3], rounds)
    base = statistics.median(samples["cuDNN"])
    lines = []
    for name, times in samples.items():
        ms = statistics.median(times)
        spread = 100 * (np.quantile(times, 0.75) - np.quantile(times, 0.25)) / ms
        rate = table.flops / ms / 1e9
        lines.append(
            f"| {table.row} | {table.title} | {name} | {rate:.0f} | {base / ms:.3f} | {ms:.4f} | {spread:.1f} % "
            f"| {errors[name]} |"
        )
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="all", help="comma-separated indices of the table's rows")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    picked = range(len(ROWS)) if options.rows == "all" else [int(i) for i in options.rows.split(",")]
    seed = time.time_ns() % 2**31
    random.seed(seed)
    lines = [
        f"JAX {jax.__version__}, {jax.devices()[0].device_kind}, {options.rounds} rounds, seed {seed}",
        "",
        "| batch, length, heads (kv), dim, mask | pass | what | TFLOP/s | of cuDNN | ms | quartiles | out dq dk dv |",
        "|---|---|---|---|---|---|---|---|",
    ]
    with concurrent.futures.ThreadPoolExecutor(14) as pool:
        tables = [(i, build(pool, ROWS[i], gradients, options.sweep)) for gradients in (False, True) for i in picked]
    print(f"{len(tables)} tables compiled", flush=True)
    for i, table in tables:
        lines += report(table, seed + i, options.rounds)
        if options.out:
            options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
