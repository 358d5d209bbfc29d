import dataclasses
import json
import os
import re
import signal
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from ejkernel.cli import main, tune
from ejkernel.cli.arguments import ArgumentTextError, parse_arrays, parse_settings
from ejkernel.ops import Autotuner, Invocation, PersistentCache
from ejkernel.ops.offline import fleet, specs
from ejkernel.ops.store import entry as entries
from ejkernel.ops.store import packs
from ejkernel.ops.tuning.bench import Bench
from tests import offline_program


def ejkernel(capsys, *args):
    with pytest.raises(SystemExit) as exit_:
        main([str(a) for a in args])
    out = capsys.readouterr()
    return exit_.value.code, out.out, out.err


def test_named_kernel_is_tuned_and_stored(capsys, tmp_path):
    code, out, err = ejkernel(
        capsys, "tune", "tests.offline_program:Mixer", "--args", "f32[2,8,16]", "--set", "causal=false",
        "--store", tmp_path / "store", "--out", tmp_path / "pack.json", "--isolation", "thread",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert "tests.offline_program.Mixer" in out
    (entry,) = PersistentCache(tmp_path / "store").entries()
    assert entry.cfg in [offline_program.Rows(1), offline_program.Rows(4)]
    assert entry.signature["kwargs"]["causal"] == {"static": False}
    assert len(json.loads((tmp_path / "pack.json").read_text())["entries"]) == 1


def test_candidates_run_in_a_process_of_their_own_by_default(capsys, tmp_path):
    code, out, _ = ejkernel(
        capsys, "tune", "tests.offline_program:Mixer", "--args", "f32[1,4,8]", "--store", tmp_path, "--json"
    )
    assert code == 0
    (row,) = json.loads(out)["tuned"]
    assert row["measurement"]["median_ms"] > 0


def test_calls_are_spread_over_an_executor(capsys, tmp_path):
    code, out, err = ejkernel(
        capsys, "tune", "tests.offline_program:Mixer", "--args", "f32[1,4,8]", "--store", tmp_path,
        "--isolation", "thread", "--executor", "tests.ops.offline.test_fleet:make_executor",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert "Rows(rows=" in out
    assert len(PersistentCache(tmp_path)) == 1


def test_interrupted_tuning_on_a_worker_leaves_a_finished_one_alone(capsys, tmp_path, monkeypatch):
    call = (
        "tune", "tests.offline_program:Mixer", "--args", "f32[1,4,8]", "--store", tmp_path,
        "--isolation", "thread", "--executor", "tests.ops.offline.test_fleet:make_executor",
    )  # fmt: skip
    assert ejkernel(capsys, *call)[0] == 0
    (finished,) = PersistentCache(tmp_path).entries()
    stopped = dataclasses.replace(finished, complete=False, statistics={})
    monkeypatch.setattr(
        fleet, "tune_specs", lambda calls, *_: iter([fleet.TunedCall(stopped.place, stopped) for _ in calls])
    )
    assert ejkernel(capsys, *call)[0] == 0
    assert [entry.complete for entry in PersistentCache(tmp_path).entries()] == [True]


def test_budget_that_is_over_too_soon_is_named_on_a_fleet_too(capsys, tmp_path):
    for where in ([], ["--executor", "tests.ops.offline.test_fleet:make_executor"]):
        code, _, err = ejkernel(capsys, "tune", *MIX, "--store", tmp_path, "--budget", "0", *where)
        assert code == 1
        assert re.fullmatch(
            r"not tuned: \S+Mixer \w+: stopped before .*: its budget of 0 s was used up.*larger one\n",
            err,
        )


def test_effort_of_a_tuning_is_set_by_options(capsys, monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(tune, "Autotuner", lambda **settings: made.append(settings) or Autotuner(**settings))
    limits = ["--max-candidates", "1", "--compile-s", "30", "--out", tmp_path / "p.json", "--no-trials"]
    assert ejkernel(capsys, "tune", *MIX, "--store", tmp_path / "s", *limits)[0] == 0
    assert (made[0]["max_candidates"], made[0]["compile_s"]) == (1, 30.0)
    (entry,) = json.loads((tmp_path / "p.json").read_text())["entries"]
    assert {c["status"] for c in entry["statistics"]["candidates"]} == {"winner"}


def test_record_file_is_tuned_and_what_fails_is_named(capsys, tmp_path):
    x = jax.ShapeDtypeStruct((2, 8, 16), jnp.float32)
    good = specs.to_spec(Invocation(kernel=offline_program.MIX, args=(x,), kwargs={"causal": True}))
    bad = {**good, "kernel": "gone.away:Kernel", "call_key": "0" * 16}
    specs.write([good, bad], tmp_path / "record.json")
    code, out, err = ejkernel(
        capsys, "tune", tmp_path / "record.json", "--store", tmp_path / "s", "--isolation", "thread"
    )
    assert code == 1
    assert "mix" in out
    assert "gone.away:Kernel cannot be imported" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["tune", "tests.offline_program:Nothing"], "tests.offline_program:Nothing cannot be imported"),
        (["tune", "tests.offline_program:Mixer", "--args", "f32(3)"], "--args: 'f32(3)' is not of the form"),
        (["tune", "tests.offline_program:Mixer", "--set", "causal"], "--set: 'causal' is not of the form name=value"),
        (["tune", "nowhere.json"], "nowhere.json"),
        (["tune", "x.json", "--args", "f32[1]"], "--args, --set and --grad go with module:Kernel"),
        (["tune", "tests.offline_program:Mixer", "--args", "f32[1,2,3]", "--executor", "nonsense"], "neither dask://"),
        (["tune", ".relative:Kernel"], "kernel .relative:Kernel cannot be imported"),
        (
            ["tune", "tests.offline_program:Mixer", "--args", "f32[1,2,3]", "--executor", "os:getcwd"],
            "makes a str, not",
        ),
        (["labels", "nowhere.hlo"], "not the text of a program"),
        (["tune", "no.such.folder/step"], "not the text of a program"),
        (["tune", "nowhere/step"], "not the text of a program"),
    ],
)
def test_user_errors_are_one_line_and_exit_code_2(capsys, args, message):
    code, _, err = ejkernel(capsys, *args)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_record_without_calls_is_exit_code_1(capsys, tmp_path):
    specs.write([], tmp_path / "record.json")
    for command in ("tune", "explain"):
        code, _, err = ejkernel(capsys, command, tmp_path / "record.json")
        assert code == 1
        assert err.endswith("record.json: the record has no calls.\n")


def test_program_without_labels_and_budget_without_result_are_exit_code_1(capsys, tmp_path):
    (tmp_path / "p.hlo").write_text("HloModule nothing\n")
    code, _, err = ejkernel(capsys, "tune", tmp_path / "p.hlo")
    assert code == 1
    assert "has no labels" in err
    code, _, err = ejkernel(
        capsys, "tune", "tests.offline_program:Mixer", "--args", "f32[2,4,8]", "--budget", "0.000001",
        "--isolation", "thread", "--store", tmp_path / "s",
    )  # fmt: skip
    assert code == 1
    assert "stopped before anything was measured" in err


class Hopeless(offline_program.Mixer):
    """Has a guess, and no candidates."""

    def config_space(self, inv):
        raise ValueError("no space")


HERE = "tests.cli.test_tune"
MIX = ["tests.offline_program:Mixer", "--args", "f32[2,4,8]", "--isolation", "thread"]


@pytest.mark.parametrize(
    "call", [[f"{HERE}:Hopeless", "--args", "f32[2,4,8]", "--isolation", "thread"], [*MIX, "--budget", "0"]]
)
def test_pack_is_left_alone_if_nothing_was_tuned(capsys, tmp_path, call):
    pack = tmp_path / "pack.json"
    pack.write_text(text := '{"ejkernel_pack": 1, "name": "p", "entries": []}')
    code, _, err = ejkernel(capsys, "tune", *call, "--store", tmp_path / "s", "--out", pack)
    assert code == 1
    assert err.splitlines()[-1] == f"not written: {pack}: there is no result to write."
    assert pack.read_text() == text


def held(path, *ops):
    """A pack with an entry of each of these ops."""
    found = [entries.make(("cpu-x", op, "0" * 16), offline_program.Rows(1)) for op in ops]
    packs.write(path, found)
    return {entry.place for entry in packs.read(path).entries}


def test_a_pack_that_is_there_keeps_its_entries_of_other_calls(capsys, tmp_path):
    before = held(pack := tmp_path / "pack.json", "one", "two")
    assert ejkernel(capsys, "tune", *MIX, "--store", tmp_path / "s", "--out", pack)[0] == 0
    after = {entry.place for entry in packs.read(pack).entries}
    assert before < after
    assert len(after) == 3


def test_a_call_that_was_cut_short_replaces_no_complete_entry_of_a_pack(capsys, tmp_path):
    pack = tmp_path / "pack.json"
    command = ["tune", *MIX, "--store", tmp_path / "s", "--out", pack]
    assert ejkernel(capsys, *command)[0] == 0
    (entry,) = packs.read(pack).entries
    assert entry.complete
    assert ejkernel(capsys, *command[:-3], tmp_path / "other", "--max-candidates", "1", *command[-2:])[0] == 0
    (kept,) = packs.read(pack).entries
    assert entries.to_data(kept) == entries.to_data(entry)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", "JSON text: "),
        ('{"other": 1}', "is not a pack"),
        ('{"ejkernel_pack": 1, "entries": [{"schema": 1}]}', "1 entry that cannot be read and would be lost"),
    ],
)
def test_no_file_is_replaced_that_is_no_pack_or_cannot_be_read(capsys, tmp_path, text, said):
    (file := tmp_path / "mine.py").write_text(text)
    code, out, err = ejkernel(capsys, "tune", *MIX, "--store", tmp_path / "s", "--out", file)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: --out: {file}")
    assert said in err
    assert file.read_text() == text
    assert not (tmp_path / "s").exists(), "it was measured first"


def test_a_file_that_cannot_be_written_is_named_before_anything_is_measured(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    code, out, err = ejkernel(capsys, "tune", *MIX, "--store", tmp_path / "s", "--out", tmp_path / "file" / "p.json")
    assert (code, out) == (2, "")
    assert err.startswith(f"error: --out: {tmp_path / 'file' / 'p.json'} cannot be written: {tmp_path / 'file'}")
    assert not (tmp_path / "s").exists()


def test_results_that_cannot_be_stored_are_exit_code_1(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "file" / "x"))
    code, out, err = ejkernel(capsys, "tune", *MIX, "--out", tmp_path / "pack.json")
    assert code == 1
    assert "Rows(rows=" in out
    assert err.splitlines()[-1] == f"not kept: results could not be stored in {tmp_path / 'file' / 'x' / 'configs'}."
    assert len(json.loads((tmp_path / "pack.json").read_text())["entries"]) == 1


def test_labels_without_a_record_name_the_option(capsys, tmp_path):
    program = tmp_path / "p.hlo"
    program.write_text('HloModule p\n  metadata={op_name="jit(f)/ejkernel_ops#mix:0123456789abcdef/dot"}\n')
    code, _, err = ejkernel(capsys, "tune", program)
    assert code == 1
    assert err.startswith(
        f"not tuned: {program}: which calls its labels stand for is not known here; --specs record.json"
    )
    assert err.count("\n") == 1
    code, _, err = ejkernel(capsys, "tune", program, "--specs", "nope.json")
    assert (code, "nope.json" in err) == (2, True)


@pytest.fixture
def record(tmp_path):
    """A record of three calls."""
    calls = [
        Invocation(kernel=offline_program.MIX, args=(jax.ShapeDtypeStruct((1, n, 8), "float32"),)) for n in (4, 5, 6)
    ]
    specs.write([specs.to_spec(inv) for inv in calls], tmp_path / "record.json")
    return tmp_path / "record.json"


def press_ctrl_c(monkeypatch, method, call):
    """Sends Ctrl-C once `Bench` has done something for that call."""
    do, seen = getattr(Bench, method), set()

    def stopping(self, *args):
        done = do(self, *args)
        seen.add(self.problem.args[0].shape)
        if len(seen) == call:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
        return done

    monkeypatch.setattr(Bench, method, stopping)


def test_ctrl_c_ends_the_command_and_keeps_what_was_measured(capsys, monkeypatch, tmp_path, record):
    press_ctrl_c(monkeypatch, "measure", call=2)
    command = ["tune", record, "--isolation", "thread", "--store", tmp_path / "s", "--out", tmp_path / "pack.json"]
    code, out, err = ejkernel(capsys, *command)
    assert code == 130
    assert ["(incomplete)" in line for line in out.splitlines()[1:]] == [False, True]
    assert err == "stopped: 1 of 3 calls not reached.\n"
    kept = json.loads((tmp_path / "pack.json").read_text())["entries"]
    assert sorted(entry["complete"] for entry in kept) == [False, True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_call_that_ctrl_c_stops_before_it_was_measured_did_not_run_out_of_budget(capsys, monkeypatch, tmp_path, record):
    press_ctrl_c(monkeypatch, "build", call=1)
    command = ["tune", record, "--isolation", "thread", "--store", tmp_path / "s", "--out", tmp_path / "pack.json"]
    code, out, err = ejkernel(capsys, *command, "--json")
    assert code == 130
    assert json.loads(out)["tuned"] == []
    first, second, third = err.splitlines()
    assert first.endswith(": stopped before anything was measured")
    assert second.startswith("not written: ")
    assert third == "stopped: 2 of 3 calls not reached."


@pytest.mark.parametrize(
    ("calls", "complete", "text"),
    [
        (1, [], "stopped: 1 of 1 call not reached."),
        (3, [True], "stopped: 2 of 3 calls not reached."),
        (1, [False], "stopped in the last call; the same command resumes it."),
        (2, [True, True], "stopped after the last call."),
    ],
)
def test_ctrl_c_says_what_is_left(calls, complete, text):
    from ejkernel.cli.tune import _stopped

    assert _stopped(calls, [{"complete": each, "error": None} for each in complete]) == text


def test_second_ctrl_c_does_not_wait_for_the_call(capsys, monkeypatch, tmp_path, record):
    def twice(self, *args):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
        return []

    monkeypatch.setattr(Bench, "build", twice)
    code, _, err = ejkernel(capsys, "tune", record, "--isolation", "thread", "--store", tmp_path / "s")
    assert (code, err) == (130, "stopped: 3 of 3 calls not reached.\n")


def test_command_finds_kernels_of_the_current_directory(tmp_path):
    import subprocess
    import sys

    (tmp_path / "mine.py").write_text(Path(offline_program.__file__).read_text())
    script = Path(sys.executable).with_name("ejkernel")
    command = [str(script), "tune", "mine:Mixer", "--args", "f32[1,4,8]", "--store", "s", "--isolation", "thread"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_labels_of_a_program_without_any_is_exit_code_1(capsys, tmp_path):
    (tmp_path / "p.hlo").write_text("HloModule nothing\n")
    code, out, err = ejkernel(capsys, "labels", tmp_path / "p.hlo")
    assert (code, out) == (1, "")
    assert "p.hlo: the program has no labels" in err


def test_arrays_are_read_in_either_spelling():
    found = parse_arrays("f32[2,3], bf16[], int8[4] ,pred[1],u16[2],float16[1,1]")
    assert [(x.shape, x.dtype.name) for x in found] == [
        ((2, 3), "float32"), ((), "bfloat16"), ((4,), "int8"), ((1,), "bool"), ((2,), "uint16"), ((1, 1), "float16"),
    ]  # fmt: skip
    assert parse_arrays("") == ()
    with pytest.raises(ArgumentTextError, match="'q8' is not a dtype"):
        parse_arrays("q8[1]")
    with pytest.raises(ArgumentTextError, match="float64 would be float32: set JAX_ENABLE_X64=1"):
        parse_arrays("f64[1]")


def test_settings_are_json_or_text():
    assert parse_settings(["a=true", "b=1.5", "c=text", "d=[1, 2]", "e="]) == {
        "a": True, "b": 1.5, "c": "text", "d": [1, 2], "e": "",
    }  # fmt: skip
    assert parse_settings([f"a={'9' * 5000}", f"b={'[' * 50_000}"]) == {"a": "9" * 5000, "b": "[" * 50_000}
    assert parse_settings(["a=True", "b=False", "c=None"]) == {"a": True, "b": False, "c": None}  # As in Python.


def test_version_is_printed(capsys):
    import ejkernel as package

    code, out, _ = ejkernel(capsys, "--version")
    assert (code, out) == (0, f"ejkernel {package.__version__}\n")


@pytest.mark.parametrize(
    ("store", "message"), [("s3://bucket/x", "path must be a local directory"), (__file__, "is a file; a store is a")]
)
def test_store_must_be_a_local_directory(capsys, store, message):
    code, _, err = ejkernel(capsys, "cache", "ls", "--store", store)
    assert code == 2
    assert message in err
