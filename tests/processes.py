"""Real processes that form one program over `jax.distributed`, for tests of what they agree on."""

import json
import os
import socket
import subprocess
import sys
import textwrap

PRELUDE = """
import json, os, sys, time
import jax
index, count, port = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", count, index)
import jax.numpy as jnp
from ejkernel.ops import *
from ejkernel.ops import Autotuner, EjkernelError, PersistentCache, autotune
from tests.support import Plain, Scale
def tell(**data):
    print("TOLD " + json.dumps(data), flush=True)
class Prefers:
    '''A tuner whose timings differ from process to process.'''
    def __init__(self, factor): self.factor = factor
    def autotune(self, make_fn, args, kwargs, candidates): return Scale(self.factor)
def choices(executor, kernel, sizes):
    return [executor.choose_config(kernel, jnp.ones((n, 4)), jnp.ones((n, 4))).factor for n in sizes]
"""


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def start(script, count, tmp_path, *arguments, devices=1):
    """Processes that run `script` after the prelude."""
    path = tmp_path / "program.py"
    path.write_text(PRELUDE + textwrap.dedent(script))
    port = free_port()
    flags = f"--xla_force_host_platform_device_count={devices}"
    env = {**os.environ, "PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, path]
    return [
        subprocess.Popen(
            [*command, str(i), str(count), str(port), *map(str, arguments)],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for i in range(count)
    ]  # fmt: skip


def told(processes, timeout=90, may_fail=()):
    """What each process told last, as a list; every one must end well, except those that may fail."""
    found = []
    try:
        for index, process in enumerate(processes):
            out, err = process.communicate(timeout=timeout)
            assert process.returncode == 0 or index in may_fail, err[-4000:]
            lines = [line for line in out.splitlines() if line.startswith("TOLD ")]
            found.append(json.loads(lines[-1].removeprefix("TOLD ")) if lines else None)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return found
