"""What ejkernel costs: eager calls, tracing, lowering and import, each as a ratio to plain JAX in one run.

Run: python benchmarks/overhead.py [--out FILE]
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from ejkernel.kernels.flash_attention import xla
from ejkernel.kernels.flash_attention.arguments import Attention
from ejkernel.modules.flash_attention import FlashAttention, flash_attention
from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Kernel


@dataclass(frozen=True)
class Cfg:
    block: int = 128


def total(args, kwargs):
    return sum(jax.tree.leaves((args, kwargs)))


class Sum(Kernel[Cfg, jax.Array]):
    def run(self, *args, cfg, scale=1.0, **kwargs):
        return total(args, kwargs)

    def heuristic_cfg(self, inv):
        return Cfg()


class SumVjp(Sum):
    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return jax.tree.map(lambda x: cotangents[0], primals)


class SumResiduals(Sum):
    def fwd_with_residuals(self, *args, cfg, **kwargs):
        return total(args, kwargs), None

    def vjp(self, residuals, out, dout, *args, cfg, **kwargs):
        return jax.tree.map(lambda x: dout, args)


class First(Sum):
    """Ignores all arguments but one: `jax.jit` does not even pass them on."""

    def run(self, x, *args, cfg):
        return x + x


class FirstVjp(First):
    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return 2 * cotangents[0], *[None] * (len(primals) - 1)


STYLES = {"no gradient": Sum, "custom_vjp": SumVjp, "fwd_with_residuals + vjp": SumResiduals}


def plain_function(style):
    f = lambda *args, scale=1.0, **kwargs: total(args, kwargs)
    if style is Sum:
        return f
    f = jax.custom_vjp(lambda *args: total(args, {}))
    f.defvjp(lambda *args: (total(args, {}), args), lambda args, dout: jax.tree.map(lambda x: dout, args))
    return f


def interleaved(functions, samples, calls):
    """Median seconds a call of each function, measured in turns so that drift hits them alike.

    Seconds of this thread: on a busy machine those of the clock are mostly about the others.
    """
    times = [[] for _ in functions]
    for f in functions:
        f()
    for i in range(samples):
        order = list(enumerate(functions))
        for k, f in order if i % 2 else reversed(order):
            start = time.thread_time()
            for _ in range(calls):
                f()
            times[k].append((time.thread_time() - start) / calls)
    return [statistics.median(t) for t in times]


def eager_rows():
    x = jnp.ones((8, 8))
    executor, cfg = Executor(ConfigSelectorChain(cache=ConfigCache())), Cfg()
    cases = {
        "2 arrays": ((x, x), {}),
        "16 arrays": ((x,) * 16, {}),
        "64-leaf dict": (({f"w{i}": x for i in range(64)},), {}),
        "keyword array": ((x,), {"bias": x}),
        "2 arrays and a static keyword": ((x, x), {"scale": 2.0}),
    }
    for name, (args, kwargs) in cases.items():
        for style_name, style in STYLES.items():
            if kwargs and style is not Sum:
                continue
            kernel, plain = (
                style(),
                jax.jit(plain_function(style), **({"static_argnames": "scale"} if "scale" in kwargs else {})),
            )
            variants = [
                lambda p=plain, a=args, k=kwargs: p(*a, **k),
                lambda e=executor, n=kernel, a=args, k=kwargs: e(n, *a, **k),
                lambda e=executor, n=kernel, a=args, k=kwargs, c=cfg: e(n, *a, cfg=c, **k),
                lambda n=kernel, a=args, k=kwargs: n(*a, **k),
            ]
            base, call, explicit, direct = interleaved(variants, 41, 500)
            yield f"{name}, {style_name}", base * 1e6, call / base, explicit / base, direct / base


def ignored_rows():
    x = jnp.ones((8, 8))
    executor, cfg = Executor(ConfigSelectorChain(cache=ConfigCache())), Cfg()
    for count in (2, 8):
        for style_name, style in {"no gradient": First, "custom_vjp": FirstVjp}.items():
            args, kernel, plain = (x,) * count, style(), jax.jit(lambda x, *_: x + x)
            variants = [
                lambda p=plain, a=args: p(*a),
                lambda n=kernel, a=args: executor(n, *a),
                lambda n=kernel, a=args: executor(n, *a, cfg=cfg),
                lambda n=kernel, a=args: n(*a),
            ]
            base, *ours = interleaved(variants, 41, 500)
            yield f"{count} arrays, all but one ignored, {style_name}", base * 1e6, *(t / base for t in ours)


def attention_rows():
    """The public function, against a jitted function of the same keywords that runs the same implementation."""
    kernel, x = FlashAttention(), jnp.ones((1, 8, 1, 8))
    ids = jnp.zeros((1, 8), jnp.int32)
    cases = {
        "": {},
        "causal=True": {"causal": True},
        "causal=True, softmax_scale=0.5": {"causal": True, "softmax_scale": 0.5},
        "causal=True, q_segment_ids=array": {"causal": True, "q_segment_ids": ids},
    }

    def run(query, key, value, **kwargs):
        args, kwargs = kernel.prepare(query, key, value, **kwargs)
        return xla.forward(Attention.of(args, kwargs))[0]

    plain = jax.jit(run, static_argnames=("causal", "softmax_scale"))
    for name, kwargs in cases.items():
        variants = [lambda k=kwargs: plain(x, x, x, **k), lambda k=kwargs: flash_attention(x, x, x, **k)]
        base, ours = interleaved(variants, 41, 300)
        yield f"flash_attention(q, k, v{', ' if name else ''}{name})", base * 1e6, ours / base


def trace_rows():
    x = jnp.ones((8, 8))
    executor = Executor(ConfigSelectorChain(cache=ConfigCache()))

    def chain(f):
        def run(x):
            for _ in range(100):
                x = f(x, x)
            return x

        return run

    for style_name, style in STYLES.items():
        functions = [plain_function(style), partial(executor, style())]
        # A fresh function each time: the outer trace is what is measured, so it must not be found in a cache.
        traces = [lambda f=f: jax.jit(chain(f)).trace(x) for f in functions]
        base, ours = interleaved(traces, 15, 1)
        yield f"tracing 100 calls, {style_name}", base * 1e3, ours / base
        base, ours = interleaved([lambda t=t: t().lower() for t in traces], 15, 1)
        yield f"tracing and lowering 100 calls, {style_name}", base * 1e3, ours / base


def import_row():
    # Both from bytecode, as installed: where the environment forbids writing it, ours would be compiled each time.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def seconds(module):
        code = f"import time; t = time.process_time(); import {module}; print(time.process_time() - t)"
        command = [sys.executable, "-c", code]
        return float(subprocess.run(command, capture_output=True, check=True, text=True, env=env).stdout)

    seconds("ejkernel.ops")
    modules, times = ["jax", "ejkernel.ops"], {"jax": [], "ejkernel.ops": []}
    for i in range(21):
        for module in modules if i % 2 else reversed(modules):
            times[module].append(seconds(module))
    base, ours = times.values()
    # Of ratios, not of times: neighbours have the machine alike.
    ratio = statistics.median(b / a for a, b in zip(base, ours, strict=True))
    return "import ejkernel.ops / import jax", statistics.median(base) * 1e3, ratio


def report():
    device = jax.devices()[0]
    yield f"# Overhead against plain JAX, {date.today()}"
    yield ""
    yield f"`python benchmarks/overhead.py` · {device.device_kind} · {platform.processor() or platform.machine()} · "
    yield f"Python {platform.python_version()} · JAX {jax.__version__}. Ratios of interleaved medians in one run."
    yield "All in CPU time: of the thread, on which programs run too, and for imports of the process."
    yield ""
    yield "| eager call | plain jitted call, µs | executor(kernel, …) | with cfg= | kernel(…) |"
    yield "|---|---|---|---|---|"
    for name, base, *ratios in [*eager_rows(), *ignored_rows()]:
        yield f"| {name} | {base:.2f} | " + " | ".join(f"{r:.2f}" for r in ratios) + " |"
    yield ""
    yield "| public function | plain jitted call, µs | ratio |"
    yield "|---|---|---|"
    for name, base, ratio in attention_rows():
        yield f"| {name} | {base:.2f} | {ratio:.2f} |"
    yield ""
    yield "| what | plain JAX, ms | ratio |"
    yield "|---|---|---|"
    for name, base, ratio in [*trace_rows(), import_row()]:
        yield f"| {name} | {base:.1f} | {ratio:.2f} |"


def main():
    # Else larger programs run on other threads, whose time is not measured.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    lines = []
    for line in report():
        print(line, flush=True)
        lines.append(line)
    if out:
        out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
