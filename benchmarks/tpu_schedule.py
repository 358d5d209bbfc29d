"""Flash attention on TPUs by the compiler's own schedule, ours beside JAX's splash attention; no TPU is needed.

Needs an environment with `pip install "jax[tpu]"`. Every program is compiled in a process of its own, because libtpu
reads where to write its bundles when it is loaded.

Run: python -m benchmarks.tpu_schedule [--generations v5e v6e] [--out FILE]
"""

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

from ejkernel.ops.tuning import schedule

TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "v7x": "tpu7x:2x2x1",
}
CALLS = (
    ("4, 4096, 16, 128", (4, 4096, 16, 16, 128), (1024, 1024)),
    ("4, 4096, 16, 128", (4, 4096, 16, 16, 128), (512, 512)),
    ("4, 4096, 16 (4), 128", (4, 4096, 16, 4, 128), (1024, 1024)),
)
"""Batch, length, heads, key heads, head dim; blocks of queries and keys. All causal, in bfloat16.

Arrays have their heads first, as both kernels take them: what XLA does to turn others is no part of this.
"""
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
KERNELS = ("forward", "dq", "dkv")


# --- In a process of its own ---


def ours(heads, length, blocks):
    from ejkernel.modules import FlashAttention, FlashAttentionConfig
    from ejkernel.ops import BwdParams, FwdParams

    kernel, sizes = FlashAttention(), {"q_blocksize": blocks[0], "kv_blocksize": blocks[1]}
    cfg = FlashAttentionConfig(FwdParams(**sizes), BwdParams(**sizes), "pallas")

    turned = lambda x: x.swapaxes(1, 2)

    def forward(q, k, v):
        args, rules = kernel.prepare(turned(q), turned(k), turned(v), causal=True)
        return turned(kernel.fwd_with_residuals_pallas(*args, cfg=cfg, **rules)[0])

    def gradient(q, k, v, dout):
        args, rules = kernel.prepare(turned(q), turned(k), turned(v), causal=True)
        out, saved = kernel.fwd_with_residuals_pallas(*args, cfg=cfg, **rules)
        grads = kernel.vjp_pallas(saved, out, turned(dout), *args, cfg=cfg, **rules)[:3]
        return turned(out), [turned(x) for x in grads]

    return forward, gradient


def splash(heads, length, blocks):
    import jax
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    rows, cols = blocks
    sizes = splash_attention_kernel.BlockSizes(
        block_q=rows, block_kv=cols, block_kv_compute=cols, block_q_dq=rows, block_kv_dq=cols,
        block_q_dkv=rows, block_kv_dkv=cols, block_kv_dkv_compute=cols,
    )  # fmt: skip

    def forward(q, k, v):
        mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((length, length))] * heads)
        attend = splash_attention_kernel.make_splash_mha(mask=mask, head_shards=1, q_seq_shards=1, block_sizes=sizes)
        return jax.vmap(attend)(q * q.shape[3] ** -0.5, k, v)

    def gradient(q, k, v, dout):
        out, back = jax.vjp(forward, q, k, v)
        return out, back(dout)

    return forward, gradient


def compile_one(who, generation, shape, blocks):
    """Temporary bytes of the forward and of forward and backward together, which is compiled last."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

    device = topologies.get_topology_desc(TOPOLOGIES[generation], platform="tpu").devices[0]
    batch, length, heads, kv_heads, dim = shape
    array = lambda n: jax.ShapeDtypeStruct((batch, n, length, dim), jnp.bfloat16, sharding=SingleDeviceSharding(device))
    kind = AbstractDevice(platform="tpu", device_kind=device.device_kind, num_cores=1)
    q, k = array(heads), array(kv_heads)
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=kind)):
        forward, gradient = {"ours": ours, "splash": splash}[who](heads, length, blocks)
        compiled = [
            jax.jit(f).trace(*args).lower(lowering_platforms=("tpu",)).compile()
            for f, args in ((forward, (q, k, k)), (gradient, (q, k, k, q)))
        ]
    return [x.memory_analysis().temp_size_in_bytes for x in compiled]


# --- The table ---


def measure(who, generation, shape, blocks):
    """Temporary bytes of both programs, and the schedule of each kernel of the second."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **ENVIRONMENT, "LIBTPU_INIT_ARGS": schedule.dump_flags(Path(folder))}
        call = json.dumps([who, generation, shape, blocks])
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.tpu_schedule", "--one", call],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{call}: {done.stderr[-2000:]}")
        found = {kernel_of(x.name): x for x in schedule.read(Path(folder))}
        return json.loads(done.stdout.splitlines()[-1]), found


def kernel_of(name):
    """Which of ours a kernel is, by its name or by that of splash attention's."""
    name = name.replace("fwd", "forward")
    return next((kernel for kernel in ("dkv", "dq", "forward") if kernel in name), name)


def bundles(found, blocks, length):
    """Bundles of a step on average: tiles on the diagonal are computed by another part, if there is one."""
    if len(found.steps) == 1:
        return found.step_bundles
    clear, edge = found.steps
    tiles = [
        "edge" if (j + 1) * blocks[1] - 1 > i * blocks[0] else "clear"
        for i in range(length // blocks[0])
        for j in range(length // blocks[1])
        if j * blocks[1] <= (i + 1) * blocks[0] - 1
    ]
    return (clear * tiles.count("clear") + edge * tiles.count("edge")) / len(tiles)


def report(options):
    versions = f"JAX {importlib.metadata.version('jax')}, libtpu {importlib.metadata.version('libtpu')}"
    yield f"# Flash attention on TPUs by the compiler's schedule, {date.today()}"
    yield ""
    yield f"`python -m benchmarks.tpu_schedule {' '.join(sys.argv[1:])}` · {platform.machine()} · {versions}. No TPU."
    yield ""
    yield "Bundles per step of the grid that computes a tile, on average over the tiles of a causal call; ratio to"
    yield "splash attention. Temporary memory of the forward, and of forward and backward in one program."
    yield ""
    yield "| TPU | batch, length, heads (kv), dim | blocks | kernel | ours | splash | ratio |"
    yield "|---|---|---|---|---|---|---|"
    memory = []
    for name, shape, blocks in CALLS:
        for generation in options.generations:
            where = f"{generation} | {name} | {blocks[0]} by {blocks[1]}"
            (own, kernels), (other, peers) = (measure(who, generation, shape, blocks) for who in ("ours", "splash"))
            for kernel in KERNELS:
                a, b = (bundles(x[kernel], blocks, shape[1]) for x in (kernels, peers))
                yield f"| {where} | {kernel} | {a:.0f} | {b:.0f} | {a / b:.2f} |"
            memory += [
                f"| {where} | {what} | {a / 2**20:.1f} | {b / 2**20:.1f} | {f'{a / b:.2f}' if b else '-'} |"
                for what, a, b in zip(("forward", "with backward"), own, other, strict=True)
            ]
    yield ""
    yield "| TPU | batch, length, heads (kv), dim | blocks | program | ours, MiB | splash, MiB | ratio |"
    yield "|---|---|---|---|---|---|---|"
    yield from memory


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generations", nargs="+", default=["v5e", "v6e"], choices=TOPOLOGIES)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(compile_one(*json.loads(options.one))))
        return
    lines = []
    for line in report(options):
        print(line, flush=True)
        lines.append(line)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
