"""Checks our Hopper attention kernels on small and awkward shapes: every mask, both dtypes, many head dims and lengths.

    python -m benchmarks.hopper_checks
    NPROC=12 JAX_PLATFORMS=cpu python -m benchmarks.hopper_checks --interpret

Outputs and gradients are compared with float32 on fresh data; where cuDNN serves the case, with its error too. Ten
runs are compared bit by bit. Needs a Hopper GPU, or `--interpret` for JAX's interpreter of Mosaic GPU kernels, which
blocks one of XLA's NPROC threads per warpgroup.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.flash_attention import config, mosaic, mosaic_bwd, mosaic_support


@dataclasses.dataclass(frozen=True)
class Case:
    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    dim: int
    dtype: str = "bfloat16"
    lower: int | None = None
    upper: int | None = None
    soft_cap: float | None = None
    segments: str = ""
    value_dim: int | None = None
    mask: str = ""
    bias: str = ""
    splits: int = 0

    @property
    def dims(self) -> tuple[int, int]:
        return self.dim, self.dim if self.value_dim is None else self.value_dim


def ids_of(case: Case, seed: int) -> tuple[jax.Array, jax.Array] | tuple[None, None]:
    """Ids of queries and keys: `sorted`, with `padding` that sees nothing at the end, in `runs` or in no order."""
    rng, length = np.random.default_rng(seed), max(case.q_len, case.kv_len)
    if not case.segments:
        return None, None
    ids = rng.integers(0, 5, (case.batch, length))
    if case.segments in ("sorted", "padding"):
        ids.sort()
    if case.segments == "runs":
        ids = rng.integers(0, 4, (case.batch, -(-length // 40))).repeat(40, axis=1)[:, :length]
    q_ids, kv_ids = ids[:, : case.q_len], ids[:, : case.kv_len]
    if case.segments == "padding":
        q_ids, kv_ids = np.where(q_ids > 2, -1, q_ids), np.where(kv_ids > 2, -2, kv_ids)
    return jnp.asarray(q_ids, jnp.int32), jnp.asarray(kv_ids, jnp.int32)


def mask_of(case: Case, seed: int) -> jax.Array | None:
    """Keys that are `padding`, tiles that are all seen, mixed or not seen at all, or the lower `triangle`."""
    rng, shape = np.random.default_rng(seed), (case.batch, 1, case.q_len, case.kv_len)
    if not case.mask:
        return None
    if case.mask == "padding":
        lengths = rng.integers(1, case.kv_len + 1, case.batch)
        return jnp.asarray((np.arange(case.kv_len) < lengths[:, None])[:, None, None])
    if case.mask == "triangle":
        return jnp.tril(jnp.ones(shape[2:], bool))[None, None]
    share = rng.integers(0, 3, (case.batch, 1, -(-case.q_len // 100), -(-case.kv_len // 100))) / 2
    share = share.repeat(100, axis=2).repeat(100, axis=3)[:, :, : case.q_len, : case.kv_len]
    return jnp.asarray(rng.random(shape) < share)


def bias_of(case: Case, seed: int) -> jax.Array | None:
    """A number for each of the `keys`, or for each pair, of one or of all `heads`; some hide a key, or fill a row."""
    if not case.bias:
        return None
    heads, rows = case.heads if "heads" in case.bias else 1, 1 if "keys" in case.bias else case.q_len
    bias = 2 * np.random.default_rng(seed).standard_normal((case.batch, heads, rows, case.kv_len))
    row = np.arange(rows)[:, None] % 7
    bias = np.where(row == 5, float(jnp.finfo(case.dtype).min), np.where(row == 3, -3e4, bias))
    bias[..., 7:20] = -np.inf
    return jnp.asarray(bias, case.dtype if "pairs" in case.bias else jnp.float32)


CASES = [
    *(Case(2, 512, 512, 4, 4, dim, dtype) for dim in (64, 128, 256) for dtype in ("bfloat16", "float16")),
    *(Case(2, 512, 512, 4, 2, dim, dtype, upper=0) for dim in (64, 128, 256) for dtype in ("bfloat16", "float16")),
    *(Case(1, 1024, 1024, 4, 1, dim, lower=-300, upper=0) for dim in (64, 128, 256)),
    *(Case(1, 640, 640, 2, 2, dim, upper=0, soft_cap=20.0) for dim in (64, 128, 256)),
    *(Case(2, 768, 768, 2, 1, dim, upper=0, segments="sorted") for dim in (64, 128, 256)),
    *(Case(2, 712, 712, 2, 2, dim, upper=0) for dim in (64, 128, 256)),
    *(Case(1, 600, 600, 2, 1, dim) for dim in (64, 128, 256)),
    *(Case(1, 328, 1000, 2, 1, dim, upper=672) for dim in (64, 128, 256)),
    *(Case(1, 1000, 328, 2, 1, dim, upper=-100) for dim in (64, 128, 256)),
    *(Case(1, 504, 504, 2, 1, dim, lower=-33, upper=17, segments="sorted", soft_cap=30.0) for dim in (64, 128, 256)),
    *(
        Case(2, 700, 700, 4, 2, dim, upper=upper, segments=kind)
        for kind in ("sorted", "padding", "runs", "any")
        for dim, upper in ((64, None), (128, 0), (256, 0))
    ),
    *(Case(1, 2048, 2048, 2, 1, dim, lower=-200, upper=0, segments="sorted") for dim in (64, 128)),
    *(Case(2, 640, 400, 4, 2, dim, upper=30, segments="runs", value_dim=64) for dim in (64, 192)),
    *(
        Case(2, 520, 520, 4, 2, dim, upper=0, value_dim=value_dim)
        for dim, value_dim in ((192, 128), (96, 96), (80, 80), (72, 72), (160, 160), (192, 192), (112, 112), (48, 48))
    ),
    *(Case(2, 392, 520, 2, 1, dim, "float16", value_dim=v) for dim, v in ((128, 256), (256, 64), (40, 104), (8, 24))),
    *(Case(1, 300, 300, 2, 1, dim, upper=0, soft_cap=20.0) for dim in (88, 136, 224, 248)),
    *(Case(2, q_len, kv_len, 2, 1, 64) for q_len, kv_len in ((197, 197), (1, 77), (511, 129), (130, 1001))),
    *(Case(2, q_len, kv_len, 2, 1, 128, upper=0) for q_len, kv_len in ((197, 197), (1023, 1023), (333, 65))),
    *(Case(3, 397, 397, 4, 2, dim, lower=-77, upper=3, segments="padding") for dim in (72, 128, 256)),
    *(Case(3, 500, 700, 4, 2, dim, mask=mask) for mask in ("padding", "triangle", "tiles") for dim in (64, 128, 256)),
    *(Case(2, 600, 600, 2, 2, dim, upper=0, mask=mask) for mask in ("padding", "tiles") for dim in (64, 80, 128)),
    Case(2, 603, 605, 4, 2, 128, upper=10, segments="runs", mask="tiles"),
    *(Case(2, 500, 700, 4, 2, dim, upper=200, bias=bias) for bias in ("keys", "pairs") for dim in (64, 128, 256)),
    *(Case(2, 512, 512, 4, 2, dim, "float16", bias="pairs of heads") for dim in (64, 96, 128)),
    Case(2, 300, 300, 4, 2, 192, upper=0, value_dim=128, bias="keys of heads", segments="sorted"),
    *(Case(1, 1000, 1000, 6, 2, dim, upper=0, splits=3) for dim in (64, 128, 192, 256)),
    *(Case(2, 1200, 1200, 4, 1, dim, upper=0, segments="sorted", splits=2) for dim in (64, 128, 192, 256)),
]


def reference(case: Case, ids, mask, bias, q, k, v, xp: Any = jnp):
    """Attention in the precision of its arguments, by JAX or, with `xp=np`, by NumPy."""
    exact = {"precision": "highest"} if xp is jnp else {"optimize": True}
    group = case.heads // case.kv_heads
    k, v = xp.repeat(k, group, axis=2), xp.repeat(v, group, axis=2)
    s = xp.einsum("bqhd,bkhd->bhqk", q, k, **exact) * case.dim**-0.5
    if case.soft_cap is not None:
        s = case.soft_cap * xp.tanh(s / case.soft_cap)
    if bias is not None:
        s = s + xp.asarray(bias).astype(s.dtype)
    distance = np.arange(case.kv_len)[None] - np.arange(case.q_len)[:, None]
    seen = np.ones((1, 1, case.q_len, case.kv_len), bool)
    if case.lower is not None:
        seen = seen & (distance >= case.lower)
    if case.upper is not None:
        seen = seen & (distance <= case.upper)
    if ids[0] is not None:
        seen = seen & (np.asarray(ids[0])[:, None, :, None] == np.asarray(ids[1])[:, None, None, :])
    if mask is not None:
        seen = seen & np.asarray(mask)
    s = xp.where(seen, s, -xp.inf)
    top = s.max(axis=-1, keepdims=True)
    p = xp.exp(s - xp.where(top == -xp.inf, 0, top))
    total = p.sum(axis=-1, keepdims=True)
    return xp.einsum("bhqk,bkhd->bqhd", p / xp.where(total == 0, 1, total), v, **exact)


def cudnn_serves(case: Case) -> bool:
    plain = (
        case.lower is None
        and case.soft_cap is None
        and not case.segments + case.mask + case.bias
        and case.q_len == case.kv_len
    )
    plain = plain and case.dim == case.dims[1] in (64, 128, 256) and case.q_len % 8 == 0
    return plain and case.upper in (None, 0)


def relative(out, ref) -> float:
    out, ref = (np.asarray(x, np.float64) for x in (out, ref))
    return float(np.linalg.norm(out - ref) / np.linalg.norm(ref))


def build(case: Case, seed: int, interpret=None, forward: bool = False) -> Callable[[], tuple[bool, str]]:
    """Compiles all that a case needs; what is returned runs and compares.

    Compiling may happen in any thread, running may not: cuDNN's first run fails, or takes the process along, when
    another thread waits for the device at that moment.
    """
    rng = np.random.default_rng(seed)
    shape, kv_shape = (case.batch, case.q_len, case.heads), (case.batch, case.kv_len, case.kv_heads)
    (dim, value_dim), dtype = case.dims, jnp.dtype(case.dtype)
    shapes = (*shape, dim), (*kv_shape, dim), (*kv_shape, value_dim), (*shape, value_dim)
    q, k, v, dout = (jnp.asarray(rng.standard_normal(shape).astype(dtype)) for shape in shapes)
    ids, mask, bias = ids_of(case, seed), mask_of(case, seed), bias_of(case, seed)
    backward = dataclasses.replace(config.default_backward(*case.dims), splits=case.splits) if case.splits else None
    rules = {
        "lower": case.lower,
        "upper": case.upper,
        "soft_cap": case.soft_cap,
        "q_segment_ids": ids[0],
        "kv_segment_ids": ids[1],
        "mask": mask,
        "bias": bias,
        "interpret": interpret,
    }

    def ours(q, k, v, dout):
        out, *sums = mosaic.flash_attention_forward(q, k, v, **rules)
        if forward or mosaic_support.unsupported(q, k, v, backward=True) is not None:
            return (out,)
        return out, *mosaic_bwd.flash_attention_backward(q, k, v, out, *sums, dout, cfg=backward, **rules)

    def gradients(q, k, v, dout):
        want, pull = jax.vjp(
            lambda *x: reference(case, ids, mask, bias, *x), *(x.astype(jnp.float32) for x in (q, k, v))
        )
        return want, *pull(dout.astype(jnp.float32))

    def cudnn(q, k, v, dout):
        attention = functools.partial(jax.nn.dot_product_attention, is_causal=case.upper == 0, implementation="cudnn")
        out, pull = jax.vjp(attention, q, k, v)
        return out, *pull(dout)

    args = (q, k, v, dout)
    compiled: list[Any] = [jax.jit(ours).lower(*args).compile()]
    if forward:
        wide = [np.asarray(x, np.float64) for x in (q, k, v)]
        compiled.append(lambda *_: (reference(case, ids, mask, bias, *wide, xp=np),))
    else:
        # Tuning the float32 products of a reference that runs once would take longer than all the rest.
        options = {"xla_gpu_autotune_level": 0}
        compiled.append(jax.jit(gradients, compiler_options=options).lower(*args).compile())
    if cudnn_serves(case) and not interpret and not forward:
        compiled.append(jax.jit(cudnn).lower(*args).compile())

    def check() -> tuple[bool, str]:
        got, wants, *base = (jax.block_until_ready(program(*args)) for program in compiled)
        errors = [relative(a, b) for a, b in zip(got, wants, strict=False)]
        theirs = [relative(a, b) for a, b in zip(base[0], wants, strict=True)] if base else []
        limit = 4e-3 if case.dtype == "bfloat16" else 6e-4
        good = all(np.isfinite(e) and e < limit for e in errors)
        good &= all(e <= 1.1 * t for e, t in zip(errors, theirs, strict=False))
        return good, f"ours {show(errors)}" + (f" cuDNN {show(theirs)}" if theirs else "")

    return check


def show(errors) -> str:
    return " ".join(f"{e:.1e}" for e in errors)


def repeats(seed: int, dim: int, runs: int = 10) -> str:
    """Says which outputs of one call are bitwise equal over `runs` runs."""
    keys = jax.random.split(jax.random.key(seed), 4)
    q, k, v, dout = (jax.random.normal(key, (2, 2048, 8, dim), jnp.bfloat16) for key in keys)

    @jax.jit
    def call(q, k, v, dout):
        out, *sums = mosaic.flash_attention_forward(q, k, v, upper=0)
        return out, *sums, *mosaic_bwd.flash_attention_backward(q, k, v, out, *sums, dout, upper=0)

    first = call(q, k, v, dout)
    equal = [True] * len(first)
    for _ in range(runs - 1):
        equal = [e and bool((a == b).all()) for e, a, b in zip(equal, first, call(q, k, v, dout), strict=True)]
    return ", ".join(f"{n} {e}" for n, e in zip(("out", "lse", "rest", "dq", "dk", "dv"), equal, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated indices of the cases")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--threads", type=int, default=14, help="that compile")
    parser.add_argument("--interpret", action="store_true")
    parser.add_argument("--forward", action="store_true", help="no gradients")
    options = parser.parse_args()
    interpret = None
    if options.interpret:
        interpret = plgpu.InterpretGPUParams()
        mosaic.SMS, mosaic_bwd.SMS = 2, 1  # dQ is summed without atomics there: one block at a time.
    picked = [int(i) for i in options.only.split(",")] if options.only else range(len(CASES))
    seed, lines, failed = time.time_ns() % 2**31, [], 0
    # Most of the time goes into compiling; the interpreter keeps its state in one place.
    with concurrent.futures.ThreadPoolExecutor(1 if interpret else options.threads) as pool:
        jobs = {i: pool.submit(build, CASES[i], seed + i, interpret, options.forward) for i in picked}
        if not options.forward:  # Only then cuDNN runs, which no thread may disturb.
            concurrent.futures.wait(jobs.values())
        for i, job in jobs.items():
            try:
                good, text = job.result()()
            except Exception as error:  # noqa: BLE001 - a case that fails is a result
                good, text = False, f"{type(error).__name__}: {str(error)[:200]}"
            failed += not good
            lines.append(f"{'ok  ' if good else 'FAIL'} {i} {CASES[i]} {text}")
            print(lines[-1], flush=True)
    if not options.only and not interpret:
        lines += [f"bitwise equal over ten runs, head dim {dim}: {repeats(seed, dim)}" for dim in (64, 128, 256)]
    lines.append(f"{failed} of {len(picked)} cases failed; relative errors are out, dq, dk, dv; seed {seed}")
    print("\n".join(lines[len(picked) :]))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
