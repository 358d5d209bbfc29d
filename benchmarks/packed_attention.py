"""Sequences packed into one, beside the same sequences as a batch, in one run; and the same by a mask.

    python benchmarks/packed_attention.py --platform xla --count 16 --length 128 --heads 8 --kv-heads 2 --dim 64
    python benchmarks/packed_attention.py --platform triton --count 16 --length 1024 --heads 32 --kv-heads 8 --dim 128

Ways of a round run one after the other; the figures are medians over the rounds. On a CPU it is the CPU time of the
process, of all its threads; on others the time of several calls in a row, divided by their number.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from ejkernel.modules import flash_attention


def ways(options):
    """Name -> arrays and keywords, all of the same work: the batch, and what packs it."""
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    total = options.count * options.length
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (options.heads, options.kv_heads, options.kv_heads, options.heads)
    arrays = [jax.random.normal(k, (1, total, n, options.dim), dtype) for k, n in zip(keys, heads, strict=True)]
    batch = [x.reshape(options.count, options.length, *x.shape[2:]) for x in arrays]
    ids = jnp.repeat(jnp.arange(options.count), options.length)
    found = {
        "batch": (batch, {}),
        "segment ids": (arrays, {"q_segment_ids": ids[None]}),
        "cum_seqlens": (arrays, {"cum_seqlens_q": jnp.arange(options.count + 1) * options.length}),
    }
    if options.mask:
        mask = (ids[:, None] == ids[None, :]) & jnp.tri(total, dtype=bool)
        found["mask"] = arrays, {"attention_mask": mask[None, None]}
    return found


def calls(options, arrays, kwargs):
    """The forward, and forward and backward together, compiled."""
    q, k, v, dout = arrays
    causal = {} if "attention_mask" in kwargs else {"causal": True}

    def forward(q, k, v, kwargs):
        return flash_attention(q, k, v, platform=options.platform, **causal, **kwargs)

    def both(q, k, v, kwargs, dout):
        out, back = jax.vjp(lambda *x: forward(*x, kwargs), q, k, v)
        return out, back(dout)

    compiled = [jax.jit(forward).lower(q, k, v, kwargs), jax.jit(both).lower(q, k, v, kwargs, dout)]
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda x: x.compile(), compiled)
    return {"forward": lambda: one(q, k, v, kwargs), "with gradients": lambda: two(q, k, v, kwargs, dout)}


def measured(call, repeat):
    """Milliseconds of a call."""
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    begun = clock()
    found = [call() for _ in range(repeat)]
    jax.block_until_ready(found)
    return 1e3 * (clock() - begun) / repeat


def agree(options, ready):
    """Packed results are those of the batch."""
    shape = (1, options.count * options.length, options.heads, options.dim)
    want = np.asarray(ready["batch"]["forward"](), np.float32).reshape(shape)
    for name, call in ready.items():
        got = np.asarray(call["forward"](), np.float32).reshape(shape)
        assert np.abs(got - want).max() < 2e-2, name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"count": 16, "length": 128, "heads": 8, "kv-heads": 2, "dim": 64, "rounds": 15, "repeat": 1}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--platform", default=None)
    parser.add_argument("--mask", action="store_true", help="also by a mask of all pairs")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")
    given = ways(options)
    with ThreadPoolExecutor() as pool:
        ready = dict(zip(given, pool.map(lambda x: calls(options, *x), given.values()), strict=True))
    agree(options, ready)
    times = {}
    for _ in range(options.rounds + 1):  # The first one warms up.
        for name, both in ready.items():
            for what, call in both.items():
                times.setdefault((name, what), []).append(measured(call, options.repeat))
    device = jax.devices()[0].device_kind
    print(f"{device}, JAX {jax.__version__}, {options.count} x {options.length}, causal, heads {options.heads}", end="")
    print(f"/{options.kv_heads}, dim {options.dim}, {options.platform or 'untuned'}, {options.rounds} rounds\n")
    print("| way | forward, ms | to the batch | with gradients, ms | to the batch |\n|---|---|---|---|---|")
    found = {key: statistics.median(values[1:]) for key, values in times.items()}
    for name in ready:
        cells = [f"{found[name, w]:.2f} | {found[name, w] / found['batch', w]:.2f}" for w in ready[name]]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
