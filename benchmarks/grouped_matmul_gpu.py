"""Grouped products on a GPU: checks against float64, and device times beside torch's and a dense product.

    python benchmarks/grouped_matmul_gpu.py check
    python benchmarks/grouped_matmul_gpu.py time --workloads mixtral --passes forward dlhs drhs --configs 4

Times are the sum of a call's kernels by CUPTI, medians of interleaved rounds; torch's kernels are seen by it too.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import functools
import json
import os
import pathlib
import statistics
import sys
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from ejkernel.kernels.grouped_matmul import config, mosaic, mosaic_drhs, reference
from ejkernel.kernels.grouped_matmul.dimensions import Dimensions
from ejkernel.kernels.grouped_matmul.workloads import DISTRIBUTIONS, draw_group_sizes
from ejkernel.kernels.grouped_matmul.workloads import WORKLOADS as ALL

PASSES = ("forward", "dlhs", "drhs")
WORKLOADS = {w.name: w for w in ALL if w.device == "gpu"}


def sizes_of(workload):
    """Rows, groups, k and n."""
    (rows, k), (groups, _, n) = (shape for shape, _ in workload.shapes[:2])
    return rows, groups, k, n


def relative(out, want) -> float:
    out, want = np.asarray(out, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(out - want) / max(np.linalg.norm(want), 1e-30))


def check_cases(seed):
    rng = np.random.default_rng(seed)
    shapes = [(1000, 256, 320), (1024, 192, 512), (333, 64, 64), (2048, 512, 768), (4096, 128, 192), (777, 200, 328)]
    for rows, k, n in shapes:
        for distribution in ("even", "uneven", "one-hot", "with empty groups"):
            groups = int(rng.integers(1, 40))
            inside = int(rng.integers(rows // 2, rows + 1))
            first = int(rng.integers(0, rows - inside + 1))
            yield rows, k, n, first, draw_group_sizes(inside, groups, distribution, seed=int(rng.integers(1 << 30)))


def build_check(case, which, cfg, dtype, out_dtype, seed):
    """Compiles a case; what is returned runs it and gives the relative error, rows of no group being NaN."""
    rows, k, n, first, sizes = case
    rng = np.random.default_rng(seed)
    inside = np.zeros(rows, bool)
    inside[first : first + sizes.sum()] = True

    def array(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

    def poisoned(x):
        return jnp.where(inside[:, None], x, jnp.nan).astype(dtype)

    lhs, dout, rhs = array(rows, k), array(rows, n), array(len(sizes), k, n)
    start = jnp.int32(first)
    if which == "drhs":
        fn = functools.partial(mosaic_drhs.drhs, cfg=cfg, out_dtype=out_dtype)
        args = (poisoned(lhs), poisoned(dout), jnp.asarray(sizes), start)
        want = functools.partial(reference.drhs, lhs, dout, sizes, first_row=first)
    else:
        transpose = which == "dlhs"
        fn = functools.partial(mosaic.forward, cfg=cfg, out_dtype=out_dtype, transpose_rhs=transpose)
        given = dout if transpose else lhs
        args = (poisoned(given), rhs, jnp.asarray(sizes), start)
        want = functools.partial(reference.forward, given, rhs, sizes, transpose_rhs=transpose, first_row=first)
    compiled = jax.jit(lambda a, b, s, r: fn(a, b, s, first_row=r)).lower(*args).compile()
    return lambda: relative(compiled(*args), want())


@dataclasses.dataclass(frozen=True)
class Checks:
    threads: int = 14
    configs: int = 1
    passes: tuple[str, ...] = PASSES
    lock: pathlib.Path | None = None


def check(options) -> bool:
    seed = time.time_ns() % 2**31
    jobs = []
    with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
        for i, case in enumerate(check_cases(seed)):
            rows, k, n, _, sizes = case
            for which in options.passes:
                space = config.drhs_space if which == "drhs" else config.space
                dtype = (jnp.bfloat16, jnp.float16)[i % 2]
                out_dtype = jnp.float32 if i % 3 == 2 else dtype
                cfgs = space(Dimensions(rows=rows, groups=len(sizes), k=k, n=n, out_dtype=jnp.dtype(out_dtype)))
                for cfg in [cfgs[(5 * i + j) % len(cfgs)] for j in range(options.configs)]:
                    job = pool.submit(build_check, case, which, cfg, dtype, out_dtype, seed + i)
                    jobs.append((case, which, cfg, dtype, out_dtype, job))
    failed = 0
    with alone(options.lock):
        for case, which, cfg, dtype, out_dtype, job in jobs:
            limit = 4e-3 if dtype == jnp.bfloat16 else 6e-4
            limit = 1e-5 if out_dtype == jnp.float32 else limit
            try:
                error = job.result()()
            except Exception as exception:  # noqa: BLE001 - a case that fails is a result
                error = f"{type(exception).__name__}: {str(exception)[:300]}"
            good = isinstance(error, float) and error < limit
            failed += not good
            if not good:
                print("FAIL", which, case[:4], case[4].tolist(), cfg, jnp.dtype(dtype).name, error, flush=True)
    print(f"{failed} of {len(jobs)} checks failed, seed {seed}", flush=True)
    return not failed


def parse_config(kind, text):
    types = {field.name: field.type for field in dataclasses.fields(kind)}
    pairs = dict(part.split("=") for part in text.split(",") if part)
    pairs = {name: value for name, value in pairs.items() if name in types}
    return kind(
        **{name: value if types[name] in ("Left", "Halves", "Order") else int(value) for name, value in pairs.items()}
    )


def short(cfg) -> str:
    base = f"{cfg.height}x{cfg.width} c{cfg.cluster} s{cfg.stages} b{cfg.band} {cfg.store}x{cfg.slots} l{cfg.lag}"
    if isinstance(cfg, config.MosaicDrhsConfig):
        return f"{base} {cfg.order[0]}"
    kind = f"rows {cfg.halves}" if cfg.left == "rows" else f"weights {cfg.grain}"
    return f"{kind} {base} {cfg.order[0]}"


def candidates(options, workload, which):
    kind = config.MosaicDrhsConfig if which == "drhs" else config.MosaicConfig
    if options.cfg:
        cfgs = [parse_config(kind, text) for text in options.cfg]
        return list(dict.fromkeys(cfg for cfg in cfgs if cfg.unfit() is None))
    rows, groups, k, n = sizes_of(workload)
    k, n = (n, k) if which == "dlhs" else (k, n)
    space = config.drhs_space if which == "drhs" else config.space
    return space(Dimensions(rows=rows, groups=groups, k=k, n=n))[: options.configs]


def torch_calls(lhs, rhs, dout, sizes):
    import torch

    a, b, d = (torch.from_dlpack(x) for x in (lhs, rhs, dout))
    offs = torch.cumsum(torch.from_numpy(np.array(sizes)).cuda(), 0).to(torch.int32)
    return torch.cuda.synchronize, {
        "forward": lambda: torch._grouped_mm(a, b, offs=offs),
        "dlhs": lambda: torch._grouped_mm(d, b.transpose(-2, -1), offs=offs),
        "drhs": lambda: torch._grouped_mm(a.t(), d, offs=offs),
    }


def kernel_ms(call, sync):
    from jax._src.lib import mosaic_gpu

    extension = mosaic_gpu._mosaic_gpu_ext
    extension._cupti_init()
    try:
        sync(call())
    finally:
        kernels = extension._cupti_get_timings(False)
    return sum(ms for _, ms in kernels), kernels


@contextlib.contextmanager
def alone(path):
    """Holds the file at `path`: of several processes that compile at the same time, one at a time uses the GPU."""
    if path is None:
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def time_workload(name, options):
    workload = WORKLOADS[name]
    rows, groups, k, n = sizes_of(workload)
    distribution = options.distribution or ("even" if name.startswith("even") else "uneven")
    sizes = draw_group_sizes(rows, groups, distribution, seed=options.seed)

    @functools.partial(jax.jit, static_argnums=(1,))
    def normal(key, shape):
        return jax.random.normal(key, shape, jnp.bfloat16)

    keys = jax.random.split(jax.random.key(options.seed), 3)
    lhs, rhs, dout = (
        normal(key, shape) for key, shape in zip(keys, ((rows, k), (groups, k, n), (rows, n)), strict=True)
    )
    device_sizes = jnp.asarray(sizes)
    arguments = {
        "forward": (lhs, rhs, device_sizes),
        "dlhs": (dout, rhs, device_sizes),
        "drhs": (lhs, dout, device_sizes),
    }
    dense = {
        "forward": (lambda a, b: a @ b, (lhs, rhs[0])),
        "dlhs": (lambda a, b: a @ b.T, (dout, rhs[0])),
        "drhs": (lambda a, b: a.T @ b, (lhs, dout)),
    }
    functions = {
        "forward": lambda cfg: functools.partial(mosaic.forward, cfg=cfg),
        "dlhs": lambda cfg: functools.partial(mosaic.forward, cfg=cfg, transpose_rhs=True),
        "drhs": lambda cfg: functools.partial(mosaic_drhs.drhs, cfg=cfg),
    }
    torch_sync, torch_call = torch_calls(lhs, rhs, dout, sizes)
    results = {}
    with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
        jobs = []
        for which in options.passes:
            for cfg in candidates(options, workload, which):
                lowered = jax.jit(functions[which](cfg)).lower(*arguments[which])
                jobs.append((which, short(cfg), arguments[which], pool.submit(lowered.compile)))
            fn, args = dense[which]
            jobs.append((which, "dense", args, pool.submit(jax.jit(fn).lower(*args).compile)))
        calls = [
            (which, "torch", torch_call[which], lambda _: torch_sync()) for which in options.passes if options.torch
        ]
        for which, label, args, job in jobs:
            try:
                calls.append((which, label, functools.partial(job.result(), *args), jax.block_until_ready))
            except Exception as error:  # noqa: BLE001 - a config that does not compile is a result
                print("FAIL", name, which, label, str(error)[:300], flush=True)
    bytes_ = 2 * (rows * k + rows * n + int((sizes > 0).sum()) * k * n)
    parts = {}
    with alone(options.lock):
        for which, label, call, sync in calls:
            if options.verbose:
                print("first run of", name, which, label, flush=True)
            sync(call())
        for _ in range(options.rounds):
            for which, label, call, sync in calls:
                ms, kernels = kernel_ms(call, sync)
                results.setdefault((which, label), []).append(ms)
                parts[which, label] = " ".join(f"{1e3 * ms:.1f}" for _, ms in kernels)
        agree(torch_call, calls)
    # torch's results, once compared with float64 on a few rows, stand in for the truth of large products.
    rows_out = []
    for (which, label), times in results.items():
        ms = statistics.median(times)
        base = statistics.median(results[which, "torch"]) if options.torch else float("nan")
        flat = statistics.median(results[which, "dense"])
        rows_out.append(
            {
                "workload": name,
                "pass": which,
                "config": label,
                "ms": ms,
                "tflops": workload.flops / ms / 1e9,
                "gbs": bytes_ / ms / 1e6,
                "kernels_us": parts[which, label],
                "x_torch": base / ms,
                "x_dense": flat / ms,
            }
        )
    for row in sorted(rows_out, key=lambda r: (PASSES.index(r["pass"]), r["ms"])):
        print(
            f"{row['workload']:20s} {row['pass']:8s} {row['config']:36s} {row['ms']:8.4f} ms "
            f"{row['tflops']:6.0f} TFLOP/s {row['gbs']:6.0f} GB/s  x torch {row['x_torch']:.3f}"
            f"  x dense {row['x_dense']:.3f}  [{row['kernels_us']}]",
            flush=True,
        )
    return rows_out


def agree(torch_call, calls):
    """Compares every config's result with torch's."""
    for which, label, call, _ in calls:
        if label in ("torch", "dense"):
            continue
        want = jnp.from_dlpack(torch_call[which]())
        got = call()
        error = float(_distance(got, want))
        if not error < 2e-3:
            print("FAIL", which, label, "differs from torch by", error, flush=True)


@jax.jit
def _distance(got, want):
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.sqrt(jnp.sum((got - want) ** 2) / jnp.sum(want**2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "time"))
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--passes", nargs="+", default=list(PASSES), choices=PASSES)
    parser.add_argument("--configs", type=int, default=4, help="of each space")
    parser.add_argument("--cfg", action="append", default=[], help="field=value,... instead of the space")
    parser.add_argument("--distribution", choices=DISTRIBUTIONS, help="instead of the workload's")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=14)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--no-torch", dest="torch", action="store_false")
    parser.add_argument("--lock", type=pathlib.Path, help="a file; processes that share it measure in turn")
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    if options.what == "check":
        print("JAX", jax.__version__, jax.devices())
        sys.exit(not check(options))
    rows = []
    for name in options.workloads:
        try:
            rows += time_workload(name, options)
        except Exception as error:  # noqa: BLE001 - the other workloads still count
            print("FAIL", name, f"{type(error).__name__}: {str(error)[:500]}", flush=True)
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
