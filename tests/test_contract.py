"""The public contract, call form by call form, exactly as it is written."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import (
    Autotuner,
    AutotuningResult,
    ConfigCache,
    ConfigSelectorChain,
    Entry,
    Executor,
    Invocation,
    Kernel,
    PersistentCache,
    autotune,
    autotune_recorded,
    benchmark,
    default_executor,
    find_labels_in_lowered,
    get_invocations,
    overlay_cache,
    pmap_with_config,
    policy_override,
    record_invocation,
    vmap_with_config,
)


@dataclass(frozen=True)
class MyConfig:
    block_size: int = 128
    num_warps: int = 4
    algorithm: str = "default"


class MyKernel(Kernel[MyConfig, jax.Array]):
    def __init__(self):
        super().__init__(name="my_kernel")

    def run(self, a, b, *, cfg: MyConfig, **kwargs):
        return jax.lax.map(lambda row: row @ b, a, batch_size=cfg.block_size) * kwargs.get("scale", 1.0)

    def heuristic_cfg(self, inv: Invocation) -> MyConfig:
        return MyConfig(block_size=min(32, inv.args[0].shape[0]))

    def config_space(self, inv) -> list[MyConfig]:
        return [MyConfig(block_size=b) for b in (8, 32) if b <= inv.args[0].shape[0]]


A, B = jnp.ones((32, 16)), jnp.ones((16, 8))


@pytest.fixture
def kernel():
    return MyKernel()


def test_executor_forms(kernel):
    cache = ConfigCache()
    selector = ConfigSelectorChain(cache=cache)
    executor = Executor(selector)
    np.testing.assert_allclose(executor(kernel, A, B), A @ B)
    np.testing.assert_allclose(executor(kernel, A, B, cfg=MyConfig(8)), A @ B)
    assert executor.choose_config(kernel, A, B) == MyConfig(32)
    np.testing.assert_allclose(executor.compile(kernel, A, B)(A, B), A @ B)
    np.testing.assert_allclose(kernel(A, B, scale=2.0), 2 * A @ B)
    assert isinstance(default_executor(), Executor)


def test_selection_forms(kernel, tmp_path):
    inv = Invocation(kernel=kernel, args=(A, B), kwargs={"scale": 1.0}, metadata={"who": "me"})
    cache = ConfigCache()
    selectors = [
        ConfigSelectorChain(cache),
        ConfigSelectorChain(cache=cache, persistent=PersistentCache(path=tmp_path), autotune=True),
    ]
    for store in (cache, PersistentCache(path=tmp_path / "configs")):
        store.put(inv.key, MyConfig(8))
        assert store.get(inv.key) == MyConfig(8)
        assert inv.key in store
        store.put(inv.device_fingerprint, inv.op_id, inv.call_key, MyConfig(16))
        assert store.get(inv.device_fingerprint, inv.op_id, inv.call_key) == MyConfig(16)
        assert store.get("no", "such", "key") is None
        assert store.get("nothing") is None
    with overlay_cache(cache), overlay_cache({inv.key: MyConfig(8)}):
        assert selectors[0].choose(inv, kernel) == MyConfig(8)
    with policy_override(autotune=False), policy_override(selectors[1], autotune=False):
        assert selectors[1].choose(inv, kernel) == MyConfig(16)


def test_tuning_forms(kernel):
    inv = Invocation(kernel=kernel, args=(A, B), kwargs={})
    best = autotune(kernel, A, B, configs=kernel.config_space(inv), num_warmup=3, num_iters=10)
    assert best in kernel.config_space(inv)
    assert autotune(kernel, A, B) in kernel.config_space(inv)
    assert 0 < benchmark(lambda: kernel(A, B), num_iters=100) < 1000
    (stored,) = (e for e in default_executor().chooser.persistent.entries() if e.layer == "store")
    assert {"ejkernel", "jax", "jaxlib", "kernel_source", "timer", "device", "host", "time"} <= set(stored.provenance)
    record_invocation(kernel, inv)
    assert get_invocations()["my_kernel"][inv.call_key][0] is kernel
    assert get_invocations(inv.device_fingerprint) == get_invocations()
    result = autotune_recorded(get_invocations())
    assert isinstance(result, AutotuningResult)
    (entry,) = result.entries
    assert (result.device, entry.op_id, entry.call_key) == inv.key
    assert isinstance(entry, Entry)
    assert entry.cfg in kernel.config_space(inv)


def test_tuner_is_anything_with_autotune(kernel):
    tuner = Autotuner()
    make_fn = lambda cfg: lambda a, b: kernel.run(a, b, cfg=cfg)
    assert tuner.autotune(make_fn, (A, B), {}, [MyConfig(8), MyConfig(32)]) in (MyConfig(8), MyConfig(32))


def test_result_is_a_context_and_a_file(kernel, tmp_path):
    executor = Executor(ConfigSelectorChain(cache=ConfigCache()))
    device, op_id, call_key = executor.explain(kernel, A, B).key
    result = AutotuningResult(device, [Entry(op_id, call_key, MyConfig(8))])
    seen = lambda: executor.explain(kernel, A, B).cfg
    with result:
        assert seen() == MyConfig(8)
        with result, AutotuningResult(device, [Entry(op_id, call_key, MyConfig(16))]):
            assert seen() == MyConfig(16)
        with result.as_overlay():
            assert seen() == MyConfig(8)
    assert seen() == MyConfig(32)
    result.dump(tmp_path / "result.json")
    assert AutotuningResult.load(tmp_path / "result.json") == result
    other = AutotuningResult(device, [Entry(op_id, "0" * 16, MyConfig(1))])
    assert [e.cfg for e in (result | other).entries] == [MyConfig(8), MyConfig(1)]


def test_label_form(kernel):
    executor = Executor(ConfigSelectorChain(), stamp_prefix="ejkernel_ops")
    lowered = jax.jit(lambda a, b: executor(kernel, a, b)).lower(A, B)
    assert find_labels_in_lowered(lowered) == [f"ejkernel_ops#my_kernel:{executor.explain(kernel, A, B).key[2]}"]


def test_batch_forms():
    executor, kernel = Executor(ConfigSelectorChain(cache=ConfigCache())), MyKernel()
    bx, by = jnp.ones((4, 8, 16)), jnp.ones((4, 16, 8))
    want = bx @ by
    np.testing.assert_allclose(vmap_with_config(executor, kernel, in_axes=0)(bx, by), want)
    np.testing.assert_allclose(vmap_with_config(kernel, in_axes=(0, 0))(bx, by, scale=2.0), 2 * want)
    np.testing.assert_allclose(pmap_with_config(executor, kernel, in_axes=0, axis_name="devices")(bx, by), want)
    np.testing.assert_allclose(pmap_with_config(kernel, axis_name="devices")(bx, by, scale=2.0), 2 * want)
