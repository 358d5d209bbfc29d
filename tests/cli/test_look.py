"""`info`, `kernels`, `bench`, `explain`, and what all commands share."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import ejkernel as package
from ejkernel.cli import info, main, operations
from ejkernel.ops import Invocation, Kernel, PersistentCache
from ejkernel.ops.offline import specs
from ejkernel.ops.store import entry as entries
from ejkernel.ops.store import packs
from tests import offline_program
from tests.support import fully


def ejkernel(capsys, *args):
    with pytest.raises(SystemExit) as exit_:
        main([str(a) for a in args])
    out = capsys.readouterr()
    return exit_.value.code, out.out, out.err


@dataclass(frozen=True)
class Pieces:
    size: int = 4
    platform: str | None = None


class Doubled(Kernel[Pieces, jax.Array]):
    """Two implementations on a CPU."""

    def run_xla(self, x, *, cfg):
        return x * 2

    def run(self, x, *, cfg):
        return x * 2.0

    def reference(self, x):
        return x + x

    def heuristic_cfg(self, inv):
        return Pieces()


class Picky(Kernel[Pieces, jax.Array]):
    """Refuses every call."""

    def run_xla(self, x, *, cfg):
        return x

    def supports(self, inv, platform):
        return "never in the mood"

    def heuristic_cfg(self, inv):
        return Pieces()


class Broken(Kernel[Pieces, jax.Array]):
    def run(self, x, *, cfg):
        return x

    def heuristic_cfg(self, inv):
        return inv.args[3]


class Strict(Kernel[Pieces, jax.Array]):
    def __init__(self, needed):
        super().__init__("strict")
        self.needed = needed


MIX = "tests.offline_program:Mixer"
HERE = "tests.cli.test_look"
HERE_DIRECTORY = str(Path(__file__).parent)


# --- info and kernels ---


def test_info_tells_devices_versions_store_and_backends(capsys, tmp_path):
    code, out, err = ejkernel(capsys, "info", "--store", tmp_path / "s", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["ejkernel"] == package.__version__
    assert found["versions"]["jax"] == jax.__version__
    assert len(found["devices"]) == len(jax.local_devices())
    assert found["store"] == {
        "path": str(tmp_path / "s"), "exists": False, "writable": True, "entries": 0, "packs": [],
    }  # fmt: skip
    backends = {b["name"]: b["reason"] for b in found["backends"]}
    assert set(backends) == {"triton", "mosaic", "cudnn", "pallas", "xla"}
    assert backends["xla"] is None
    code, out, _ = ejkernel(capsys, "info")
    assert code == 0
    assert os.environ["EJKERNEL_CACHE_DIR"] in out


def test_info_shows_the_rest_when_the_stores_own_variable_is_wrong(capsys, monkeypatch):
    monkeypatch.setenv("EJKERNEL_STALE", "sometimes")
    code, out, err = ejkernel(capsys, "info")
    assert (code, err) == (1, "EJKERNEL_STALE: 'sometimes' is not one of 'use', 'retune', 'ignore'.\n")
    assert os.environ["EJKERNEL_CACHE_DIR"] in out


def test_info_names_variables_with_wrong_values(capsys, monkeypatch):
    monkeypatch.setenv("EJKERNEL_AUTOTUNE", "sometimes")
    for options in ((), ("--json",)):
        code, out, err = ejkernel(capsys, "info", *options)
        assert code == 1
        assert "EJKERNEL_AUTOTUNE: 'sometimes' is not one of 'off', 'on', 'record', 'frozen'." in err
    assert json.loads(out)["problems"] == [err.strip()]


def test_info_names_variables_that_do_not_exist(capsys, monkeypatch):
    monkeypatch.setenv("EJKERNEL_AUTOTUN", "on")
    code, _, err = ejkernel(capsys, "info")
    assert (code, err) == (
        1,
        "EJKERNEL_AUTOTUN: there is no such variable, so it has no effect. Did you mean EJKERNEL_AUTOTUNE?\n",
    )


def test_info_counts_the_entries_of_packs_apart(capsys, monkeypatch, tmp_path):
    PersistentCache(tmp_path / "configs").put("cpu", "mine", "k", Pieces())
    packs.write(tmp_path / "p.json", [entries.make(("cpu", f"op{i}", "k"), Pieces()) for i in range(2)])
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(packs, "from_packages", lambda: [str(tmp_path / "p.json")])
    store = json.loads(ejkernel(capsys, "info", "--json")[1])["store"]
    assert (store["entries"], store["packs"]) == (1, [{"path": str(tmp_path / "p.json"), "entries": 2}])
    _, out, _ = ejkernel(capsys, "info")
    assert f"{tmp_path / 'configs'} (1 entry)" in out
    assert f"{tmp_path / 'p.json'} (2 entries)" in out


class FakeDevice:
    device_kind = "NVIDIA A100"
    compute_capability = "8.0"


@pytest.mark.parametrize(
    ("kind", "backend", "reason"),
    [
        ("cpu", "triton", "needs a GPU, this is a CPU"),
        ("gpu", "pallas", "needs a TPU, this is a GPU"),
        ("gpu", "mosaic", "needs compute capability 9.0, this is 8.0"),
        ("gpu", "triton", None),
        ("gpu", "xla", None),
        ("tpu", "pallas", None),
    ],
)
def test_backend_that_cannot_run_says_why(monkeypatch, kind, backend, reason):
    from ejkernel.ops.utils import fingerprint

    monkeypatch.setattr(fingerprint, "device_kind", lambda: kind)
    monkeypatch.setattr(fingerprint, "current_device", FakeDevice)
    assert info._why_not(backend) == reason


def test_gpu_of_another_maker_has_no_compute_capability(monkeypatch):
    from ejkernel.ops.utils import fingerprint

    monkeypatch.setattr(fingerprint, "device_kind", lambda: "gpu")
    monkeypatch.setattr(FakeDevice, "compute_capability", "gfx942")
    monkeypatch.setattr(fingerprint, "current_device", FakeDevice)
    assert info._why_not("cudnn") == "needs an NVIDIA GPU, this is NVIDIA A100"


def test_kernels_lists_operations_and_their_backends(capsys):
    code, out, _ = ejkernel(capsys, "kernels", "--json")
    assert code == 0
    found = {o["name"]: o for o in json.loads(out)}["flash_attention"]
    assert set(found["here"]) | set(found["elsewhere"]) == {"triton", "mosaic", "cudnn", "pallas", "xla"}
    assert "xla" in found["here"]


def test_packages_announce_operations(monkeypatch, capsys):
    from importlib.metadata import EntryPoint

    points = [
        EntryPoint("mix", MIX, operations.ENTRY_POINTS),
        EntryPoint("lost", "no.where:K", operations.ENTRY_POINTS),
    ]
    monkeypatch.setattr(operations.importlib.metadata, "entry_points", lambda group: points)
    assert isinstance(operations.make("mix"), offline_program.Mixer)
    assert operations.complete("fl") == ["flash_attention"]
    code, out, _ = ejkernel(capsys, "kernels")
    assert code == 0
    assert "lost: kernel no.where:K cannot be imported" in out


# --- explain ---


def test_explain_names_the_nearest_entry_and_what_differs(capsys, tmp_path):
    tune = ["tune", MIX, "--args", "f32[2,8,16]", "--store", tmp_path, "--isolation", "thread", "--json"]
    assert ejkernel(capsys, *tune)[0] == 0
    code, out, _ = ejkernel(capsys, "explain", MIX, "--args", "f32[2,8,16]", "--store", tmp_path)
    assert code == 0
    assert "from persistent" in out
    asked = ["explain", MIX, "--args", "f32[2,32,16]", "--set", "causal=false", "--store", tmp_path]
    code, out, _ = ejkernel(capsys, *asked)
    assert code == 1
    assert "args[0].shape: (2, 8, 16) -> (2, 32, 16)" in out
    assert "kwargs.causal: absent -> false" in out
    code, out, _ = ejkernel(capsys, *asked, "--json")
    assert code == 1
    (call,) = json.loads(out)["calls"]
    assert (call["tier"], call["stored"]) == ("heuristic", False)
    assert len(call["nearest"]["differs"]) == 2


def test_explain_of_an_operation_that_was_never_tuned(capsys, tmp_path):
    code, out, _ = ejkernel(capsys, "explain", MIX, "--args", "f32[2,8,16]", "--store", tmp_path)
    assert code == 1
    assert "nothing is stored for this operation" in out


def test_explain_reads_records_and_tells_what_no_backend_serves(capsys, tmp_path):
    x = jax.ShapeDtypeStruct((2, 8, 16), jnp.float32)
    calls = [specs.to_spec(Invocation(kernel=k, args=(x,))) for k in (offline_program.MIX, Picky("picky"))]
    specs.write([*calls, {**calls[0], "kernel": "gone.away:K", "call_key": "f" * 16}], tmp_path / "record.json")
    code, out, err = ejkernel(capsys, "explain", tmp_path / "record.json", "--store", tmp_path / "s", "--json")
    assert code == 1
    found = {call["op_id"]: call for call in json.loads(out)["calls"]}
    assert found["mix"]["error"] is None
    assert "never in the mood" in found["picky"]["error"]
    assert "gone.away:K cannot be imported" in err


def test_explain_of_a_record_ends_with_a_summary(capsys, tmp_path):
    shapes = [jax.ShapeDtypeStruct((2, 8 * i, 16), jnp.float32) for i in (1, 2)]
    calls = [Invocation(kernel=offline_program.MIX, args=(x,)) for x in shapes]
    specs.write([specs.to_spec(inv) for inv in calls], tmp_path / "record.json")
    command = ["explain", tmp_path / "record.json", "--store", tmp_path / "s"]
    for stored, last in (
        (0, "0 of 2 calls with a config of their own. `ejkernel tune` measures the others."),
        (1, "1 of 2 calls with a config of their own. `ejkernel tune` measures the others."),
        (2, "2 of 2 calls with a config of their own."),
    ):
        if stored:
            PersistentCache(tmp_path / "s").put(*calls[stored - 1].key, offline_program.Rows(1))
        code, out, _ = ejkernel(capsys, *command)
        assert (code, out.splitlines()[-1]) == (0 if stored == 2 else 1, last)
    assert json.loads(ejkernel(capsys, *command, "--json")[1])["stored"] == 2


def test_entry_of_another_device_is_the_nearest_if_there_is_no_other(capsys, tmp_path):
    x = jax.ShapeDtypeStruct((2, 8, 16), jnp.float32)
    inv = Invocation(kernel=offline_program.Mixer(), args=(x,))
    cache = PersistentCache(tmp_path)
    cache.put("gpu-far", inv.op_id, inv.call_key, offline_program.Rows(4), signature=inv.signature)
    code, out, _ = ejkernel(capsys, "explain", MIX, "--args", "f32[2,8,16]", "--store", tmp_path)
    assert code == 1
    assert "device: gpu-far -> " in out


def test_kernel_that_fails_to_guess_is_told_with_the_others(capsys, tmp_path):
    code, out, err = ejkernel(capsys, "explain", f"{HERE}:Broken", "--args", "f32[1]", "--store", tmp_path, "--json")
    assert (code, err) == (1, "")
    assert json.loads(out)["calls"][0]["error"] == "IndexError: tuple index out of range"


# --- bench ---


def test_bench_times_backends_on_every_shape(capsys, tmp_path):
    code, out, err = ejkernel(
        capsys, "bench", f"{HERE}:Doubled", "--args", "f32[8]", "--args", "f32[16]", "--rounds", "6", "--json",
        "--store", tmp_path,
    )  # fmt: skip
    assert (code, err) == (0, "")
    first, second = json.loads(out)
    assert (first["arrays"], second["arrays"]) == ("float32[8]", "float32[16]")
    rows = {row["backend"]: row for row in first["backends"]}
    assert set(rows) == {"xla", "run", "reference"}
    assert min(row["of_best"] for row in rows.values()) == 1.0
    assert all(row["low_ms"] <= row["median_ms"] <= row["high_ms"] for row in rows.values())


def test_bench_tells_a_wrong_backend_and_exits_1(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(Doubled, "run_xla", lambda self, x, *, cfg: x * 5)
    command = ["bench", f"{HERE}:Doubled", "--args", "f32[8]", "--rounds", "3", "--store", tmp_path]
    code, out, err = ejkernel(capsys, *command)
    assert code == 1
    assert "reference" in out
    assert err.startswith("xla: wrong: error")


def test_bench_measures_each_of_two_methods_for_one_platform(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(Doubled, "run", wrong := lambda self, x, *, cfg: x * 3)
    wrong.__name__ = "run"
    command = ["bench", f"{HERE}:Doubled", "--args", "f32[8]", "--rounds", "3", "--store", tmp_path, "--json"]
    code, out, err = ejkernel(capsys, *command)
    assert code == 1
    rows = [(row["backend"], row["status"]) for row in json.loads(out)[0]["backends"]]
    assert rows == [("xla", "measured"), ("run", "wrong"), ("reference", "measured")]
    assert err.startswith("run: wrong: error")


def test_bench_of_a_call_that_nobody_serves_gives_the_reason_and_exits_1(capsys, tmp_path):
    code, out, _ = ejkernel(capsys, "bench", f"{HERE}:Picky", "--args", "f32[8]", "--rounds", "3", "--store", tmp_path)
    assert code == 1
    assert "refused: never in the mood" in out


def test_bench_exits_1_if_only_the_reference_could_run(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(Picky, "reference", lambda self, x: x, raising=False)
    code, out, _ = ejkernel(capsys, "bench", f"{HERE}:Picky", "--args", "f32[8]", "--rounds", "3", "--store", tmp_path)
    assert code == 1
    assert "reference" in out


def test_bench_adds_what_is_stored(capsys, tmp_path):
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    inv = Invocation(kernel=Doubled(), args=(x,))
    PersistentCache(tmp_path).put(*inv.key, Pieces(2), signature=inv.signature)
    command = ["bench", f"{HERE}:Doubled", "--args", "f32[8]", "--rounds", "3", "--store", tmp_path, "--json"]
    code, out, _ = ejkernel(capsys, *command)
    assert code == 0
    assert "stored" in {row["backend"] for row in json.loads(out)[0]["backends"]}


# --- Backwards ---


def test_backward_with_configs_of_its_own_goes_along(capsys, tmp_path):
    norm = ["tests.offline_program:RmsNorm", "--args", "f32[4,32],f32[32]", "--grad", "--store", tmp_path, "--json"]
    code, out, _ = ejkernel(capsys, "explain", *norm)
    assert code == 1
    forward, backward = json.loads(out)["calls"]
    assert backward["op_id"] == f"{forward['op_id']}.vjp"
    assert (backward["method"], backward["error"]) == ("vjp", None)
    code, out, err = ejkernel(capsys, "tune", *norm, "--isolation", "thread")
    assert (code, err) == (0, "")
    assert [row["op_id"] for row in json.loads(out)["tuned"]] == [forward["op_id"], backward["op_id"]]
    assert ejkernel(capsys, "explain", *norm)[0] == 0
    code, out, _ = ejkernel(capsys, "bench", *norm, "--rounds", "3")
    assert code == 0
    assert [row["backend"] for row in json.loads(out)[1]["backends"]] == ["xla", "stored"]


# --- All commands ---


LOUD = """
import os
from tests.offline_program import Mixer
print("loading")
os.system("echo compiling")

class Loud(Mixer):
    def run(self, x, *, cfg, causal=True):
        print("tracing")
        return super().run(x, cfg=cfg, causal=causal)
"""


@pytest.mark.thin(3)
@pytest.mark.parametrize("command", [["tune", "--isolation", "thread"], ["bench", "--rounds", "3"], ["explain"]])
def test_json_is_alone_on_the_standard_output(tmp_path, command):
    (tmp_path / "loud.py").write_text(LOUD)
    call = [*command, "loud:Loud", "--args", "f32[1,4,8]", "--store", tmp_path / "s", "--json"]
    done = run_script(*call, cwd=tmp_path, PYTHONPATH=str(Path(__file__).parents[2]))
    assert json.loads(done.stdout)
    assert "loading\n" in done.stderr
    assert "compiling\n" in done.stderr
    assert ("tracing\n" in done.stderr) == (command != ["explain"])


def test_json_is_alone_where_python_has_replaced_the_standard_output(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(Doubled, "reference", lambda self, x: print("running") or x + x)
    command = ["bench", f"{HERE}:Doubled", "--args", "f32[8]", "--rounds", "3", "--store", tmp_path, "--json"]
    code, out, err = ejkernel(capsys, *command)
    assert code == 0
    assert json.loads(out)
    assert "running\n" in err
    print("heard again")
    assert capsys.readouterr().out == "heard again\n"


def test_page_on_the_standard_output_is_utf8_in_every_locale(tmp_path):
    PersistentCache(tmp_path / "s").put("cpu", "gr\u00f6\u00dfe", "aa11", Pieces())
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
    done = run_script("report", "-o", "-", "--store", tmp_path / "s", text=False, **locale)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode().startswith("<!doctype html>")
    assert not done.stdout.isascii()


def run_script(*args, cwd=None, text=True, **env):
    command = [Path(sys.executable).with_name("ejkernel"), *map(str, args)]
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=text, check=False, timeout=120
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["bench", "nothing", "--args", "f32[1]"],
            "'nothing' is not an installed operation. Known are flash_attention",
        ),
        (["bench", f"{HERE}:Pieces", "--args", "f32[1]"], "not a Kernel"),
        (["bench", f"{HERE}:Strict", "--args", "f32[1]"], "cannot be made without arguments"),
        (["explain", MIX], "--args: tests.offline_program:Mixer needs the arrays of a call"),
        (["explain", MIX, "--args", "f32[1]", "--set", "nonsense=true"], None),
        (["explain", "flash_attention", "--args", "f32[2],f32[2],f32[2]"], "query"),
        (["explain", "x.json", "--args", "f32[1]"], "--args, --set and --grad go with"),
        (
            ["tune", MIX, "--args", "f32[1,2,3]", "--grad"],
            "--grad: the backward of tests.offline_program:Mixer takes the",
        ),
        (["report", "--store", __file__], "is a file; a store is a directory"),
        (["bench", f"{HERE}:Broken", "--args", "f32[1]"], "the kernel's own code failed (IndexError"),
        (["report", "-o", "-", "--json"], "--json: the page itself goes to the standard output"),
        (["report", "-o", HERE_DIRECTORY], f"--out: {HERE_DIRECTORY} is a directory"),
        (["cache", "export", HERE_DIRECTORY], f"TARGET: {HERE_DIRECTORY} is a directory"),
        (["cache", "merge", HERE_DIRECTORY, "x.json"], f"TARGET: {HERE_DIRECTORY} is a directory"),
        (["tune", MIX, "--args", "f32[1,2,3]", "--out", HERE_DIRECTORY], f"--out: {HERE_DIRECTORY} is a directory"),
        (["tune", MIX, "--args", "f32[1,2,3]", "--budget", "nan"], "--budget: nan is not a number of seconds"),
        (["tune", MIX, "--args", "f32[1,2,3]", "--budget", "-1"], "--budget: -1.0 is not a number of seconds"),
        (["tune", "x.json", "--specs", "nope.json"], "--specs goes with the text of a program, which x.json is not"),
        (["explain", MIX, "--args", "f32[1,2,3]", "--specs", "nope.json"], "--specs goes with the text of a program"),
        (["explain", "--specs", "nope.json"], "record.json is not."),
        (["tune"], "record.json: there is no record. A program that runs with EJKERNEL_OPS_RECORD=1 writes one."),
    ],
)
def test_user_errors_are_one_line_and_exit_code_2(capsys, args, message):
    code, out, err = ejkernel(capsys, *args)
    if message is None:  # Nobody looks at keyword arguments before the call is traced.
        assert (code, "from heuristic" in out) == (1, True)
        return
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["info", "kernels", "tune", "bench", "explain", "report", "labels", "cache"])
def test_every_command_has_help(capsys, command):
    code, out, _ = ejkernel(capsys, command, "--help")
    assert code == 0
    assert "--json" in out or command == "cache"


def test_keyword_arrays_are_arrays(capsys, tmp_path):
    x = "f32[1,16,2,8]"
    code, out, _ = ejkernel(
        capsys, "explain", "flash_attention", "--args", f"{x},{x},{x}", "--set", "q_segment_ids=s32[1,16]",
        "--store", tmp_path, "--json",
    )  # fmt: skip
    assert code == 1
    assert "int32[1,16]" in json.loads(out)["calls"][0]["arrays"]


def test_backend_that_cannot_start_is_one_line():
    script = Path(sys.executable).with_name("ejkernel")
    env = {**os.environ, "JAX_PLATFORMS": "nonsense"}
    done = subprocess.run([script, "info"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: JAX cannot start: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("shell", ["bash", *fully("zsh", "fish")])
def test_shells_complete_commands(shell):
    script = Path(sys.executable).with_name("ejkernel")
    env = {**os.environ, "_EJKERNEL_COMPLETE": f"complete_{shell}", "COMP_WORDS": "ejkernel ex", "COMP_CWORD": "1"}
    env |= {"_TYPER_COMPLETE_ARGS": "ejkernel ex", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    done = subprocess.run([script], env=env, capture_output=True, text=True, check=False)
    assert "explain" in done.stdout


@pytest.mark.parametrize(
    ("typed", "name"),
    [("bench fla", "flash_attention"), ("tune fla", "flash_attention"), ("explain fla", "flash_attention"),
     ("cache ls --op mi", "mine"), ("report --device cp", "cpu")],
)  # fmt: skip
def test_names_of_operations_and_devices_are_completed(capsys, monkeypatch, tmp_path, typed, name):
    PersistentCache(tmp_path / "configs").put("cpu", "mine", "k", Pieces())
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("_EJKERNEL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"ejkernel {typed}")
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split())))
    _, out, _ = ejkernel(capsys)
    assert name in out.split()


@pytest.mark.parametrize(
    ("arrays", "settings", "message"),
    [
        ("f32[1,256,4,64]", [], "missing a required argument: 'key'. A call takes query, key and value"),
        ("f32[1,256,4,64],f32[1,256,4,64]", [], "missing a required argument: 'value'"),
    ],
)
def test_call_with_too_few_arrays_is_told_which_are_missing(capsys, arrays, settings, message):
    code, _, err = ejkernel(capsys, "explain", "flash_attention", "--args", arrays, *settings)
    assert code == 2
    assert f"flash_attention: {message}" in err
