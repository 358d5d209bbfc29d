"""A store and a pack that ejkernel wrote before its rooms were moved, read by today's.

`tests/upgrade` holds them. They were made by the commit before the move, beside a copy of `kernels_then.py`:

    ejkernel tune flash_attention --args "f32[1,256,2,8],f32[1,256,2,8],f32[1,256,2,8]" --set causal=true --grad \
        --max-candidates 6 --isolation thread --store store
    ejkernel tune tests.upgrade.kernels_then:Moved --args "f32[4096]" --set power=3 --isolation thread --store store
    (Reworded and Changed alike)
    ejkernel cache export pack.json --store store --name then
"""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels.flash_attention import xla_blocks
from ejkernel.modules import FlashAttention, FlashAttentionConfig
from ejkernel.ops import BwdParams, ConfigSelectorChain, Executor, FwdParams, PersistentCache
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.execution.pipeline import backward_invocation
from ejkernel.ops.store import entry as entries
from ejkernel.ops.store import layers, packs, upkeep
from ejkernel.ops.utils import fingerprint
from tests.upgrade.kernels import Changed, Moved, Reworded, Split

HERE = Path(__file__).parents[2] / "upgrade"
DEVICE = "cpu-x86_64-avx512f-2c"
QKV = [jax.ShapeDtypeStruct((1, 256, 2, 8), jnp.float32)] * 3


def forward():
    kernel = FlashAttention()
    args, kwargs = kernel.prepare(*QKV, causal=True)
    return Invocation(kernel=kernel, args=args, kwargs=kwargs)


def backward():
    return backward_invocation(BackwardKernel(FlashAttention()), forward())


def power(kernel):
    x = jax.ShapeDtypeStruct((4096,), jnp.float32)
    return lambda: Invocation(kernel=kernel(), args=(x,), kwargs={"power": 3})


CALLS = {
    "flash_attention": (forward, FlashAttentionConfig(FwdParams(q_blocksize=128, kv_blocksize=128), None, "xla")),
    "flash_attention.vjp": (backward, FlashAttentionConfig(None, BwdParams(q_blocksize=128, kv_blocksize=128), "xla")),
    "upgrade.moved": (power(Moved), Split(1)),
    "upgrade.reworded": (power(Reworded), Split(1)),
    "upgrade.changed": (power(Changed), Split(1)),
}


@pytest.fixture(params=["store", "pack"])
def cache(request, tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "device_fingerprint", lambda device=None: DEVICE)
    if request.param == "store":
        return PersistentCache(shutil.copytree(HERE / "store", tmp_path / "store"))
    return PersistentCache(tmp_path / "empty", packs=HERE / "pack.json")


def test_every_call_of_then_has_the_key_that_it_had_and_finds_its_config(cache):
    assert {entry.place.op_id for entry in cache.entries()} == set(CALLS)
    for op_id, (make, cfg) in CALLS.items():
        inv = make()
        assert inv.op_id == op_id
        found = cache.lookup(*inv.key, cfg_type=type(cfg))
        assert found is not None
        assert (found.cfg, type(found.cfg)) == (cfg, type(cfg))
        assert found.signature == json.loads(json.dumps(inv.signature))


def test_calls_are_served_what_was_stored_and_not_their_guess(cache, monkeypatch):
    monkeypatch.setattr(xla_blocks, "guess", lambda call, backward: (64, 32))  # Today's is what was stored.
    executor = Executor(ConfigSelectorChain(persistent=cache))
    assert executor.choose_config(Moved(), jnp.ones(4096), power=3) == Split(1) != Moved().heuristic_cfg(power(Moved)())
    query = jnp.ones((1, 256, 2, 8))
    kernel, stored = FlashAttention(), CALLS["flash_attention"][1]
    assert executor.choose_config(kernel, query, query, query, causal=True) == stored != kernel.heuristic_cfg(forward())


def test_nothing_of_an_entry_is_lost_when_it_is_written_again(cache, tmp_path):
    then = {e.place: entries.to_data(e) for e in layers.entries_of(HERE / "pack.json")}
    packs.write(tmp_path / "again.json", cache.entries(), "then")
    assert (tmp_path / "again.json").read_bytes() == (HERE / "pack.json").read_bytes()
    copy = PersistentCache(tmp_path / "copy")
    for entry in cache.entries():
        copy.add(entry)
    assert {e.place: entries.to_data(e) for e in copy.entries()} == then


def test_only_kernels_whose_source_changed_are_stale(cache):
    def stale(kernel, op_id):
        return cache.lookup(*CALLS[op_id][0]().key, kernel=kernel, cfg_type=kernel.cfg_type).has_other_source

    assert not stale(Moved(), "upgrade.moved")
    assert stale(Reworded(), "upgrade.reworded")
    assert stale(Changed(), "upgrade.changed")
    assert stale(FlashAttention(), "flash_attention")  # Its class is a list of backends since.


def test_store_and_pack_of_then_are_in_order():
    assert [p for source in (HERE / "store", HERE / "pack.json") for p in upkeep.verify(source)] == []


def test_trials_of_then_are_read():
    cache = PersistentCache(HERE / "store")
    assert all(cache.read_trials(entry.key) for entry in cache.entries())
