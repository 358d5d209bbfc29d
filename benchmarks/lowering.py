"""What labels cost: tracing and lowering a 32-layer model with labels against without, in time and in text.

Run: python -m benchmarks.lowering [--out FILE]
"""

import argparse
import os
import platform
import statistics
import time
from datetime import date
from pathlib import Path

import jax
import jax.numpy as jnp

from tests.offline_program import Feed, Mixer, RmsNorm

LAYERS = 32


def model(kernels, params, x):
    norm, mix, feed = kernels
    for layer in range(LAYERS):
        scale, w = params["scale"][layer], params["w"][layer]
        x = x + mix(norm(x, scale))
        x = x + feed(norm(x, scale), w)
    return (x**2).mean()


def plain_kernels():
    cfg = RmsNorm().heuristic_cfg(None)
    return (
        lambda x, scale: RmsNorm().run(x, scale, cfg=cfg),
        lambda x: Mixer().run(x, cfg=cfg),
        lambda x, w: Feed().run(x, w, cfg=cfg, activation=jax.nn.gelu),
    )


def our_kernels(tag):
    norm, mix, feed = RmsNorm(f"norm{tag}"), Mixer(f"mix{tag}"), Feed(f"feed{tag}")
    return norm, mix, lambda x, w: feed(x, w, activation=jax.nn.gelu)


def lowered(kernels, grad):
    params = {"scale": jnp.ones((LAYERS, 64)), "w": jnp.ones((LAYERS, 64, 64))}
    f = lambda params, x: model(kernels, params, x)
    start = time.perf_counter()
    text = jax.jit(jax.grad(f) if grad else f).lower(params, jnp.ones((2, 16, 64))).as_text(debug_info=True)
    return time.perf_counter() - start, len(text)


def variant(name, grad, tag):
    # New kernels each time: what is measured is the first trace of a program, not one that finds its calls traced.
    os.environ["EJKERNEL_OPS_STAMP"] = "none" if name == "without labels" else "hash"
    return lowered(plain_kernels() if name == "plain JAX" else our_kernels(tag), grad)


def report(rounds):
    yield f"# Lowering a {LAYERS}-layer model, {date.today()}"
    yield ""
    where = f"{platform.machine()} · Python {platform.python_version()} · JAX {jax.__version__}"
    yield f"`python -m benchmarks.lowering` · {where}. Medians of interleaved rounds in one run: the time to"
    yield "trace, lower and print with debug information, and the size of that text."
    yield ""
    yield "| program | plain JAX | ours, no labels | ours, labels | labels: time | size | ours / plain: time | size |"
    yield "|---|---|---|---|---|---|---|---|"
    names = ["plain JAX", "without labels", "with labels"]
    for what, grad in (("forward", False), ("forward and backward", True)):
        found = {name: [variant(name, grad, f"{i}{grad}") for i in range(1)] for name in names}
        for i in range(1, rounds):
            for name in names if i % 2 else reversed(names):
                found[name].append(variant(name, grad, f"{i}{grad}{name[4:6]}"))
        seconds = {n: statistics.median(s for s, _ in rows[1:]) for n, rows in found.items()}
        size = {n: rows[-1][1] for n, rows in found.items()}
        plain, bare, full = names
        cells = " | ".join(f"{1e3 * seconds[n]:.0f} ms, {size[n] / 1e3:.0f} kB" for n in names)
        ratios = [
            seconds[full] / seconds[bare],
            size[full] / size[bare],
            seconds[full] / seconds[plain],
            size[full] / size[plain],
        ]
        yield f"| {what} | {cells} | " + " | ".join(f"{r:.2f}" for r in ratios) + " |"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    lines = []
    for line in report(options.rounds):
        print(line, flush=True)
        lines.append(line)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
