"""Every code block of the README and of the docs does what the page says, and every example runs."""

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from ejkernel.modules import FlashAttentionConfig
from ejkernel.ops import FwdParams, Measurement
from ejkernel.ops.core import dispatch
from ejkernel.ops.tuning import racing
from ejkernel.ops.tuning.outcome import Tuning
from ejkernel.ops.tuning.standings import Candidate
from ejkernel.ops.utils import env
from scripts.run_page import PageError, commands, matches, run_command

ROOT = Path(__file__).parent.parent
PAGES = [p for p in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")] if "\n```" in p.read_text()]


TAKE_LONG = {
    "tutorial.md", "offline.md", "ci.md", "fused_kernel.py", "transformer.py", "tune_offline.py",
    # What these show has tests of its own.
    "cli.md", "gradients.md", "sharing.md", "devices.md", "switching.md", "backends.md", "authors.md",
    "flash_attention.md", "grouped_matmul.md", "experts.py", "shared_choice.py", "processes.py",
}  # fmt: skip
"""In the full suite, and partly in `make walk-through`."""


def files(paths):
    marks = lambda path: pytest.mark.full if path.name in TAKE_LONG else ()
    return [pytest.param(path, marks=marks(path), id=str(path.relative_to(ROOT))) for path in sorted(paths)]


@pytest.mark.slow
@pytest.mark.parametrize("page", files(PAGES))
def test_code_blocks_run(page, tmp_path):
    folder = tmp_path / "page"
    folder.mkdir()
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, ROOT / "scripts" / "run_page.py", page, folder]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


ARGUMENTS = {
    "demo.py": ["--budget", "2"],
    "fused_kernel.py": ["--budget", "3"],
    "transformer.py": ["--steps", "3"],
}


@pytest.mark.slow
@pytest.mark.parametrize("script", files(ROOT.glob("examples/*.py")))
def test_example_runs(script):
    command = [sys.executable, script, *ARGUMENTS.get(script.name, [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_demo_marks_the_guess_and_says_what_became_of_each(capsys):
    demo = runpy.run_path(str(ROOT / "examples/demo.py"))
    cfg = lambda block: FlashAttentionConfig(FwdParams(q_blocksize=block, kv_blocksize=64), None, "xla")
    measured = lambda ms, n: Measurement.of(np.full(n, 1e-3 * ms), "wall")
    candidates = (
        Candidate(cfg=cfg(32), status="screened", reason="12 times as slow", measurement=measured(9.99, 2)),
        Candidate(cfg=cfg(64), status="finalist", measurement=measured(12.5, 16), guess=True),
        Candidate(cfg=cfg(128), status="winner", measurement=measured(11.8, 16)),
    )
    facts = {"measurement": None, "speedup": None, "timer": "wall", "rounds": 2, "seconds": 1.0}
    Console(width=100).print(demo["table"](Tuning(cfg=cfg(128), complete=True, candidates=candidates, **facts)))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [
        "xla 128 x 64 11.8 11.8 to 11.8 winner",
        "xla 64 x 64, guess 12.5 12.5 to 12.5 finalist",
        "xla 32 x 64 9.99 - 12 times as slow",
    ]


def test_reference_has_every_public_name():
    from ejkernel import modules, ops

    text = "".join(path.read_text() for path in ROOT.glob("docs/reference/*.md"))
    listed = {line.rpartition(".")[2] for line in text.splitlines() if line.startswith(":::")}
    exported = {*re.findall(r"^from \S+ import (\w+) as \1$", Path(ops.__file__).read_text(), re.M), *ops._LAZY}
    exported |= set(re.findall(r"^from \S+ import (\w+) as \1$", Path(modules.__file__).read_text(), re.M))
    # Type variables, protocols and a pattern: nothing to document beyond the pages that use them.
    assert exported - listed <= {"Cfg", "Out", "ConfigChooser", "Tuner", "LABEL_RE", "EjkernelError"}


WRITTEN_BY_AUTHORS = (
    "run", "prepare", "supports", "heuristic_cfg", "config_space", "custom_vjp", "fwd_with_residuals", "vjp",
    "heuristic_cfg_vjp", "config_space_vjp", "reference", "tolerance", "mismatch", "example_inputs", "example_cases",
    "run_batched", "version", "key_builder", "describe_keywords", "transfers",
)  # fmt: skip


def test_reference_has_an_entry_for_what_an_author_writes():
    text = (ROOT / "docs/reference/authors.md").read_text()
    assert set(WRITTEN_BY_AUTHORS) | {"Dispatch order"} == set(re.findall(r"^### (.+)$", text, re.M))
    orders = dict(re.findall(r"^\| (GPU|TPU|CPU) \| (.+) \|$", text, re.M))
    for kind, platforms in dispatch.PLATFORMS.items():
        methods = [f"run_{p}" for p in platforms]
        methods.insert(len(methods) if kind == "cpu" else methods.index("run_xla"), f"run_{kind}")
        assert re.findall(r"`(\w+)`", orders[kind.upper()]) == [*methods, "run"]


def test_every_environment_variable_is_on_its_page():
    names = re.compile(r"(EJKERNEL|JAX|XLA|XDG|TF|CUDA)_[A-Z_]+")
    strings = {
        node.value
        for path in ROOT.glob("ejkernel/**/*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    rows = [line for line in (ROOT / "docs/environment.md").read_text().splitlines() if line.startswith("| `")]
    told = {name: line for line in rows for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert set(told) == {text for text in strings if names.fullmatch(text)}
    for name, allowed in env.ALLOWED.items():
        assert re.findall(r"`(\w+)`", told[name].split("|")[2]) == [*allowed], name


def test_figures_of_the_readme_are_in_their_files():
    for line in re.findall(r"^\|.*\(benchmarks/results/.*$", (ROOT / "README.md").read_text(), re.M):
        figure, paths = line.split("|")[2], re.findall(r"\((benchmarks/results/[^)]+)\)", line)
        text = "".join((ROOT / path).read_text() for path in paths).replace(",", "")
        measured = [float(n) for n in re.findall(r"\d+(?:\.\d+)?", text)]
        for number in re.findall(r"\d+(?:\.\d+)?", re.sub(r"\]\([^)]*\)", "", figure)):
            digits = len(number.partition(".")[2])
            assert any(f"{m:.{digits}f}" == number for m in measured), f"{number} is not in {paths}"


def test_figures_of_races_are_those_of_the_table():
    rows = re.findall(r"^\| (.+) \|$", (ROOT / "benchmarks/results/2026-11-15-racing.md").read_text(), re.M)
    table = {tuple(row.split(" | ")[:2]): row.split(" | ")[2:] for row in rows}
    ours, mean = (float(table["all together", rule][2].rstrip("%")) for rule in ("race", "10 runs, mean"))
    assert f"| {ours} %; a mean of 10 runs {mean:.0f} % |" in (ROOT / "README.md").read_text()
    worse = max(float(row[3].rstrip("%")) for (_, rule), row in table.items() if rule.startswith("race"))
    assert f"slower than the guess in 0 to {worse:.1f} % of them" in (ROOT / "docs/tuning.md").read_text()


def test_rounds_of_a_race_are_those_of_the_design_page():
    text = " ".join((ROOT / "docs/design.md").read_text().split())
    for rules in (racing.DEVICE_TIME, racing.WALL_CLOCK):
        least, most = rules.final_rounds
        assert re.search(rf"at most {rules.heat_rounds}\b[^.]*, then {least} to {most}\b", text)
    assert f"{racing.WALL_CLOCK.heat_rounds + racing.WALL_CLOCK.final_rounds[1]} in all" in text


def test_search_works_from_a_file_and_fetches_nothing():
    text = (ROOT / "mkdocs.yml").read_text()
    assert "\n  - offline " in text  # Puts the index into a script.
    (worker,) = re.findall(r"polyfills: \[(\S*iframe-worker\S*)\]", text)  # In place of one from the network.
    assert "http" not in (ROOT / "docs" / worker).read_text()


def test_make_help_lists_every_target():
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # Not a make in a make.
    text = subprocess.run(["make", "help"], cwd=ROOT, env=alone, capture_output=True, text=True, check=True).stdout
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)[1].split()
    assert sorted(line.split()[0] for line in text.splitlines()) == sorted(targets)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page):
    """Those of the docs are checked when the site is built."""
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", (ROOT / page).read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []


# --- The runner itself ---


def test_commands_carry_what_they_print():
    text = "$ ls \\\n  -a\none\ntwo\n$ true\n"
    assert commands(text) == [("ls   -a", ["one", "two"]), ("true", [])]
    with pytest.raises(PageError, match="begins with 'ls'"):
        commands("ls\n")


@pytest.mark.parametrize(
    ("expected", "got", "same"),
    [
        (["took 1.5 s"], ["took   12 s"], True),
        (["took 1.5 s"], ["took long"], False),
        (["a", "...", "z"], ["a", "b", "c", "z"], True),
        (["a", "...", "z"], ["a", "b", "c"], False),
        (["call 0123456789abcdef"], ["call fedcba9876543210"], True),
        (["a"], ["a", "b"], False),
        (["a"], ["a", ""], True),
        (["1 call in report.html."], ["25 calls in report.html."], False),
        (["2 entries in p.json."], ["3 entries in p.json."], False),
        (["1.80 [1.76, 1.84]"], ["2 [1.9e-05, 2]"], True),
        (["version 0.1.0"], ["version 0.12.3"], True),
        (["... 3 entries"], ["/a/path 3 entries"], True),
    ],
)
def test_output_is_compared_without_what_was_measured(expected, got, same):
    assert matches(expected, got) is same


def test_numbers_of_a_block_may_differ_if_the_page_says_so():
    assert not matches(["Chunks(rows=1024)"], ["Chunks(rows=256)"])
    assert matches(["Chunks(rows=1024)"], ["Chunks(rows=256)"], exact=False)
    assert not matches(["Chunks(rows=1024)"], ["Chunks(columns=256)"], exact=False)


@pytest.mark.parametrize(
    ("command", "expected", "error"),
    [
        ("echo hello", ["hello"], None),
        ("echo hello", ["goodbye"], "the page says\ngoodbye"),
        ("false", [], "exit code 1, the page says 0"),
        ("false  # exit code 1", [], None),
        ("make nonsense", [], "there is no nonsense"),
        ("make demo  # tunes", [], None),
    ],
)
def test_page_that_is_wrong_is_an_error(command, expected, error):
    if error is None:
        run_command(command, expected, set_up=False)
        return
    with pytest.raises(PageError, match=error):
        run_command(command, expected, set_up=False)
