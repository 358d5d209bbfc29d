"""Our Hopper attention forward on what models train, beside cuDNN: grouped heads, packed sequences, dims, lengths.

    python benchmarks/hopper_forward.py --rounds 30 --out results.md
    python benchmarks/hopper_forward.py --rows packed,short --variants

Device time by CUPTI, candidates of a row interleaved in random order, medians. TFLOP/s count the pairs of queries and
keys that see each other. Packed rows have the same work as a batch beside them where their segments are equal;
`--variants` adds other configs. Numbers are checked by `hopper_checks.py`.
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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from ejkernel.kernels.flash_attention import config as configs
from ejkernel.kernels.flash_attention import mosaic


@dataclasses.dataclass(frozen=True)
class Row:
    """A call; `segments` are the lengths of packed sequences, `window` how many keys before itself a query sees.

    `mask` is a boolean mask beside that: `triangle`, in place of causal, or `padding`, of no key.
    """

    kind: str
    batch: int
    q_len: int
    heads: int
    kv_heads: int
    dim: int
    causal: bool = True
    kv_len: int | None = None
    value_dim: int | None = None
    window: int | None = None
    soft_cap: float | None = None
    segments: tuple[int, ...] = ()
    mask: str = ""
    variants: tuple[tuple[tuple[str, Any], ...], ...] = ()

    @property
    def keys(self) -> int:
        return self.kv_len or self.q_len

    @property
    def dims(self) -> tuple[int, int]:
        return self.dim, self.value_dim or self.dim

    @property
    def band(self) -> dict[str, int | None]:
        upper = self.keys - self.q_len if self.causal else None
        return {"upper": upper, "lower": None if self.window is None else (upper or 0) - self.window}

    @property
    def flops(self) -> float:
        pairs = self.batch * sum(map(self._pairs, self.segments or (self.q_len,)))
        return 2 * sum(self.dims) * self.heads * pairs

    def _pairs(self, q_len: int) -> float:
        before = 0 if self.segments else self.keys - self.q_len
        if not self.causal:
            return q_len * (q_len + before)
        seen = np.arange(1, q_len + 1) + before
        return float((seen if self.window is None else np.minimum(seen, self.window + 1)).sum())

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        dims = f"{self.dim}" if self.value_dim is None else f"{self.dim}/{self.value_dim}"
        length = f"{self.q_len}" if self.kv_len is None else f"{self.q_len}->{self.kv_len}"
        more = f" window {self.window}" if self.window else ""
        more += f" cap {self.soft_cap:g}" if self.soft_cap else ""
        more += f" {len(self.segments)} segments" if self.segments else ""
        more += f", mask: {self.mask}" if self.mask else ""
        return f"{self.batch} x {length} {heads} {dims} {'causal' if self.causal else 'full'}{more}"


def uneven(count: int, total: int, seed: int) -> tuple[int, ...]:
    """`count` lengths with the sum `total`, from a few dozen up."""
    shares = np.random.default_rng(seed).dirichlet(np.full(count, 1.5))
    lengths = np.maximum((shares * total).astype(int), 32)
    lengths[lengths.argmax()] += total - lengths.sum()
    return tuple(map(int, lengths))


def v(**fields: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(fields.items())


TURNLESS, HEADS_8, HEADS_16 = v(ping_pong=False), v(head_group=8), v(head_group=16)

ROWS = [
    Row("first", 4, 4096, 16, 16, 128),
    Row("first", 4, 4096, 16, 16, 128, causal=False),
    Row("first", 1, 16384, 16, 16, 128),
    Row("first", 8, 2048, 32, 8, 64, variants=(v(consumers=2, stages=2),)),
    Row("first", 16, 1024, 16, 16, 128, variants=(v(q_stages=2),)),
    Row("first", 2, 8192, 16, 16, 64),
    Row("first", 2, 8192, 8, 8, 256),
    Row("grouped", 2, 4096, 32, 8, 128, variants=(HEADS_8, HEADS_16)),
    Row("grouped", 1, 8192, 64, 8, 128, variants=(HEADS_8, HEADS_16)),
    Row("grouped", 4, 2048, 28, 4, 128),
    Row("grouped", 1, 32768, 8, 8, 128),
    Row("packed", 16, 1024, 32, 8, 128),
    Row("packed", 1, 16384, 32, 8, 128, segments=(1024,) * 16, variants=(HEADS_8, HEADS_16)),
    Row("packed", 1, 16384, 32, 8, 128, segments=uneven(3, 16384, 0)),
    Row("packed", 1, 16384, 32, 8, 128, segments=uneven(10, 16384, 1)),
    Row("packed", 40, 410, 32, 8, 128),
    Row("packed", 1, 16384, 32, 8, 128, segments=uneven(40, 16384, 2)),
    Row("packed", 16, 1024, 32, 8, 64),
    Row("packed", 1, 16384, 32, 8, 64, segments=(1024,) * 16, variants=(TURNLESS,)),
    Row("dims", 2, 4096, 16, 16, 192, value_dim=128),
    Row("dims", 4, 4096, 16, 16, 192, variants=(v(stages=3, share_qo=True),)),
    Row("dims", 4, 4096, 16, 16, 112),
    Row("dims", 4, 4096, 16, 16, 96),
    Row("dims", 4, 4096, 16, 16, 80),
    Row("dims", 4, 4096, 16, 16, 72),
    Row("masks", 4, 4096, 16, 16, 128, mask="triangle"),
    Row("masks", 4, 4096, 16, 16, 128, mask="padding"),
    Row("windows", 2, 8192, 32, 8, 128, window=4095),
    Row("windows", 2, 8192, 32, 8, 128, window=511),
    Row("cap", 2, 4096, 8, 4, 256, soft_cap=50.0),
    Row("cap", 2, 4096, 8, 4, 256),
    Row("short", 32, 512, 12, 12, 64, causal=False, variants=(v(ping_pong=True), v(stages=4))),
    Row(
        *("short", 64, 256, 16, 16, 64),
        causal=False,
        variants=(v(q_stages=1), v(stages=4), v(cluster=2), v(stages=2), v(head_group=16), v(block_kv=64, stages=6)),
    ),
    Row("short", 64, 197, 16, 16, 64, causal=False, variants=(v(stages=4),)),
    Row("short", 64, 256, 16, 16, 128, causal=False, variants=(v(cluster=1), v(cluster=1, q_stages=2))),
    Row("few", 1, 512, 32, 8, 128, kv_len=8192, variants=(v(cluster=2), HEADS_8, v(head_group=32))),
]


def inputs(row: Row, seed: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(seed), 3)
    queries, kv = (row.batch, row.q_len, row.heads), (row.batch, row.keys, row.kv_heads)
    shapes = (*queries, row.dims[0]), (*kv, row.dims[0]), (*kv, row.dims[1])
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]
    if row.segments:
        arrays.append(jnp.asarray(np.repeat(np.arange(len(row.segments)), row.segments)[None], jnp.int32))
    if row.mask == "triangle":
        arrays.append(jnp.tril(jnp.ones((1, 1, row.q_len, row.keys), bool)))
    elif row.mask:
        arrays.append(jnp.ones((row.batch, 1, 1, row.keys), bool))
    return tuple(arrays)


def ours(row: Row, cfg, q, k, v, extra=None):
    band = {"upper": None, "lower": None} if row.mask == "triangle" else row.band
    ids, mask = (None, extra) if row.mask else (extra, None)
    rules = band | {"soft_cap": row.soft_cap, "q_segment_ids": ids, "kv_segment_ids": ids, "mask": mask}
    return mosaic.flash_attention_forward(q, k, v, cfg=cfg, **rules)[0]


def cudnn(row: Row, q, k, v):
    window = None if row.window is None else (row.window, 0)
    return jax.nn.dot_product_attention(q, k, v, is_causal=row.causal, local_window_size=window, implementation="cudnn")


def candidates(row: Row, variants: bool) -> dict[str, Any]:
    full = configs.is_full(row.q_len, row.keys, **row.band)
    facts = {"full": full, "packed": bool(row.segments + tuple(row.mask)), "banded": row.causal, "q_len": row.q_len}
    guess = configs.default_forward(*row.dims, **facts)
    found: dict[str, Any] = {"ours": functools.partial(ours, row, guess)}
    for fields in row.variants if variants else ():
        name = "ours " + " ".join(f"{key}={value}" for key, value in fields)
        found[name] = functools.partial(ours, row, dataclasses.replace(guess, **dict(fields)))
    # JAX aligns causal masks to the first key, so it has no call for queries at the end.
    if not row.segments and not row.mask and row.soft_cap is None and row.dim == row.dims[1] and row.kv_len is None:
        found["cuDNN"] = functools.partial(cudnn, row)
    elif row.kv_len is not None:
        found["cuDNN, all keys"] = functools.partial(cudnn, dataclasses.replace(row, causal=False))
    return found


def device_ms(call, args) -> float:
    """Runs `call` twice and returns the time the kernels of the second run took."""
    from jax.experimental.mosaic.gpu import profiler

    return profiler.Cupti(finalize=False).measure(call)(*args)[1]


def report(row: Row, jobs: dict[str, Any], rounds: int, seed: int) -> list[str]:
    args, calls = inputs(row, seed), {}
    for name, job in jobs.items():
        try:
            calls[name] = job.result()
            jax.block_until_ready(calls[name](*args))
        except Exception as error:  # noqa: BLE001 - a candidate that fails is a result
            calls.pop(name, None)
            print(f"{row}: {name} failed: {type(error).__name__}: {str(error)[:200]}", flush=True)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            samples[name].append(device_ms(calls[name], args))
    medians = {name: statistics.median(times) for name, times in samples.items()}
    base = next((ms for name, ms in medians.items() if name.startswith("cuDNN")), None)
    lines = []
    for name, ms in medians.items():
        ratio = "-" if base is None else f"{base / ms:.3f}"
        lines.append(f"| {row.kind} | {row} | {name} | {ms:.4f} | {row.flops / ms / 1e9:.0f} | {ratio} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="comma-separated kinds of rows; all if none")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    picked = [row for row in ROWS if not options.rows or row.kind in options.rows.split(",")]
    seed = time.time_ns() % 2**31
    random.seed(seed)
    lines = [
        f"JAX {jax.__version__}, {jax.devices()[0].device_kind}, {options.rounds} rounds, seed {seed}",
        "",
        "| kind | call | what | ms | TFLOP/s | of cuDNN |",
        "|---|---|---|---|---|---|",
    ]
    with concurrent.futures.ThreadPoolExecutor(14) as pool:
        compiled = lambda fn, args: jax.jit(fn).lower(*args).compile()
        tables = [
            {
                name: pool.submit(compiled, fn, jax.eval_shape(functools.partial(inputs, row), 0))
                for name, fn in candidates(row, options.variants).items()
            }
            for row in picked
        ]
    print("\n".join(lines), flush=True)
    for row, jobs in zip(picked, tables, strict=True):
        lines += report(row, jobs, options.rounds, seed)
        if options.out:
            options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
