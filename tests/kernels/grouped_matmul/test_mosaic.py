"""The Hopper kernels: their configs and schedules anywhere, small cases in JAX's interpreter, the rest on a GPU."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.grouped_matmul import config
from ejkernel.kernels.grouped_matmul.mosaic_schedule import (
    Tiling,
    extent,
    item_of_group,
    item_of_zeros,
    items,
    largest_first,
    zero_items,
)
from ejkernel.kernels.grouped_matmul.problem import product
from ejkernel.kernels.grouped_matmul.workloads import WORKLOADS, draw_group_sizes
from ejkernel.ops.utils.devices import HOPPER

ROOT = pathlib.Path(__file__).resolve().parents[3]

# Rows, K, N, sizes, first row, transposed, fields of the config; the last is for drhs if it has no `halves`.
INTERPRETED = {
    "clusters, odd tiles": (520, 320, 320, [300, 1, 7, 100], 0, False, {"cluster": 2, "halves": "near", "lag": 1}),
    "rows of no group": (123, 64, 64, [50, 40], 20, True, {"cluster": 2, "halves": "late"}),
    "by columns": (256, 128, 128, [100, 0, 130], 0, True, {"cluster": 1, "split": "columns"}),
    "drhs, clusters": (520, 320, 192, [300, 1, 7, 200], 0, None, {"cluster": 2, "lag": 1}),
    "drhs, one tile of columns": (123, 192, 64, [50, 0, 40], 20, None, {"cluster": 1}),
}

SCRIPT = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from ejkernel.kernels.grouped_matmul import config, mosaic, mosaic_drhs, reference

rows, k, n, sizes, first, transpose, fields = json.loads(sys.argv[1])
rng = np.random.default_rng(0)
normal = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)
inside = np.zeros((rows, 1), bool)
inside[first : first + sum(sizes)] = True
poisoned = lambda x: jnp.where(inside, x, jnp.nan)
options = dict(interpret=plgpu.InterpretGPUParams(), blocks=4, first_row=jnp.int32(first))
lhs, fields = normal(rows, k), dict(block_n=128, stages=3) | fields
if transpose is None:
    dout, cfg = normal(rows, n), config.MosaicDrhsConfig(**fields)
    got = mosaic_drhs.drhs(poisoned(lhs), poisoned(dout), jnp.array(sizes), cfg=cfg, **options)
    want = reference.drhs(lhs, dout, sizes, first_row=first)
else:
    rhs, cfg = normal(len(sizes), *((n, k) if transpose else (k, n))), config.MosaicConfig(**fields)
    got = mosaic.forward(poisoned(lhs), rhs, jnp.array(sizes), cfg=cfg, transpose_rhs=transpose, **options)
    want = reference.forward(lhs, rhs, sizes, first_row=first, transpose_rhs=transpose)
assert cfg.unfit() is None, cfg.unfit()
print(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))
"""


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 has no public GPU interpreter")
@pytest.mark.parametrize("name", INTERPRETED)
def test_products_match_float64_in_the_interpreter(name):
    # The interpreter blocks one thread per warpgroup, and XLA sizes its pool by NPROC when it starts.
    env = os.environ | {"NPROC": "16", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, json.dumps(INTERPRETED[name])]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) < 4e-3


def tilings():
    rng = np.random.default_rng(0)
    for trial in range(12):
        halves, order = ["no", "near", "late"][trial % 3], ["as given", "large first"][trial % 2]
        block_m, columns, band = int(rng.choice([64, 128, 256])), int(rng.integers(1, 7)), int(rng.integers(1, 9))
        yield trial, Tiling(block_m, columns, 1 + trial // 2 % 2, band, halves, order)


@pytest.mark.parametrize(("trial", "tiling"), list(tilings()), ids=str)
def test_items_cover_every_row_and_column_once_and_with_their_own_group(trial, tiling):
    rng = np.random.default_rng(trial)
    rows, groups = (2500, 77)[trial % 5 == 4], 7
    inside = int(rng.integers(0, rows + 1))
    first = int(rng.integers(0, rows - inside + 1))
    sizes = draw_group_sizes(inside, groups, ["even", "uneven", "one-hot", "with empty groups"][trial % 4], seed=trial)
    owner = np.full(rows, -1)
    owner[first : first + inside] = np.repeat(np.arange(groups), sizes)

    @jax.jit
    def walk(sizes, first):
        table, facts = items(sizes, rows, tiling, first)
        count, begin, end = extent(*facts, rows)
        number = jnp.arange(tiling.bound(rows, groups), dtype=jnp.int32)
        later = jnp.arange((rows // tiling.block_m + 4) * tiling.column_tiles, dtype=jnp.int32)
        found = item_of_group(tiling, table, number), item_of_zeros(tiling, rows, begin, end, later)
        fields = [(x.group, x.alone, x.row, x.start, x.end, x.column) for x in found]
        return fields, (count, zero_items(tiling, rows, begin, end))

    fields, counts = walk(jnp.asarray(sizes), jnp.int32(first))
    assert int(counts[0]) <= tiling.bound(rows, groups)
    hits = np.zeros((rows, tiling.column_tiles), int)
    for part, length in zip(fields, map(int, counts), strict=True):
        columns = [np.resize(np.asarray(x), length) if np.ndim(x) == 0 else np.asarray(x)[:length] for x in part]
        for g, a, row, start, stop, column in zip(*columns, strict=True):
            for place in range(tiling.cluster):
                low = max(row + (0 if a else place * tiling.block_m), start)
                high = min(row + (0 if a else place * tiling.block_m) + tiling.block_m, stop)
                mine = column + (place if a else 0)
                if low < high and mine < tiling.column_tiles:
                    hits[low:high, mine] += 1
                    assert (owner[low:high] == g).all()
    assert (hits == 1).all()


def test_groups_are_listed_by_size_with_their_rows():
    group, start, end = (x.tolist() for x in largest_first(jnp.array([3, 9, 0, 9, 5]), 40, jnp.int32(2)))
    assert group == [1, 3, 4, 0, 2]
    assert start == [5, 14, 23, 2, 14]
    assert end == [14, 23, 28, 5, 14]


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
def test_config_spaces_hold_only_what_fits(workload, out_dtype):
    problem = product(*workload.abstract()[0][:2], out_dtype=out_dtype)
    for cfgs in (config.space, config.drhs_space):
        found = cfgs(problem)
        assert found
        assert len(set(found)) == len(found)
        assert all(cfg.unfit(problem.out_bytes) is None for cfg in found)
        assert all(cfg.smem_bytes(problem.out_bytes) <= HOPPER.block_bytes for cfg in found)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"stages": 5}, "shared memory"),
        ({"rows": 128, "stages": 2}, "registers"),
        ({"cluster": 3}, "cluster"),
        ({"lag": 2}, "lag"),
        ({"store_columns": 96}, "store_columns"),
        ({"block_n": 96}, "columns"),
        ({"consumers": 4}, "consumers"),
    ],
)
def test_a_config_that_does_not_fit_says_why(fields, reason):
    assert reason in (config.MosaicConfig(**fields).unfit() or "")


def hopper() -> bool:
    if jax.default_backend() != "gpu":
        return False
    return getattr(jax.devices()[0], "compute_capability", "").startswith("9.")


@pytest.mark.gpu
@pytest.mark.skipif(not hopper(), reason="needs a Hopper GPU")
def test_every_case_matches_float64_on_the_gpu():
    loader = importlib.util.spec_from_file_location("checks", ROOT / "benchmarks" / "grouped_matmul_gpu.py")
    assert loader is not None
    assert loader.loader is not None
    checks = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(checks)
    assert checks.check(checks.Checks(threads=8, configs=1))
