"""Attention at shapes drawn at random from what models use: an untuned call beside every backend that serves it.

    python -m benchmarks.attention_shapes --count 30 --rounds 20 --out results.md
    for i in 0 1 2 3; do python -m benchmarks.attention_shapes --part $i/4 --lock turn & done; wait  # sooner

No store and no pack is read. Device time by CUPTI, all calls of a shape interleaved in random order, medians. The last
column is the time of the best backend over that of the untuned call, forward and forward with backward. With `--lock`,
processes that compile at the same time take turns on the device.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import pathlib
import random
import statistics
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from filelock import FileLock

from ejkernel.modules import FlashAttention, FlashAttentionConfig
from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor
from ejkernel.ops.core.dispatch import UnsupportedCallError

BACKENDS = ("cudnn", "mosaic", "triton")


class Model(NamedTuple):
    """The attention of a family of models, and the lengths it is trained with."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    lengths: tuple[int, ...]
    kwargs: dict[str, Any]
    value_dim: int | None = None
    packed: bool = False


_CAUSAL: dict[str, Any] = {"causal": True}
MODELS = (
    Model("Llama 8B", 32, 8, 128, (2048, 4096, 8192), _CAUSAL, packed=True),
    Model("Llama 70B", 64, 8, 128, (4096, 8192), _CAUSAL, packed=True),
    Model("Qwen 7B", 28, 4, 128, (2048, 4096, 32768), _CAUSAL, packed=True),
    Model("Qwen 30B, experts", 32, 4, 128, (4096, 8192), _CAUSAL, packed=True),
    Model("Mistral, window", 32, 8, 128, (8192, 16384), {"causal": True, "sliding_window": 4096}),
    Model("Gemma, soft cap", 16, 8, 256, (4096, 8192), {"causal": True, "logits_soft_cap": 50.0}),
    Model("Gemma, window", 8, 4, 256, (8192,), {"causal": True, "sliding_window": 1024}),
    Model("Phi", 32, 32, 96, (2048, 4096), _CAUSAL),
    Model("StableLM", 32, 32, 80, (4096,), _CAUSAL),
    Model("GPT-2", 12, 12, 64, (1024,), _CAUSAL),
    Model("small Llama", 9, 3, 64, (2048, 8192), _CAUSAL, packed=True),
    Model("Falcon", 71, 1, 64, (2048,), _CAUSAL),
    Model("DeepSeek, latent", 16, 16, 192, (4096,), _CAUSAL, value_dim=128),
    Model("BERT large", 16, 16, 64, (128, 384, 512), {}),
    Model("ViT large", 16, 16, 64, (197, 577), {}),
    Model("ViT huge", 16, 16, 80, (257, 729), {}),
    Model("Whisper", 20, 20, 64, (1500,), {}),
    Model("diffusion transformer", 24, 24, 128, (1024, 4096), {}),
    Model("wide full attention", 16, 16, 256, (2048,), {}),
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """One drawn call."""

    model: Model
    batch: int
    length: int
    segments: tuple[int, ...] = ()

    def __str__(self) -> str:
        model = self.model
        heads = f"{model.heads}" if model.heads == model.kv_heads else f"{model.heads}/{model.kv_heads}"
        dims = f"{model.dim}" if model.value_dim is None else f"{model.dim}/{model.value_dim}"
        kind = ", ".join(f"{name} {value}" for name, value in model.kwargs.items()) or "full"
        packed = f", {len(self.segments)} segments" if self.segments else ""
        return f"{model.name}: {self.batch} x {self.length} x {heads} x {dims}, {kind}{packed}"

    @property
    def arrays(self) -> list[tuple[int, ...]]:
        m, lead = self.model, (self.batch, self.length)
        return [(*lead, m.heads, m.dim), (*lead, m.kv_heads, m.dim), (*lead, m.kv_heads, m.value_dim or m.dim)]


def draw(count: int, seed: int) -> list[Shape]:
    """Shapes of 4096 to 32 768 tokens, all different."""
    rng, found = np.random.default_rng(seed), {}
    while len(found) < count:
        model = MODELS[rng.integers(len(MODELS))]
        length = int(rng.choice(model.lengths))
        batch = max(1, int(rng.choice([4096, 8192, 16384, 32768])) // length)
        segments: tuple[int, ...] = ()
        if model.packed and rng.random() < 0.4:
            shares = rng.dirichlet(np.full(int(rng.integers(2, 25)), 2.0))
            ends = np.unique([0, *(np.cumsum(shares) * length).astype(int)[:-1], length])
            segments = tuple(map(int, np.diff(ends)))
        shape = Shape(model, batch, length, segments)
        found[str(shape)] = shape
    return list(found.values())


def call(shape: Shape, platform: str | None):
    """The public operation by one backend, or as an untuned call takes it."""
    kernel, executor = FlashAttention(), Executor(ConfigSelectorChain(cache=ConfigCache()))
    fixed = {} if platform is None else {"cfg": FlashAttentionConfig(platform=platform), "platform": platform}
    kwargs = dict(shape.model.kwargs)
    if shape.segments:
        ids = jnp.asarray(np.repeat(np.arange(len(shape.segments)), shape.segments), jnp.int32)
        kwargs["q_segment_ids"] = jnp.broadcast_to(ids, (shape.batch, shape.length))
    return lambda q, k, v: executor(kernel, q, k, v, **kwargs, **fixed)


def compiled(shape: Shape, platform: str | None, backward: bool):
    """The program, or None if the backend does not serve the call."""
    fn = call(shape, platform)

    def both(q, k, v, dout):
        out, pull = jax.vjp(fn, q, k, v)
        return out, pull(dout)

    given = [jax.ShapeDtypeStruct(dims, jnp.bfloat16) for dims in shape.arrays]
    out = jax.ShapeDtypeStruct((*shape.arrays[0][:3], shape.arrays[2][3]), jnp.bfloat16)
    run = both if backward else lambda q, k, v, dout: fn(q, k, v)
    try:
        return jax.jit(run).lower(*given, out).compile()
    except UnsupportedCallError:
        return None


def device_ms(program, args) -> float:
    """Runs a program twice and returns the time that the kernels of the second run took."""
    from jax.experimental.mosaic.gpu import profiler

    return profiler.Cupti(finalize=False).measure(program)(*args)[1]


def inputs(shape: Shape, seed: int) -> list[jax.Array]:
    dims = [*shape.arrays, (*shape.arrays[0][:3], shape.arrays[2][3])]
    keys = jax.random.split(jax.random.key(seed), len(dims))
    return [jax.random.normal(key, d, jnp.bfloat16) for key, d in zip(keys, dims, strict=True)]


def measure(shape: Shape, jobs: dict[str, Any], rounds: int, seed: int) -> dict[str, float]:
    """Median milliseconds by contender."""
    programs = {}
    for name, job in jobs.items():
        try:
            programs[name] = job.result()
        except Exception as error:  # noqa: BLE001 - a contender that fails is a result
            print(f"{shape}: {name} failed: {type(error).__name__}: {str(error)[:200]}", flush=True)
    programs = {name: program for name, program in programs.items() if program is not None}
    args, times = inputs(shape, seed), {name: [] for name in programs}
    for program in programs.values():
        jax.block_until_ready(program(*args))
    for _ in range(rounds):
        for name in random.sample(list(programs), len(programs)):
            times[name].append(device_ms(programs[name], args))
    return {name: statistics.median(found) for name, found in times.items()}


def line(shape: Shape, forward: dict[str, float], both: dict[str, float]) -> str:
    """A row of the table."""
    cells = [str(shape)]
    for found in (forward, both):
        cells += [f"{found[name]:.4f}" if name in found else "-" for name in ("untuned", *BACKENDS)]
        others = [ms for name, ms in found.items() if name != "untuned"]
        cells.append(f"{min(others) / found['untuned']:.3f}" if others and "untuned" in found else "-")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--backends", default=",".join(BACKENDS), help="whom to measure, comma-separated")
    parser.add_argument("--part", default="0/1", help="which shapes: every n-th from the i-th on, as i/n")
    parser.add_argument("--lock", help="a file that is locked while something is measured")
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    random.seed(options.seed)
    names = " | ".join(("untuned", *BACKENDS, "best / untuned"))
    lines = [
        f"JAX {jax.__version__}, {jax.devices()[0].device_kind}, {options.rounds} rounds, seed {options.seed}; ms.",
        "",
        f"| call | forward: {names} | with backward: {names} |",
        "|---" * 11 + "|",
    ]
    print("\n".join(lines), flush=True)
    first, parts = map(int, options.part.split("/"))
    shapes = draw(options.count, options.seed)[first::parts]
    turn = FileLock(options.lock) if options.lock else contextlib.nullcontext()
    with concurrent.futures.ThreadPoolExecutor(max(2, 14 // parts)) as pool:
        submit = lambda shape, backward: {
            name: pool.submit(partial(compiled, shape, None if name == "untuned" else name, backward))
            for name in ("untuned", *options.backends.split(","))
        }
        jobs = [(shape, submit(shape, False), submit(shape, True)) for shape in shapes]
        for shape, *passes in jobs:
            concurrent.futures.wait([job for each in passes for job in each.values()])
            with turn:
                found = [measure(shape, each, options.rounds, options.seed) for each in passes]
            lines.append(line(shape, *found))
            print(lines[-1], flush=True)
            if options.out:
                options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
