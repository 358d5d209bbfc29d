"""Every code block of the README and of the docs does what the page says, and every example runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.run_page import PageError, commands, matches, run_command

ROOT = Path(__file__).parent.parent
PAGES = sorted(p for p in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")] if "\n```" in p.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_code_blocks_run(page, tmp_path):
    folder = tmp_path / "page"
    folder.mkdir()
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, ROOT / "scripts" / "run_page.py", page, folder]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


ARGUMENTS = {"demo.py": ["--budget", "10"], "transformer.py": ["--steps", "5"]}


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(ROOT.glob("examples/*.py")), ids=lambda p: p.name)
def test_example_runs(script):
    command = [sys.executable, script, *ARGUMENTS.get(script.name, [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_reference_has_every_public_name():
    from ejkernel import modules, ops

    text = "".join(path.read_text() for path in ROOT.glob("docs/reference/*.md"))
    listed = {line.rpartition(".")[2] for line in text.splitlines() if line.startswith(":::")}
    exported = {*re.findall(r"^from \S+ import (\w+) as \1$", Path(ops.__file__).read_text(), re.M), *ops._LAZY}
    exported |= set(re.findall(r"^from \S+ import (\w+) as \1$", Path(modules.__file__).read_text(), re.M))
    # Type variables, protocols and a pattern: nothing to document beyond the pages that use them.
    assert exported - listed <= {"Cfg", "Out", "ConfigChooser", "Tuner", "LABEL_RE", "EjkernelError"}


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
    ],
)
def test_output_is_compared_without_numbers(expected, got, same):
    assert matches(expected, got) is same


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
