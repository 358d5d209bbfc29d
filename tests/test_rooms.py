"""Imports point one way, lazy ones and those for type checkers too."""

import ast
from pathlib import Path

import pytest

import ejkernel

ROOT = Path(ejkernel.__file__).parent
ORDER = [
    {"_compat", "errors", "ops.utils"},
    {"ops.core", "ops.registry"},
    {"ops.store"},
    {"ops.config"},
    {"ops.tuning"},
    {"ops.processes"},
    {"ops.offline"},
    {"ops.execution"},
    {"ops.wiring"},
    {"ops"},
    {"kernels"},
    {"modules"},
    {"integrations", "packs", "report"},
    {"cli"},
    {""},
]
"""Rooms from the bottom to the top; the room of a module is the longest of these that its name begins with."""

MODULES = sorted(ROOT.rglob("*.py"))


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(path) for path in MODULES}


def level(name):
    rooms = {room: number for number, level in enumerate(ORDER) for room in level}
    parts = name.split(".") if name else []
    for length in range(len(parts), -1, -1):
        room = ".".join(parts[:length])
        if room in rooms and (room != "ops" or name == "ops"):
            return rooms[room]
    raise AssertionError(f"{name} is in no room; give it one in ORDER")


def imported(path):
    """The modules of ejkernel that a file imports, wherever the import stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative imports are not read by this test"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name == "ejkernel" or name.startswith("ejkernel."):
                inner = name.removeprefix("ejkernel").removeprefix(".")
                while inner and inner not in NAMES:
                    inner = inner.rpartition(".")[0]
                yield inner


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_import_points_to_a_higher_room(path):
    own = name_of(path)
    higher = {name for name in imported(path) if level(name) > level(own)}
    # The package's own `__init__` is loaded with any of its modules; what matters is who names it.
    assert not higher - {""}, f"{own} imports {sorted(higher)}, which stand above it"
