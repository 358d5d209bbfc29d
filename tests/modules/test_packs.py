"""The packs that are shipped: readable, of use to today's calls, and found by default."""

import importlib.metadata
from pathlib import Path

import pytest

import ejkernel
from ejkernel.cli import operations
from ejkernel.ops import PersistentCache
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.execution.pipeline import backward_invocation
from ejkernel.ops.store import packs
from tests.outside_operation import Take

OPERATIONS = {op_id: operations.make(op_id) for op_id in operations.own()}
PACKS = sorted((Path(ejkernel.__file__).parent / "packs").glob("*.json"))


def installed():
    return any(dist.metadata["Name"] == "ejkernel" for dist in importlib.metadata.distributions())


def test_there_are_packs_for_a_cpu_and_an_h200():
    assert {"cpu-x86_64", "gpu-nvidia_h200"} <= {"-".join(path.name.split("-")[:2]) for path in PACKS}


def kernel_of(entry):
    return OPERATIONS[entry.place.op_id.removesuffix(".vjp")]


@pytest.mark.parametrize("path", PACKS, ids=lambda path: path.name)
def test_a_pack_is_whole_and_its_configs_are_measured(path):
    pack = packs.read(path)
    assert pack.entries
    assert not pack.problems
    for entry in pack.entries:
        kernel = kernel_of(entry)
        assert entry.complete
        assert entry.place.device == path.stem
        cfg = entry.typed(kernel.cfg_type).cfg
        assert isinstance(cfg, kernel.cfg_type)
        # Of the backend that it names, which knows the class of its own params.
        backend, backward = kernel.backend(cfg.platform), entry.place.op_id.endswith(".vjp")
        params, other = (cfg.bwd_params, cfg.fwd_params) if backward else (cfg.fwd_params, cfg.bwd_params)
        assert backend.checked(kernel.op_id, params, backward=backward) is params
        assert other is None
        assert entry.statistics["measurement"]["median_ms"] > 0


def keys_of(kernel, workload):
    """The keys of a workload's forward and backward, as a call of today has them."""
    args, kwargs = workload.abstract()
    args, kwargs = kernel.prepare(*args, **kwargs)
    forward = Invocation(kernel=kernel, args=args, kwargs=kwargs)
    backward = BackwardKernel.of(kernel)
    calls = [forward] if backward is None else [forward, backward_invocation(backward, forward)]
    return {(inv.op_id, inv.call_key) for inv in calls}


def asked(kernel, kind):
    return set().union(*(keys_of(kernel, w) for w in kernel.workloads(kind)))


@pytest.mark.parametrize("path", PACKS, ids=lambda path: path.name)
def test_every_entry_of_a_pack_is_what_a_workload_asks_for_today(path):
    kind = path.name.partition("-")[0]
    stored = {(entry.place.op_id, entry.place.call_key) for entry in packs.read(path).entries}
    assert stored <= set().union(*(asked(kernel, kind) for kernel in OPERATIONS.values()))
    for op_id in {op_id.removesuffix(".vjp") for op_id, _ in stored}:
        assert asked(OPERATIONS[op_id], kind) <= stored, f"ejkernel tune {op_id} --suite --out {path}"


@pytest.mark.parametrize("kernel", [*OPERATIONS.values(), Take()], ids=lambda kernel: kernel.op_id)
def test_workloads_of_an_operation_have_names_and_keys_of_their_own(kernel):
    for kind in ("cpu", "gpu", "tpu"):
        workloads = kernel.workloads(kind)
        assert (
            len({w.name for w in workloads})
            == len({frozenset(keys_of(kernel, w)) for w in workloads})
            == len(workloads)
        )


@pytest.mark.skipif(
    not installed(), reason="ejkernel runs from its directory here; packs are found by their entry point"
)
def test_packs_are_found_by_default():
    cache = PersistentCache()
    for path in PACKS:
        for entry in packs.read(path).entries:
            found = cache.lookup(*entry.place, cfg_type=kernel_of(entry).cfg_type)
            assert found is not None
            assert found.layer == path.stem
