"""Ranking candidates by what a compiler says, and what becomes of the result."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.flash_attention.visits import visited
from ejkernel.kernels.grouped_matmul.dimensions import Dimensions
from ejkernel.kernels.grouped_matmul.tiles import TpuConfig, tpu_steps
from ejkernel.modules.flash_attention import FlashAttention, FlashAttentionConfig
from ejkernel.ops import ConfigSelectorChain, Executor, Invocation, PersistentCache
from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.store import entry as entries
from ejkernel.ops.store import merging, packs
from ejkernel.ops.tuning import clock, compiling
from ejkernel.ops.tuning.clock import Ranked
from ejkernel.ops.tuning.compiling import Report
from ejkernel.ops.tuning.schedule import KernelSchedule
from ejkernel.ops.utils import targets
from ejkernel.ops.utils.params import FwdParams
from tests.support import Plain, Scale

# --- Ranking ---


def ranked(number, bundles=None, reason=None, guess=False):
    report = None if reason else Report(kernels=1, temp_bytes=0, bundles=bundles)
    return Ranked(cfg=Scale(number), report=report, reason=reason, is_guess=guess)


def test_a_schedule_ranks_by_bundles_and_equals_keep_the_guess():
    found = [ranked(1, 300.0), ranked(2, 200.0), ranked(3, reason="no room"), ranked(4, 200.0, guess=True), ranked(5)]
    ranking = clock.order(found, "schedule")
    assert [each.cfg.factor for each in ranking.candidates] == [4, 2, 1, 5, 3]
    rows = ranking.statistics()["candidates"]
    assert [row["status"] for row in rows] == ["winner", "ranked", "ranked", "ranked", "dropped"]
    assert [row.get("bundles") for row in rows] == [200, 200, 300, None, None]
    assert rows[-1]["reason"] == "no room"


def test_without_a_schedule_the_order_stays_and_says_so():
    ranking = clock.order([ranked(1, reason="spills 8 bytes", guess=True), ranked(2), ranked(3)], "order")
    assert [each.cfg.factor for each in ranking.candidates] == [2, 3, 1]
    assert "no schedule" in ranking.statistics()["note"]


def test_a_guess_without_a_schedule_is_not_replaced_by_a_kernel_that_has_one():
    ranking = clock.order([ranked(1, guess=True), ranked(2, 200.0)], "schedule")
    assert ranking.cfg == Scale(1)
    assert ranking.clock == "order"


def schedule_of(loop, iterations, bodies):
    return KernelSchedule(name="k", total=loop + 10, loop=loop, iterations=iterations, bodies=bodies)


def test_bundles_are_rounds_times_overhead_and_needed_steps_times_their_body():
    kernel = schedule_of(loop=1000, iterations=64, bodies=(10, 600))
    assert compiling.total_bundles([kernel], needed=40) == 64 * 390 + 40 * 600
    assert compiling.total_bundles([kernel], needed=None) == 64 * 390 + 64 * 600
    assert compiling.total_bundles([kernel, kernel], needed=40) == 2 * (64 * 390 + 40 * 600)
    # Two bodies of about the same size: a step runs one of them.
    masked = schedule_of(loop=1500, iterations=64, bodies=(600, 500))
    assert compiling.total_bundles([masked], needed=40) == 64 * 400 + 40 * 550
    plain = schedule_of(loop=100, iterations=8, bodies=())
    assert compiling.total_bundles([plain], needed=None) == 800


@pytest.mark.parametrize(("lower", "upper"), [(None, 0), (None, None), (-100, 0), (-100, 50), (0, None), (3, 7)])
@pytest.mark.parametrize(("q_len", "kv_len"), [(256, 256), (200, 300), (300, 200)])
def test_blocks_that_a_mask_leaves_out_are_not_counted(q_len, kv_len, lower, upper):
    i, j = np.arange(q_len)[:, None], np.arange(kv_len)[None, :]
    seen = np.ones((q_len, kv_len), bool) if lower is None else j >= i + lower
    seen &= True if upper is None else j <= i + upper
    for rows, cols in itertools.product((64, 128), (32, 128)):
        pairs = {(a // rows, b // cols) for a, b in zip(*np.nonzero(seen), strict=True)}
        assert visited(q_len, kv_len, rows, cols, lower, upper) == len(pairs)


def test_tiles_of_rows_are_counted_once_for_each_group_in_them():
    one = Dimensions(rows=1024, groups=1, k=1024, n=512)
    assert tpu_steps(one, TpuConfig(block_m=256, block_k=512, block_n=256)) == 4 * 2 * 2
    many = Dimensions(rows=1024, groups=8, k=512, n=512)
    assert 4 + 7 >= tpu_steps(many, TpuConfig(block_m=256)) >= 8


# --- Entries ---

PLACE = ("tpu-v6e", "op", "0" * 16)


def made(number, **provenance):
    return entries.make(PLACE, Scale(number), provenance=provenance)


def test_a_measured_entry_of_any_layer_comes_first(tmp_path):
    packs.write(tmp_path / "pack.json", [made(1)])
    cache = PersistentCache(tmp_path / "store", packs=[tmp_path / "pack.json"])
    cache.add(made(2, clock="schedule"))
    assert cache.get(*PLACE, cfg_type=Scale) == Scale(1)
    (listed,) = cache.entries()
    assert listed.clock is None
    cache.add(made(3))
    assert cache.get(*PLACE, cfg_type=Scale) == Scale(3)


def test_a_ranked_entry_is_used_until_something_is_measured(tmp_path):
    packs.write(tmp_path / "pack.json", [made(1, clock="schedule")])
    cache = PersistentCache(tmp_path / "store", packs=[tmp_path / "pack.json"])
    found = cache.lookup(*PLACE, cfg_type=Scale)
    assert (found.cfg, found.clock) == (Scale(1), "schedule")
    assert [entry.clock for entry in cache.entries()] == ["schedule"]
    cache.put(*PLACE, Scale(2))
    assert cache.get(*PLACE, cfg_type=Scale) == Scale(2)


def test_what_was_measured_is_better_than_what_was_ranked():
    old, new = made(1, jax="0.10.0"), made(2, jax="0.12.0", clock="schedule")
    assert merging.better(new, old) is old
    assert merging.better(old, new) is old


# --- Choosing ---


def chosen(tmp_path, cfg, *, target=None, autotune="off"):
    """What a call of `Plain` gets whose only entry was ranked by a compiler."""
    cache, kernel = PersistentCache(tmp_path), Plain()
    x = jax.ShapeDtypeStruct((8, 3), jnp.float32)
    with targets.compiling_for(targets.find(target)) if target else jax.default_device(jax.devices()[0]):
        inv = Invocation(kernel=kernel, args=(x, x))
        cache.add(entries.make(inv.key, cfg, signature=inv.signature, provenance={"clock": "schedule"}))
        selector = ConfigSelectorChain(persistent=cache, policy=AutotunePolicy(autotune=autotune))
        return selector.explain(inv, kernel), lambda: selector.choose(inv, kernel)


def test_explain_shows_the_clock_of_a_config_for_a_described_device(tmp_path):
    selection, _ = chosen(tmp_path, Scale(7), target="v6e")
    assert (selection.cfg, selection.tier) == (Scale(7), "persistent")
    assert "clock: schedule, not measured" in str(selection)


def test_a_ranked_config_is_checked_before_it_runs(tmp_path):
    selection, choose = chosen(tmp_path, Scale(1))
    assert "to be checked" in str(selection) or selection.cfg == Scale(1)
    assert choose() == Scale(1)


def test_a_ranked_config_that_computes_something_else_is_not_used(tmp_path):
    _, choose = chosen(tmp_path, Scale(7))  # `Plain` multiplies by it.
    assert choose() != Scale(7)


def test_tuning_measures_what_was_only_ranked(tmp_path):
    selection, _ = chosen(tmp_path, Scale(1), autotune="on")
    assert selection.tier != "persistent"
    assert "would be measured now" in str(selection)


def test_the_config_of_a_pack_reaches_a_program_that_is_compiled_ahead(tmp_path):
    kernel, q = FlashAttention(), jax.ShapeDtypeStruct((1, 1024, 2, 128), jnp.bfloat16)
    cfg = FlashAttentionConfig(fwd_params=FwdParams(q_blocksize=256, kv_blocksize=128), platform="pallas")
    executor = Executor(ConfigSelectorChain(persistent=PersistentCache(tmp_path)))
    with targets.compiling_for(targets.find("v5e")):
        args, kwargs = kernel.prepare(q, q, q, causal=True)
        inv = Invocation(kernel=kernel, args=args, kwargs=kwargs)
        executor.chooser.persistent.add(entries.make(inv.key, cfg, provenance={"clock": "schedule"}))
        assert executor.choose_config(kernel, q, q, q, causal=True) == cfg
        other = jax.ShapeDtypeStruct((2, 1024, 2, 128), jnp.bfloat16)
        # Another shape: nothing can be proved here, so it gets the guess.
        assert executor.choose_config(kernel, other, other, other, causal=True) != cfg
