"""The packs that are shipped: readable, of use to today's calls, and found by default."""

import dataclasses
import functools
import importlib.metadata
import operator
from pathlib import Path

import pytest

import ejkernel
from ejkernel.cli import operations, suites
from ejkernel.ops import PersistentCache
from ejkernel.ops.config.asking import source_of
from ejkernel.ops.store import packs
from tests.outside_operation import Take

OPERATIONS = {op_id: operations.make(op_id) for op_id in operations.own()}
PACKS = sorted((Path(ejkernel.__file__).parent / "packs").glob("*.json"))


def installed():
    return any(dist.metadata["Name"] == "ejkernel" for dist in importlib.metadata.distributions())


def test_there_are_packs_for_a_cpu_an_h200_and_two_tpus():
    assert {"cpu-x86_64", "gpu-nvidia_h200", "tpu-v5e.json", "tpu-v6e.json"} <= {
        "-".join(path.name.split("-")[:2]) for path in PACKS
    }


@functools.cache
def calls_of(op_id, kind):
    """What the workloads of an operation ask for today, forward and gradients, and who asks."""
    kernel = OPERATIONS[op_id]
    found = (inv for w in kernel.workloads(kind) for inv in suites.calls_of(kernel, w))
    return {(inv.op_id, inv.call_key): source_of(inv.kernel) for inv in found}


def asked(kind):
    return functools.reduce(operator.or_, (calls_of(op_id, kind) for op_id in OPERATIONS))


@pytest.mark.thin(2)
@pytest.mark.parametrize("path", PACKS, ids=lambda path: path.name)
def test_a_pack_is_whole_and_its_configs_are_measured_or_ranked(path):
    pack = packs.read(path)
    assert pack.entries
    assert not pack.problems
    kernels = asked(path.name.partition("-")[0])
    for entry in pack.entries:
        kernel = kernels[entry.place.op_id, entry.place.call_key]
        assert entry.complete
        assert entry.place.device == path.stem
        cfg = entry.typed(kernel.cfg_type).cfg
        assert isinstance(cfg, kernel.cfg_type)
        # Of the backend that it names, which knows the class of its own params.
        params = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg) if f.name != "platform"}
        backward = entry.place.op_id.endswith(".vjp")
        own = params.pop("bwd_params" if backward else "fwd_params")
        assert kernel.backend(cfg.platform).checked(kernel.op_id, own, backward=backward) is own
        assert set(params.values()) <= {None}
        if path.name.startswith("tpu-"):
            # By the compiler's schedule, until somebody with a TPU has measured it.
            assert entry.clock == "schedule"
            assert entry.provenance["compiler"].startswith("libtpu ")
            winner = next(c for c in entry.statistics["candidates"] if c["status"] == "winner")
            assert winner["bundles"] > 0
        else:
            assert entry.clock is None
            assert entry.statistics["measurement"]["median_ms"] > 0


@pytest.mark.parametrize("path", PACKS, ids=lambda path: path.name)
def test_every_entry_of_a_pack_is_what_a_workload_asks_for_today(path):
    kind = path.name.partition("-")[0]
    stored = {(entry.place.op_id, entry.place.call_key) for entry in packs.read(path).entries}
    assert stored <= set(asked(kind))
    for op_id in OPERATIONS:
        held = stored & set(calls_of(op_id, kind))
        assert held in (set(), set(calls_of(op_id, kind))), f"ejkernel tune {op_id} --suite --out {path}"


def test_the_pack_of_a_cpu_holds_every_operation():
    (path,) = [path for path in PACKS if path.name.startswith("cpu-")]
    assert {(entry.place.op_id, entry.place.call_key) for entry in packs.read(path).entries} == set(asked("cpu"))


@pytest.mark.parametrize("kernel", [*OPERATIONS.values(), Take()], ids=lambda kernel: kernel.op_id)
def test_workloads_of_an_operation_have_names_and_keys_of_their_own(kernel):
    for kind in ("cpu", "gpu", "tpu"):
        workloads = kernel.workloads(kind)
        keys = {frozenset((inv.op_id, inv.call_key) for inv in suites.calls_of(kernel, w)) for w in workloads}
        assert len({w.name for w in workloads}) == len(keys) == len(workloads)


@pytest.mark.skipif(
    not installed(), reason="ejkernel runs from its directory here; packs are found by their entry point"
)
@pytest.mark.shipped_packs
def test_packs_are_found_by_default():
    cache = PersistentCache()
    for path in PACKS:
        for entry in packs.read(path).entries:
            kernel = asked(path.name.partition("-")[0])[entry.place.op_id, entry.place.call_key]
            found = cache.lookup(*entry.place, cfg_type=kernel.cfg_type)
            assert found is not None
            assert found.layer == path.stem
