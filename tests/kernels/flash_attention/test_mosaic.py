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

from ejkernel.kernels.flash_attention import config as configs
from ejkernel.kernels.flash_attention import mosaic_bwd_schedule, mosaic_support
from ejkernel.kernels.flash_attention.hopper import backward_space
from ejkernel.kernels.flash_attention.mosaic_mask import Band
from ejkernel.kernels.flash_attention.mosaic_schedule import deal, tile_table
from ejkernel.modules import FlashAttention
from ejkernel.ops import Invocation
from ejkernel.ops.utils.devices import HOPPER

ROOT = pathlib.Path(__file__).resolve().parents[3]
HEAD_DIMS = (64, 128, 256)
RECENT = jax.__version_info__ >= (0, 11)

# Query length, key length, key heads, dim (or that of keys and of values), lower, upper, soft cap, segments (or id and
# length of each), what queries are moved by (keys by minus), the logit of every seventh query and all keys. Fields of
# the backward config may come last, those of the forward config, and the shape of a random mask or bias.
INTERPRETED = {
    "causal": (256, 256, 1, 64, None, 0, None, False),
    "full, grouped heads": (128, 256, 1, 128, None, None, None, False),
    "window and soft cap": (256, 128, 2, 128, -70, 64, 20.0, False),
    "segments": (128, 128, 2, 64, None, 0, None, True),
    "lengths that fill no block": (200, 72, 2, 64, None, -40, None, False),
    "keys past the end, all scores far below zero": (64, 72, 1, 64, None, None, None, False, 4.0),
    "rows of hugely negative logits": (128, 192, 2, 64, None, 0, None, False, 0.0, -(2.0**30)),
    "rows of hugely negative logits, head dim 256": (64, 128, 1, 256, None, None, None, False, 0.0, -(2.0**30)),
    "head dim 256": (136, 200, 1, 256, -100, 64, 20.0, False),
    "head dim 256, segments": (128, 128, 2, 256, None, 0, None, True),
    "head dims 192 and 128": (128, 136, 1, (192, 128), None, 0, 20.0, False),
    "head dims 80 and 72, odd lengths": (70, 131, 1, (80, 72), -90, 64, None, False),
    "head dims 128 and 256, by columns": (
        *(72, 70, 1, (128, 256), None, 0, None, False),
        {"split": "columns", "stages": 2},
    ),
    "head dims 256 and 128, by columns, in parts": (
        *(136, 70, 1, (256, 128), None, None, None, False),
        {"split": "columns", "stages": 2, "dq_v_stages": 1, "splits": 2},
    ),
    "head dim 112, two blocks of keys": (70, 100, 1, 112, None, None, None, False),
    "head dims 192 and 128, segments in parts": (
        130,
        130,
        1,
        (192, 128),
        None,
        0,
        None,
        [(0, 70), (2, 60)],
        {"splits": 2},
    ),
    "mask": (130, 200, 1, 128, None, None, None, False, {"mask": (1, 1, 130, 200)}),
    "mask of all queries": (70, 140, 1, 64, None, 0, None, False, {"mask": (1, 1, 1, 140)}),
    "mask and segments, head dim 256": (72, 72, 2, 256, None, 0, None, True, {"mask": (1, 1, 72, 72)}),
    "segments that come back": (320, 320, 1, 64, None, 0, None, [(3, 90), (0, 38), (3, 100), (7, 92)]),
    "window in segments, in parts": (264, 264, 1, 128, -60, 0, None, [(0, 130), (4, 100), (5, 34)], {"splits": 2}),
    "window in segments, head dim 256": (264, 264, 1, 256, -60, 9, None, [(0, 130), (4, 100), (5, 34)]),
    "tiles of keys in parts": (256, 256, 1, 128, None, 0, None, False, {"splits": 3}),
    "outputs are held": (330, 330, 1, 128, None, 0, None, False, {"forward": {"hold": True}}),
    "outputs are held, window in segments": (
        *(330, 330, 1, 72, -60, 9, None, [(0, 130), (4, 166), (5, 34)]),
        {"forward": {"hold": True, "q_stages": 2, "ping_pong": False}},
    ),
    "tiles of keys in parts, head dim 256": (136, 200, 1, 256, -100, 64, 20.0, False, {"splits": 2}),
    "bias": (130, 200, 1, 128, None, 0, None, False, {"bias": (1, 1, 130, 200)}),
    "bias of keys, segments": (130, 130, 1, 64, None, 0, None, True, {"bias": (1, 2, 1, 130)}),
    "bias of heads, head dim 256": (72, 140, 1, 256, None, None, 20.0, False, {"bias": (1, 2, 72, 140)}),
    "bias of keys, head dims 192 and 128": (72, 140, 1, (192, 128), None, None, None, False, {"bias": (1, 1, 1, 140)}),
}

SCRIPT = """
import dataclasses, json, sys
import jax, jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from ejkernel.kernels.flash_attention import config, mosaic, mosaic_bwd

mosaic.SMS, mosaic_bwd.SMS = 4, 1  # dQ is summed without atomics in the interpreter: one block at a time.

def reference(q, k, v, lower, upper, cap, ids, mask, bias):
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    s = s if cap is None else cap * jnp.tanh(s / cap)
    s = s if bias is None else s + bias.astype(jnp.float32)
    distance = jnp.arange(k.shape[1])[None] - jnp.arange(q.shape[1])[:, None]
    seen = jnp.ones(distance.shape, bool)
    seen = seen if lower is None else seen & (distance >= lower)
    seen = seen if upper is None else seen & (distance <= upper)
    seen = seen[None, None] & (True if ids is None else ids[:, None, :, None] == ids[:, None, None, :])
    seen = seen if mask is None else seen & mask
    s = jnp.where(seen, s, -jnp.inf)
    top = jnp.max(s, axis=-1, keepdims=True)
    p = jnp.exp(s - jnp.where(top == -jnp.inf, 0, top))
    p = p / jnp.maximum(p.sum(axis=-1, keepdims=True), 1e-30)
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)

def errors(
    q_len, kv_len, kv_heads, dim, lower, upper, cap, segments, shift=0.0, far=0.0, bwd={}, mask=None, bias=None, fwd={}
):
    dim, value_dim = dim if isinstance(dim, list) else (dim, dim)
    keys = jax.random.split(jax.random.key(q_len + kv_len + dim), 4)
    shapes = [(q_len, 2, dim), (kv_len, kv_heads, dim), (kv_len, kv_heads, value_dim), (q_len, 2, value_dim)]
    q, k, v, dout = (jax.random.normal(key, (1, *x), jnp.bfloat16) for key, x in zip(keys, shapes, strict=True))
    q, k = q + jnp.bfloat16(shift), k - jnp.bfloat16(shift)
    if far:
        rows = jnp.arange(q_len)[None, :, None, None] % 7 == 3
        first = jnp.arange(dim) == 0
        q, k = jnp.where(rows, first, jnp.where(first, 0, q)).astype(q.dtype), k.at[..., 0].set(far)
    ids = jnp.arange(q_len)[None] // 50 if segments else None
    if isinstance(segments, list):
        ids = jnp.repeat(*map(jnp.asarray, zip(*segments)), total_repeat_length=q_len)[None]
    options = dict(lower=lower, upper=upper, soft_cap=cap, q_segment_ids=ids, kv_segment_ids=ids)
    if mask is not None:
        mask = jax.random.bernoulli(keys[0], 0.7, mask).at[..., -40:].set(False)
    if bias is not None:
        # Some keys are not seen; in some rows float32 has room for nothing but the bias.
        bias = 2 * jax.random.normal(keys[1], bias, jnp.bfloat16 if bias[1] > 1 else jnp.float32)
        rows = jnp.arange(bias.shape[2])[:, None] % 7
        least = float(jnp.finfo(bias.dtype).min)
        bias = jnp.where(rows == 5, least, jnp.where(rows == 3, -1e9, bias)).astype(bias.dtype)
        bias = bias.at[..., 7:20].set(-jnp.inf)
    options |= dict(mask=mask, bias=bias)
    options["interpret"] = plgpu.InterpretGPUParams()
    forward = config.MosaicFwdConfig(consumers=2, block_kv=64, share_qo=dim == 256, cluster=2 if cap else 1)
    forward = dataclasses.replace(forward, **fwd)
    out, *sums = mosaic.flash_attention_forward(q, k, v, cfg=forward, **options)
    backward = dataclasses.replace(config.default_backward(dim, value_dim), **bwd)
    grads = mosaic_bwd.flash_attention_backward(q, k, v, out, *sums, dout, cfg=backward, **options)
    exact = lambda *x: reference(*x, lower, upper, cap, ids, mask, bias)
    want, pull = jax.vjp(exact, *(x.astype(jnp.float32) for x in (q, k, v)))
    wants = [want, *pull(dout.astype(jnp.float32))]
    if far:  # A gradient that is the small difference of huge numbers.
        grads, wants[1] = (grads[0].at[..., 0].set(0), *grads[1:]), wants[1].at[..., 0].set(0)
    norm = lambda x: jnp.linalg.norm(x.astype(jnp.float32))
    return [float(norm(a - b) / norm(b)) for a, b in zip((out, *grads), wants, strict=True)]

case = json.loads(sys.argv[1])
bwd = case.pop() if isinstance(case[-1], dict) else {}
extras = {name: bwd.pop(name, None) for name in ("mask", "bias")}
print(json.dumps(errors(*case, **extras, fwd=bwd.pop("forward", {}), bwd=bwd)))
"""


SHORT = ("window and soft cap", "rows of hugely negative logits", "head dim 256, segments", "outputs are held", "bias")


@pytest.mark.slow
@pytest.mark.skipif(not RECENT, reason="JAX 0.10 has no public GPU interpreter")
@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.full) for name in INTERPRETED]
)
def test_output_and_gradients_match_float32_in_the_interpreter(name):
    # The interpreter blocks one thread per warpgroup, and XLA sizes its pool by NPROC when it starts.
    env = os.environ | {"NPROC": "8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, json.dumps(INTERPRETED[name])]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    moved = len(INTERPRETED[name]) > 8 and not isinstance(INTERPRETED[name][-1], dict)
    limit = 2e-2 if moved else 4e-3  # Moved keys cancel in dQ, which costs digits.
    assert all(error < limit for error in json.loads(done.stdout)), done.stdout


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_config_spaces_hold_only_what_fits(head_dim):
    forward, backward = list(configs.forward_space(head_dim)), list(configs.backward_space(head_dim))
    assert configs.default_forward(head_dim).unfit(head_dim) is None
    assert forward
    assert len(set(forward)) == len(forward)
    assert all(cfg.smem_bytes(head_dim) <= HOPPER.block_bytes for cfg in forward + backward)
    assert configs.default_backward(head_dim) in backward
    for full in (False, True):
        assert configs.default_forward(head_dim, full=full).unfit(head_dim) is None
        assert configs.default_backward(head_dim, clusters=full).unfit(head_dim) is None


@pytest.mark.parametrize(
    ("heads", "lower", "batch", "packed", "pays"),
    [(14, None, 9, False, True), (12, None, 9, False, False), (14, -99, 9, False, False), (14, None, 2, False, False),
     (14, None, 9, True, False)],
)  # fmt: skip
def test_clusters_of_a_causal_backward_need_many_heads_for_each_key_head(heads, lower, batch, packed, pays):
    q, kv = (batch, 1000, heads, 128), (batch, 1000, 2, 128)
    assert configs.clusters_pay(q, kv, lower, 0, packed=packed) == pays


def test_clusters_need_whole_tiles_and_no_mask():
    assert configs.is_full(512, 768, None, None)
    assert not any(
        configs.is_full(*call) for call in [(512, 512, None, 0), (320, 512, None, None), (512, 320, -9, None)]
    )


@pytest.mark.parametrize("head_dim", [128, 256])
def test_a_second_kernel_for_dq_fits_too(head_dim):
    cfgs = [cfg for cfg in configs.backward_space(head_dim) if cfg.dq == "kernel"]
    assert cfgs
    assert all(cfg.dq_smem_bytes(head_dim) <= HOPPER.block_bytes for cfg in cfgs)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
def test_configs_of_packed_calls_leave_room_for_the_ids(head_dim):
    x, ids = jax.ShapeDtypeStruct((1, 512, 2, head_dim), jnp.bfloat16), jax.ShapeDtypeStruct((1, 512), jnp.int32)

    def space(segments):
        args, kwargs = FlashAttention().prepare(x, x, x, q_segment_ids=segments, kv_segment_ids=segments)
        return set(backward_space(Invocation(kernel=FlashAttention(), args=args, kwargs=kwargs)))

    plain, packed = space(None), space(ids)
    bytes_of = {cfg: cfg.smem_bytes(head_dim) + cfg.id_bytes for cfg in plain if cfg.split == "keys"}
    full = {cfg for cfg, size in bytes_of.items() if size > HOPPER.block_bytes}
    assert plain - packed == full | {cfg for cfg in plain if cfg.kv_stages > 1}
    assert any(cfg.kv_stages == 1 for cfg in full) == (head_dim == 128)


def test_a_config_that_does_not_fit_says_why():
    cfg = configs.MosaicFwdConfig(consumers=2, block_kv=128, stages=4)
    assert "shared memory" in (cfg.unfit(128) or "")
    assert "registers" in (configs.MosaicFwdConfig(consumers=3, block_kv=192).unfit(64) or "")
    assert "cluster" in (configs.MosaicFwdConfig(cluster=4).unfit(128) or "")
    assert "share_qo" in (configs.MosaicFwdConfig(share_qo=True, hold=True).unfit(128) or "")
    assert "splits" in (configs.MosaicBwdConfig(splits=9).unfit(128) or "")
    assert "split" in (configs.MosaicBwdConfig(split="columns", dq="bulk").unfit(256) or "")
    assert "32 columns of dQ" in (configs.MosaicBwdConfig(dq="bulk").unfit(80) or "")
    second = configs.default_backward(256)
    assert "for dQ" in (dataclasses.replace(second, dq_k_stages=3).unfit(256) or "")


@pytest.mark.parametrize("persistent", [True, False])
def test_every_tile_is_handed_out_once(persistent):
    steps = (1, 2, 3, 4, 5)
    table = tile_table(heads=7, steps=steps, blocks=4, head_group=3, persistent=persistent)
    tiles = [tile for count, *tiles in table.tolist() for tile in tiles[:count]]
    assert sorted(tiles) == list(range(7 * len(steps)))


def test_persistent_blocks_get_equal_work():
    steps = tuple(range(1, 33))
    table = tile_table(heads=64, steps=steps, blocks=132, head_group=8, persistent=True)
    work = [sum(steps[tile % 32] for tile in tiles[:count]) for count, *tiles in table.tolist()]
    assert max(work) <= 1.05 * sum(work) / len(work)


def causal_work(batch, length, heads, kv_heads):
    steps = Band(q_len=length, kv_len=length, upper=0).query_steps(64, 128)
    group = heads // kv_heads
    return mosaic_bwd_schedule.Work(
        heads=batch * kv_heads,
        steps=tuple(group * n for n in steps),
        blocks=132,
        head_bytes=group * length * 128 * 8,
        sum_bytes=batch * kv_heads * length * 128 * 8,
    )


@pytest.mark.parametrize("splits", [1, 3, 8])
def test_parts_cover_every_tile_of_keys_once(splits):
    work = causal_work(2, 640, 4, 2)
    table = mosaic_bwd_schedule.item_table(work, splits, 3, persistent=True)
    items = [mosaic_bwd_schedule.decode_item(i, splits) for count, *items in table.tolist() for i in items[:count]]
    longest = -(-max(work.steps) // splits)
    for tile in range(work.heads * len(work.steps)):
        parts = {(part, of) for number, part, of in items if number == tile}
        of = -(-work.steps[tile % len(work.steps)] // longest)
        assert parts == {(part, of) for part in range(of)}
    assert len(items) == len(set(items))


@pytest.mark.parametrize(
    ("shape", "splits", "busy"),
    [
        ((2, 4096, 32, 8), 1, 0.95),
        ((1, 8192, 64, 8), 1, 0.95),
        ((4, 2048, 28, 4), 1, 0.93),
        ((4, 4096, 16, 16), 1, 0.93),
        ((1, 2048, 32, 8), 3, 0.75),  # One part: half of that.
        ((1, 8192, 8, 1), 6, 0.75),  # One part: a quarter.
    ],
)
def test_few_long_tiles_of_keys_keep_all_blocks_busy(shape, splits, busy):
    work = causal_work(*shape)
    choice = mosaic_bwd_schedule.plan(work)
    assert choice[0] == splits
    _, end = deal(work.items(*choice), work.blocks)
    assert work.heads * sum(work.steps) / work.blocks >= busy * end


@pytest.mark.parametrize(("lower", "upper"), [(None, None), (None, 0), (-100, 0), (-30, 50), (None, -200), (300, None)])
@pytest.mark.parametrize(("q_len", "kv_len"), [(512, 512), (200, 712), (712, 200)])
def test_steps_cover_exactly_the_blocks_that_are_seen(lower, upper, q_len, kv_len):
    band = Band(q_len=q_len, kv_len=kv_len, lower=lower, upper=upper)
    distance = np.arange(kv_len)[None] - np.arange(q_len)[:, None]
    seen = np.ones(distance.shape, bool)
    seen &= True if lower is None else distance >= lower
    seen &= True if upper is None else distance <= upper
    for row, steps in zip(range(0, q_len, 128), band.steps(128, 64), strict=True):
        cols = np.flatnonzero(seen[row : row + 128].any(axis=0))
        start, end = (int(x) for x in band.blocks(jnp.int32(row), 128, 64))
        assert end - start == steps
        assert not len(cols) or (start * 64 <= cols[0] and cols[-1] < end * 64)
    for col, steps in zip(range(0, kv_len, 128), band.query_steps(64, 128), strict=True):
        rows = np.flatnonzero(seen[:, col : col + 128].any(axis=1))
        start, end = (int(x) for x in band.query_blocks(jnp.int32(col), 128, 64))
        assert end - start == steps
        assert not len(rows) or (start * 64 <= rows[0] and rows[-1] < end * 64)


def spec(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("q", "k", "options", "reason"),
    [
        (spec(2, 512, 8, 128), spec(2, 512, 2, 128), {"backward": True}, None if RECENT else "JAX 0.10"),
        (spec(2, 512, 8, 256), spec(2, 512, 2, 256), {}, None),
        (spec(2, 512, 8, 256), spec(2, 512, 2, 256), {"backward": True}, None if RECENT else "JAX 0.10"),
        (spec(2, 512, 8, 96), spec(2, 512, 2, 96), {"backward": True}, None if RECENT else "JAX 0.10"),
        (spec(2, 512, 8, 100), spec(2, 512, 2, 100), {}, "multiples of 8"),
        (spec(2, 512, 8, 264), spec(2, 512, 2, 264), {}, "up to 256"),
        (spec(2, 512, 8, 64), spec(2, 512, 3, 64), {}, "evenly"),
        (spec(2, 510, 8, 64), spec(2, 511, 8, 64), {"backward": True}, None if RECENT else "JAX 0.10"),
        (spec(2, 512, 8, 64, dtype=jnp.float32), spec(2, 512, 8, 64, dtype=jnp.float32), {}, "float16"),
        (spec(2, 512, 8, 64), spec(2, 512, 8, 64), {"scale": -1.0}, "positive"),
        (spec(2, 512, 8, 64), spec(2, 512, 8, 64), {"compute_capability": "8.0"}, "Hopper"),
    ],
)
def test_unsupported_gives_the_reason(q, k, options, reason):
    got = mosaic_support.unsupported(q, k, k, **options)
    assert got is None if reason is None else reason in (got or "")


def hopper() -> bool:
    if jax.default_backend() != "gpu":
        return False
    return getattr(jax.devices()[0], "compute_capability", "").startswith("9.")


@pytest.mark.gpu
@pytest.mark.skipif(not hopper(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("part", range(12))
def test_every_case_matches_float32_on_the_gpu(part):
    from benchmarks import hopper_checks as checks

    results = {i: checks.build(checks.CASES[i], i)() for i in range(part, len(checks.CASES), 12)}
    assert all(good for good, _ in results.values()), results
