"""Norms and the linear cross entropy on a GPU, beside plain JAX and torch.compile, in one run.

    python -m benchmarks.norms_gpu rms_norm layer_norm linear_cross_entropy --torch
    python -m benchmarks.norms_gpu rms_norm --sweep                      # every config of the space

Times are the sum of a call's kernels by CUPTI, medians of interleaved rounds; torch's kernels are seen by it too. The
backward of a norm is measured alone, from what its forward kept. Bytes and operations are those that a call cannot do
without.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import os
import random
import statistics

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.7")

import jax
import jax.numpy as jnp

from ejkernel import modules
from ejkernel.kernels.linear_cross_entropy.workloads import WORKLOADS as LOSSES

KERNELS = {"rms_norm": modules.RmsNorm, "layer_norm": getattr(modules, "LayerNorm", None)}
SHAPES = ((16384, 4096), (8192, 8192), (65536, 1024))


def device_ms(call):
    """The sum of a call's kernels."""
    return sum(ms for _, ms in kernels_of(call))


def kernels_of(call):
    """Names and times of a call's kernels."""
    from jax._src.lib import mosaic_gpu

    extension = mosaic_gpu._mosaic_gpu_ext
    extension._cupti_init()
    try:
        call()
    finally:
        kernels = extension._cupti_get_timings(False)
    return kernels


def print_kernels(title, call, most=14):
    """What a call spends its time in."""
    total = collections.defaultdict(list)
    for name, ms in kernels_of(call):
        total[name].append(ms)
    for name, times in sorted(total.items(), key=lambda item: -sum(item[1]))[:most]:
        print(f"  {title}: {sum(times):.3f} ms, {len(times)} x {name[:90]}", flush=True)


def measure(calls, rounds):
    names, samples, rng = list(calls), {name: [] for name in calls}, random.Random(0)
    for name in names:
        calls[name]()
    for _ in range(rounds):
        rng.shuffle(names)
        for name in names:
            samples[name].append(device_ms(calls[name]))
    return {name: statistics.median(ms) for name, ms in samples.items()}


def compiled(jobs):
    """Name -> (call, temporary bytes), compiled in threads; what fails is left out, and said."""
    made = {}
    with concurrent.futures.ThreadPoolExecutor(14) as pool:
        lowered = {name: (fn.lower(*args), args) for name, (fn, args) in jobs.items()}
        futures = {name: (pool.submit(low.compile), args) for name, (low, args) in lowered.items()}
        for name, (future, args) in futures.items():
            try:
                program = future.result()
            except jax.errors.JaxRuntimeError as error:
                print(f"  {name}: {str(error)[:120]}")
                continue
            call = lambda program=program, args=args: jax.block_until_ready(program(*args))
            made[name] = call, program.memory_analysis().temp_size_in_bytes
    return made


def report(title, times, work, unit, memory=None):
    best = times.get("plain JAX")
    for name, ms in sorted(times.items(), key=lambda item: item[1]):
        space = f" | {memory[name] / 1e6:.0f} MB" if memory and name in memory else " |"
        ratio = f"{best / ms:.3f}" if best else "-"
        print(
            f"| {title} | {name} | {ms:.4f} | {work / ms / 1e9 * unit[0]:.2f} {unit[1]} | {ratio}{space} |", flush=True
        )


# --- Norms ---


def plain_norm(op_id, args):
    x, scale, *rest = args
    residual = rest[-1]
    total = x if residual is None else x + residual
    wide = total.astype(jnp.float32)
    if op_id == "layer_norm":
        wide -= jnp.mean(wide, axis=-1, keepdims=True)
    rstd = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    out = wide * rstd * scale.astype(jnp.float32)
    out = (out + rest[0].astype(jnp.float32) if op_id == "layer_norm" else out).astype(x.dtype)
    return out if residual is None else (out, total)


def norm_jobs(op_id, args, sweep):
    kernel = KERNELS[op_id]()
    moving = [i for i, a in enumerate(args) if a is not None]
    fill = lambda moved: [dict(zip(moving, moved, strict=True)).get(i) for i in range(len(args))]
    given = [args[i] for i in moving]
    like = lambda out: jax.tree.map(lambda a: jax.random.normal(jax.random.key(9), a.shape, a.dtype), out)
    prepared, statics = kernel.prepare(*args)
    forwards = {"plain JAX": (jax.jit(lambda *m: plain_norm(op_id, fill(m))), given)}
    plain_pull = lambda dout, *m: jax.vjp(lambda *m: plain_norm(op_id, fill(m)), *m)[1](dout)
    fake = type("Call", (), {"args": prepared, "kwargs": statics})

    def by(platform):
        """The functions of a backend for given params, and its spaces; no params where it refuses a pass."""
        functions, extra = kernel.backend(platform).functions, {"interpret": False, **statics}
        run = lambda params: lambda *m: functions.forward(*fill(m), params=params, **extra)
        pull = lambda params: (
            lambda saved, out, dout, *m: [
                g for g in functions.backward(saved, out, dout, *fill(m), params=params, **extra) if g is not None
            ]
        )
        spaces = {False: functions.forward_space, True: functions.backward_space}
        refused = lambda backward: functions.unsupported(fake, backward=backward)
        return run, pull, {backward: [] if refused(backward) else of(fake) for backward, of in spaces.items()}

    run, _, spaces = by("triton")
    out, saved = jax.block_until_ready(jax.jit(run(spaces[False][0]))(*given))
    dout = like(out)
    backwards = {"plain JAX": (jax.jit(plain_pull), (dout, *given))}
    for platform in ("triton", "mosaic"):
        run, pull, spaces = by(platform)
        for backward, space in spaces.items():
            for i, params in enumerate(dict.fromkeys(space if sweep else space[:1])):
                one, cut = run(params), " x ".join(str(n) for n in dataclasses.astuple(params))
                name = f"{platform} {cut}{' (guess)' if not i else ''}"
                if backward:
                    backwards[name] = (
                        jax.jit(pull(params)),
                        (saved, None if prepared[-1] is None else out, dout, *given),
                    )
                else:
                    forwards[name] = (jax.jit(lambda *m, one=one: one(*m)[0]), given)
    return forwards, backwards, dout


def norm(op_id, options):
    for rows, columns in SHAPES:
        for with_residual in (False, True) if options.residual else (False,):
            keys = jax.random.split(jax.random.key(0), 4)
            x, residual = (jax.random.normal(k, (rows, columns), jnp.bfloat16) for k in keys[:2])
            scale, offset = (jax.random.normal(k, (columns,), jnp.bfloat16) for k in keys[2:])
            args = [x, scale, *([offset] if op_id == "layer_norm" else []), residual if with_residual else None]
            forwards, backwards, dout = norm_jobs(op_id, args, options.sweep)
            size = 2 * rows * columns
            for name, jobs, arrays in (
                ("forward", forwards, 2 + 2 * with_residual),
                ("backward", backwards, 3 + with_residual),
            ):
                made = compiled(jobs)
                calls = {n: call for n, (call, _) in made.items()}
                if options.torch:
                    calls["torch.compile"] = torch_norm(op_id, args, dout, name)
                title = f"{op_id} {rows} x {columns}{', residual' if with_residual else ''}, {name}"
                report(title, measure(calls, options.rounds), arrays * size, (1, "TB/s"))


def torch_norm(op_id, args, dout, which):
    import torch

    there = lambda a: None if a is None else torch.from_dlpack(a).detach().clone().requires_grad_(True)
    given = [there(a) for a in args]
    douts = [torch.from_dlpack(d) for d in jax.tree.leaves(dout)]
    moving = [a for a in given if a is not None]

    def norm(x, scale, *rest):
        total = x if rest[-1] is None else x + rest[-1]
        if op_id == "layer_norm":
            out = torch.nn.functional.layer_norm(total, total.shape[-1:], scale, rest[0], 1e-6)
        else:
            out = torch.nn.functional.rms_norm(total, total.shape[-1:], scale, 1e-6)
        return (out,) if rest[-1] is None else (out, total)

    fast = torch.compile(norm, dynamic=False)
    if which == "forward":
        plain = [None if a is None else a.detach() for a in given]
        return lambda: (fast(*plain), torch.cuda.synchronize())
    outs = fast(*given)
    return lambda: (torch.autograd.grad(outs, moving, douts, retain_graph=True), torch.cuda.synchronize())


# --- The loss ---


def plain_loss(x, weights, labels):
    logits = (x @ weights).astype(jnp.float32)
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0])


def loss_by(platform):
    return lambda x, weights, labels: modules.linear_cross_entropy(x, weights, labels, platform=platform)


def loss(options):
    for workload in [w for w in LOSSES if w.device == "gpu"]:
        x, weights, labels = workload.inputs()[0]
        ours = {"plain JAX": plain_loss} | {name: loss_by(name) for name in ("triton", "xla")}
        for name, work in (("forward", workload.flops), ("with gradients", workload.flops + workload.backward_flops)):
            make = (lambda f: jax.jit(f)) if name == "forward" else (lambda f: jax.jit(jax.value_and_grad(f, (0, 1))))
            made = compiled({n: (make(f), (x, weights, labels)) for n, f in ours.items()})
            calls = {n: call for n, (call, _) in made.items()}
            if options.torch:
                calls["torch.compile"] = torch_loss(x, weights, labels, name)
            times = measure(calls, options.rounds)
            for n, call in calls.items() if options.kernels else ():
                print_kernels(n, call)
            report(f"{workload}, {name}", times, work, (1, "TFLOP/s"), {n: memory for n, (_, memory) in made.items()})


def torch_loss(x, weights, labels, which):
    import torch

    x, weights = (torch.from_dlpack(a).detach().requires_grad_(which != "forward") for a in (x, weights))
    labels = torch.from_dlpack(labels).long()
    fast = torch.compile(lambda x, w: torch.nn.functional.cross_entropy((x @ w).float(), labels), dynamic=False)

    def call():
        out = fast(x, weights)
        grads = torch.autograd.grad(out, (x, weights)) if which != "forward" else None
        torch.cuda.synchronize()
        return out, grads

    return call


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operations", nargs="+", choices=["rms_norm", "layer_norm", "linear_cross_entropy"])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--sweep", action="store_true", help="every config, not only the guess")
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--kernels", action="store_true", help="what the losses spend their time in")
    parser.add_argument("--residual", action="store_true", help="norms with a residual, too")
    options = parser.parse_args()
    print(f"{jax.local_devices()[0].device_kind}, JAX {jax.__version__}, CUPTI, {options.rounds} rounds\n")
    print("| call | by | ms | rate | x plain JAX | temporaries |\n|---|---|---|---|---|---|")
    for op_id in options.operations:
        loss(options) if op_id == "linear_cross_entropy" else norm(op_id, options)


if __name__ == "__main__":
    main()
