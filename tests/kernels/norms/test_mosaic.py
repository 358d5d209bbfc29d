"""The Hopper kernels of norms: small cases in JAX's interpreter, the rest on a GPU."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from ejkernel.kernels.norms import mosaic
from ejkernel.kernels.rows import MosaicRows, RowParams, RowSizeError
from ejkernel.modules import LayerNorm, RmsNorm
from ejkernel.ops.utils.devices import HOPPER
from ejkernel.ops.utils.fingerprint import compute_capability
from tests.kernels.contract import check
from tests.kernels.layer_norm import test_contract as layer
from tests.kernels.rms_norm import test_contract as rms

ROOT = pathlib.Path(__file__).resolve().parents[3]

# Rows, columns, dtype, whether there are a mean, a scale, an offset and a residual, stages, blocks.
INTERPRETED = {
    "rows of several parts": (7, 4096, "bfloat16", False, True, False, False, 3, 2),
    "all that there is": (9, 1024, "bfloat16", True, True, True, True, 2, 4),
    "more blocks than rows": (3, 128, "float32", False, False, False, True, 4, 4),
    "parts of odd size": (5, 640, "float16", True, True, True, False, 6, 1),
    "an offset alone": (6, 256, "float32", True, False, True, False, 4, 1),
}

SCRIPT = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from ejkernel.kernels.norms import mosaic, xla
from ejkernel.kernels.rows import MosaicRows

mosaic.multiprocessors = lambda: 1
errors = {}
for name, (count, columns, dtype, center, scale, offset, residual, stages, blocks) in json.loads(sys.argv[1]).items():
    rng = np.random.default_rng(0)
    normal = lambda *shape, dtype=dtype: jnp.asarray(rng.standard_normal(shape, np.float32), dtype)
    x, per_column = 3 * normal(count, columns) + 1, lambda given: normal(columns, dtype="float32") if given else None
    args = x, per_column(scale), per_column(offset), normal(count, columns) if residual else None
    kwargs = {"center": center, "epsilon": 1e-6, "scale_offset": 0.0 if center else 0.5}
    run = {"params": MosaicRows(stages=stages, blocks=blocks), "interpret": plgpu.InterpretGPUParams(), **kwargs}
    (out, statistics), (want, others) = mosaic.forward(*args, **run), xla.forward(*args, **kwargs)
    dout = jax.tree.map(lambda a: normal(*a.shape), want)
    grads = mosaic.backward(others, want, dout, *args, **run)
    exact = jax.vjp(lambda *args: xla.forward(*args, **kwargs)[0], *args)[1](dout)
    wide = lambda tree: [np.asarray(a, np.float64) for a in jax.tree.leaves(tree)]
    pairs = zip(wide((out, statistics, grads)), wide((want, others, exact)), strict=True)
    errors[name] = max(np.abs(a - b).max() / np.abs(b).max() for a, b in pairs)
print(json.dumps(errors))
"""
LIMITS = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 2e-6}


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 has no public GPU interpreter")
def test_norms_and_gradients_agree_in_the_interpreter():
    # The interpreter blocks one thread per warpgroup, and XLA sizes its pool by NPROC when it starts.
    env = os.environ | {"NPROC": "16", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, json.dumps(INTERPRETED)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    errors = json.loads(done.stdout)
    assert list(errors) == list(INTERPRETED)
    assert not {name: error for name, error in errors.items() if not error < LIMITS[INTERPRETED[name][2]]}


@pytest.mark.parametrize(
    ("params", "sizes", "words"),
    [
        (MosaicRows, {"stages": 1}, "stages must be an integer of at least 2, got 1"),  # It would wait for itself.
        (MosaicRows, {"blocks": 1.5}, "blocks must be an integer of at least 1, got 1.5"),
        (RowParams, {"rows": 0}, "RowParams: rows must be an integer of at least 1, got 0"),
        (RowParams, {"num_warps": 0}, "num_warps must be an integer of at least 1, got 0"),
        (RowParams, {"programs": -1}, "programs must be an integer of at least 0, got -1"),
    ],
)
def test_sizes_with_which_rows_would_be_left_out_are_refused(params, sizes, words):
    with pytest.raises(RowSizeError, match=words):
        params(**sizes)


@pytest.mark.parametrize("columns", [128, 640, 2560, 4096, 5120, 8192, 12288, 16384])
def test_parts_cover_a_row_and_rings_fit(columns):
    parts = mosaic._parts(columns)
    count, width = mosaic._cut(columns)
    assert [part.start for part in parts] == list(range(0, count, parts[0].size))
    assert parts[0].size * width <= mosaic.MOST_AT_ONCE
    x = jax.ShapeDtypeStruct((64, columns), "float32")
    for params in mosaic._space((x, None, x), backward=False):
        assert params.blocks * params.stages * 2 * columns * 4 < HOPPER.block_bytes


# --- On a Hopper GPU ---

ON_HOPPER = [
    *((RmsNorm, rms, name) for name in ("plain, not even", "without a scale", "residual, scale offset", "one row")),
    *((LayerNorm, layer, name) for name in ("plain", "residual", "offset only", "neither", "large mean")),
    *((RmsNorm, rms, "bfloat16, residual"), (RmsNorm, rms, "float16"), (LayerNorm, layer, "bfloat16, residual")),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("operation", "module", "name"), ON_HOPPER, ids=str)
def test_hopper_kernels_agree_on_a_gpu(operation, module, name):
    if compute_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    cases = module.LANES if operation is RmsNorm else module.CASES
    check(operation, "mosaic", next(case for case in cases if case.name == name), module.oracle)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1024, 4096, 8192, 2560])
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
def test_hopper_kernels_agree_on_rows_that_models_have(columns, residual):
    if compute_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    check(RmsNorm, "mosaic", rms.case("rows", 1111, columns, residual=residual, dtype="bfloat16"), rms.oracle)
