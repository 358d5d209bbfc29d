"""`ejkernel tune --for`: what is asked of the compilers, and where their answers go. The compilers are stand-ins."""

import json

import pytest

from ejkernel.cli import ahead, main
from ejkernel.ops import PersistentCache
from ejkernel.ops.config.asking import candidates, heuristic, on_its_platform
from ejkernel.ops.store import packs
from ejkernel.ops.tuning import clock
from ejkernel.ops.tuning.clock import Ranked, RankingError
from ejkernel.ops.tuning.compiling import Report
from ejkernel.ops.utils import targets

CALL = ("--args", "bf16[1024,256],bf16[4,256,512],s32[4]")


class Compilers:
    """Likes the last candidate best."""

    fails = False

    def __init__(self, target, **limits):
        self.target = target

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def rank(self, inv, kernel, *, most=None):
        if self.fails:
            raise RankingError("none of them compiles")
        with targets.compiling_for(self.target):
            inv = on_its_platform(inv, kernel)
            guess, cfgs = heuristic(inv, kernel), [c for c in candidates(inv, kernel) if c.platform != "xla"][:most]
        report = lambda n: Report(kernels=1, temp_bytes=0, bundles=float(len(cfgs) - n))
        found = [Ranked(cfg=c, report=report(n), is_guess=c == guess) for n, c in enumerate(cfgs)]
        return clock.order(found, "schedule" if self.target.platform == "tpu" else "order")


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(ahead, "Compilers", Compilers)


def ejkernel(capsys, *args):
    with pytest.raises(SystemExit) as exit_:
        main([str(a) for a in args])
    out = capsys.readouterr()
    return exit_.value.code, out.out, out.err


def test_unknown_targets_are_refused_with_the_known_ones(capsys):
    code, _, err = ejkernel(capsys, "tune", "grouped_matmul", *CALL, "--for", "v3")
    assert code != 0
    assert "v3" in err
    assert "known are v4 (TPU v4), v5e" in " ".join(err.split())


def test_nothing_is_measured_so_there_is_no_budget(capsys):
    code, _, err = ejkernel(capsys, "tune", "grouped_matmul", *CALL, "--for", "v6e", "--budget", "3")
    assert code != 0
    assert "nothing is measured" in " ".join(err.split())


def test_a_ranked_call_goes_into_the_store_with_its_clock(capsys, tmp_path):
    code, out, _ = ejkernel(capsys, "tune", "grouped_matmul", *CALL, "--for", "v6e", "--store", tmp_path, "--json")
    assert code == 0
    (row,) = json.loads(out)["ranked"]
    assert row["device"] == "tpu-v6e"
    assert row["bundles"] == 1
    (entry,) = PersistentCache(tmp_path).entries()
    assert entry.clock == "schedule"
    assert entry.provenance["device"] == "TPU v6 lite"
    assert entry.place.device == "tpu-v6e"


def test_what_was_measured_stays(capsys, tmp_path):
    ejkernel(capsys, "tune", "grouped_matmul", *CALL, "--for", "v6e", "--store", tmp_path)
    cache = PersistentCache(tmp_path)
    (entry,) = cache.entries()
    cache.put(*entry.key, entry.cfg, statistics={"measured": True})
    ejkernel(capsys, "tune", "grouped_matmul", *CALL, "--for", "v6e", "--store", tmp_path)
    (entry,) = PersistentCache(tmp_path).entries()
    assert entry.clock is None


def test_a_suite_for_a_gpu_says_that_it_has_no_schedule(capsys, tmp_path):
    pack = tmp_path / "b200.json"
    asked = ("tune", "rms_norm", "--suite", "--for", "sm_100a", "--out", pack, "--store", tmp_path / "store")
    code, _, err = ejkernel(capsys, *asked)
    assert code == 0, err
    found = packs.read(pack).entries
    assert len(found) == 6
    assert {entry.place.device for entry in found} == {"gpu-nvidia_b200-sm100-148c-128g"}
    assert {entry.clock for entry in found} == {"order"}
    assert all("no schedule" in entry.statistics["note"] for entry in found)
    # Decided by this compiler for this kernel: nothing is left to do.
    _, out, _ = ejkernel(capsys, *asked, "--json")
    assert json.loads(out)["ranked"] == []


def test_a_call_of_which_nothing_compiles_is_reported(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(Compilers, "fails", True)
    code, _, err = ejkernel(capsys, "tune", "grouped_matmul", *CALL, "--for", "v5e", "--store", tmp_path)
    assert code == 1
    assert "none of them compiles" in " ".join(err.split())


def test_explain_shows_the_clock(capsys, tmp_path):
    ejkernel(capsys, "tune", "grouped_matmul", *CALL, "--for", "v6e", "--store", tmp_path)
    code, out, _ = ejkernel(capsys, "explain", "grouped_matmul", *CALL, "--for", "v6e", "--store", tmp_path)
    assert code == 0
    assert "clock: schedule, not measured" in " ".join(out.split())
