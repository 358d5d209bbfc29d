"""Nothing that was stored is lost, whatever happens to the process, the file or the disk."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.store import entry as entries
from ejkernel.ops.store import files, layers, packs, persistent, provenance, upkeep
from ejkernel.ops.store.files import StoreFiles
from ejkernel.ops.store.persistent import PersistentCache, StoreSettingError, StoreWarning, default_root
from ejkernel.ops.store.places import StoreKeyError, directory_name, place_of
from ejkernel.ops.utils.env import EnvironmentValueError
from ejkernel.ops.utils.serialize import ConfigEncodeError

KEY = ("gpu-h200", "pkg.module.MyKernel", "0123456789abcdef")
ROOT = Path(__file__).parents[3]


@dataclasses.dataclass(frozen=True)
class Config:
    block: int = 128
    shape: tuple[int, ...] = (1, 2)


@pytest.fixture
def cache(tmp_path):
    return PersistentCache(tmp_path / "store")


def only_file(cache):
    [path] = cache.path.rglob("*.json")
    return path


def spawn(script, *args):
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, args)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# Interface.


def test_both_key_forms_are_one_key(cache):
    cache.put(*KEY, Config(1))
    assert cache.get(KEY) == cache.get(*KEY) == Config(1)
    cache.put(KEY, Config(2))
    assert cache.get(*KEY) == Config(2)
    assert KEY in cache
    assert list(cache) == [KEY]
    assert len(cache) == 1


def test_an_absent_key_is_none(cache):
    assert cache.get(*KEY) is None
    assert cache.get("anything") is None
    assert KEY not in cache
    assert list(cache) == []
    assert cache.lookup(*KEY) is None
    assert not cache.delete(*KEY)
    assert not cache.path.exists()


def test_a_new_cache_reads_what_another_wrote(cache):
    cache.put(*KEY, Config(7, (3, 4)), signature={"op": "x"}, statistics={"median_s": 1e-3}, complete=False)
    entry = PersistentCache(cache.path).lookup(*KEY, cfg_type=Config)
    assert entry.cfg == Config(7, (3, 4))
    assert type(entry.cfg) is Config
    assert (entry.key, entry.signature, entry.statistics) == (KEY, {"op": "x"}, {"median_s": 1e-3})
    assert (entry.complete, entry.layer, entry.stale) == (False, "store", None)
    assert {"ejkernel", "jax", "jaxlib", "python", "host", "time"} <= entry.provenance.keys()


free_keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)


@given(free_keys, free_keys)
@example("7", 7)
@example("null", None)
@example('["7"]', "7")
@example('{"$tuple":[1]}', (1,))
def test_places_are_equal_exactly_for_equal_keys(a, b):
    assert (place_of(a) == place_of(b)) == (a == b)


@pytest.mark.parametrize("key", ["text", ("a", 1), 1.5, None, (), (("x", None), True), ("a", "b"), "über/../x"])
def test_any_key_of_plain_values_works(cache, key):
    cache.put(key, {"block": 1})
    again = PersistentCache(cache.path)
    assert again.get(key) == {"block": 1}
    assert list(again) == [key]
    assert key in again
    assert again.delete(key)
    assert len(again) == 0


ALIKE = [7, "7", None, "null", 1.5, "1.5", "true", (1, "a"), '{"$tuple":[1,"a"]}', '["7"]', '["null"]']


def test_keys_that_read_alike_are_different_keys(cache):
    for number, key in enumerate(ALIKE):
        cache.put(key, {"block": number})
    again = PersistentCache(cache.path)
    assert [again.get(key) for key in ALIKE] == [{"block": number} for number in range(len(ALIKE))]
    assert sorted(map(repr, again)) == sorted(map(repr, ALIKE))
    assert again.delete("7")
    assert "7" not in again
    assert again.get(7) == {"block": 0}


@pytest.fixture
def older(cache):
    """A store that 0.1 wrote: it put "7" where 7 belongs."""
    cache.put("7", {"block": 1})
    now, then = map(StoreFiles(cache.path).path, (place_of("7"), place_of(7)))
    then.write_text(now.read_text().replace(place_of("7").call_key, place_of(7).call_key))
    now.unlink()
    return PersistentCache(cache.path)


def test_what_an_older_version_stored_under_text_that_reads_like_a_number_is_found(older):
    assert older.get("7") == older.own("7").cfg == {"block": 1}
    assert older.get(7) is None
    assert list(older) == ["7"]
    assert not list(upkeep.verify(older.path))
    assert [e.key for e in layers.entries_of(older.path)] == ["7"]


@pytest.mark.parametrize("order", [[7, "7"], ["7", 7]])
def test_what_an_older_version_stored_is_not_lost_when_a_key_that_reads_alike_is_put(older, order):
    older.put(7, {"block": 2})
    assert (older.get("7"), older.get(7)) == ({"block": 1}, {"block": 2})
    older.put("7", {"block": 3})
    again = PersistentCache(older.path)
    assert (again.get("7"), again.get(7)) == ({"block": 3}, {"block": 2})
    assert len(again) == 2
    for left, key in enumerate(order):
        assert again.delete(key)
        assert len(again) == 1 - left


def test_what_an_older_version_stored_is_replaced_and_deleted(older):
    older.put("7", {"block": 3})
    assert [(e.key, e.cfg) for e in older.entries()] == [("7", {"block": 3})]
    assert older.delete("7")
    assert len(older) == 0


@pytest.mark.parametrize("key", [object(), [1], {"a": 1}, (1, b"x"), float("nan"), ("a", ("b", object()))])
def test_other_keys_are_refused_by_name(cache, key):
    with pytest.raises(StoreKeyError, match=r"a key is made of str"):
        cache.put(key, 1)


@pytest.mark.parametrize("call", [lambda c: c.get("a", "b"), lambda c: c.put(1), lambda c: c.get("a", "b", 3)])
def test_calls_with_half_a_key_are_refused(cache, call):
    with pytest.raises(StoreKeyError, match="takes one key"):
        call(cache)


@given(st.text() | st.sampled_from(["con", "nul.txt", "aux.", "com1", "op."]), st.text())
def test_directory_names_are_safe_and_distinct(a, b):
    name = directory_name(a)
    assert name
    assert name.isascii()
    assert len(name) < 100
    assert not set(name) & set('/\\:*?"<>|')
    assert not name.startswith(".")
    assert not name.endswith(".")
    assert name.partition(".")[0].lower() not in {"con", "prn", "aux", "nul", "com1", "lpt1"}
    assert (name.lower() == directory_name(b).lower()) == (a == b)


def test_keys_that_differ_in_case_or_need_escaping_stay_apart(cache):
    ops = ["op", "Op", "OP", "a/b", "a_b", "a b", "", ".", "..", "é", "x" * 300, "x" * 301, "\ud800"]
    for i, op in enumerate(ops):
        cache.put("dev", op, "k", i)
    again = PersistentCache(cache.path)
    assert [again.get("dev", op, "k") for op in ops] == list(range(len(ops)))
    assert sorted(again) == sorted(("dev", op, "k") for op in ops)
    assert all(path.parents[2] == cache.path for path in cache.path.rglob("*.json"))


RESERVED = ["con", "nul.txt", "aux.a.b", "com1", "lpt9", "op."]


def test_names_that_windows_keeps_for_devices_are_cleaned(cache):
    for name in RESERVED:
        cache.put(name, name, name, Config(1))
    names = {part.partition(".")[0] for path in cache.path.rglob("*") for part in path.relative_to(cache.path).parts}
    assert not names & {"con", "nul", "aux", "com1", "lpt9"}
    assert not [path for path in cache.path.rglob("*") if path.name.endswith(".")]
    again = PersistentCache(cache.path)
    assert [again.get(name, name, name) for name in RESERVED] == [Config(1)] * len(RESERVED)


@pytest.mark.parametrize(
    "key", [("con", "op", "k"), ("dev", "aux", "k"), ("dev", "op", "nul"), ("con", "aux.x", "nul")]
)
def test_stores_that_have_such_names_are_read_on(cache, key):
    cache.put(*key, Config(1))
    path = only_file(cache)
    stem = key[2] + ".json" if key[2] == "nul" else path.name
    former = cache.path / key[0] / key[1] / stem  # As an earlier version wrote it.
    former.parent.mkdir(parents=True, exist_ok=True)
    path.rename(former)
    again = PersistentCache(cache.path)
    assert again.get(*key) == Config(1)
    assert (
        [entry.place for entry in again.entries()] == [entry.place for entry in again.entries(key[0], key[1])] == [key]
    )
    again.put(*key, Config(2))
    assert PersistentCache(cache.path).get(*key) == Config(2)
    assert only_file(cache) == former
    assert again.delete(*key)
    assert again.get(*key) is None


def test_delete_removes_the_entry_and_its_trials(cache):
    cache.put(*KEY, Config())
    cache.append_trial(KEY, {"cfg": 1})
    assert cache.delete(*KEY)
    assert cache.get(*KEY) is None
    assert cache.read_trials(KEY) == []


def test_entries_can_be_narrowed_to_a_device_and_an_op(cache):
    for device in ("d1", "D2"):
        for op in ("a", "B/b"):
            cache.put(device, op, "k", device + op)
    assert [e.cfg for e in cache.entries("D2")] == ["D2B/b", "D2a"]
    assert [e.cfg for e in cache.entries(op_id="B/b")] == ["D2B/b", "d1B/b"]
    assert [e.cfg for e in cache.entries("d1", "a")] == ["d1a"]
    assert list(cache.entries("d3")) == []


def test_a_config_that_the_caller_changes_stays_as_stored(cache):
    cfg = {"blocks": [1, 2]}
    cache.put("k", cfg)
    cfg["blocks"].append(3)
    cache.get("k")["blocks"].append(4)
    assert cache.get("k") == {"blocks": [1, 2]}


@dataclasses.dataclass(eq=False)
class Mutable:
    block: int = 1


def test_a_config_that_hashes_by_identity_is_not_shared(cache):
    cfg = Mutable()
    cache.put("k", cfg)
    cfg.block = 2
    cache.get("k").block = 3
    assert cache.get("k").block == 1


def test_a_config_that_is_not_data_is_refused(cache):
    with pytest.raises(ConfigEncodeError, match="cannot be stored"):
        cache.put(*KEY, Config(block=print))  # pyright: ignore[reportArgumentType]


def test_statistics_of_any_kind_are_kept_as_json(cache):
    import numpy as np

    cache.put(*KEY, Config(), statistics={"t": np.float32(0.5), "nan": float("nan"), "inner": Config(), "f": print})
    stored = PersistentCache(cache.path).lookup(*KEY).statistics
    assert stored == {"t": 0.5, "nan": None, "inner": {"block": 128, "shape": [1, 2]}, "f": str(print)}


# Places.


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"EJKERNEL_CACHE_DIR": "/a/b", "XDG_CACHE_HOME": "/x"}, "/a/b/configs"),
        ({"EJKERNEL_CACHE_DIR": "~/b", "HOME": "/h"}, "/h/b/configs"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/ejkernel/configs"),
        ({"HOME": "/h"}, "/h/.cache/ejkernel/configs"),
        ({"EJKERNEL_CACHE_DIR": "", "XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/ejkernel/configs"),
    ],
)
def test_default_location(monkeypatch, environment, expected):
    for name in ("EJKERNEL_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert default_root() == PersistentCache().path == Path(expected)


def test_a_home_in_the_path_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    PersistentCache("~/here").put("k", 1)
    assert (tmp_path / "here").is_dir()


def test_without_a_home_it_goes_on_in_memory(monkeypatch):
    for name in ("EJKERNEL_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def homeless(self):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    cache = PersistentCache(packs=())
    assert cache.get(*KEY) is None
    with pytest.warns(StoreWarning, match="continues in memory"):
        cache.put(*KEY, Config(1))
    assert cache.get(*KEY, cfg_type=Config) == Config(1)


def test_home_of_nobody_is_named(monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", "~nobody-of-that-name/x")
    with pytest.raises(StoreSettingError, match="'~nobody-of-that-name/x' has no meaning here"):
        PersistentCache()


def test_relative_directory_stays_where_it_was(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", "here")
    cache = PersistentCache(packs=())
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    cache.put(*KEY, Config(1))
    assert list((tmp_path / "here").rglob("*.json"))
    assert not list((tmp_path / "sub").iterdir())


def test_construction_touches_no_file(tmp_path):
    PersistentCache(tmp_path / "a", packs=[tmp_path / "absent.json"])
    assert list(tmp_path.iterdir()) == []


def test_a_remote_store_is_refused_with_the_way_out():
    with pytest.raises(StoreSettingError, match=r"packs=\['gs://bucket/x'\]"):
        PersistentCache("gs://bucket/x")


# Remembering.


def test_an_answer_is_remembered_and_a_replaced_file_is_read_again(cache, monkeypatch):
    cache.put(*KEY, Config(1))
    reader = PersistentCache(cache.path)
    assert reader.get(*KEY) == Config(1)
    with monkeypatch.context() as patch:
        patch.setattr("ejkernel.ops.store.files.read", lambda *_: pytest.fail("read again"))
        assert reader.get(*KEY) == Config(1)
        patch.undo()
    cache.put(*KEY, Config(2))
    assert reader.get(*KEY) == Config(2)
    cache.delete(*KEY)
    assert reader.get(*KEY) is None


def test_a_miss_does_not_hide_what_comes_later(cache):
    reader = PersistentCache(cache.path)
    for i in range(20):
        assert reader.get("dev", "op", str(i)) is None
        cache.put("dev", "op", str(i), i)
        assert reader.get("dev", "op", str(i)) == i


@pytest.mark.parametrize("skew_s", [-(10**9), 10**9])
def test_wrong_clocks_do_not_hide_changes(cache, skew_s):
    """Another host writes with a clock that is decades off; so does its directory."""
    reader = PersistentCache(cache.path)
    for i in range(3):
        cache.put(*KEY, Config(i))
        moved = time.time() + skew_s
        os.utime(only_file(cache), (moved, moved))
        os.utime(only_file(cache).parent, (moved, moved))
        assert reader.get(*KEY) == Config(i)
    assert upkeep.prune(cache.path) == []
    assert PersistentCache(cache.path).get(*KEY) == Config(2)


def test_a_file_carries_the_exact_time_of_its_writing(cache):
    """The system's own times are milliseconds apart and inodes are used again: they cannot tell two files apart."""
    for i in range(20):
        before = time.time_ns()
        cache.put("k", i)
        assert before <= only_file(cache).stat().st_mtime_ns <= time.time_ns()


# Broken files.


def read_with_warning(cache, text):
    reader = PersistentCache(cache.path)
    with pytest.warns(StoreWarning, match=text):
        assert reader.get(*KEY) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reader.get(*KEY) is None  # Said once.
    return reader


def test_a_file_truncated_at_any_byte_is_a_miss(cache):
    cache.put(*KEY, Config(), statistics={"name": 'ü\n{["\\'})
    path = only_file(cache)
    whole = path.read_bytes()
    for length in range(len(whole.rstrip())):
        path.write_bytes(whole[:length])
        with pytest.warns(StoreWarning, match=r"counts as absent"):
            assert PersistentCache(cache.path).get(*KEY) is None


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "counts as absent"),
        (b"\x00\xff\xfe" * 99, "counts as absent"),
        (b"[1, 2]", "not an entry"),
        (b'{"name": "somebody", "dependencies": {}}', "not an entry"),
        (b'{"schema": 99}', "written with schema 99"),
        (b'{"schema": 1}', "'device' is missing"),
        (b'{"schema": 1, "a": ' + b"[" * 500 + b"]" * 500 + b"}", "levels deep"),
        (b'"' + b"x" * (2 << 20) + b'"', "bytes, at most"),
        (b'{"schema": ' + b"9" * 5000 + b"}", "counts as absent"),
    ],
)
def test_each_kind_of_broken_file_is_a_miss_and_is_kept_when_replaced(cache, content, text):
    cache.put(*KEY, Config())
    path = only_file(cache)
    path.write_bytes(content)
    reader = read_with_warning(cache, text)
    reader.put(*KEY, Config(5))
    assert reader.get(*KEY) == PersistentCache(cache.path).get(*KEY) == Config(5)
    assert path.with_name(path.name + ".broken").read_bytes() == content


def test_a_file_in_the_wrong_place_is_a_miss(cache):
    cache.put("other", *KEY[1:], Config())
    path = only_file(cache)
    target = cache.path / directory_name(KEY[0])
    path.parents[1].rename(target)
    reader = read_with_warning(cache, "another key")
    with pytest.warns(StoreWarning, match="not where"):
        assert len(reader) == 0


def test_a_directory_in_the_way_is_a_miss_and_is_kept(cache):
    cache.put(*KEY, Config())
    path = only_file(cache)
    path.unlink()
    path.mkdir()
    reader = read_with_warning(cache, "counts as absent")
    reader.put(*KEY, Config(3))
    assert PersistentCache(cache.path).get(*KEY) == Config(3)


def test_iteration_passes_over_broken_files(cache):
    cache.put("dev", "op", "a", 1)
    cache.put("dev", "op", "b", 2)
    next(cache.path.rglob("a.json")).write_text("{")
    with pytest.warns(StoreWarning, match="counts as absent"):
        assert list(cache) == [("dev", "op", "b")]


def test_a_config_that_no_longer_fits_is_a_miss_that_says_why(cache):
    cache.put(*KEY, Config())
    path = only_file(cache)
    data = json.loads(path.read_text())
    data["cfg"]["value"]["block"] = "huge"
    path.write_text(json.dumps(data))
    read_with_warning(cache, r"Config.block: 'huge' is not")


def test_two_schema_versions_live_side_by_side(cache, monkeypatch):
    cache.put(*KEY, Config(1))
    with monkeypatch.context() as patch:
        patch.setattr(entries, "SCHEMA", 2)
        newer = PersistentCache(cache.path)
        assert newer.get(*KEY) is None
        newer.put(*KEY, Config(2))
        newer.put("dev", "op", "k", Config(3))
        assert newer.get(*KEY) == Config(2)
        assert len(newer) == 2
        patch.undo()
    again = PersistentCache(cache.path)
    assert again.get(*KEY) == Config(1)
    assert list(again) == [KEY]
    assert list(upkeep.verify(cache.path)) == []
    assert upkeep.prune(cache.path) == []
    monkeypatch.setattr(entries, "SCHEMA", 2)
    assert PersistentCache(cache.path).get(*KEY) == Config(2)


# Where nothing can be written.


def use(cache):
    cache.put(*KEY, Config(1))
    cache.put("k", 2)
    cache.append_trial(KEY, {"a": 1})
    with cache.tuning_lock(KEY) as held:
        assert held


def goes_on_in_memory(cache):
    with pytest.warns(StoreWarning, match=r"EJKERNEL_CACHE_DIR") as caught:
        use(cache)
    assert len(caught) == 1
    assert str(cache.path) in str(caught[0].message)
    assert (cache.get(*KEY), cache.get("k")) == (Config(1), 2)
    assert sorted(map(str, cache)) == sorted(map(str, [KEY, "k"]))
    assert [e.cfg for e in cache.entries(KEY[0])] == [Config(1)]
    assert cache.delete("k")
    assert cache.get("k") is None


def test_a_path_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    goes_on_in_memory(PersistentCache(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_disk_that_recovers_takes_over_again(tmp_path):
    path = tmp_path / "file"
    path.write_text("mine")
    cache = PersistentCache(path)
    with pytest.warns(StoreWarning):
        cache.put("k", 1)
    assert cache.in_memory
    path.unlink()
    cache.put("k", 2)
    assert not cache.in_memory
    PersistentCache(path).put("k", 3)
    assert cache.get("k") == 3


def test_a_path_below_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    goes_on_in_memory(PersistentCache(tmp_path / "file" / "below"))


def test_a_directory_that_nobody_may_write():
    goes_on_in_memory(PersistentCache("/proc/self/ejkernel"))


UNPRIVILEGED = """
import os, sys, warnings
from ejkernel.ops.store.persistent import PersistentCache
cache = PersistentCache(sys.argv[1])
cache.put("before", 1)
if os.getuid() == 0:
    os.setuid(65534)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    cache.put("after", 2)
    cache.put("more", 3)
    print(len(caught), cache.get("before"), cache.get("after"), cache.get("more"))
    print(caught[0].message)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can drop its rights")
def test_a_directory_that_lost_its_permissions():
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)
        out, err = spawn(UNPRIVILEGED, Path(root, "store")).communicate()
    assert out.splitlines()[0] == "1 1 2 3", err
    assert "Permission denied" in out


def test_a_store_that_became_unreadable_still_answers_what_it_knows(cache, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", path)

    cache.put(*KEY, Config(1))
    cache.put("other", Config(2))
    reader = PersistentCache(cache.path)
    assert reader.get(*KEY) == Config(1)
    monkeypatch.setattr("ejkernel.ops.store.files.stamp", refuse)
    with pytest.warns(StoreWarning, match="cannot be read") as caught:
        assert (reader.get(*KEY), reader.get("other")) == (Config(1), None)
    assert len(caught) == 1


FULL = """
import resource, signal, sys, warnings
from ejkernel.ops.store.persistent import PersistentCache
cache = PersistentCache(sys.argv[1])
cache.put("before", 1)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    cache.put("after", 2)
    cache.put("before", 3)
    print(len(caught), cache.get("before"), cache.get("after"))
"""


def test_a_disk_that_is_full(tmp_path):
    """The system refuses every byte after the 64th: what was there stays, nothing half-written is left."""
    out, err = spawn(FULL, tmp_path).communicate()
    assert out == "1 3 2\n", err
    cache = PersistentCache(tmp_path)
    assert (cache.get("before"), cache.get("after")) == (1, None)
    assert not list(tmp_path.rglob(".tmp-*"))


def test_a_full_disk_says_which_file_could_not_be_written(tmp_path, monkeypatch):
    def full(fd, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "_write_all", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*tuned\.json'"):
        files.write(tmp_path / "tuned.json", b"{}")


# Many at once.

WRITER = """
import sys
from ejkernel.ops.store.persistent import PersistentCache
root, writer, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
cache = PersistentCache(root)
for i in range(count):
    cache.put("dev", "op", f"{writer}-{i}", {"writer": writer, "i": i})
    cache.put("dev", "op", "shared", {"writer": writer, "i": i})
"""


def test_four_processes_lose_nothing(tmp_path):
    writers = [spawn(WRITER, tmp_path, w, 100) for w in range(4)]
    for writer in writers:
        _, err = writer.communicate()
        assert writer.returncode == 0, err
    cache = PersistentCache(tmp_path)
    for w in range(4):
        for i in range(100):
            assert cache.get("dev", "op", f"{w}-{i}") == {"writer": str(w), "i": i}
    assert cache.get("dev", "op", "shared")["i"] == 99
    assert len(cache) == 401
    assert list(upkeep.verify(tmp_path)) == []


KILLER = """
import json, os, random, signal, sys, time
from pathlib import Path
from ejkernel.ops.store.persistent import PersistentCache

root, rounds = Path(sys.argv[1]), int(sys.argv[2])

def write_until_killed(start, out):
    cache = PersistentCache(root)
    for i in range(start, start + 10_000):
        cache.put("dev", "op", str(i), {"i": i, "pad": "x" * 20_000})
        os.write(out, f"{i} ".encode())

finished, rng = [], random.Random(0)
for n in range(rounds):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        write_until_killed(n * 10_000, writer)
        os._exit(1)
    os.close(writer)
    text = os.read(reader, 1)
    time.sleep(rng.uniform(0, 0.02))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while more := os.read(reader, 1 << 16):
        text += more
    os.close(reader)
    finished += text.decode().split(" ")[:-1]
strays = len(list(root.rglob(".tmp-*")))
print(json.dumps({"finished": finished, "strays": strays}))
"""


def test_an_entry_is_on_the_disk_before_it_has_its_name(cache, monkeypatch):
    events, sync, rename = [], os.fsync, os.replace
    kind = lambda fd: "directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file"
    monkeypatch.setattr(os, "fsync", lambda fd: events.append(kind(fd)) or sync(fd))
    monkeypatch.setattr(os, "replace", lambda *paths: events.append("name") or rename(*paths))
    cache.put("key", 1)
    assert events == ["file", "name", "directory"]


def test_kill_9_while_writing_loses_no_finished_entry(tmp_path):
    out, err = spawn(KILLER, tmp_path, 50).communicate()  # Forks its writers, so that 50 kills take seconds.
    result = json.loads(out or err)
    cache = PersistentCache(tmp_path)
    assert len(result["finished"]) >= 50
    for i in result["finished"]:
        assert cache.get("dev", "op", i)["i"] == int(i)
    assert result["strays"] >= 5, "too few kills hit a write: the test proves nothing"
    assert list(upkeep.verify(tmp_path)) == []
    upkeep.prune(tmp_path)
    assert not list(tmp_path.rglob(".tmp-*"))
    assert len(cache) >= len(result["finished"])


def test_threads_share_a_cache(cache):
    def work(n):
        for i in range(20):
            cache.put("dev", "op", f"{n}-{i}", (n, i))
            assert cache.get("dev", "op", f"{n}-{i}") == (n, i)
            cache.append_trial(("dev", "op", "t"), {"n": n, "i": i})

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cache) == 160
    assert len(cache.read_trials(("dev", "op", "t"))) == 160


# Trials.


def test_trials_are_read_in_order_up_to_a_torn_line(cache):
    for i in range(3):
        cache.append_trial(KEY, {"i": i, "time_s": float("nan")})
    [path] = cache.path.rglob("*.trials.jsonl")
    whole = path.read_bytes()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        kept = whole[:length].count(b"}")
        assert cache.read_trials(KEY) == [{"i": i, "time_s": None} for i in range(kept)]
        cache.append_trial(KEY, {"i": 9})
        assert cache.read_trials(KEY)[-1] == {"i": 9}
        assert len(cache.read_trials(KEY)) == kept + 1
    assert cache.read_trials(("dev", "op", "none")) == []


# Staleness.


class KernelA:
    def run(self, x, cfg):
        return helper(x)


class KernelB:
    def run(self, x, cfg):
        return helper(x) + 1


def helper(x):
    return x


def test_an_unchanged_kernel_is_not_stale(cache):
    cache.put(*KEY, Config(), kernel=KernelA())
    assert cache.lookup(*KEY, kernel=KernelA).stale is None


@pytest.mark.parametrize("kernel_changed", [True, False])
def test_stale_policies(cache, monkeypatch, caplog, kernel_changed):
    cache.put(*KEY, Config(), kernel=KernelA)
    cache.put(*KEY[:2], "another", Config(), kernel=KernelA)
    kernel, reason = KernelB, "kernel source changed"
    if not kernel_changed:
        kernel, reason = KernelA, f"jax {provenance.version('jax')} -> 9.9"
        monkeypatch.setattr(provenance, "version", lambda name: "9.9" if name == "jax" else None)
    with caplog.at_level(logging.WARNING):
        assert cache.lookup(*KEY, kernel=kernel).stale == reason
        assert cache.lookup(*KEY[:2], "another", kernel=kernel).stale == reason
    assert len(caplog.records) == 1
    assert reason in caplog.text
    assert KEY[1] in caplog.text
    caplog.clear()
    assert cache.lookup(*KEY, kernel=kernel, stale="retune").stale == reason
    assert cache.lookup(*KEY, kernel=kernel, stale="ignore") is None
    assert PersistentCache(cache.path, stale="ignore").lookup(*KEY, kernel=kernel) is None
    assert PersistentCache(cache.path, stale="ignore").get(*KEY) == Config()
    assert caplog.records == []


def test_the_environment_says_what_to_do_with_stale_entries(monkeypatch, tmp_path):
    PersistentCache(tmp_path).put(*KEY, Config(), kernel=KernelA())
    monkeypatch.setenv("EJKERNEL_STALE", "ignore")
    assert PersistentCache(tmp_path).lookup(*KEY, kernel=KernelB) is None
    assert PersistentCache(tmp_path, stale="retune").lookup(*KEY, kernel=KernelB).cfg == Config()
    assert (AutotunePolicy().stale, AutotunePolicy(stale="use").stale) == ("ignore", "use")
    monkeypatch.setenv("EJKERNEL_STALE", "never")
    with pytest.raises(EnvironmentValueError, match="EJKERNEL_STALE: 'never' is not one of 'use', 'retune', 'ignore'"):
        PersistentCache(tmp_path)


def test_a_stale_pack_is_noted_once_a_process_and_quietly(monkeypatch, tmp_path, caplog):
    own, pack = PersistentCache(tmp_path / "own"), tmp_path / "old.json"
    for op in ("op", "op.vjp"):
        own.put("dev", op, "k", Config(), kernel=KernelA())
    packs.write(pack, own.entries())
    persistent._note_stale_pack.cache_clear()
    with caplog.at_level(logging.INFO, "ejkernel.store"):
        for op in ("op", "op.vjp"):
            for directory in ("a", "b"):
                cache = PersistentCache(tmp_path / directory, packs=[pack])
                assert cache.lookup("dev", op, "k", kernel=KernelB).stale
    (record,) = caplog.records
    assert (record.levelname, "pack old" in record.getMessage()) == ("INFO", True)


def test_an_unknown_stale_policy_lists_the_known():
    with pytest.raises(StoreSettingError, match="'use', 'retune', 'ignore', got 'maybe'"):
        PersistentCache("x", stale="maybe")  # pyright: ignore[reportArgumentType]


def test_jitted_calls_are_told_of_a_change_and_only_then(cache, monkeypatch):
    told = []
    monkeypatch.setattr("ejkernel.ops.core.context.invalidate", lambda: told.append(1))
    cache.put(*KEY, Config(1))
    cache.served.note(KEY, Config(1))
    cache.put(*KEY, Config(1))
    cache.put("other", Config(2))
    assert told == []
    cache.put(*KEY, Config(2))
    assert told == [1]
    cache.served.note(KEY, Config(2))
    cache.delete(*KEY)
    assert told == [1, 1]


def test_importing_the_store_loads_no_heavy_package():
    script = "import jax, sys; before = set(sys.modules)\n"  # JAX loads filelock itself, where it is installed.
    script += "import ejkernel.ops.store.persistent as p, ejkernel.ops.config.transfer; p.PersistentCache('x')\n"
    script += "print({'pydantic', 'filelock', 'rich', 'typer', 'fsspec'} & (sys.modules.keys() - before))"
    out, err = spawn(script).communicate()
    assert out == "set()\n", err
