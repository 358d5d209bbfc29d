"""The list of planted defects stays true: each can still be planted, and its tests exist."""

import ast
import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent
script = runpy.run_path(str(ROOT / "scripts" / "mutants"))


def test_each_defect_can_be_planted():
    for mutant in script["MUTANTS"]:
        assert ast.parse(script["planted_in"](ROOT, mutant)), mutant.name
        assert mutant.old != mutant.new, mutant.name


def test_each_defect_names_tests_that_exist():
    for mutant in script["MUTANTS"]:
        assert mutant.test_files, mutant.name
        for test in mutant.test_files:
            file, _, name = test.partition("::")
            assert f"def {name}" in (ROOT / file).read_text(), f"{mutant.name}: {test}"


def test_sample_is_large_and_its_names_are_distinct():
    names = [mutant.name for mutant in script["MUTANTS"]]
    assert len(set(names)) == len(names) >= 48
