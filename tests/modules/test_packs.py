"""The packs that are shipped: readable, of use to today's calls, and found by default."""

import importlib.metadata
from pathlib import Path

import pytest

import ejkernel
from ejkernel.modules import FlashAttention, FlashAttentionConfig, RmsNorm
from ejkernel.ops import PersistentCache
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.execution.pipeline import backward_invocation
from ejkernel.ops.store import packs

OPERATIONS = [FlashAttention(), RmsNorm()]
PACKS = sorted((Path(ejkernel.__file__).parent / "packs").glob("*.json"))


def installed():
    return any(dist.metadata["Name"] == "ejkernel" for dist in importlib.metadata.distributions())


def test_there_are_packs_for_a_cpu_and_an_h200():
    assert {"cpu-x86_64", "gpu-nvidia_h200"} <= {"-".join(path.name.split("-")[:2]) for path in PACKS}


@pytest.mark.parametrize("path", PACKS, ids=lambda path: path.name)
def test_a_pack_is_whole_and_its_configs_are_measured(path):
    pack = packs.read(path)
    assert pack.entries
    assert not pack.problems
    for entry in pack.entries:
        assert entry.complete
        assert entry.place.device == path.stem
        cfg = entry.typed(FlashAttentionConfig).cfg
        assert isinstance(cfg, FlashAttentionConfig)
        own, other = cfg.fwd_params, cfg.bwd_params
        assert (other if entry.place.op_id.endswith(".vjp") else own) is not None
        assert entry.statistics["measurement"]["median_ms"] > 0


def keys_of(kernel, workload):
    """The keys of a workload's forward and backward, as a call of today has them."""
    args, kwargs = workload.abstract()
    args, kwargs = kernel.prepare(*args, **kwargs)
    forward = Invocation(kernel=kernel, args=args, kwargs=kwargs)
    backward = backward_invocation(BackwardKernel(kernel), forward)
    return {(forward.op_id, forward.call_key), (backward.op_id, backward.call_key)}


@pytest.mark.parametrize("path", PACKS, ids=lambda path: path.name)
def test_every_entry_of_a_pack_is_what_a_workload_asks_for_today(path):
    kind = path.name.partition("-")[0]
    asked = set().union(*(keys_of(kernel, w) for kernel in OPERATIONS for w in kernel.workloads(kind)))
    stored = {(entry.place.op_id, entry.place.call_key) for entry in packs.read(path).entries}
    assert stored <= asked
    attention = set().union(*(keys_of(OPERATIONS[0], w) for w in OPERATIONS[0].workloads(kind)))
    assert attention <= stored, "tune the workloads again"


@pytest.mark.skipif(
    not installed(), reason="ejkernel runs from its directory here; packs are found by their entry point"
)
def test_packs_are_found_by_default():
    cache = PersistentCache()
    for path in PACKS:
        for entry in packs.read(path).entries:
            found = cache.lookup(*entry.place, cfg_type=FlashAttentionConfig)
            assert found is not None
            assert found.layer == path.stem
