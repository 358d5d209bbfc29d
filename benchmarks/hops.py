"""Hops: the files of ejkernel that a call and a tuning pass, counted by what Python runs.

    python -m benchmarks.hops                                   # this tree
    PYTHONPATH=../older python -P benchmarks/hops.py            # another one

A file counts if a function of it runs; what runs while a module is imported does not. Functions are counted once each,
and so are the folders that the files stand in.
"""

import contextlib
import sys
import tempfile
import threading
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp

import ejkernel
from ejkernel.modules import flash_attention
from ejkernel.ops import Autotuner, ConfigCache, ConfigSelectorChain, Executor, Kernel, PersistentCache

ROOT = str(Path(ejkernel.__file__).parent)


@dataclass(frozen=True)
class Block:
    rows: int = 1


class Double(Kernel[Block, object]):
    """The smallest kernel with something to tune."""

    def run(self, x, *, cfg):
        return jnp.concatenate([2 * part for part in jnp.split(x, cfg.rows)])

    def heuristic_cfg(self, inv):
        return Block(1)

    def config_space(self, inv):
        return [Block(1), Block(2)]


class Watch:
    """Which functions of the package run, in all threads."""

    def __init__(self):
        self.functions = defaultdict(set)

    def __call__(self, frame, event, arg):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(ROOT) and frame.f_code.co_name != "<module>":
            self.functions[name[len(ROOT) + 1 :]].add(frame.f_code.co_qualname)

    @contextlib.contextmanager
    def watching(self):
        sys.setprofile(self)
        threading.setprofile(self)
        try:
            yield self
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def measure():
    """Name -> what was watched."""
    x, kernel = jnp.ones(64), Double()
    q = jnp.ones((1, 32, 1, 8))
    folder = Path(tempfile.mkdtemp())
    plain = Executor(ConfigSelectorChain(cache=ConfigCache(), persistent=PersistentCache(folder / "calls")))
    tuning = ConfigSelectorChain(
        cache=ConfigCache(),
        persistent=PersistentCache(folder / "tuning"),
        autotune=True,
        tuner=Autotuner(isolation="thread", progress=False),
    )
    steps = {
        "cold call of a kernel": lambda: plain(kernel, x),
        "warm call of a kernel": lambda: plain(kernel, x),
        "cold call of flash_attention": lambda: flash_attention(q, q, q, causal=True),
        "warm call of flash_attention": lambda: flash_attention(q, q, q, causal=True),
        "cold call that tunes": lambda: Executor(tuning)(kernel, x),
    }
    found = {}
    for name, step in steps.items():
        if name.startswith("warm"):
            step()  # The second call may still take note of something.
        with Watch().watching() as found[name]:
            step()
    return found


def main():
    print(f"ejkernel in {ROOT}")
    for name, watch in measure().items():
        functions, folders = sum(map(len, watch.functions.values())), {str(Path(f).parent) for f in watch.functions}
        print(f"{name}: {len(watch.functions)} files in {len(folders)} folders, {functions} functions")
        if "--files" in sys.argv:
            print("   ", ", ".join(sorted(watch.functions)))


if __name__ == "__main__":
    main()
