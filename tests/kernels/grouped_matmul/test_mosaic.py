"""The Hopper kernels: their configs and schedules anywhere, small cases in JAX's interpreter, the rest on a GPU."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.grouped_matmul import config, mosaic, mosaic_rows_items, mosaic_weights_items, mosaic_work
from ejkernel.kernels.grouped_matmul.dimensions import product
from ejkernel.kernels.grouped_matmul.mosaic_tables import extent, ordered
from ejkernel.kernels.grouped_matmul.workloads import WORKLOADS, draw_group_sizes
from ejkernel.ops.core.operation import OperationArgumentError
from ejkernel.ops.utils.devices import HOPPER

ROOT = pathlib.Path(__file__).resolve().parents[3]

# Rows, K, N, sizes, first row, transposed (None: drhs), fields of the config.
INTERPRETED = {
    "rows left, clusters, odd tiles": (
        *(520, 320, 320, [300, 1, 7, 100], 0, False),
        {"left": "rows", "width": 128, "cluster": 2, "halves": "near", "lag": 1},
    ),
    "rows left, rows of no group": (
        *(123, 64, 64, [50, 40], 20, True),
        {"left": "rows", "width": 128, "cluster": 2},
    ),
    "weights left, nothing aligned": (123, 72, 200, [50, 0, 33], 20, False, {"cluster": 2, "lag": 1}),
    "weights left, float32": (123, 72, 136, [1, 50, 33], 7, True, {"cluster": 1, "out_dtype": "float32"}),
    "weights left, wide tiles": (300, 64, 64, [200, 1, 7], 0, True, {"width": 128, "grain": 32}),
    "weights left, widest first": (
        *(300, 64, 136, [1, 100, 180], 0, False),
        {"width": 128, "grain": 16, "order": "wide first", "store": 32, "slots": 2, "cluster": 1},
    ),
    "drhs, clusters": (520, 320, 192, [300, 1, 7, 200], 0, None, {"width": 128, "cluster": 2, "lag": 1}),
    "drhs, odd sizes": (61, 72, 40, [20, 0, 33], 5, None, {"cluster": 1, "order": "as given"}),
    "rows left, held": (
        *(520, 320, 320, [300, 1, 7, 100], 20, False),
        {"left": "rows", "width": 128, "cluster": 2, "halves": "near", "lag": 1, "hold": True},
    ),
    "weights left, held": (123, 72, 200, [50, 0, 33], 20, False, {"cluster": 2, "lag": 1, "hold": True}),
    "weights left, held, one step": (300, 64, 136, [1, 100, 180], 7, True, {"width": 128, "cluster": 1, "hold": True}),
    "drhs, held": (520, 320, 192, [300, 0, 7, 200], 0, None, {"width": 128, "cluster": 2, "lag": 1, "hold": True}),
    "drhs, one tile of columns": (123, 192, 64, [50, 0, 40], 20, None, {"width": 128, "cluster": 1}),
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
out_dtype = jnp.dtype(fields.pop("out_dtype", "bfloat16"))
options = dict(interpret=plgpu.InterpretGPUParams(), blocks=4, first_row=jnp.int32(first), out_dtype=out_dtype)
lhs, fields = normal(rows, k), dict(width=64, stages=3, store=64 if out_dtype.itemsize == 2 else 32) | fields
if transpose is None:
    dout, cfg = normal(rows, n), config.MosaicDrhsConfig(**fields)
    got = mosaic_drhs.drhs(poisoned(lhs), poisoned(dout), jnp.array(sizes), cfg=cfg, **options)
    want = reference.drhs(lhs, dout, sizes, first_row=first)
else:
    rhs, cfg = normal(len(sizes), *((n, k) if transpose else (k, n))), config.MosaicConfig(**fields)
    got = mosaic.forward(poisoned(lhs), rhs, jnp.array(sizes), cfg=cfg, transpose_rhs=transpose, **options)
    want = reference.forward(lhs, rhs, sizes, first_row=first, transpose_rhs=transpose)
assert cfg.unfit(out_dtype.itemsize) is None, cfg.unfit(out_dtype.itemsize)
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
    for trial in range(8):
        columns, band, order = int(rng.integers(1, 7)), int(rng.integers(1, 9)), ["as given", "large first"][trial % 2]
        rows, cluster, halves = int(rng.choice([64, 128])), 1 + trial // 2 % 2, ["no", "near"][trial % 2]
        yield trial, mosaic_rows_items.Tiling(rows, columns, cluster, band, halves, order)
        grain, order = int(rng.choice([16, 32, 64])), ["as given", "large first", "wide first"][trial % 3]
        yield trial, mosaic_weights_items.Tiling(int(rng.choice([64, 128, 256])), grain, columns, band, order)


def parts_of(tiling, fields, numbers):
    """Group, first and last row and column of every tile in each item."""
    if isinstance(tiling, mosaic_weights_items.Tiling):
        for group, row, width, start, end, column in numbers(fields):
            yield group, max(row, start), min(row + width, end), column
        return
    for group, row, start, end, column, alone in numbers(fields):
        for place in range(tiling.cluster):
            first = row + (0 if alone else place * tiling.block_m)
            if (mine := column + (place if alone else 0)) < tiling.column_tiles:
                yield group, max(first, start), min(first + tiling.block_m, end), mine


@pytest.mark.thin(2)
@pytest.mark.parametrize(("trial", "tiling"), list(tilings()), ids=str)
def test_items_cover_every_row_and_column_once_and_with_their_own_group(trial, tiling):
    rng = np.random.default_rng(trial)
    rows, groups = (2500, 77)[trial % 5 == 4], 7
    inside = int(rng.integers(0, rows + 1))
    first = int(rng.integers(0, rows - inside + 1))
    sizes = draw_group_sizes(inside, groups, ["even", "uneven", "one-hot", "with empty groups"][trial % 4], seed=trial)
    owner = np.full(rows, -1)
    owner[first : first + inside] = np.repeat(np.arange(groups), sizes)
    by_rows = isinstance(tiling, mosaic_rows_items.Tiling)
    height, columns = (tiling.block_m, tiling.column_tiles) if by_rows else (tiling.rows, tiling.column_items)

    @jax.jit
    def walk(sizes, first):
        table, facts = tiling.items(sizes, rows, first)
        count, begin, end = extent(*facts, rows)
        number = jnp.arange(tiling.bound(rows, groups), dtype=jnp.int32)
        later = jnp.arange((rows // height + 4) * columns, dtype=jnp.int32)
        zeros = mosaic_work.item_of_zeros(tiling, rows, begin, end, later)
        found = tiling.item_of_group(table, number), zeros
        fields = [tuple(getattr(x, f.name) for f in dataclasses.fields(x)) for x in found]
        return fields, (count, mosaic_work.zero_items(tiling, rows, begin, end))

    fields, counts = walk(jnp.asarray(sizes), jnp.int32(first))
    assert int(counts[0]) <= tiling.bound(rows, groups)
    hits = np.zeros((rows, columns), int)
    for part, length in zip(fields, map(int, counts), strict=True):
        each = [np.resize(np.asarray(x), length) if np.ndim(x) == 0 else np.asarray(x)[:length] for x in part]
        for group, low, high, column in parts_of(tiling, each, lambda each: zip(*each, strict=True)):
            if low < high:
                hits[low:high, column] += 1
                assert (owner[low:high] == group).all()
    assert (hits == 1).all()


def test_groups_are_listed_by_size_with_their_rows():
    sizes = jnp.array([3, 9, 0, 9, 5])
    group, start, end = (x.tolist() for x in ordered(sizes, 40, jnp.int32(2), "large first"))
    assert group == [1, 3, 4, 0, 2]
    assert start == [5, 14, 23, 2, 14]
    assert end == [14, 23, 28, 5, 14]
    group, start, end = (x.tolist() for x in ordered(sizes, 40, jnp.int32(2), "as given"))
    assert group == [0, 1, 2, 3, 4]
    assert start == [2, 5, 14, 14, 23]
    assert end == [5, 14, 14, 23, 28]


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
def test_config_spaces_hold_only_what_fits(workload, out_dtype):
    dims = product(*workload.abstract()[0][:2], out_dtype=out_dtype)
    for cfgs in (config.space, config.drhs_space):
        found = cfgs(dims)
        assert found
        assert len(set(found)) == len(found)
        assert all(cfg.unfit(dims.out_bytes) is None for cfg in found)
        assert all(cfg.smem_bytes(dims.out_bytes) <= HOPPER.block_bytes for cfg in found)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"stages": 5}, "shared memory"),
        ({"consumers": 3, "stages": 2}, "registers"),
        ({"cluster": 3}, "cluster"),
        ({"lag": 2}, "lag"),
        ({"store": 96}, "store"),
        ({"left": "rows", "store": 96}, "store"),
        ({"width": 96}, "width"),
        ({"left": "rows", "width": 32}, "width"),
        ({"grain": 24}, "grain"),
        ({"consumers": 4}, "consumers"),
        ({"left": "rows", "order": "wide first"}, "order"),
        ({"consumers": 3, "stages": 2, "width": 192, "hold": True}, "registers"),
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
@pytest.mark.parametrize("part", range(8))
def test_every_case_matches_float64_on_the_gpu(part):
    from benchmarks import grouped_matmul_checks

    assert grouped_matmul_checks.check(threads=2, part=part, parts=8)


def test_rows_on_the_left_need_whole_memory_tiles():
    lhs, rhs = jnp.zeros((8, 72), jnp.bfloat16), jnp.zeros((1, 72, 64), jnp.bfloat16)
    with pytest.raises(OperationArgumentError, match=r'left="rows".*multiples of 64, got 72 and 64.*left="weights"'):
        mosaic.forward(lhs, rhs, jnp.array([8]), cfg=config.MosaicConfig(left="rows"))
