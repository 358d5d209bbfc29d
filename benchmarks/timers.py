"""What the timers say about known calls, and how much they scatter: `python -m benchmarks.timers [exclusive]`.

One line a timer and call: the median of 30 samples, their spread (1.4826 MAD) and what a sample costs in seconds. CUPTI
needs a process of its own, hence `exclusive`.
"""

import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.tuning import robust, timers

SIZES = {"cpu": (64, 512, 1024), "gpu": (256, 1024, 4096, 8192), "tpu": (256, 1024, 4096, 8192)}


def main(exclusive: bool, samples: int = 30) -> None:
    device = jax.local_devices()[0]
    chosen = timers.choose(device, exclusive=exclusive)
    print(f"JAX {jax.__version__} on {device.device_kind}; automatic choice: {chosen.name}\n")
    print("| call | timer | median | spread | one sample costs |")
    print("|---|---|---|---|---|")
    product = jax.jit(lambda x: x @ x)
    for size in SIZES[device.platform]:
        x = jnp.ones((size, size), jnp.float32 if device.platform == "cpu" else jnp.bfloat16)
        warm = partial(product, x)
        for name, call in (("", warm), (", cold", timers.cold(product, (x,)))):
            jax.block_until_ready(call())
            for timer in timers.available(device, exclusive=exclusive):
                report(f"product of {size}²{name}", timer, call, samples)


def report(name: str, timer: timers.Timer, call: timers.Call, samples: int) -> None:
    start = time.perf_counter()
    try:
        times = np.array([timer.measure([call])[0] for _ in range(samples)])
    except timers.TimerError as error:
        print(f"| {name} | {timer.name} | {error} | | |", flush=True)
        return
    cost = (time.perf_counter() - start) / samples
    centre = np.median(times)
    spread = 1.4826 * robust.mad(times) / centre
    print(f"| {name} | {timer.name} | {1e6 * centre:,.2f} µs | {spread:.2%} | {cost:.2g} s |", flush=True)


if __name__ == "__main__":
    main("exclusive" in sys.argv)
