"""Targets: devices that programs can be compiled for on a machine that has none of them.

TPUs need libtpu (`pip install "jax[tpu]"`), NVIDIA GPUs JAX's CUDA plugin of the same version as JAX. Neither needs its
device.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractDevice, AbstractMesh

from ejkernel.errors import EjkernelError
from ejkernel.ops.utils import devices

TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Without it libtpu asks the cloud which TPU this is, or waits for another process that has loaded it."""


class TargetError(EjkernelError, ValueError):
    """There is no such target, or nothing here that compiles for it."""


class Target(NamedTuple):
    """A device that is only described.

    Attributes:
      name: What it is called on the command line.
      kind: The `device_kind` that a real one reports.
      topology: What the plugin calls the smallest machine with such devices.
    """

    name: str
    kind: str
    topology: str

    @property
    def platform(self) -> str:
        """As JAX calls it."""
        return "tpu" if self.kind.startswith("TPU") else "cuda"

    @property
    def abstract(self) -> AbstractDevice:
        """What Pallas asks about the device while it lowers."""
        # The smallest v4 is described as two devices of one core, a v5p as one device of two.
        cores = 2 if self.name == "v5p" else devices.find(self.kind).sms or 1
        return AbstractDevice(device_kind=self.kind, num_cores=cores, platform=self.platform)


TARGETS = {
    target.name: target
    for target in (
        Target("v4", "TPU v4", "v4:2x2x1"),
        Target("v5e", "TPU v5 lite", "v5e:2x2"),
        Target("v5p", "TPU v5", "v5p:2x2x1"),
        Target("v6e", "TPU v6 lite", "v6e:2x2"),
        Target("v7x", "TPU7x", "tpu7x:2x2x1"),
        Target("sm_80", "NVIDIA A100-SXM4-80GB", "1x1x1"),
        Target("sm_90a", "NVIDIA H200", "1x1x1"),
        Target("sm_100a", "NVIDIA B200", "1x1x1"),
    )
}
_OTHER_NAMES = {"tpu7x": "v7x", "sm_90": "sm_90a", "sm_100": "sm_100a"}


def find(name: str) -> Target:
    """The target of this name.

    Raises:
      TargetError: There is none.
    """
    short = name.lower().removeprefix("tpu-")
    found = TARGETS.get(_OTHER_NAMES.get(short, short))
    if found is None:
        known = ", ".join(f"{target.name} ({target.kind})" for target in TARGETS.values())
        raise TargetError(f"there is no target {name!r}; known are {known}.")
    return found


def describe(target: Target) -> list[Any]:
    """The devices of a small machine; programs can be compiled for them.

    Raises:
      TargetError: Their compiler is not installed.
    """
    from jax.experimental import topologies

    options: dict[str, Any] = {"topology_name": target.topology}
    if target.platform == "tpu":
        for name, value in TPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    else:
        options = {"topology": target.topology, "target_config": gpu_config(target)}
    try:
        return list(topologies.get_topology_desc(platform=target.platform, **options).devices)
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        wanted = 'pip install "jax[tpu]"' if target.platform == "tpu" else f"JAX's CUDA plugin, {jax.__version__}"
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise TargetError(f"{target.name}: nothing here compiles for it ({reason}). Needed is {wanted}.") from error


@contextlib.contextmanager
def compiling_for(target: Target, device: Any = None) -> Iterator[None]:
    """Inside, programs are traced for the target: its backends, its configs.

    With a `device` of `describe`, they are compiled for it, too.
    """
    mesh = AbstractMesh((), (), abstract_device=target.abstract)
    with contextlib.ExitStack() as stack:
        if device is not None:
            stack.enter_context(jax.default_device(device))
        stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        yield


_GPU_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {block} shared_memory_per_core: {core}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  core_count: {sms} fpus_per_core: {lanes} clock_rate_ghz: 1.5
  memory_bandwidth: {bandwidth} device_memory_size: {memory} l2_cache_size: {cache}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
  runtime_version: "13.0.0" driver_version: "13.0.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{kind}"
"""


def gpu_config(target: Target) -> str:
    """What XLA wants to know of a GPU, in the text form of its protocol buffer."""
    facts = devices.find(target.kind)
    major, minor = facts.capability.split(".")
    return _GPU_CONFIG.format(
        block=facts.block_bytes,
        core=facts.block_bytes + 1024,
        sms=facts.sms,
        lanes=64 if facts.capability == "8.0" else 128,
        bandwidth=int(facts.bytes_per_s),
        memory=facts.memory_bytes,
        cache=facts.cache_bytes,
        major=major,
        minor=minor,
        features="ACCELERATED_FEATURES" if target.name.endswith("a") else "NONE",
        kind=target.kind,
    )
