"""Errors: every one derives from `EjkernelError` and is importable from `ejkernel.errors`."""

import ast
import builtins
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import ejkernel
from ejkernel import errors

PACKAGE = Path(ejkernel.__file__).parent
MODULES = [m.name for m in pkgutil.walk_packages(ejkernel.__path__, "ejkernel.") if m.name != "ejkernel.__main__"]


def defined():
    """Errors and warnings that modules of the package define, by name."""
    found = {}
    for name in MODULES:
        for value in vars(importlib.import_module(name)).values():
            if inspect.isclass(value) and value.__module__ == name and issubclass(value, Exception):
                found[value.__name__] = value
    return found


def test_every_error_and_warning_is_importable_from_one_place():
    expected = {n: e for n, e in defined().items() if issubclass(e, errors.EjkernelError | Warning)}
    missing = {name: e.__module__ for name, e in expected.items() if getattr(errors, name, None) is not e}
    assert not missing, f"add to _HOMES in ejkernel/errors.py: {missing}"
    assert set(errors._HOME_OF) | {"EjkernelError"} == set(expected), "names in _HOMES that no longer exist"
    assert set(expected) <= set(dir(errors))


def test_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'NoSuchError'"):
        errors.NoSuchError  # noqa: B018


# Signals from one of our functions to another; nobody else sees them.
INTERNAL = {"StaticFound", "InputsWanted", "ShapeFault"}


def test_every_error_derives_from_ours():
    others = {n for n, e in defined().items() if not issubclass(e, errors.EjkernelError | Warning)}
    assert others <= INTERNAL


# Files that raise an error of Python's, and catch it themselves or must raise that one by a protocol of Python's.
CAUGHT = {
    "ops/store/files.py": {"OSError", "AssertionError"},
    "ops/tuning/truth.py": {"ValueError"},
    "ops/utils/fingerprint.py": {"TypeError"},  # What `default` of `json.dumps` must raise.
    "ops/utils/jsontext.py": {"ValueError"},
    "ops/utils/tagged.py": {"ValueError"},
}
# `__getattr__` must raise the first, and a backend that cannot serve a call says so with the second.
PROTOCOL = {"AttributeError", "NotImplementedError"}


def test_no_error_of_pythons_is_raised_for_users():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            raised = node.exc.func if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) else None
            if isinstance(raised, ast.Name) and hasattr(builtins, raised.id):
                found.setdefault(path.relative_to(PACKAGE).as_posix(), set()).add(raised.id)
    wrong = {path: names - PROTOCOL - CAUGHT.get(path, set()) for path, names in found.items()}
    assert not {path: names for path, names in wrong.items() if names}


def test_a_star_import_brings_every_error():
    scope = {}
    exec("from ejkernel.errors import *", scope)
    assert set(scope) - {"__builtins__"} == {"EjkernelError", *errors._HOME_OF}


def test_importing_errors_imports_nothing_else():
    code = "import sys, ejkernel.errors; print([m for m in sys.modules if m.startswith(('jax', 'ejkernel.'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['ejkernel.errors']\n"
