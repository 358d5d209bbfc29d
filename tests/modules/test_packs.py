"""The packs that are shipped: readable, of use to today's calls, and found by default."""

import importlib.metadata
from pathlib import Path

import jax
import pytest

import ejkernel
from benchmarks.flash_attention import CPU_ROWS, GPU_ROWS
from ejkernel.modules import FlashAttention, FlashAttentionConfig
from ejkernel.ops import PersistentCache
from ejkernel.ops.config import packs
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.execution.pipeline import backward_invocation

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


def keys_of(row):
    """The keys of a row's forward and backward, as a call of today has them."""
    kernel = FlashAttention()
    q, kv = (jax.ShapeDtypeStruct((row.batch, row.length, n, row.dim), row.dtype) for n in (row.heads, row.kv_heads))
    args, kwargs = kernel.prepare(q, kv, kv, **({"causal": True} if row.causal else {}))
    forward = Invocation(kernel=kernel, args=args, kwargs=kwargs)
    backward = backward_invocation(BackwardKernel(kernel), forward)
    return {("flash_attention", forward.call_key), ("flash_attention.vjp", backward.call_key)}


@pytest.mark.parametrize(("kind", "rows"), [("cpu-", CPU_ROWS), ("gpu-", GPU_ROWS)], ids=["cpu", "gpu"])
def test_todays_calls_find_what_is_in_the_pack(kind, rows):
    for path in (p for p in PACKS if p.name.startswith(kind)):
        stored = {(entry.place.op_id, entry.place.call_key) for entry in packs.read(path).entries}
        assert stored == set().union(*map(keys_of, rows)), "tune the rows again"


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
