"""`ejkernel tune OP --suite`: the named workloads of an operation, each once."""

import dataclasses
import json

import jax
import pytest

from ejkernel.cli import main
from ejkernel.modules import GroupedMatmul, grouped_matmul
from ejkernel.ops import PersistentCache
from ejkernel.ops.store import packs
from ejkernel.ops.utils import meta

TAKE = "tests.outside_operation:Take"
QUICK = ("--isolation", "thread", "--budget", "20")


@pytest.fixture
def suite(capsys, tmp_path):
    def run(name, *args, store=tmp_path / "store"):
        with pytest.raises(SystemExit) as stopped:
            main(["tune", name, "--suite", *QUICK, "--store", str(store), *map(str, args)])
        out, err = capsys.readouterr()
        return stopped.value.code or 0, out, err

    return run


def measured(store):
    return {tuple(e.place): e.provenance["time"] for e in PersistentCache(store).entries()}


def test_workloads_of_this_device_are_listed_with_their_backward(suite):
    code, out, _ = suite("rms_norm", "--list", "--json")
    assert code == 0
    rows = json.loads(out)
    assert [(row["workload"], row["op_id"], row["state"]) for row in rows] == [
        ("4096 x 1024, float32", "rms_norm", "open"),
        ("4096 x 1024, float32", "rms_norm.vjp", "open"),
    ]
    assert "4096 x 1024, float32  rms_norm.vjp" in suite("rms_norm", "--list")[1]


def test_calls_that_a_gradient_makes_are_part_of_a_suite(suite):
    _, out, _ = suite("grouped_matmul", "--list", "--json")
    listed = {(row["op_id"], row["call_key"]) for row in json.loads(out)}
    (workload,) = GroupedMatmul.workloads("cpu")
    lhs, rhs, sizes = workload.abstract()[0]
    total = lambda lhs, rhs, sizes: grouped_matmul(lhs, rhs, sizes).sum()
    labels = meta.find_labels_in_lowered(jax.jit(jax.value_and_grad(total, (0, 1))).lower(lhs, rhs, sizes))
    assert listed == {(parts.op_id, parts.call_key) for parts in map(meta.parse_label, labels)}
    assert {op_id for op_id, _ in listed} == {"grouped_matmul", "grouped_matmul_drhs"}


def test_a_suite_of_an_outside_author_is_tuned_once_and_goes_on_where_it_was(suite, tmp_path):
    store, pack = tmp_path / "store", tmp_path / "pack.json"
    code, _, err = suite(TAKE, "--only", "few")
    assert code == 0
    assert "1 of 2: outside.take, few rows: measured" in err
    first = PersistentCache(store)
    assert len(first) == 2
    code, out, err = suite(TAKE, "--out", pack)
    assert (code, "2 of 4 calls decided already" in err) == (0, True)
    assert "4 of 4: outside.take.vjp, many rows: measured" in err
    assert "few rows" not in err
    assert {e.place.op_id for e in packs.read(pack).entries} == {"outside.take", "outside.take.vjp"}
    assert len(packs.read(pack).entries) == 4
    known = {e.place: e.provenance for e in PersistentCache(store).entries()}
    code, out, _ = suite(TAKE, "--json")
    assert json.loads(out)["tuned"] == []
    assert len(json.loads(out)["decided"]) == 4
    assert {e.place: e.provenance for e in PersistentCache(store).entries()} == known
    code, out, _ = suite(TAKE, "--again", "--only", "few*", "--json")
    assert [row["workload"] for row in json.loads(out)["tuned"]] == ["few rows", "few rows"]


def test_a_pack_counts_as_decided_and_keeps_what_it_holds_of_others(suite, tmp_path):
    pack = tmp_path / "here.json"
    assert suite(TAKE, "--only", "few", "--out", pack)[0] == 0
    held = packs.read(pack).entries
    trials = {"candidates": [{"cfg": "a", "status": "raced out"}, {"cfg": "b", "status": "winner"}]}
    other = dataclasses.replace(held[0], key=(held[0].place.device, "another.op", "0" * 16), statistics=trials)
    packs.write(pack, [*held, other], "here")
    code, out, err = suite(TAKE, "--out", pack, "--no-trials", "--json", store=tmp_path / "elsewhere")
    assert code == 0, err
    assert [row["workload"] for row in json.loads(out)["tuned"]] == ["many rows", "many rows"]
    assert sorted({e.place.op_id for e in packs.read(pack).entries}) == [
        "another.op",
        "outside.take",
        "outside.take.vjp",
    ]
    assert len(packs.read(pack).entries) == 5
    (kept,) = [e for e in packs.read(pack).entries if e.place.op_id == "another.op"]
    assert kept.statistics == trials


def test_an_entry_of_an_earlier_source_is_measured_again(suite, tmp_path):
    assert suite(TAKE, "--only", "few")[0] == 0
    cache = PersistentCache(tmp_path / "store")
    for entry in cache.entries(op_id="outside.take"):
        cache.add(dataclasses.replace(entry, provenance={**entry.provenance, "kernel_source": "2:then"}))
    states = {row["op_id"]: row["state"] for row in json.loads(suite(TAKE, "--only", "few", "--list", "--json")[1])}
    assert states == {"outside.take": "open", "outside.take.vjp": "decided"}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((TAKE, "--only", "no such"), "--only: no workload matches no such. There are: 'few rows', 'many rows'."),
        (("tests.offline_program:Mixer",), "has no workloads for a CPU"),
        ((TAKE, "--args", "f32[2]"), "--suite goes with the name of an operation"),
    ],
)
def test_what_is_no_suite_is_named(suite, args, words):
    code, _, err = suite(*args)
    assert code == 2
    assert words in err


def test_options_of_suites_need_one(capsys):
    with pytest.raises(SystemExit):
        main(["tune", TAKE, "--again", "--args", "f32[2,2],s32[1]"])
    assert "--only and --again go with --suite" in capsys.readouterr().err
