"""Packs: shared, layered, merged, compared, checked."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import json
import os
import sys
import time
from typing import Any

import pytest

from ejkernel.ops.store import entry as entries
from ejkernel.ops.store import layers, merging, packs, upkeep
from ejkernel.ops.store.files import host
from ejkernel.ops.store.persistent import PersistentCache, StoreWarning

KEY = ("dev", "pkg.Op", "0123456789abcdef")


@dataclasses.dataclass(frozen=True)
class Config:
    block: int = 0


def entry(key=KEY, block=0, **options):
    return entries.make(key, Config(block), **options)


def write_pack(path, *items, name=None):
    packs.write(path, items, name)
    return path


@pytest.fixture
def no_packages(monkeypatch):
    monkeypatch.setattr(packs, "from_packages", lambda: [])


# Reading and writing.


def test_a_pack_reads_back_what_was_written(tmp_path):
    items = [entry(block=1, statistics={"n": 3}, complete=False), entry("free key", 2, signature={"op": "x"})]
    pack = packs.read(write_pack(tmp_path / "h200.json", *items))
    assert pack.name == "h200"
    assert pack.problems == []
    found = {e.key: e for e in pack.entries}
    assert {key: e.cfg for key, e in found.items()} == {KEY: Config(1), "free key": Config(2)}
    assert merging.same(found[KEY], items[0])


def test_equal_packs_are_equal_files(tmp_path):
    items = [entry(("d", "op", str(i)), i) for i in range(5)]
    a = write_pack(tmp_path / "a.json", *items, name="x")
    b = write_pack(tmp_path / "b.json", *reversed(items), name="x")
    assert a.read_bytes() == b.read_bytes()
    json.loads(a.read_text())


def test_a_pack_truncated_at_any_byte_is_refused(tmp_path):
    path = write_pack(tmp_path / "p.json", entry())
    whole = path.read_bytes()
    for length in range(len(whole.rstrip())):
        path.write_bytes(whole[:length])
        with pytest.raises(packs.PackError, match=r"p\.json"):
            packs.read(path)


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"ejkernel_pack": 2, "entries": []}', '{"ejkernel_pack": 1}', "[" * 999]
)
def test_other_json_is_refused(tmp_path, content):
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(packs.PackError):
        packs.read(tmp_path / "p.json")


def test_a_broken_entry_does_not_spoil_its_pack(tmp_path):
    path = write_pack(tmp_path / "p.json", entry(block=1), entry("other", 2))
    data = json.loads(path.read_text())
    data["entries"][0] = {"schema": 7}
    path.write_text(json.dumps(data))
    cache = PersistentCache(tmp_path / "store", packs=path)
    with pytest.warns(StoreWarning, match="entry 0: written with schema 7"):
        assert len(cache) == 1


# Layers.


def test_the_store_wins_over_packs_and_earlier_packs_over_later(tmp_path):
    first = write_pack(tmp_path / "first.json", entry("a", 1), entry("b", 1))
    second = write_pack(tmp_path / "second.json", entry("a", 2), entry("b", 2), entry("c", 2))
    cache = PersistentCache(tmp_path / "store", packs=[first, second])
    cache.put("a", Config(0))
    answers = {key: cache.lookup(key) for key in "abc"}
    assert {key: (e.cfg.block, e.layer) for key, e in answers.items()} == {
        "a": (0, "store"),
        "b": (1, "first"),
        "c": (2, "second"),
    }
    assert sorted((e.key, e.layer) for e in cache.entries()) == [("a", "store"), ("b", "first"), ("c", "second")]
    assert len(cache) == 3
    assert cache.delete("a")
    assert cache.get("a") == Config(1)
    assert not cache.delete("b")


def test_a_directory_serves_as_a_pack_and_is_never_written(tmp_path):
    shared = PersistentCache(tmp_path / "shared")
    shared.put("a", Config(1))
    write_pack(tmp_path / "shared" / "more.json", entry("b", 2))
    before = sorted(p for p in shared.path.rglob("*"))
    cache = PersistentCache(tmp_path / "mine", packs=[shared.path])
    assert (cache.lookup("a").layer, cache.lookup("b").layer) == ("shared", "more")
    cache.put("a", Config(3))
    assert shared.get("a") == Config(1)
    assert sorted(p for p in shared.path.rglob("*")) == before
    shared.put("later", Config(4))
    assert cache.get("later") == Config(4)


def test_the_environment_names_packs(tmp_path, monkeypatch, no_packages):
    paths = [write_pack(tmp_path / f"{name}.json", entry(name, i)) for i, name in enumerate("xy")]
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "home"))
    monkeypatch.setenv("EJKERNEL_CACHE_PACKS", os.pathsep.join(map(str, paths)))
    assert (PersistentCache().get("x"), PersistentCache().get("y")) == (Config(0), Config(1))
    assert PersistentCache(tmp_path / "own").get("x") is None
    assert PersistentCache(packs=[]).get("x") is None


def test_packs_of_the_environment_come_before_those_of_packages(monkeypatch):
    monkeypatch.setattr(packs, "from_packages", lambda: ["of a package"])
    monkeypatch.setenv(packs.VARIABLE, f"first.json{os.pathsep}second.json")
    assert packs.default() == ["first.json", "second.json", "of a package"]


def test_urls_in_the_environment_are_not_cut_at_their_colon(monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_PACKS", "gs://bucket/a.json:/b.json::s3://c/d.json")
    assert packs.from_environment() == ["gs://bucket/a.json", "/b.json", "s3://c/d.json"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("http://host:8080/p.json", ["http://host:8080/p.json"]),
        ("a.json:http://host:8080/p.json:/b.json", ["a.json", "http://host:8080/p.json", "/b.json"]),
        ("s3://u:p@[::1]:9000/c.json:s3://b/d.json", ["s3://u:p@[::1]:9000/c.json", "s3://b/d.json"]),
        ("gs://bucket:/b.json", ["gs://bucket", "/b.json"]),
    ],
)
def test_urls_in_the_environment_keep_their_ports_and_users(monkeypatch, text, parts):
    monkeypatch.setattr(os, "pathsep", ":")
    monkeypatch.setenv("EJKERNEL_CACHE_PACKS", text)
    assert packs.from_environment() == parts


@pytest.mark.shipped_packs
def test_installed_packages_bring_packs_without_being_imported(tmp_path, monkeypatch):
    site = tmp_path / "site"
    package = site / "trap_package"
    (package / "packs").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    write_pack(package / "packs" / "h200.json", entry("in directory", 1))
    write_pack(package / "single.json", entry("in file", 2))
    info = site / "trap_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: trap-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[ejkernel.packs]\na = trap_package.packs\nb = trap_package.single\nc = trap_package.absent\nd = nowhere\n"
    )
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "home"))
    monkeypatch.delenv("EJKERNEL_CACHE_PACKS", raising=False)
    cache = PersistentCache()
    assert (cache.get("in directory"), cache.get("in file")) == (Config(1), Config(2))
    assert cache.lookup("in directory").layer == "h200"
    assert "trap_package" not in sys.modules


def test_a_pack_that_is_missing_is_left_out_with_one_warning(tmp_path):
    cache = PersistentCache(tmp_path / "store", packs=[tmp_path / "absent.json"])
    with pytest.warns(StoreWarning, match=r"absent\.json.*left out"):
        assert cache.get("x") is None
    assert cache.get("x") is None


def test_remote_packs_need_fsspec(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(packs.PackError, match=r"pip install 'ejkernel\[remote\]'"):
        packs.read("gs://bucket/pack.json")
    with pytest.raises(packs.PackError, match="need fsspec"):
        packs.write("s3://bucket/pack.json", [])
    with pytest.warns(StoreWarning, match="need fsspec"):
        assert PersistentCache(tmp_path, packs=["gs://bucket/pack.json"]).get("x") is None


def test_remote_packs_with_fsspec(tmp_path):
    pytest.importorskip("fsspec")
    packs.write("memory://bucket/remote.json", [entry("a", 3)])
    cache = PersistentCache(tmp_path, packs=["memory://bucket/remote.json"])
    assert cache.get("a") == Config(3)
    assert cache.lookup("a").layer == "remote"
    with pytest.raises(packs.PackError, match="nosuchscheme"):
        packs.read("nosuchscheme://x")
    with pytest.raises(packs.PackError, match="absent"):
        packs.read("memory://bucket/absent.json")


def test_whatever_a_remote_backend_raises_is_a_pack_that_is_left_out(tmp_path, monkeypatch):
    fsspec = pytest.importorskip("fsspec")

    def refuse(*_):
        raise RuntimeError("token expired")

    monkeypatch.setattr(fsspec, "open", refuse)
    with pytest.warns(StoreWarning, match="RuntimeError: token expired It is left out"):
        assert PersistentCache(tmp_path, packs=["gs://bucket/p.json"]).get("x") is None
    with pytest.raises(packs.PackError, match="token expired"):
        packs.write("gs://bucket/p.json", [entry()])


def test_of_two_entries_for_one_key_the_first_counts_for_every_reader(tmp_path):
    path = write_pack(tmp_path / "p.json", entry(block=1), entry(block=2))
    assert PersistentCache(tmp_path / "a", packs=[path]).get(KEY) == Config(1)
    own = PersistentCache(tmp_path / "b")
    merging.add_all(own, layers.entries_of(path))
    assert own.get(KEY) == Config(1)


# What a pack may make.


class Base:
    """Of no fields itself."""


@dataclasses.dataclass(frozen=True)
class Tile(Base):
    rows: int = 1


@dataclasses.dataclass(frozen=True)
class Open:
    tile: Base | None = None
    extra: Any = None


@dataclasses.dataclass
class Planted:
    made = 0

    def __post_init__(self):
        Planted.made += 1


def hostile_pack(path, value, key=None):
    data = entries.to_data(entry())
    data["cfg"] = {"type": f"{Open.__module__}:Open", "value": value}
    if key is not None:
        data |= {"device": "_", "op_id": "_", "key": key}
    path.write_text(json.dumps({"ejkernel_pack": 1, "name": "p", "entries": [data]}))
    return path


PLANTED: dict[str, Any] = {"$type": f"{Planted.__module__}:Planted", "fields": {}}


@pytest.mark.parametrize(
    "value", [{"extra": PLANTED}, {"extra": {"$tuple": [{"a": [PLANTED]}]}}, {"tile": PLANTED}, {"extra": [PLANTED]}]
)
@pytest.mark.parametrize("imported", [False, True])
def test_a_pack_makes_no_class_that_the_fields_do_not_name(tmp_path, value, imported):
    path, home = hostile_pack(tmp_path / "p.json", value), tmp_path / "store"
    if imported:
        merging.add_all(PersistentCache(home), layers.entries_of(path))
    cache = PersistentCache(home, packs=[] if imported else [path])
    with pytest.warns(StoreWarning, match=r"Planted' is none of them.*counts as absent"):
        assert cache.get(KEY, cfg_type=Open) is None
    assert [p.text for p in upkeep.verify(path)] == []
    assert Planted.made == 0


def test_a_key_in_a_pack_makes_no_class(tmp_path):
    path = hostile_pack(tmp_path / "p.json", {}, key={"$tuple": [PLANTED]})
    assert packs.read(path).entries == []
    assert Planted.made == 0


def test_a_pack_makes_subclasses_of_what_a_field_names(tmp_path):
    tile = {"$type": f"{Tile.__module__}:Tile", "fields": {"rows": 3}}
    path = hostile_pack(tmp_path / "p.json", {"tile": tile})
    assert PersistentCache(tmp_path / "store", packs=[path]).get(KEY, cfg_type=Open) == Open(Tile(3))


class Color(enum.Enum):
    RED = 1


class Mask(enum.Flag):
    LOW = 1

    @classmethod
    def _missing_(cls, value):
        raise AssertionError("runs")


def test_a_pack_names_members_of_enums_but_makes_no_flags(tmp_path):
    name = lambda cls: {"$enum": f"{cls.__module__}:{cls.__name__}"}
    path = hostile_pack(tmp_path / "p.json", {"extra": {**name(Color), "name": "RED"}})
    assert PersistentCache(tmp_path / "a", packs=[path]).get(KEY, cfg_type=Open) == Open(extra=Color.RED)
    path = hostile_pack(tmp_path / "p.json", {"extra": {**name(Mask), "value": 8}})
    with pytest.warns(StoreWarning, match="Mask' is none of them"):
        assert PersistentCache(tmp_path / "a", packs=[path]).get(KEY, cfg_type=Open) is None


def test_the_own_store_reads_back_classes_that_no_field_names(tmp_path):
    """In another process, which has not written one itself: the store is the user's own."""
    [data] = json.loads(hostile_pack(tmp_path / "p.json", {"extra": PLANTED}).read_text())["entries"]
    assert entries.from_data(data).typed(Open).cfg == Open(extra=Planted())
    Planted.made = 0


# Merging and comparing.


def measured(block, *, complete=True, jax="0.10.2", half=0.01, at="2026-01-01T00:00:00+00:00"):
    statistics = {"estimate": {"median_s": 1.0, "low_s": 1 - half, "high_s": 1 + half}}
    return entry(block=block, complete=complete, statistics=statistics, provenance={"jax": jax, "time": at})


FROM_WORST_TO_BEST = [
    measured(0, complete=False, jax="0.12.0", half=0.001, at="2030-01-01T00:00:00+00:00"),
    measured(1, jax="0.9.9", half=0.001, at="2030-01-01T00:00:00+00:00"),
    measured(2, jax="0.10.2.dev1", half=0.001),
    measured(3, half=0.02, at="2030-01-01T00:00:00+00:00"),
    measured(4, half=0.01),
    measured(5, half=0.01, at="2026-01-02T00:00:00+00:00"),
]


@pytest.mark.parametrize(("worse", "better"), [*itertools.combinations(FROM_WORST_TO_BEST, 2)])
def test_the_better_founded_entry_stays(worse, better):
    assert merging.better(worse, better) is merging.better(better, worse) is better
    assert merging.merge([[worse], [better]]) == merging.merge([[better], [worse]]) == {better.place: better}


def test_of_two_equally_founded_entries_the_first_stays():
    one, two = measured(1), measured(2)
    assert merging.better(one, two) is one
    assert merging.better(two, one) is two


def test_an_entry_without_statistics_or_provenance_can_be_merged():
    bare, full = entry(block=1), measured(2)
    assert merging.better(bare, full) is full


@pytest.mark.parametrize(("keep", "expected"), [("better", 9), ("mine", 1), ("theirs", 9)])
def test_import_keeps_whose_entry_it_is_told(tmp_path, keep, expected):
    cache = PersistentCache(tmp_path)
    cache.add(measured(1, half=0.02))
    done = merging.add_all(cache, [measured(9, half=0.01), entry("new", 5)], keep)
    assert cache.get(*KEY) == Config(expected)
    assert cache.get("new") == Config(5)
    assert (done.added, done.replaced, done.kept) == ((1, 0, 1) if keep == "mine" else (1, 1, 0))
    again = merging.add_all(cache, [entry("new", 5)] if keep == "mine" else [], keep)
    assert again.replaced == 0


def test_import_keeps_a_better_entry_of_mine(tmp_path):
    cache = PersistentCache(tmp_path)
    cache.add(measured(1, half=0.01))
    assert merging.add_all(cache, [measured(9, half=0.02)]).kept == 1
    assert cache.get(*KEY) == Config(1)


def test_entries_keep_their_provenance_on_the_way_through_packs(tmp_path):
    original = measured(3)
    pack = write_pack(tmp_path / "p.json", original)
    cache = PersistentCache(tmp_path / "store")
    merging.add_all(cache, layers.entries_of(pack))
    assert merging.same(PersistentCache(cache.path).lookup(*KEY), original)


def test_differences_name_the_fields(tmp_path):
    left = [entry("a", 1), entry("b", 2), entry("c", 3)]
    right = [entry("a", 1, statistics={"n": 1}), entry("b", 4), entry("d", 5)]
    found = {(d.left or d.right).key: d for d in merging.differences(left, right)}
    assert found.keys() == {"b", "c", "d"}
    assert list(found["b"].fields()) == [("block", 2, 4)]
    assert (found["c"].right, found["d"].left) == (None, None)


# Upkeep.


def test_verify_finds_nothing_wrong_with_a_good_store(tmp_path):
    cache = PersistentCache(tmp_path)
    cache.add(measured(1))
    cache.append_trial(KEY, {"a": 1})
    with cache.tuning_lock(KEY):
        assert list(upkeep.verify(tmp_path)) == []
    packs.write(tmp_path / "p.json", cache.entries())
    assert list(upkeep.verify(tmp_path / "p.json")) == []


def test_verify_reports_each_kind_of_problem(tmp_path):
    cache = PersistentCache(tmp_path)
    for name in ("broken", "moved", "misfit", "unknown", "signed"):
        cache.put("dev", "op", name, Config(), signature={"op": "x"} if name == "signed" else None)
    folder = tmp_path / "dev" / "op"
    (folder / "broken.json").write_text("{")
    (folder / "moved.json").rename(folder / "elsewhere.json")
    for name, old, new in (("misfit", '"block"', '"blocks"'), ("unknown", ":Config", ":Gone")):
        path = folder / f"{name}.json"
        path.write_text(path.read_text().replace(old, new))
    (folder / "x.json.broken").write_text("")
    found = {os.path.basename(p.where): (p.level, p.text) for p in upkeep.verify(tmp_path)}
    assert {name: level for name, (level, _) in found.items()} == {
        "broken.json": "error",
        "elsewhere.json": "error",
        "misfit.json": "error",
        "signed.json": "note",
        "x.json.broken": "note",
    }
    assert "no longer has the field(s) blocks" in found["misfit.json"][1]


def test_verify_reports_entries_that_are_twice_in_a_pack(tmp_path):
    path = write_pack(tmp_path / "p.json", entry(), entry())
    assert [p.text for p in upkeep.verify(path)] == ["is there twice."]
    assert [p.level for p in upkeep.verify(tmp_path / "absent.json")] == ["error"]


def test_prune_removes_litter_and_nothing_else(tmp_path):
    cache = PersistentCache(tmp_path)
    cache.put(*KEY, Config())
    cache.append_trial(("dev", "op", "unfinished"), {"a": 1})
    with cache.tuning_lock(KEY):
        pass
    folder = tmp_path / "dev" / "op"
    (tmp_path / "empty" / "op").mkdir(parents=True)
    day_ago = time.time() - 2 * 86400
    litter = [folder / f".tmp-{host()}-{2**22 + 1}-aa", folder / ".tmp-00000000-1-bb"]
    litter.append(tmp_path / ".locks" / "old.lock")
    kept = [folder / "x.json.broken", folder / f".tmp-{host()}-{os.getpid()}-cc", folder / ".tmp-00000000-1-dd"]
    for path in [*litter, *kept]:
        path.write_text("")
    for path in litter[1:]:
        os.utime(path, (day_ago, day_ago))
    before = {p for p in tmp_path.rglob("*") if p.is_file()}
    assert set(upkeep.prune(tmp_path, dry_run=True)) == set(litter)
    assert {p for p in tmp_path.rglob("*") if p.is_file()} == before
    assert set(upkeep.prune(tmp_path)) == set(litter)
    assert {p for p in tmp_path.rglob("*") if p.is_file()} == before - set(litter)
    # Folders that it did not empty are somebody else's.
    assert (tmp_path / "empty" / "op").is_dir()
    lonely = tmp_path / "lonely" / "op" / f".tmp-{host()}-{2**22 + 1}-ee"
    lonely.parent.mkdir(parents=True)
    lonely.write_text("")
    assert upkeep.prune(tmp_path) == [lonely]
    assert not (tmp_path / "lonely").exists()
    assert cache.get(*KEY) == Config()


def test_prune_removes_old_and_broken_entries_on_request(tmp_path):
    cache = PersistentCache(tmp_path)
    cache.put("old", 1, provenance={"time": "2001-01-01T00:00:00+00:00"})
    cache.append_trial("old", {"a": 1})
    cache.put("future", 1, provenance={"time": "2101-01-01T00:00:00+00:00"})
    cache.put("undated", 1, provenance={"time": "yesterday"})
    cache.put("new", 1)
    cache.put("dev", "op", "broken", 1)
    (tmp_path / "dev" / "op" / "broken.json").write_text("{")
    (tmp_path / "dev" / "op" / "aside.json.broken").write_text("{")
    assert upkeep.prune(tmp_path) == []
    assert len(upkeep.prune(tmp_path, older_than_days=30)) == 2
    assert len(upkeep.prune(tmp_path, broken=True)) == 2
    assert sorted(PersistentCache(tmp_path)) == ["future", "new", "undated"]


def test_a_writer_survives_being_pruned(tmp_path, monkeypatch):
    """The directory that it has just made goes before its file is in it: it makes it again."""
    cache, pruned = PersistentCache(tmp_path), []

    def name_after_pruning(_):
        folder = tmp_path / "dev" / "op"
        if not pruned:
            (folder / f".tmp-{host()}-{2**22 + 1}-aa").write_text("")
            upkeep.prune(tmp_path)
            pruned.append(not folder.exists())
        return "name"

    monkeypatch.setattr("secrets.token_hex", name_after_pruning)
    cache.put("dev", "op", "k", 1)
    assert pruned == [True]
    assert PersistentCache(tmp_path).get("dev", "op", "k") == 1
