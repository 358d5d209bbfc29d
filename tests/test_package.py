"""What is shipped: a wheel that has all it needs, and works where there is no repository."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support import fully

ROOT = Path(__file__).parent.parent


def build(target, folder):
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder], cwd=ROOT, check=True)
    (made,) = folder.iterdir()
    return made


def test_wheel_holds_the_page_the_packs_and_the_types(tmp_path):
    wheel = build("wheel", tmp_path / "dist")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"ejkernel/report/page.html", "ejkernel/py.typed"} <= set(names)
    packs = {f"ejkernel/packs/{path.name}" for path in (ROOT / "ejkernel" / "packs").glob("*.json")}
    assert packs
    assert packs <= set(names)
    assert not [name for name in names if name.startswith(("tests", "docs", "benchmarks", "examples", "scripts"))]


def test_type_checkers_know_what_calls_return():
    pytest.importorskip("basedpyright")
    checker = [sys.executable, "-m", "basedpyright", "--level", "error", "--pythonpath", sys.executable]
    run = subprocess.run([*checker, "tests/typed_calls.py"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


@pytest.mark.slow
@pytest.mark.parametrize("target", ["wheel", *fully("sdist")])
def test_installed_package_runs_without_the_repository(tmp_path, target):
    made, site = build(target, tmp_path / "dist"), tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", site]
    subprocess.run([*pip, made], check=True)
    program = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import ejkernel, ejkernel.cli;"
        "assert ejkernel.__file__.startswith(sys.path[0]), ejkernel.__file__;"
        "ejkernel.cli.main(sys.argv[1:])"
    )
    pack = next((site / "ejkernel" / "packs").glob("cpu-*.json"))
    for arguments in (["--version"], ["report", str(pack), "-o", "page.html"]):
        command = [sys.executable, "-P", "-c", program, str(site), *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert "flash_attention" in (tmp_path / "page.html").read_text()
