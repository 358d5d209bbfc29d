"""The weights' gradient in the place of the logits' on Hopper: small cases in JAX's interpreter, the rest on a GPU."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.linear_cross_entropy import mosaic_in_place
from ejkernel.kernels.linear_cross_entropy.params import ChunkParams
from ejkernel.modules import LinearCrossEntropy
from ejkernel.ops.utils.fingerprint import compute_capability
from tests.kernels.contract import check
from tests.kernels.linear_cross_entropy.test_contract import case, oracle

ROOT = pathlib.Path(__file__).resolve().parents[3]
SCRIPT = """
import dataclasses, json, sys
import jax, jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from ejkernel.kernels.linear_cross_entropy import mosaic_in_place

errors = []
for size, width, fields in json.loads(sys.argv[1]):
    x, held = (jax.random.normal(jax.random.key(i), (size, n), jnp.bfloat16) for i, n in enumerate((size, width)))
    cfg = dataclasses.replace(mosaic_in_place.TILE, **fields)
    got = mosaic_in_place.product(x, held, cfg=cfg, interpret=plgpu.InterpretGPUParams())
    want = jnp.dot(x.astype(jnp.float32).T, held.astype(jnp.float32), precision="highest")
    errors.append(float(jnp.abs(got - want).max() / jnp.abs(want).max()))
print(json.dumps(errors))
"""


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 has no public GPU interpreter")
def test_product_takes_the_place_of_its_operand_in_the_interpreter():
    # One panel and several, tiles and panels that are not whole, one that is stored at once.
    cases = [(128, 320, {}), (64, 576, {}), (128, 1024, {"hold": False}), (64, 64, {"store": 128, "slots": 1})]
    # The interpreter blocks one thread per warpgroup, and XLA sizes its pool by NPROC when it starts.
    env = os.environ | {"NPROC": "8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, json.dumps(cases)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    errors = json.loads(done.stdout)
    assert len(errors) == len(cases)
    assert all(error < 1e-2 for error in errors), errors


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ((128, 64, 640), "as many rows as columns, got 128 and 64"),
        ((64, 64, 100), "multiples of 64, got 64 and 100"),
        ((64, 64, 640, "float32", "bfloat16"), "must be bfloat16, got float32 and bfloat16"),
        ((1280, 1280, 640), "needs 10 multiprocessors, this device has 1"),
    ],
)
def test_what_is_not_served_is_named(call, words, monkeypatch):
    monkeypatch.setattr(mosaic_in_place, "multiprocessors", lambda: 1)
    *sizes, x, weights = call if len(call) > 3 else (*call, "bfloat16", "bfloat16")
    assert words in (mosaic_in_place.unsupported(*sizes, jnp.dtype(x), jnp.dtype(weights)) or "")
    assert mosaic_in_place.unsupported(64, 64, 640, *[jnp.dtype("bfloat16")] * 2) is None


def on_hopper():
    return compute_capability()[0] == 9


CASES = [
    case("64 rows", 64, 64, vocabulary=192, dtype="bfloat16", limit=1e-2),
    case("one tile of memory", 64, 64, vocabulary=64, dtype="bfloat16", limit=1e-2),
    case("several tiles, bias", 4, 80, 320, vocabulary=1344, bias=True, dtype="bfloat16", limit=1e-2),
    case("none", 128, 128, vocabulary=640, dtype="bfloat16", limit=1e-2, kwargs={"reduction": "none"}),
    case("all else", 192, 192, vocabulary=576, dtype="bfloat16", bias=True, ignored=True, limit=2e-2, kwargs={
        "label_smoothing": 0.1, "z_loss": 1e-2, "logits_soft_cap": 3.0}),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.skipif("not on_hopper()", reason="needs Hopper")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loss_and_gradients_agree_on_a_hopper_gpu(case):
    chunks = {part: ChunkParams(rows=512) for part in ("fwd_params", "bwd_params")}
    check(LinearCrossEntropy, "mosaic", case, oracle, **chunks)


@pytest.mark.gpu
@pytest.mark.skipif("not on_hopper()", reason="needs Hopper")
@pytest.mark.parametrize("shape", [(64, 64), (320, 1344), (1024, 32000), (2560, 50304), (4096, 128256)], ids=str)
def test_no_block_stores_before_all_have_read(shape):
    size, width = shape
    run = jax.jit(mosaic_in_place.product, donate_argnums=1)
    for seed in range(4):
        keys = jax.random.split(jax.random.key(seed))
        x, held = (jax.random.normal(k, (size, n), jnp.bfloat16) for k, n in zip(keys, (size, width), strict=True))
        want = jnp.dot(x.T, held, preferred_element_type=jnp.float32)
        got = run(x, held)
        # A tile of which a part was computed from what another block had stored would be far off.
        worst = float(jnp.abs(got - want).max() / jnp.sqrt(jnp.mean(jnp.square(want))))
        assert worst < 5 * 2.0**-8, (seed, worst)
        assert np.isfinite(worst)
