"""The page on how a call flows names files and functions that are there."""

import ast
import re
from pathlib import Path

import pytest

import ejkernel

ROOT = Path(ejkernel.__file__).parent
PAGE = ROOT.parent / "docs" / "flow.md"
PLACES = re.findall(r"`(ops/[\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", PAGE.read_text())


def test_every_step_names_a_place():
    steps = [line for line in PAGE.read_text().splitlines() if re.match(r"\| \d+ \|", line)]
    assert len(steps) == 20
    assert all(re.search(r"`ops/[\w/]+\.py`: `\w+`", line) for line in steps)


@pytest.mark.parametrize(("file", "names"), PLACES, ids=lambda x: x)
def test_functions_of_a_step_are_in_its_file(file, names):
    tree = ast.parse((ROOT / file).read_text())
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert set(re.findall(r"\w+", names)) <= defined
