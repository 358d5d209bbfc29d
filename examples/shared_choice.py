"""Two processes meet the same untuned call at the same time: one measures, the other waits, both use one config.

All that they share is a directory. On several machines it is one that they all mount.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ejkernel.ops import ConfigSelectorChain, Executor, Kernel, PersistentCache


@dataclass(frozen=True)
class Chunks:
    rows: int = 16


class RowSoftmax(Kernel[Chunks, jax.Array]):
    """Softmax over rows, `rows` of them at a time."""

    def run(self, x, *, cfg):
        return jax.lax.map(jax.nn.softmax, x, batch_size=cfg.rows)

    def heuristic_cfg(self, inv):
        return Chunks()

    def config_space(self, inv):
        return [Chunks(4), Chunks(16), Chunks(64), Chunks(256)]


def worker():
    """Calls the kernel once and prints how it came by its config."""
    measured = []
    selector = ConfigSelectorChain(
        persistent=PersistentCache(),  # under EJKERNEL_CACHE_DIR
        autotune=True,
        on_event=lambda name, **data: measured.append(data) if name == "tuned" else None,
    )
    softmax, executor, x = RowSoftmax("row_softmax"), Executor(selector), jnp.ones((2048, 128))
    start = time.perf_counter()
    jax.jit(lambda x: executor(softmax, x))(x).block_until_ready()
    seconds = time.perf_counter() - start
    rows = executor.choose_config(softmax, x).rows
    print(json.dumps({"process": os.getpid(), "rows": rows, "measured": bool(measured), "seconds": round(seconds, 2)}))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", action="store_true", help="be one of the processes")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    if options.worker:
        worker()
        return
    with tempfile.TemporaryDirectory() as shared:
        env = {**os.environ, "EJKERNEL_CACHE_DIR": shared}
        command = [sys.executable, __file__, "--worker"]
        started = [
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(options.processes)
        ]
        told = [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]
    for each in told:
        how = "measured" if each["measured"] else "waited and read"
        print(f"process {each['process']}: rows={each['rows']}, {how}, first call {each['seconds']} s")
    assert len({each["rows"] for each in told}) == 1, "they disagree"
    assert sum(each["measured"] for each in told) == 1, "the call was measured more than once"


if __name__ == "__main__":
    main()
