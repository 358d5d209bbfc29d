"""Checks our grouped products for Hopper on awkward shapes, in three passes, against float64.

    python -m benchmarks.grouped_matmul_checks --configs 3

Rows of no group are NaN, so a row that reaches a group's result is seen. Needs a Hopper GPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.hopper_checks import relative
from ejkernel.kernels.grouped_matmul import config, mosaic, mosaic_drhs, reference
from ejkernel.kernels.grouped_matmul.dimensions import Dimensions
from ejkernel.kernels.grouped_matmul.workloads import draw_group_sizes

PASSES = ("forward", "dlhs", "drhs")


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


def check(configs: int = 1, threads: int = 8, part: int = 0, parts: int = 1) -> bool:
    """Runs a part of the cases with so many configs of each space, prints what failed, and says whether nothing did."""
    seed = time.time_ns() % 2**31
    jobs = []
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for i, case in list(enumerate(check_cases(seed)))[part::parts]:
            rows, k, n, _, sizes = case
            for which in PASSES:
                space = config.drhs_space if which == "drhs" else config.space
                dtype = (jnp.bfloat16, jnp.float16)[i % 2]
                out_dtype = jnp.float32 if i % 3 == 2 else dtype
                cfgs = space(Dimensions(rows=rows, groups=len(sizes), k=k, n=n, out_dtype=jnp.dtype(out_dtype)))
                for cfg in [cfgs[(5 * i + j) % len(cfgs)] for j in range(configs)]:
                    job = pool.submit(build_check, case, which, cfg, dtype, out_dtype, seed + i)
                    jobs.append((case, which, cfg, dtype, out_dtype, job))
    failed = 0
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=int, default=1, help="of each space")
    parser.add_argument("--threads", type=int, default=14, help="that compile")
    options = parser.parse_args()
    print("JAX", jax.__version__, jax.devices())
    sys.exit(not check(options.configs, options.threads))


if __name__ == "__main__":
    main()
