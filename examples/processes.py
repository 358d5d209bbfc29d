"""One program in two processes: whatever each would measure, they run the same config.

Run: python examples/processes.py
"""

import socket
import subprocess
import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ejkernel.ops import ConfigSelectorChain, Executor, Kernel

COUNT = 2


@dataclass(frozen=True)
class Chunks:
    size: int = 64


class Total(Kernel[Chunks, jax.Array]):
    def run(self, x, *, cfg):
        return jax.lax.map(jnp.sum, x.reshape(-1, cfg.size)).sum()

    def heuristic_cfg(self, inv):
        return Chunks()

    def config_space(self, inv):
        return [Chunks(16), Chunks(64), Chunks(1024)]


def program(index, port):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", COUNT, index)
    executor = Executor(ConfigSelectorChain(autotune=True))
    x = jnp.linspace(0, 1, 4096)
    cfg = executor.choose_config(Total(), x)
    print(f"process {index} of {jax.process_count()}: {cfg}, total {executor(Total(), x):.1f}")


def main():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    command = [sys.executable, __file__]
    started = [subprocess.Popen([*command, str(i), str(port)], stdout=subprocess.PIPE, text=True) for i in range(COUNT)]
    told = [process.communicate(timeout=120)[0].strip() for process in started]
    print("\n".join(told))
    assert all(process.returncode == 0 for process in started)
    assert len({text.partition(": ")[2] for text in told}) == 1


if __name__ == "__main__":
    program(*map(int, sys.argv[1:])) if len(sys.argv) > 1 else main()
