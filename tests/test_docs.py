"""Every Python block of the README and of the docs runs, in order, as a reader would type it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(p for p in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")] if "```python" in p.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_code_blocks_run(page, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    script = tmp_path / "page.py"
    # A page may name a directory of the reader's; here it is one of the test's.
    script.write_text("\n".join(blocks).replace("/tmp/", f"{tmp_path}/"))
    done = subprocess.run([sys.executable, script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


ARGUMENTS = {"demo.py": ["--budget", "10"]}


@pytest.mark.parametrize("script", sorted(ROOT.glob("examples/*.py")), ids=lambda p: p.name)
def test_example_runs(script):
    command = [sys.executable, script, *ARGUMENTS.get(script.name, [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
