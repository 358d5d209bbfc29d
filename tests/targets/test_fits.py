"""What a space holds fits the smallest device that it is for, and what it leaves out as too large does not fit.

Margins: a TPU kernel that is thought to need up to 1.5 MiB more than there is may still fit, because the compiler keeps
fewer values in memory than thought; in float32, whose factors are split into parts, up to 8 MiB more. Shared memory is
known to the byte for Triton, and to 2 KiB for Mosaic, which aligns it.
Flash attention for TPUs has tests of its own.
"""

import dataclasses
import functools
import itertools
import re

import jax
import pytest

from ejkernel.cli import suites
from ejkernel.kernels.flash_attention import triton
from ejkernel.kernels.flash_attention.arguments import Attention
from ejkernel.kernels.flash_attention.workloads import attention
from ejkernel.kernels.grouped_matmul import tiles
from ejkernel.kernels.grouped_matmul.tiles import TpuConfig, TritonConfig
from ejkernel.kernels.grouped_matmul.workloads import product
from ejkernel.modules import linear_cross_entropy
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.workload import Workload
from ejkernel.ops.tuning import ahead, compiling
from ejkernel.ops.utils import targets
from ejkernel.ops.utils.devices import HOPPER, LEAST_BLOCK_BYTES
from ejkernel.ops.utils.params import FwdParams
from ejkernel.ops.utils.targets import TARGETS, Target
from tests.targets.plan import OPERATIONS

pytestmark = [
    pytest.mark.targets,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
L4 = Target("sm_89", "NVIDIA L4", "1x1x1")
"""The least shared memory of all GPUs that the Triton kernels are for."""
NO_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
MARGIN = {"bfloat16": 3 << 19, "float32": 8 << 20}


@functools.cache
def device(target):
    return targets.describe(target)[0]


def calls(target, op_id, workload):
    with targets.compiling_for(target):
        return suites.calls_of(OPERATIONS[op_id], workload)


def compiled(target, inv, platform, params, options=None):
    name = "bwd_params" if isinstance(inv.kernel, BackwardKernel) else "fwd_params"
    owner = inv.kernel.forward if isinstance(inv.kernel, BackwardKernel) else inv.kernel
    cfg = owner.cfg_type(**{name: params}, platform=platform)
    return ahead.compiled(inv, inv.kernel, cfg, target, device(target), options=options)


# --- TPUs ---

GRID = [
    TpuConfig(block_m=m, block_k=k, block_n=n)
    for m, k, n in itertools.product((128, 256, 512, 1024), (512, 1024, 2048), (512, 1024, 2048))
]
PRODUCTS = {dtype: product(dtype, "tpu", (8192, 8, 4096, 4096), dtype=dtype) for dtype in ("bfloat16", "float32")}


@pytest.mark.parametrize("target", ["v4"])
@pytest.mark.parametrize("dtype", PRODUCTS)
@pytest.mark.parametrize("part", [0, 2], ids=["forward", "drhs"])
def test_fast_memory_of_grouped_products(target, dtype, part):
    inv = calls(TARGETS[target], "grouped_matmul", PRODUCTS[dtype])[part]
    item = 2 if dtype == "bfloat16" else 4
    needs = lambda cfg: cfg.vmem_bytes(item, item, contraction=part == 2)
    sized = sorted(GRID, key=needs)
    for cfg in [c for c in sized if needs(c) <= tiles.VMEM_BYTES][-3:]:
        assert compiled(TARGETS[target], inv, "pallas", cfg).kernels == 1
    for cfg in [c for c in sized if needs(c) > (16 << 20) + MARGIN[dtype]][:3]:
        with pytest.raises(Exception, match=r"(?i)vmem|RESOURCE_EXHAUSTED"):
            compiled(TARGETS[target], inv, "pallas", cfg)


# --- Triton ---


@pytest.mark.parametrize("dim", [64, 128])
def test_shared_memory_and_registers_of_triton_attention(dim):
    inv = calls(L4, "flash_attention", attention("gpu", 2, 2048, 4, 4, dim, True))[0]
    grid = [
        FwdParams(q_blocksize=rows, kv_blocksize=cols, num_warps=warps, num_stages=stages)
        for rows, cols, warps, stages in itertools.product((64, 128), (64, 128), (4, 8), (2, 3))
    ]
    reasons = {params: triton.unfit(params, Attention.of(inv.args, inv.kwargs)) for params in grid}
    wide = [params for params, reason in reasons.items() if reason is None and params.kv_blocksize == 128]
    for params in wide[:3]:
        compiled(L4, inv, "triton", params)
    for params in [p for p, reason in reasons.items() if reason and "shared" in reason][:2]:
        with pytest.raises(Exception, match="Shared memory size limit exceeded") as caught:
            compiled(L4, inv, "triton", params)
        asked, told = (int(re.search(r"(\d{5,})", text)[1]) for text in (reasons[params], str(caught.value)))
        assert asked == told
    for params in [p for p, reason in reasons.items() if reason and "registers" in reason][:1]:
        with pytest.raises(Exception, match="register spilling"):
            compiled(L4, inv, "triton", params, NO_SPILLS)


@pytest.mark.parametrize("dims", [(128, 128), (64, 256)], ids=str)
def test_the_guess_of_triton_attention_fits_the_least_shared_memory(dims):
    shape = lambda dim: ((1, 512, 2, dim), "float32")
    workload = Workload(name="float32", device="gpu", shapes=(shape(dims[0]), shape(dims[0]), shape(dims[1])))
    for inv in calls(L4, "flash_attention", workload):
        backward = isinstance(inv.kernel, BackwardKernel)
        with targets.compiling_for(L4):
            guess = OPERATIONS["flash_attention"].backend("triton").space(inv, backward=backward)[0]
        assert compiled(L4, inv, "triton", guess).kernels >= 1


def test_shared_memory_and_registers_of_triton_products():
    inv = calls(L4, "grouped_matmul", product("p", "gpu", (4096, 4, 1024, 1024)))[0]
    grid = [
        TritonConfig(block_m=m, block_n=n, block_k=k, num_warps=warps, num_stages=stages)
        for m, n, k, warps, stages in itertools.product((64, 128, 256), (128, 256), (32, 64), (4, 8), (3, 5))
    ]
    smem = lambda cfg: (cfg.num_stages - 1) * (cfg.block_m + cfg.block_n) * cfg.block_k * 2
    for cfg in sorted([c for c in grid if c.unfit() is None], key=smem)[-2:]:
        compiled(L4, inv, "triton", cfg, NO_SPILLS)
    for cfg in [c for c in sorted(grid, key=smem) if smem(c) > LEAST_BLOCK_BYTES][:2]:
        with pytest.raises(Exception, match=f"Shared memory size limit exceeded: requested {smem(cfg)}"):
            compiled(L4, inv, "triton", cfg)
    spilling = [c for c in grid if "registers" in (c.unfit() or "")][-1]
    with pytest.raises(Exception, match="register spilling"):
        compiled(L4, inv, "triton", spilling, NO_SPILLS)


@pytest.mark.parametrize("scale", [False, True], ids=["without a scale", "with a scale"])
@pytest.mark.parametrize("columns", [128, 4096, 12_288, 16_384, 32_768])
def test_blocks_of_rows_fit_the_registers(columns, scale):
    norm = OPERATIONS["rms_norm"]
    shapes = ((8192, columns), "bfloat16"), ((columns,), "bfloat16") if scale else None
    workload = dataclasses.replace(norm.workloads("gpu")[0], shapes=shapes)
    for inv in calls(L4, "rms_norm", workload):
        backward = isinstance(inv.kernel, BackwardKernel)
        with targets.compiling_for(L4):
            space = norm.backend("triton").space(inv, backward=backward)
        # The guess must not spill; only in the backward of the longest rows are there too few registers.
        spills = backward and columns > (12_288 if scale else 16_384)
        compiled(L4, inv, "triton", space[0], None if spills else NO_SPILLS)
        for params in space[-2:]:
            assert compiled(L4, inv, "triton", params).kernels == 1


# --- Mosaic ---


@pytest.mark.parametrize("op_id", ["flash_attention", "grouped_matmul"])
@pytest.mark.parametrize("part", [0, -1], ids=["forward", "gradient"])
def test_shared_memory_of_hopper_kernels(op_id, part):
    target, kernel = TARGETS["sm_90a"], OPERATIONS[op_id]
    inv = calls(target, op_id, kernel.workloads("gpu")[0])[part]
    owner = inv.kernel.forward if isinstance(inv.kernel, BackwardKernel) else inv.kernel
    with targets.compiling_for(target):
        space = owner.backend("mosaic").space(inv, backward=isinstance(inv.kernel, BackwardKernel))
    size = lambda params: params.smem_bytes(*([128] if op_id == "flash_attention" else []))
    largest = max(space, key=size)
    assert compiled(target, inv, "mosaic", largest).kernels >= 1
    deeper = next(
        d
        for n in range(1, 9)
        if size(d := dataclasses.replace(largest, stages=largest.stages + n)) > HOPPER.block_bytes
    )
    with pytest.raises(ValueError, match="exceeds available shared memory") as caught:
        compiled(target, inv, "mosaic", deeper)
    needed = int(re.search(r"smem_bytes=(\d+)", str(caught.value))[1])
    assert abs(needed - size(deeper)) <= 2048


# Every query sees every key. If ptxas knew the lengths of the loops, they would spill 64 bytes to several hundred.
@pytest.mark.parametrize(
    ("length", "dim", "backward", "most"),
    [
        *((4096, 128, True, 16), (2048, 256, True, 500)),
        *((197, 112, False, 0), (197, 128, False, 0)),
        *((197, 152, False, 0), (256, 168, False, 0), (2048, 256, False, 0)),
    ],
)
def test_a_loop_of_known_length_does_not_fill_the_registers(length, dim, backward, most, monkeypatch, tmp_path):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    assert spilled((2, length, 8, dim), backward, str(tmp_path)) <= most


# Most of it is the copy of the loop for rows whose log-sum-exp was rounded. It was 256, 284 and some 500 bytes.
@pytest.mark.parametrize(("dim", "window", "most"), [(128, None, 64), (128, (1023, 0), 100), (256, None, 280)])
def test_a_soft_cap_takes_no_registers_over_the_mask(dim, window, most, monkeypatch, tmp_path):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    rules = {"causal": True, "sliding_window": window, "logits_soft_cap": 50.0}
    assert spilled((2, 4096, 8, dim), True, str(tmp_path), **rules) <= most


def spilled(shape, backward, folder, **rules):
    """The bytes that an attention call's guess spills on Hopper."""
    target = "sm_90a"
    workload = Workload(name="spills", device="gpu", shapes=((shape, "bfloat16"),) * 3, kwargs=rules)
    inv = calls(TARGETS[target], "flash_attention", workload)[backward]
    with targets.compiling_for(TARGETS[target]):
        cfg = OPERATIONS["flash_attention"].cfg_on("mosaic", inv, backward=backward)
    found = compiling.report(target, inv.kernel, inv, cfg, folder)
    assert found.kernels >= 1
    return int(re.findall(r"\d+", found.fault)[0] if found.fault else 0)


# In the backward most of it is there without a bias, too; one of its kernels is for the bias' own gradient.
@pytest.mark.parametrize(
    ("dim", "bias", "most"),
    [(64, (2, 1, 1), (0, 200)), (128, (1, 8, 2048), (0, 60)), (256, (1, 8, 2048), (32, 400))],
)
def test_a_bias_leaves_registers_for_the_rest(dim, bias, most, monkeypatch, tmp_path):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    rules = {"causal": True, "bias": jax.ShapeDtypeStruct((*bias, 2048), "bfloat16")}
    for backward, bytes_ in enumerate(most):
        assert spilled((2, 2048, 8, dim), bool(backward), str(tmp_path), **rules) <= bytes_


def test_memory_of_a_cluster_is_released_when_all_warps_have_read_it(monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    shape, target = ((1, 512, 1, 192), "bfloat16"), TARGETS["sm_90a"]
    inv = calls(target, "flash_attention", Workload(name="full", device="gpu", shapes=(shape,) * 3))[True]
    with targets.compiling_for(target):
        guess = OPERATIONS["flash_attention"].cfg_on("mosaic", inv, backward=True).bwd_params
    assert guess.split == "gradients"
    compiled(target, inv, "mosaic", dataclasses.replace(guess, cluster=2))
    # One warp arrives at the barriers of both blocks (`mapa`) for its warpgroup, with which products keep it in step.
    steps = re.findall(r"ld\.shared|bar\.sync|wgmma|mapa\.shared", capfd.readouterr().out)
    assert "mapa.shared" in steps
    assert ("ld.shared", "mapa.shared") not in set(itertools.pairwise(steps))


# --- Memory of whole programs ---


@pytest.mark.parametrize("target", ["sm_90a"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_memory_of_the_loss_with_gradients(target, place):
    workload = OPERATIONS["linear_cross_entropy"].workloads("gpu")[place]
    (x, weights, labels), _ = workload.abstract()
    run = lambda x, w, y: jax.value_and_grad(linear_cross_entropy, (0, 1))(x, w, y)
    with targets.compiling_for(TARGETS[target], device(TARGETS[target])):
        program = ahead.compile_program(run, (x, weights, labels), device(TARGETS[target]))
    assert program.temp_bytes <= (0.4e9, 1.5e9, 0.5e9)[place]
    assert program.temp_bytes < 0.25 * 2 * labels.size * weights.shape[1] * 2  # A quarter of logits and their gradient.


# The logits of all rows; of more than twice as many as columns of x, the float32 sum and a chunk's logits and gradient.
@pytest.mark.parametrize(
    ("target", "rows", "most"),
    [("v5e", 4096, 1.1e9), ("v6e", 4096, 1.1e9), ("v5e", 8192, 2.2e9), ("v6e", 8192, 2.2e9), ("v6e", 16384, 4.9e9)],
)
def test_memory_of_the_loss_with_gradients_on_a_tpu(target, rows, most):
    shapes = (((rows, 4096), "bfloat16"), ((4096, 128_256), "bfloat16"), ((rows,), "int32"))
    run = lambda x, w, y: jax.value_and_grad(linear_cross_entropy, (0, 1))(x, w, y)
    with targets.compiling_for(TARGETS[target], device(TARGETS[target])):
        program = ahead.compile_program(
            run, tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes), device(TARGETS[target])
        )
    assert program.temp_bytes <= most
