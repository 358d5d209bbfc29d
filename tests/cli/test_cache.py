"""`ejkernel cache` as a person and as a script see it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ejkernel import cli
from ejkernel.ops.store.files import host
from ejkernel.ops.store.persistent import PersistentCache

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Config:
    block: int = 128
    tile: tuple[int, int] = (1, 2)


@pytest.fixture(autouse=True)
def no_installed_packs(monkeypatch):
    """The package ships packs of its own; these tests are about those they make."""
    monkeypatch.setattr("ejkernel.ops.store.packs.from_packages", list)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "home"))
    monkeypatch.delenv("EJKERNEL_CACHE_PACKS", raising=False)
    return PersistentCache(tmp_path / "home" / "configs")


@pytest.fixture
def filled(store):
    signature = {"op": "pkg.Op", "args": [{"dtype": "float32", "shape": [128, 256]}, {"static": 3}]}
    store.put("gpu", "pkg.Op", "aa11", Config(), signature=signature, statistics={"median_s": 0.5})
    store.put("cpu", "pkg.Other", "aa22", Config(64), complete=False)
    return store


@pytest.fixture
def run(capsys):
    def run(*args):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["cache", *map(str, args)])
        out, err = capsys.readouterr()
        return stopped.value.code or 0, out, err

    return run


def run_json(run, *args, code=0):
    got, out, err = run(*args, "--json")
    assert got == code, err
    return json.loads(out)


def test_path(run, store):
    assert run("path") == (0, f"{store.path}\n", "")
    assert run("path", "--store", "/x")[1] == "/x\n"
    assert run_json(run, "path") == {"path": str(store.path), "exists": False, "packs": []}


def test_ls(run, filled, tmp_path, monkeypatch):
    code, out, _ = run("ls")
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split() == ["DEVICE", "OP", "CALL", "KEY", "ARRAYS", "CONFIG", "STATE", "LAYER"]
    assert lines[1].split() == ["cpu", "pkg.Other", "aa22", "Config(block=64,", "tile=(1,", "2))", "partial", "store"]
    assert "float32[128,256]" in lines[2]
    assert len(run("ls", "--op", "pkg.Op")[1].splitlines()) == 2
    assert [e["call_key"] for e in run_json(run, "ls", "--device", "gpu")] == ["aa11"]
    assert run_json(run, "ls", "--device", "tpu") == []
    assert run_json(run, "ls", "--store", tmp_path / "absent") == []


def test_ls_shows_packs(run, filled, tmp_path, monkeypatch):
    run("export", tmp_path / "team.json")
    filled.delete("gpu", "pkg.Op", "aa11")
    monkeypatch.setenv("EJKERNEL_CACHE_PACKS", str(tmp_path / "team.json"))
    found = {e["call_key"]: (e["layer"], e["in_pack"]) for e in run_json(run, "ls")}
    assert found == {"aa11": ("team", True), "aa22": ("store", False)}
    own, shipped = run("ls")[1].split("\n\nIn packs, which are only read: 1 entry.\n")
    assert ("aa22" in own, "aa11" in own) == (True, False)
    assert [line.split() for line in shipped.splitlines()[1:]] == [["gpu", "pkg.Op", "1", "team"]]
    for listing in (("--packs",), ("--op", "pkg.Op")):
        assert "aa11" in run("ls", *listing)[1].partition("In packs")[2]


def test_a_pack_called_store_is_still_a_pack(run, filled, tmp_path, monkeypatch):
    run("export", tmp_path / "team.json", "--name", "store")
    monkeypatch.setenv("EJKERNEL_CACHE_PACKS", str(tmp_path / "team.json"))
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "fresh"))
    assert {e["in_pack"] for e in run_json(run, "ls")} == {True}
    assert run("export", tmp_path / "mine.json")[0] == 1


def test_show(run, filled):
    filled.append_trial(("gpu", "pkg.Op", "aa11"), {"time_s": 1})
    code, out, _ = run("show", "aa11")
    assert code == 0
    assert "Config(block=128, tile=(1, 2))" in out
    assert "median_s" in out
    shown = run_json(run, "show", "aa1")
    assert (shown["cfg"]["value"]["block"], shown["trials"]) == (128, [{"time_s": 1}])
    code, out, err = run("show", "aa")
    assert (code, out) == (2, "")
    assert "gpu pkg.Op aa11" in err
    assert run("show", "aa", "--device", "cpu")[0] == 0
    assert run("show", "zz")[0] == 1


def test_show_tells_a_tuning_in_words(run, store):
    interval = {"low_ms": 1.25, "high_ms": 2.0}
    statistics = {
        "timer": "wall",
        "measurement": {"median_ms": 1.5, **interval, "samples": 16, "timer": "wall"},
        "speedup": {"value": 1.5, "low": 1.25, "high": 1.75},
        "rounds": 20,
        "seconds": 3.5,
        "keywords": {"causal": "True"},
        "candidates": [
            {"cfg": "C(block=64)", "status": "screened", "reason": "slow", "median_ms": 0.5, **interval, "n": 2},
            {"cfg": "C(block=32)", "status": "wrong", "reason": "off by 3\nmore", "median_ms": None, "guess": True},
            {"cfg": "C(block=128)", "status": "winner", "reason": "", "median_ms": 1.5, **interval, "n": 16},
        ],
    }
    store.put("gpu", "op", "aa11", Config(), statistics=statistics)
    lines = [" ".join(line.split()) for line in run("show", "aa11")[1].splitlines()]
    assert "keywords causal=True" in lines
    assert "time 1.5 ms [1.25, 2], 16 samples" in lines
    assert "speed-up 1.50 [1.25, 1.75]" in lines
    assert lines[-4:] == [
        "BLOCK TIME SAMPLES RESULT",
        "128 1.5 ms [1.25, 2] 16 winner",
        "64 0.5 ms 2 screened: slow",  # Faster by its two samples, but below: it was dropped, and has no interval.
        "32 - - wrong: off by 3 (the guess)",
    ]
    assert not any("{" in line for line in lines)


def test_one_of_a_thing_is_not_several(run, store, tmp_path):
    store.put("gpu", "op", "aa11", Config())
    assert run("export", tmp_path / "p.json")[1] == f"1 entry in {tmp_path / 'p.json'}.\n"
    assert run("merge", tmp_path / "q.json", tmp_path / "p.json")[1] == f"1 entry in {tmp_path / 'q.json'}.\n"
    assert run("diff", tmp_path / "p.json", tmp_path / "q.json")[1] == "0 differences.\n"
    store.put("gpu", "op", "aa11", Config(32))
    assert run("diff", tmp_path / "p.json")[1].splitlines()[-1] == "1 difference."


def test_export_import_and_diff(run, filled, tmp_path):
    pack, other = tmp_path / "p.json", tmp_path / "other"
    assert run("export", pack)[:2] == (0, f"2 entries in {pack}.\n")
    assert json.loads(run("export", "-")[1])["entries"] == json.loads(pack.read_text())["entries"]
    assert run("import", pack, "--store", other)[:2] == (0, "2 added, 0 replaced, 0 kept.\n")
    assert PersistentCache(other).get("gpu", "pkg.Op", "aa11") == Config()
    assert run("diff", pack)[:2] == (0, "0 differences.\n")
    assert run("diff", pack, other)[0] == 0
    filled.put("gpu", "pkg.Op", "aa11", Config(32))
    filled.delete("cpu", "pkg.Other", "aa22")
    code, out, _ = run("diff", pack)
    assert code == 1
    assert "gpu pkg.Op aa11: block: 128 -> 32" in out
    assert "cpu pkg.Other aa22: only on the left: Config(block=64, tile=(1, 2))" in out
    assert [d["call_key"] for d in run_json(run, "diff", pack, code=1)] == ["aa22", "aa11"]
    assert run_json(run, "import", pack, "--keep", "mine") == {"added": 1, "replaced": 0, "kept": 1}
    assert run_json(run, "import", pack, "--keep", "theirs") == {"added": 0, "replaced": 1, "kept": 1}
    assert run("diff", pack)[0] == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--op", "pkg.Opp"), "--op: {store} has no entries of 'pkg.Opp'. Did you mean 'pkg.Op'?"),
        (("--op", "x"), "--op: {store} has no entries of 'x'. It has pkg.Op, pkg.Other."),
        (("--device", "tpu"), "--device: {store} has no entries of 'tpu'."),
        (("--device", "cpu", "--op", "pkg.Op"), "{store} has no entries of 'pkg.Op' on 'cpu'."),
    ],
)
def test_export_of_nothing_writes_nothing_and_says_why(run, filled, tmp_path, options, reason):
    target = tmp_path / "new" / "p.json"
    code, out, err = run("export", target, *options)
    assert (code, out) == (1, "")
    assert err.startswith(f"nothing written: {reason.format(store=filled.path)}")
    assert not target.parent.exists()
    assert run("export", "-", *options)[:2] == (1, "")


def test_export_leaves_out_what_packs_hold(run, filled, tmp_path, monkeypatch):
    PersistentCache(tmp_path / "shipped").put("gpu", "pkg.Op", "aa33", Config(16))
    monkeypatch.setenv("EJKERNEL_CACHE_PACKS", str(tmp_path / "shipped"))
    assert len(run_json(run, "ls")) == 3
    assert run_json(run, "export", tmp_path / "p.json")["entries"] == 2


def test_a_pack_is_not_written_over_one_with_other_entries(run, filled, tmp_path):
    pack = tmp_path / "p.json"
    run("export", pack)
    text = pack.read_text()
    (op, *_) = {entry["op_id"] for entry in json.loads(text)["entries"]}
    run("export", tmp_path / "part.json", "--op", op)
    for command in (("export", pack, "--op", op), ("merge", pack, tmp_path / "part.json")):
        code, out, err = run(*command)
        assert (code, out) == (2, "")
        assert f"TARGET: {pack} is a pack with 1 entry of other calls, which would be lost" in err
        assert pack.read_text() == text
    assert run("merge", pack, pack, tmp_path / "part.json")[0] == 0
    assert run("export", pack)[0] == 0
    (page := tmp_path / "notes.txt").write_text("mine")
    assert run("export", page)[0] == 2
    assert page.read_text() == "mine"


def test_export_of_an_empty_store_leaves_a_good_pack_alone(run, filled, tmp_path):
    run("export", tmp_path / "p.json")
    good = (tmp_path / "p.json").read_text()
    code, _, err = run("export", tmp_path / "p.json", "--store", tmp_path / "empty")
    assert (code, err) == (1, f"nothing written: {tmp_path / 'empty'} has no entries.\n")
    (tmp_path / "empty").mkdir()
    assert run("merge", tmp_path / "p.json", tmp_path / "empty")[0] == 1
    assert (tmp_path / "p.json").read_text() == good


def test_pack_without_trials_has_the_winner_and_the_guess(run, store, tmp_path):
    statuses = [("winner", False), ("raced out", True), ("failed", False), ("raced out", False)]
    candidates = [{"cfg": str(i), "status": s, "guess": g} for i, (s, g) in enumerate(statuses)]
    store.put("gpu", "op", "k", Config(), statistics={"candidates": candidates, "rounds": 3})
    store.put("gpu", "op", "l", Config(), statistics={"candidates": "unreadable"})
    assert run("export", tmp_path / "p.json", "--no-trials")[0] == 0
    first, second = (e["statistics"] for e in json.loads((tmp_path / "p.json").read_text())["entries"])
    assert first == {"candidates": candidates[:2], "rounds": 3}
    assert second == {"candidates": "unreadable"}
    assert run("merge", tmp_path / "q.json", store.path, "--no-trials")[0] == 0
    assert json.loads((tmp_path / "q.json").read_text())["entries"][0]["statistics"] == first


def test_merge(run, filled, tmp_path):
    run("export", tmp_path / "a.json", "--device", "gpu")
    run("export", tmp_path / "b.json")
    assert run_json(run, "merge", tmp_path / "c.json", tmp_path / "a.json", tmp_path / "b.json")["entries"] == 2
    assert (tmp_path / "c.json").read_text() == (tmp_path / "b.json").read_text().replace('"name": "b"', '"name": "c"')


def test_verify_reads_the_configs_of_our_own_operations(run, tmp_path):
    cfg = {"fwd_params": {"$type": "ejkernel.ops:FwdParams", "fields": {"q_blocksize": "many"}}}
    entry = {"schema": 1, "device": "cpu-x", "op_id": "flash_attention", "call_key": "0" * 16, "signature": None,
             "cfg": {"type": "ejkernel.modules.flash_attention:FlashAttentionConfig", "value": {"platfrom": "xla"}},
             "complete": True, "statistics": {}, "provenance": {}}  # fmt: skip
    pack = tmp_path / "p.json"
    for value, words in ((cfg, "many"), ({"platfrom": "xla"}, "platfrom")):
        entry["cfg"]["value"] = value
        pack.write_text(json.dumps({"ejkernel_pack": 1, "name": "p", "entries": [entry]}))
        (found,) = run_json(run, "verify", pack, code=1)
        assert found["level"] == "error"
        assert words in found["text"]


def test_filters_that_match_nothing_say_so(run, filled):
    code, _, err = run("ls", "--op", "pkg.Opp")
    assert (code, err) == (0, "--op: the store with its packs has no entries of 'pkg.Opp'. Did you mean 'pkg.Op'?\n")
    assert json.loads(run("show", "zz", "--json")[1]) == []


def test_adopt_names_a_kernel_that_is_not_there(run, filled, tmp_path):
    code, _, err = run("adopt", "--old", tmp_path, "--kernel", "nosuch:Kernel")
    assert code == 2
    assert "nosuch" in err
    code, _, err = run("adopt", "--old", tmp_path)
    assert code == 2
    assert f"--old: {tmp_path} has no folder ejkernel" in err


def test_verify_and_prune(run, filled):
    assert run("verify")[0] == 0
    path = next(filled.path.rglob("aa22.json"))
    path.write_text("{")
    code, out, _ = run("verify")
    assert code == 1
    assert str(path) in out
    assert [p["level"] for p in run_json(run, "verify", code=1)] == ["error", "note"]
    litter = path.parent / f".tmp-{host()}-{2**22 + 1}-aa"
    litter.write_text("")
    assert run_json(run, "prune", "--dry-run") == [str(litter)]
    assert run("prune")[:2] == (0, f"{litter}\n1 file removed.\n")
    assert run_json(run, "prune", "--broken") == [str(path)]
    assert run("verify")[0] == 0
    assert run("verify", "--store", "/nonexistent")[0] == 0


def test_verify_tells_of_what_it_cannot_list(run, filled, monkeypatch):
    listed, hidden = os.listdir, next(filled.path.rglob("aa22.json")).parent

    def listdir(folder):
        if Path(folder) == hidden:
            raise PermissionError(13, "Permission denied")
        return listed(folder)

    monkeypatch.setattr(os, "listdir", listdir)
    code, out, _ = run("verify")
    assert code == 1
    assert f"{hidden}: cannot be listed" in out


def test_config_that_nobody_wrote_is_shown_as_it_is(run, store, tmp_path):
    entry = {"schema": 1, "device": "d", "op_id": "o", "call_key": "k", "signature": None, "complete": True}
    entry |= {"cfg": {"type": "x:Y", "value": {"$tuple": 5}}, "statistics": {}, "provenance": {}}
    (tmp_path / "p.json").write_text(json.dumps({"ejkernel_pack": 1, "name": "p", "entries": [entry]}))
    assert run("import", tmp_path / "p.json")[0] == 0
    for args in (("ls",), ("show", "k")):
        code, out, _ = run(*args)
        assert code == 0
        assert '{"$tuple": 5}' in out
    assert run("verify")[0] == 1


@pytest.mark.parametrize(
    "args",
    [
        ("diff", "/nonexistent/pack.json"),
        ("import", "/nonexistent/pack.json"),
        ("import", __file__),
        ("merge", "/nonexistent/out.json", "/nonexistent/in.json"),
        ("export", "/proc/self/pack.json"),
        ("export", "nosuchscheme://x"),
        ("import", "--keep", "wrong", "x"),
        ("nothing",),
    ],
)
def test_user_errors_are_one_message_and_exit_code_2(run, filled, args):
    code, out, err = run(*args)
    assert code == 2
    assert err
    assert "Traceback" not in out + err


def test_import_into_an_unwritable_store_fails_aloud(run, filled, tmp_path):
    run("export", tmp_path / "p.json")
    code, _, err = run("import", tmp_path / "p.json", "--store", "/proc/self/store")
    assert code == 2
    assert err.startswith("warning: /proc/self/store: the store cannot be used there")


def test_warnings_are_one_line(run, filled):
    next(filled.path.rglob("aa22.json")).write_text("{")
    code, out, err = run("ls")
    assert code == 0
    assert len(out.splitlines()) == 2
    assert err.startswith("warning: ")
    assert len(err.splitlines()) == 1


def test_names_that_a_terminal_would_obey_or_cannot_show_are_escaped(run, store):
    store.put("gpu", "red\x1b[31m\u202e\n", "aa11", Config())
    store.put("gpu", "lone \ud800", "aa22", Config())
    store.put("gpu", "größe", "aa33", Config())
    code, out, _ = run("ls")
    assert code == 0
    assert r"red\x1b[31m\u202e\n" in out
    assert r"lone \ud800" in out
    assert "größe" in out
    assert run("show", "aa11")[1].startswith(r"red\x1b[31m\u202e")
    assert r"gpu lone \ud800 aa22" in run("show", "aa")[2]


def test_other_characters_than_the_locale_has_are_escaped(tmp_path):
    PersistentCache(tmp_path).put("gpu", "größe \ud800", "aa11", Config())
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    script = "from ejkernel.cli import main; main()"
    command = [sys.executable, "-c", script, "cache", "ls", "--store", tmp_path]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"gr\xf6\xdfe \ud800" in done.stdout


def test_the_installed_command_runs(tmp_path):
    script = "from ejkernel.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "cache", "ls", "--store", tmp_path], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("DEVICE")


def test_importing_the_command_is_free():
    script = "import sys, ejkernel.cli; print({'typer', 'rich', 'jax', 'pydantic'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_file_of_a_result_serves_as_a_pack(store, run, tmp_path):
    from ejkernel.ops import AutotuningResult, Entry

    dumped = tmp_path / "tuned.json"
    AutotuningResult("gpu", (Entry("pkg.Op", "aa11", Config(32)),), ("pkg.Op bb22: no kernel",)).dump(dumped)
    assert run("verify", dumped)[0] == 0
    assert run_json(run, "diff", dumped, code=1)[0]["left"]["value"]["block"] == 32
    assert run_json(run, "import", dumped) == {"added": 1, "replaced": 0, "kept": 0}
    assert store.get("gpu", "pkg.Op", "aa11", cfg_type=Config) == Config(32)
    assert run_json(run, "merge", tmp_path / "all.json", dumped)["entries"] == 1
