"""Entries of kernels that changed in their source: taken over where the program is the same, left alone elsewhere."""

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from ejkernel import cli
from ejkernel.modules import RmsNorm
from ejkernel.ops import Invocation, PersistentCache
from ejkernel.ops.offline import adoption, lowered_entries
from ejkernel.ops.offline.adoption import OldCodeError, program_text
from ejkernel.ops.store import entry as entries
from ejkernel.ops.store import packs, provenance
from ejkernel.ops.utils import fingerprint
from tests.upgrade.kernels import Reworded

ROOT = Path(__file__).parents[3]
UPGRADE = ROOT / "tests" / "upgrade"
NEW = [f"tests.upgrade.kernels:{name}" for name in ("Moved", "Reworded", "Changed")]
OLD = [f"tests.upgrade.kernels_then:{name}" for name in ("Moved", "Reworded", "Changed")]
OPTIONS = [
    *(word for name in NEW for word in ("--kernel", name)),
    *(word for name in OLD for word in ("--old-kernel", name)),
]


@pytest.fixture
def store(tmp_path):
    return PersistentCache(shutil.copytree(UPGRADE / "store", tmp_path / "store"))


@pytest.fixture
def adopt(capsys):
    def run(*args, old=UPGRADE):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["cache", "adopt", "--old", str(old), *map(str, args)])
        out, err = capsys.readouterr()
        return stopped.value.code or 0, out, err

    return run


def results(out):
    return {row["op_id"]: (row["result"], row["reason"]) for row in json.loads(out)["entries"]}


def held(source):
    return {e.place: entries.to_data(e) for e in source}


@pytest.mark.full
def test_what_makes_the_same_program_is_taken_over_and_the_rest_stays(adopt, store):
    before = held(store.entries())
    code, out, err = adopt(*OPTIONS, "--store", store.path, "--json")
    assert code == 1, err
    found, how = results(out), "by the compiled program"
    assert found["upgrade.changed"] == ("differs", how)
    assert found["upgrade.reworded"] == ("same", how)
    assert found["flash_attention"][0] == "not compared"  # Its older code is not there: today's has another source.
    assert "was measured with source 2:3f86c06c0980e23d" in found["flash_attention"][1]
    assert "upgrade.moved" not in found
    after = held(store.entries())
    (changed,) = [place for place in before if before[place] != after[place]]
    assert changed.op_id == "upgrade.reworded"
    then, now = before[changed].pop("provenance"), after[changed].pop("provenance")
    assert before[changed] == after[changed]
    note = now.pop("taken_over")
    assert note.startswith(f"from source {then['kernel_source']} on 2")
    assert how in note
    assert provenance.changes({"kernel_source": now["kernel_source"]}, Reworded()) is None
    assert {**now, "kernel_source": None} == {**then, "kernel_source": None}


def test_a_dry_run_and_a_pack_leave_their_source_as_it_is(adopt, store, tmp_path, monkeypatch):
    judged = lambda found, *_: [adoption.Verdict(entry=e, result="same", reason="by hand", source="2:0") for e in found]
    monkeypatch.setattr(adoption, "compare", judged)
    before = held(store.entries())
    code, out, _ = adopt("--store", store.path, "--op", "upgrade.reworded", "--dry-run", "--old-kernel", OLD[0])
    assert code == 0
    assert "1 entry would be taken over, 0 left, 0 current." in out
    assert held(store.entries()) == before
    pack = shutil.copy(UPGRADE / "pack.json", tmp_path / "then.json")
    code, out, _ = adopt(pack, "--op", "upgrade.reworded", "--out", tmp_path / "now.json", "--old-kernel", OLD[0])
    assert code == 0
    assert "1 entry taken over" in out
    assert Path(pack).read_bytes() == (UPGRADE / "pack.json").read_bytes()
    now = {e.place: e for e in packs.read(tmp_path / "now.json").entries}
    assert now.keys() == before.keys()
    assert [place.op_id for place in now if entries.to_data(now[place]) != before[place]] == ["upgrade.reworded"]


@pytest.mark.parametrize(
    "args", [["pack.json"], ["--out", "new.json"], ["pack.json", "--dry-run", "--out", "new.json"]]
)
def test_a_pack_is_written_to_where_one_says_and_the_store_to_itself(adopt, args):
    code, _, err = adopt(*args)
    assert code == 2
    assert "--out: a pack is only read" in err


def test_an_entry_that_no_longer_lowers_is_left_alone_with_the_reason(adopt, store, tmp_path):
    (entry,) = store.entries(op_id="upgrade.reworded")
    store.add(dataclasses.replace(entry, cfg_data={**entry.cfg_data, "value": {"parts": 3}}))
    before = held(store.entries())
    code, out, _ = adopt(*OPTIONS, "--store", store.path, "--op", "upgrade.reworded", "--json")
    assert code == 1
    result, reason = results(out)["upgrade.reworded"]
    assert result == "not compared"
    assert "the old code: ValueError: array split does not result in an equal division" in reason
    assert held(store.entries()) == before


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path / "missing", "neither a directory, nor a wheel, nor a Python interpreter"),
        (lambda path: path, "has no folder ejkernel"),
        (lambda path: broken(path / "ejkernel-0.1-py3-none-any.whl"), "is not a wheel"),
        (lambda path: interpreter(path / "python"), r"the old code cannot be run \(exit code 3\): no such module"),
    ],
)
def test_old_code_that_is_none_is_named(tmp_path, store, make, words):
    with pytest.raises(OldCodeError, match=words), adoption.old_code(make(tmp_path), []) as old:
        adoption.compare(store.entries(op_id="upgrade.reworded"), old, NEW)


def broken(path):
    path.write_text("no zip")
    return path


def interpreter(path):
    path.write_text("#!/bin/sh\necho no such module >&2\nexit 3\n")
    path.chmod(0o755)
    return path


def test_the_tree_that_is_named_is_run_in_place_of_todays(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "ejkernel", tmp_path / "ejkernel", ignore=shutil.ignore_patterns("__pycache__"))
    kernel, names = RmsNorm(), ["ejkernel.modules:RmsNorm", "ejkernel.modules:ThereIsNone"]
    args, kwargs = kernel.prepare(jax.ShapeDtypeStruct((4, 8), jnp.float32))
    inv = Invocation(kernel=kernel, args=args, kwargs=kwargs)
    keywords = {"epsilon": "1e-06", "scale_offset": "0.0"}
    facts = {"signature": inv.signature, "statistics": {"keywords": keywords}, "provenance": provenance.collect(kernel)}
    entry = entries.make(inv.key, kernel.cfg_type(platform="xla"), **facts)
    stranger = dataclasses.replace(entry, key=(inv.key[0], "my_pkg.Op", "0" * 16))
    monkeypatch.setattr(lowered_entries, "source_hash", lambda kernel, first=False: "2:today")
    with adoption.old_code(tmp_path, names) as code:
        unknown, verdict = adoption.compare([stranger, entry], code, names)
    assert (verdict.result, verdict.source, verdict.reason) == ("same", "2:today", "by the program as it is lowered")
    assert unknown.reason == "today's code: no kernel of my_pkg.Op was found."


def test_a_wheel_is_unpacked(tmp_path):
    wheel = tmp_path / "ejkernel-0.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("ejkernel/__init__.py", "")
    with adoption.old_code(wheel, []) as code:
        assert Path(str(code.path).split(os.pathsep)[0], "ejkernel", "__init__.py").is_file()


def test_two_processes_take_over_one_store_and_a_newer_entry_stays(store):
    (entry,) = store.entries(op_id="upgrade.reworded")
    verdict = adoption.Verdict(entry=entry, result="same", reason="by hand", source="2:now")
    other = PersistentCache(store.path)
    with other.tuning_lock(entry.key):
        # Whoever measures holds the lock: this entry is about to be another.
        program = (
            "import sys; from ejkernel.ops import PersistentCache; from ejkernel.ops.offline import adoption;"
            "store = PersistentCache(sys.argv[1]); (entry,) = store.entries(op_id='upgrade.reworded');"
            "verdict = adoption.Verdict(entry=entry, result='same', reason='by hand', source='2:now');"
            "print([v.result for v in adoption.take_over(store, [verdict])])"
        )
        command = [sys.executable, "-c", program, store.path]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "['busy']\n"
    assert [v.result for v in adoption.take_over(other, [verdict])] == ["same"]
    assert [v.result for v in adoption.take_over(store, [verdict])] == ["busy"]
    assert store.own(entry.key).provenance["kernel_source"] == "2:now"
    again = dataclasses.replace(verdict, entry=store.own(entry.key), source="2:later")
    assert adoption.taken_over(again).provenance["taken_over"].count("from source") == 2


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_programs_for_a_device_that_is_not_here_are_compared_by_how_they_are_lowered(monkeypatch):
    kernel, device = RmsNorm(), "gpu-nvidia_h200-sm90-132c-128g"
    args, kwargs = kernel.prepare(*(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((256, 64), (64,))))
    inv = Invocation(kernel=kernel, args=args, kwargs=kwargs)
    monkeypatch.setattr(fingerprint, "device_fingerprint", lambda device=None: device)
    job = {
        "device": device, "device_name": "NVIDIA H200", "op_id": "rms_norm", "call_key": inv.call_key,
        "signature": inv.signature, "keywords": {"epsilon": "1e-06", "scale_offset": "0.0"}, "wanted": "lowered",
        "source": None,
    }  # fmt: skip
    texts = []
    for warps in (4, 4, 8):
        params = {"$type": "ejkernel.kernels.rms_norm.config:RowParams", "fields": {"rows": 2, "num_warps": warps}}
        value = {"fwd_params": params, "bwd_params": None, "platform": "triton"}
        cfg = {"type": "ejkernel.modules.rms_norm:RmsNormConfig", "value": value}
        found = lowered_entries.answer(job | {"cfg": cfg}, {"rms_norm": kernel})
        assert "error" not in found
        texts.append([program_text(text) for text in found["texts"]])
    assert fingerprint.current_device().platform == "cpu"
    assert "tt.get_program_id" in texts[0][0]
    assert texts[0] == texts[1] != texts[2]


def test_names_places_and_notes_are_no_part_of_a_program():
    def text(name, scale, inner):
        body = lambda x: jax.lax.fori_loop(0, 3, lambda i, c: inner(c) * scale, x).sum()
        body.__name__ = name
        lowered = jax.jit(body).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32))
        return lowered.as_text(), str(lowered.compile().as_text())

    @jax.jit
    def first(x):
        return jnp.where(x > 0, x, 0) @ x

    @jax.jit
    def second(value):

        return jnp.where(value > 0, value, 0) @ value

    one, same, other = text("f", 2.0, first), text("long_name", 2.0, second), text("f", 3.0, first)
    assert all(a != b for a, b in zip(one, same, strict=True))
    for a, b, c in zip(one, same, other, strict=True):
        assert program_text(a) == program_text(b) != program_text(c)


PALLAS = """
import dataclasses
import importlib.util
from jax.experimental import pallas as pl
from ejkernel.ops import Kernel

@dataclasses.dataclass(frozen=True)
class Times:
    factor: float = 2.0
    platform: str = "pallas"

def multiply(x_ref, o_ref, *, factor):
    o_ref[...] = x_ref[...] * factor

class Scaled(Kernel):
    def __init__(self):
        super().__init__("tests.scaled")

    def run_pallas(self, x, *, cfg):
        import functools
        return pl.pallas_call(functools.partial(multiply, factor=cfg.factor), out_shape=x)(x)

    def heuristic_cfg(self, inv):
        return Times()
"""


def test_where_a_pallas_kernel_is_written_is_no_part_of_its_program(tmp_path):
    def text(name, source, factor):
        (tmp_path / f"{name}.py").write_text(source)
        spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        kernel = module.Scaled()
        inv = Invocation(kernel=kernel, args=(jax.ShapeDtypeStruct((8, 128), jnp.float32),), kwargs={})
        job = {
            "device": "tpu-v6e", "device_name": "TPU v6 lite", "op_id": kernel.op_id, "call_key": inv.call_key,
            "signature": inv.signature, "keywords": {}, "wanted": "lowered", "source": None,
            "cfg": {"type": f"{name}:Times", "value": {"factor": factor, "platform": "pallas"}},
        }  # fmt: skip
        found = lowered_entries.answer(job, {kernel.op_id: kernel})
        assert "error" not in found
        assert "tpu_custom_call" in found["texts"][0]
        return [program_text(text) for text in found["texts"]]

    limit = jax.config.values["jax_traceback_in_locations_limit"]
    one, moved = text("one", PALLAS, 2.0), text("moved", "\n" * 9 + PALLAS, 2.0)
    assert one == moved
    assert one != text("other", PALLAS, 3.0)
    assert jax.config.values["jax_traceback_in_locations_limit"] == limit
