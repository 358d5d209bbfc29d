"""The measurements behind the guess of attention (`kernels/flash_attention/rule.py`): each kind of call, and near it.

    python -m benchmarks.attention_kinds --rounds 30               # on a Hopper GPU
    python -m benchmarks.attention_kinds --only 0,3 --passes forward

Milliseconds of device time, medians over rounds in which all of a row take turns; no store and no pack is read. The
last columns are the best backend's time over that of the plain call, which should not be below 0.97, and cuDNN's over
`mosaic`'s, which is the figure of the rule.
"""

from __future__ import annotations

import argparse
import concurrent.futures

import jax

from benchmarks.operation import compiled, measure
from ejkernel.modules import FlashAttention
from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, device_fingerprint, device_kind
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.core.workload import Workload
from ejkernel.ops.tuning import timers

AT_ONCE = 10
"""Rows that are compiled together."""
KINDS = [
    # batch, length, heads, key heads, head dim, causal, window
    *((64, 256, 16, 16, 64, False, None), (64, 197, 16, 16, 64, False, None), (32, 512, 12, 12, 64, False, None)),
    *((32, 512, 16, 16, 128, False, None), (32, 256, 16, 16, 128, False, None), (16, 1024, 16, 16, 64, False, None)),
    *((64, 256, 16, 16, 64, True, None), (32, 512, 16, 16, 64, True, None), (32, 512, 16, 16, 128, True, None)),
    *((2, 8192, 8, 8, 256, False, None), (4, 2048, 8, 8, 256, False, None), (4, 2048, 8, 8, 256, True, None)),
    *((4, 4096, 16, 16, 128, False, None), (4, 4096, 16, 16, 96, True, None), (4, 4096, 16, 16, 80, True, None)),
    *((2, 4096, 32, 8, 128, True, None), (1, 8192, 64, 8, 128, True, None), (4, 2048, 28, 4, 128, True, None)),
    *((2, 8192, 32, 8, 128, True, 4096), (2, 8192, 32, 8, 128, True, 512), (1, 32768, 8, 8, 128, True, None)),
]


def workload(batch, length, heads, kv_heads, dim, causal, window) -> Workload:
    q, kv = (((batch, length, n, dim), "bfloat16") for n in (heads, kv_heads))
    kwargs = {"causal": True} if causal else {}
    kwargs |= {} if window is None else {"sliding_window": (window, 0)}
    shown = "causal" if causal else "full"
    name = f"{batch}x{length} {heads}/{kv_heads} d{dim} {shown if window is None else f'window {window}'}"
    return Workload(name=name, device="gpu", shapes=(q, kv, kv), kwargs=kwargs)


def contenders(kernel, row: Workload):
    """Name -> function: each backend that serves the row and may be the fastest, and a plain call."""
    plain = Executor(ConfigSelectorChain(cache=ConfigCache()))
    args, kwargs = row.abstract()
    prepared, statics = kernel.prepare(*args, **kwargs)
    serving = [b.platform for b in kernel.serving(Invocation(kernel=kernel, args=prepared, kwargs=statics))]
    # Where both serve a call, `triton` was never near them; `xla` never near it.
    fast = [name for name in serving if name in ("cudnn", "mosaic")]
    fast = fast if len(fast) == 2 else [name for name in serving if name != "xla"] or serving
    call = lambda platform: lambda *args: plain(kernel, *args, **kwargs, platform=platform)
    return {name: call(name) for name in fast} | {"untuned": lambda *args: plain(kernel, *args, **kwargs)}


def line(row: Workload, jobs, guess: str, timer, rounds: int) -> str:
    programs = {name: job.result() for name, job in jobs.items()}
    running = {name: call for name, call in programs.items() if not isinstance(call, str)}
    for call in running.values():
        jax.block_until_ready(call())
    seconds = measure(running, timer, rounds)
    best = min(time for name, time in seconds.items() if name != "untuned")
    ours = f"{seconds['cudnn'] / seconds['mosaic']:.3f}" if {"cudnn", "mosaic"} <= set(seconds) else "-"
    shown = [f"{1e3 * seconds[name]:.3f}" if name in seconds else "-" for name in ("cudnn", "mosaic", "triton", "xla")]
    cells = [row, guess, *shown, f"{1e3 * seconds['untuned']:.3f}", f"{best / seconds['untuned']:.3f}", ours]
    return f"| {' | '.join(map(str, cells))} |"


def table(rows: list[Workload], backward: bool, timer, rounds: int) -> None:
    kernel = FlashAttention()
    print(f"\n{'Forward and backward' if backward else 'Forward'}, ms:\n")
    header = ["row", "guess", "cudnn", "mosaic", "triton", "xla", "untuned", "best / untuned", "cudnn / mosaic"]
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for start in range(0, len(rows), AT_ONCE):
        part = rows[start : start + AT_ONCE]
        with concurrent.futures.ThreadPoolExecutor(14) as pool:
            jobs = [_submitted(pool, kernel, row, backward) for row in part]
        # Left when all is compiled: nothing else runs on the GPU while something is measured, or when cuDNN runs first.
        for row, found in zip(part, jobs, strict=True):
            guess = Executor(ConfigSelectorChain(cache=ConfigCache())).explain(kernel, *row.abstract()[0], **row.kwargs)
            print(line(row, found, guess.cfg.platform, timer, rounds), flush=True)


def _submitted(pool, kernel, row: Workload, backward: bool):
    args = row.inputs()[0]
    return {name: pool.submit(compiled, fn, args, backward) for name, fn in contenders(kernel, row).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", help="numbers of rows, such as 0,2")
    parser.add_argument("--passes", choices=("forward", "both", "all"), default="all")
    options = parser.parse_args()
    if device_kind() != "gpu":
        parser.error(f"it compares backends of GPUs, and this is a {device_kind()}")
    rows = [workload(*row) for row in KINDS]
    rows = [rows[int(i)] for i in options.only.split(",")] if options.only else rows
    timer = timers.choose(exclusive=True)
    device = jax.local_devices()[0].device_kind
    print(f"{device}, {device_fingerprint()}, JAX {jax.__version__}, {timer.name}, {options.rounds} rounds")
    for backward in {"forward": (False,), "both": (True,), "all": (False, True)}[options.passes]:
        table(rows, backward, timer, options.rounds)


if __name__ == "__main__":
    main()
