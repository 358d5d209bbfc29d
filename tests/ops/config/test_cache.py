import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ejkernel.ops import ConfigCache, overlay_cache
from ejkernel.ops.config.cache import CacheKeyError

keys = st.recursive(
    st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False)),
    lambda inner: st.tuples(inner, inner),
)


@given(st.dictionaries(keys, st.integers()))
def test_any_hashable_key_finds_its_config_again(entries):
    cache = ConfigCache()
    for key, cfg in entries.items():
        cache.put(key, cfg)
    assert {key: cache.get(key) for key in cache} == entries
    assert all(key in cache for key in entries)
    assert len(cache) == len(entries)


def test_both_call_forms_reach_the_same_entry():
    cache = ConfigCache()
    cache.put("dev", "op", "key", 1)
    assert cache.get(("dev", "op", "key")) == cache.get("dev", "op", "key") == 1
    assert ("dev", "op", "key") in cache
    cache.put(("dev", "op", "key"), 2)
    assert cache.get("dev", "op", "key") == 2
    cache.delete("dev", "op", "key")
    assert cache.get("dev", "op", "key") is None
    assert len(cache) == 0


def test_absent_is_none_and_not_an_error():
    cache = ConfigCache({"a": 1})
    assert cache.get("b") is None
    assert "b" not in cache
    cache.delete("b")
    cache.clear()
    assert list(cache) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.put("a"), r"give \(key, cfg\) or \(device, op_id, call_key, cfg\), got 1"),
        (lambda c: c.put("a", "b", 1), "got 3 values"),
        (lambda c: c.get("a", "b"), "give one key or device, op_id, call_key; got 2"),
        (lambda c: c.get([1]), r"a key must be hashable, got \(\[1\],\)"),
        (lambda c: c.put(jnp.ones(2), 1), "a key must be hashable"),
        (lambda c: overlay_cache(3), "expected a cache or a mapping, got int"),
        (lambda c: overlay_cache({"name": 3}), r"a key must be \(device, op_id, call_key\), got 'name'"),
        (lambda c: overlay_cache({("device", "op"): 3}), r"a key must be .* got \('device', 'op'\)"),
    ],
)
def test_wrong_keys_are_named(call, message):
    with pytest.raises(CacheKeyError, match=message):
        call(ConfigCache())
