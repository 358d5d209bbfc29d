"""The report: what it says, that names in it stay names, and that a real browser draws it."""

import html
import json
import re
import shutil
import subprocess

import pytest

from ejkernel.cli import main
from ejkernel.ops import PersistentCache
from ejkernel.ops.store import packs
from ejkernel.ops.store.entry import StoredEntry
from ejkernel.report import render, summarise
from ejkernel.report.naming import columns, compact, fields_of
from ejkernel.report.summary import arrays_of, statics_of

EVIL = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


def candidate(block, status="raced out", median_ms=1.0, guess=False, reason=""):
    times = {} if median_ms is None else {"low_ms": 0.9 * median_ms, "high_ms": 1.1 * median_ms, "n": 16}
    cfg = f"Config(block={block}, stages=None)"
    return {"cfg": cfg, "status": status, "reason": reason, "guess": guess, "median_ms": median_ms, **times}


def entry(op="softmax", size=64, speedup=1.5, key="0" * 16, **changes):
    statistics = {
        "timer": "wall",
        "measurement": {"median_ms": 1.0, "low_ms": 0.9, "high_ms": 1.1, "samples": 16, "timer": "wall"},
        "speedup": {"value": speedup, "low": speedup - 0.1, "high": speedup + 0.1},
        "rounds": 20,
        "seconds": 3.5,
        "cost": {"flops": 2e6, "bytes": 1e6},
        "candidates": [
            candidate(128, "winner", 1.0),
            candidate(64, "raced out", 1.5, guess=True),
            candidate(256, "failed", None, reason="ValueError: no such tile"),
        ],
    }
    signature = {"args": [{"dtype": "float32", "shape": [size, 8]}] * 2, "kwargs": {"causal": {"static": True}}}
    return StoredEntry(
        key=("cpu-x", op, key),
        cfg_data={"type": "m:Config", "value": {"block": 128}},
        signature=signature,
        statistics={**statistics, **changes},
        provenance={"jax": "0.12", "host": "here"},
    )


def test_everything_that_is_known_is_in_the_data():
    (call,) = summarise([entry()], "pack")["calls"]
    assert (call["op"], call["arrays"], call["statics"]) == ("softmax", "2 x float32[64,8]", "causal=True")
    assert call["cost"] == {"flops": 2e6, "bytes": 1e6}
    assert call["fields"] == ["block"]
    assert [c["values"] for c in call["candidates"]] == [["128"], ["64"], ["256"]]
    assert [c["guess"] for c in call["candidates"]] == [False, True, False]
    assert call["candidates"][2]["reason"] == "ValueError: no such tile"


def test_winner_is_first_and_few_samples_have_no_interval():
    few = {**candidate(512, "screened", 0.5, reason="12 times as slow"), "n": 2}
    statistics = entry().statistics
    short = {"median_ms": 1.0, "low_ms": 0.9, "high_ms": 1.1, "samples": 5, "timer": "wall"}
    changed = entry(candidates=[few, *reversed(statistics["candidates"])], measurement=short)
    (call,) = summarise([changed], "pack")["calls"]
    assert [c["status"] for c in call["candidates"]] == ["winner", "raced out", "screened", "failed"]
    assert (call["candidates"][2]["low_ms"], call["candidates"][2]["median_ms"]) == (None, 0.5)
    assert call["candidates"][0]["low_ms"] == 0.9
    assert (call["measurement"]["low_ms"], call["measurement"]["samples"]) == (None, 5)


def test_six_samples_are_enough_for_an_interval():
    enough = {"median_ms": 1.0, "low_ms": 0.9, "high_ms": 1.1, "samples": 6, "timer": "wall"}
    (call,) = summarise([entry(measurement=enough)], "pack")["calls"]
    assert (call["measurement"]["low_ms"], call["measurement"]["high_ms"]) == (0.9, 1.1)


def test_candidates_without_a_time_come_after_those_that_have_one():
    unsorted = [candidate(1, "unfinished", None), candidate(2, "unfinished", 2.0), candidate(3, "unfinished", 1.0)]
    (call,) = summarise([entry(candidates=unsorted)], "pack")["calls"]
    assert [c["median_ms"] for c in call["candidates"]] == [1.0, 2.0, None]


def test_keywords_are_those_that_the_caller_wrote():
    (call,) = summarise([entry(keywords={"causal": "'lower_right'"})], "pack")["calls"]
    assert call["statics"] == "causal='lower_right'"


def test_configs_are_compact():
    nested = "C(fwd=P(block=64, stages=None), bwd=None, platform='xla')"
    assert compact(nested) == "C(block=64, platform=xla)"
    assert compact("C(fwd=P(block=64), bwd=P(block=1))") == "C(fwd.block=64, bwd.block=1)"
    assert compact("<object>") == "<object>"


def test_entry_of_an_older_version_or_by_hand_is_shown_with_what_it_has():
    older = {"cfg": "Config(block=1)", "status": "winner", "reason": "", "median_ms": 2.0}
    calls = summarise(
        [
            entry(cost=None, speedup=1.0, candidates=[older]),
            entry(measurement={"median_ms": "fast"}, speedup=1.0, candidates=[3, None, {"cfg": 5}], rounds=True),
            StoredEntry(key=("d", "o", "k"), cfg_data={}),
        ],
        "pack",
    )["calls"]
    assert calls[0]["candidates"][0]["low_ms"] is None
    assert (calls[1]["measurement"], calls[1]["rounds"]) == (None, None)
    assert [c["cfg"] for c in calls[1]["candidates"]] == ["5"]
    assert calls[2]["candidates"] == []


def test_peaks_are_known_for_the_devices_of_the_data_sheets():
    h200 = StoredEntry(key=("gpu-nvidia_h200-sm90-132c-128g", "o", "k"), cfg_data={})
    assert summarise([h200, entry()], "")["peaks"] == {
        "gpu-nvidia_h200-sm90-132c-128g": {"flops": 989e12, "bytes": 4.8e12}, "cpu-x": None,
    }  # fmt: skip


def test_configs_are_told_apart_by_what_differs():
    nested = "C(fwd=P(block=64, stages=None), bwd=P(block=1), platform='xla')"
    assert fields_of(nested) == {"fwd.block": "64", "bwd.block": "1", "platform": "xla"}
    other = nested.replace("64", "128").replace("bwd=P(block=1)", "bwd=P(block=2)")
    assert columns([nested, other]) == (["fwd.block", "bwd.block"], [["64", "1"], ["128", "2"]])
    assert columns([nested, nested.replace("64", "32")]) == (["block"], [["64"], ["32"]])
    assert columns([nested]) == (["fwd.block", "bwd.block", "platform"], [["64", "1", "xla"]])
    assert columns(["<object at 0x1>", "C(a=1)"]) == ([""], [["<object at 0x1>"], ["C(a=1)"]])
    assert columns([]) == ([""], [])


def test_signatures_in_one_line():
    array = {"dtype": "int32", "shape": []}
    assert arrays_of({"args": [array, array, {"dtype": "bool", "shape": [2]}]}) == "2 x int32[], bool[2]"
    assert (
        statics_of({"kwargs": {"rules": {"static": {"object": "m.R", "fields": {"upper": 0, "cap": None}}}}})
        == "upper=0"
    )
    assert (arrays_of(None), statics_of(None), statics_of({"kwargs": 3})) == ("", "", "")


def test_data_cannot_leave_its_element_and_comes_back_whole():
    page = render(summarise([entry(op=EVIL)], EVIL), EVIL)
    assert page.count("<script") == 2
    assert "<img" not in page
    text = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1]
    assert json.loads(text)["calls"][0]["op"] == EVIL
    assert f"<title>{html.escape(EVIL)}</title>" in page


def test_page_asks_for_nothing():
    page = render(summarise([entry()], "pack"), "title")
    assert not re.search(r"""\b(src|href|@import|fetch|url)\s*[=(]""", page)
    assert set(re.findall(r"https?://[^\"'\s]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page


# --- In a browser ---

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
in_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium on the PATH to draw the page with")


def drawn(tmp_path, data, do="", width=1280):
    """The page after its scripts and `do` have run, as text."""
    page = tmp_path / "page.html"
    page.write_text(render(data, "title").replace("</body>", f"<script>{do}</script></body>"))
    command = [
        BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={width},900",
        f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.partition("<script")[0]


def names(dom):
    return re.findall(r'class="name">([^<]*)', dom)


@in_browser
def test_browser_draws_winner_guess_failures_and_roofline(tmp_path):
    dom = drawn(tmp_path, summarise([entry()], "my pack"))
    assert "my pack" in dom
    assert "1.50\u00d7" in dom
    assert re.search(r'class="row winner".*?128.*?class="tag winner">winner', dom, re.DOTALL)
    assert re.search(r'class="row isguess".*?64.*?class="tag guess">guess', dom, re.DOTALL)
    assert "ValueError: no such tile" in dom
    assert dom.count("<circle") == 1
    assert "3.5 s" in dom
    assert re.search(r'class="row isguess".*?class="fate">raced out', dom, re.DOTALL)


@in_browser
def test_browser_sorts_and_filters(tmp_path):
    calls = [
        entry("slow", speedup=1.1, key="1"),
        entry("fast", speedup=3.0, key="2"),
        entry("mid", speedup=2.0, key="3"),
    ]
    data = summarise(calls, "pack")
    assert names(drawn(tmp_path, data)) == ["fast", "mid", "slow"]
    by_name = "at('sort').value = 'name'; at('sort').dispatchEvent(new Event('input'));"
    assert names(drawn(tmp_path, data, by_name)) == ["fast", "mid", "slow"]
    found = "at('find').value = 'MID 128'; at('find').dispatchEvent(new Event('input'));"
    assert names(drawn(tmp_path, data, found)) == ["mid"]
    one = "at('op').value = 'slow'; at('op').dispatchEvent(new Event('input'));"
    assert names(drawn(tmp_path, data, one)) == ["slow"]


@in_browser
def test_browser_shows_names_as_text(tmp_path):
    evil = entry(op=EVIL, candidates=[{"cfg": EVIL, "status": "failed", "reason": EVIL, "median_ms": None}])
    dom = drawn(tmp_path, summarise([evil], EVIL), "if (document.querySelector('img')) document.title = 'taken';")
    assert "<title>title</title>" in dom
    assert names(dom) == [html.escape(EVIL, quote=False)]


@in_browser
def test_page_fits_a_phone(tmp_path):
    wide = entry(op="a_very_long_name_of_an_operation_that_does_not_end_soon.Kernel", size=10**9)
    report = "document.title = `${document.documentElement.scrollWidth} of ${window.innerWidth}`;"
    dom = drawn(tmp_path, summarise([wide], "/a/path/" * 20), report, width=390)
    needed, have = map(int, re.search(r"<title>(\d+) of (\d+)</title>", dom).groups())
    assert needed <= have < 600


@in_browser
def test_empty_report_says_so(tmp_path):
    assert "Nothing is stored here yet" in drawn(tmp_path, summarise([], "pack"))


# --- The command ---


def ejkernel(capsys, *args):
    with pytest.raises(SystemExit) as exit_:
        main([str(a) for a in args])
    out = capsys.readouterr()
    return exit_.value.code, out.out, out.err


def test_command_writes_a_page_of_a_pack(capsys, tmp_path):
    packs.write(tmp_path / "pack.json", [entry("a", key="1"), entry("b", key="2")])
    code, out, err = ejkernel(capsys, "report", tmp_path / "pack.json", "-o", tmp_path / "r.html", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["calls"] == 2
    assert '"op":"b"' in (tmp_path / "r.html").read_text()
    code, out, _ = ejkernel(capsys, "report", tmp_path / "pack.json", "--op", "a", "-o", "-")
    assert code == 0
    assert '"op":"b"' not in out
    assert out.startswith("<!doctype html>")


def test_command_with_nothing_to_show_is_exit_code_1(capsys, tmp_path):
    (tmp_path / "r.html").write_text("good")
    code, out, err = ejkernel(capsys, "report", "--store", tmp_path / "none", "-o", tmp_path / "r.html")
    assert (code, out) == (1, "")
    assert err.startswith(f"nothing written: {tmp_path / 'none'} has no entries.")
    packs.write(tmp_path / "pack.json", [entry("softmax")])
    code, _, err = ejkernel(capsys, "report", tmp_path / "pack.json", "--op", "softmx", "-o", tmp_path / "r.html")
    assert code == 1
    assert err.endswith("has no entries of 'softmx'. Did you mean 'softmax'?\n")
    assert (tmp_path / "r.html").read_text() == "good"
    code, _, err = ejkernel(capsys, "report", tmp_path / "gone.json")
    assert code == 2
    assert "there is no such file" in err


def test_packs_under_the_store_are_shown_on_request_and_apart(capsys, monkeypatch, tmp_path):
    packs.write(tmp_path / "pack.json", [entry("theirs", key="1")])
    PersistentCache(tmp_path / "configs").add(entry("mine", key="2"))
    monkeypatch.setattr("ejkernel.ops.store.packs.from_packages", lambda: [str(tmp_path / "pack.json")])
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))

    def own(*args):
        assert ejkernel(capsys, "report", "-o", tmp_path / "r.html", *args)[0] == 0
        data = (tmp_path / "r.html").read_text().partition('id="data">')[2].partition("</script>")[0]
        return {call["op"]: call["own"] for call in json.loads(data)["calls"]}

    assert own() == {"mine": True}
    assert own("--packs") == {"mine": True, "theirs": False}
    assert own(tmp_path / "pack.json") == {"theirs": True}
