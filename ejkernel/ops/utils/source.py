"""Hash of a class's code: not of its comments, docstrings, formatting or place in the file."""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import textwrap
import threading
import tokenize
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FRAMEWORK = "ejkernel.ops."  # Its changes are told by the version of ejkernel.

_Skip = tuple[str, ...]
_ONLY_WORDS = ("describe_keywords",)
"""Methods that say something about a call and change nothing about how it runs."""
_hashes: weakref.WeakKeyDictionary[type, dict[_Skip, str | None]] = weakref.WeakKeyDictionary()
_parsing = threading.Lock()
"""Two threads that parse at the same time make Python 3.11 raise SystemError ("recursion depth mismatch")."""


def source_hash(item: Any, *, skip: _Skip = ()) -> str | None:
    """16 hex digits for the code of a class, given itself or as an instance.

    Covers its bases, and what they name of the same package: global functions and classes, and modules imported inside
    a function. Methods whose names begin with one of `skip` are left out. Where there is no source (a class typed into
    a prompt) the compiled code counts, which differs between Python versions. None if there is not even that.
    """
    cls = item if isinstance(item, type) else type(item)
    known, skip = _hashes.setdefault(cls, {}), (*skip, *_ONLY_WORDS)
    if skip not in known:
        with _parsing:
            if skip not in known:
                known[skip] = _hash(cls, skip)
    return known[skip]


def _hash(cls: type, skip: _Skip) -> str | None:
    package = cls.__module__.partition(".")[0]
    code: dict[Any, str] = {}
    typed = _source(cls, skip) is None
    if typed and not _compiled(cls, skip):
        return None
    waiting: list[Any] = [c for c in cls.__mro__ if _is_ours(c, package)]
    while waiting:
        item = waiting.pop()
        if item in code:
            continue
        text = _source(item, skip)
        if text is None and typed and not isinstance(item, Path):
            text = _compiled(item, skip)
        if text is None:
            continue
        code[item] = text
        if not isinstance(item, Path):
            waiting += _referred(item, package, skip)
    # Without names and in order of content: moving a module is not a change.
    return hashlib.sha256("\n".join(sorted(code.values())).encode()).hexdigest()[:16]


def _source(item: Any, skip: _Skip) -> str | None:
    """The source of a class, function or file in normal form; None if there is none."""
    try:
        return normal(item.read_text() if isinstance(item, Path) else inspect.getsource(item), skip)
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):
        return None


def _compiled(item: Any, skip: _Skip) -> str:
    """The code of a class or function as Python runs it; empty if there is none."""
    functions = sorted(_functions(item, skip), key=lambda f: f.__qualname__)
    if not functions:
        return ""
    return repr([sys.version_info[:2], *((f.__qualname__, _instructions(f.__code__)) for f in functions)])


def _instructions(code: types.CodeType) -> str:
    return repr((code.co_code, code.co_names, code.co_varnames, [_constant(c) for c in code.co_consts]))


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return _instructions(value)
    # The order of a set differs from process to process.
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def normal(source: str, skip: _Skip = ()) -> str:
    """Code as text that is equal for equal syntax trees, in every Python version; without the methods in `skip`."""
    tree = ast.parse(textwrap.dedent(source))
    for node in ast.walk(tree):
        if skip and isinstance(node, ast.ClassDef):
            node.body = [n for n in node.body if not (isinstance(n, ast.FunctionDef) and n.name.startswith(skip))]
        documented = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module)
        if documented and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return _shape(tree)


def _shape(node: Any) -> str:
    if isinstance(node, ast.JoinedStr):  # Python 3.12 may end an f-string with an empty text.
        node.values = [v for v in node.values if not (isinstance(v, ast.Constant) and v.value == "")]
    if isinstance(node, ast.AST):
        # Python versions differ in the empty fields that they add to a node.
        fields = [f"{name}={_shape(v)}" for name, v in ast.iter_fields(node) if v is not None and v != []]
        return f"{type(node).__name__}({','.join(fields)})"
    return f"[{','.join(map(_shape, node))}]" if isinstance(node, list) else repr(node)


def _is_ours(item: Any, package: str) -> bool:
    module = getattr(item, "__module__", None) or ""
    return module.partition(".")[0] == package and not f"{module}.".startswith(_FRAMEWORK)


def _referred(item: Any, package: str, skip: _Skip) -> Iterator[Any]:
    for function in _functions(item, skip):
        names = set(_names(function.__code__))
        for name in sorted(names & function.__globals__.keys()):
            value = function.__globals__[name]
            members = (
                [v for n, v in vars(value).items() if n in names] if isinstance(value, types.ModuleType) else [value]
            )
            unwrapped = map(_unwrap, members)
            yield from (v for v in unwrapped if isinstance(v, types.FunctionType | type) and _is_ours(v, package))
        yield from _imported_inside(names, package)


def _functions(item: Any, skip: _Skip) -> Iterator[types.FunctionType]:
    members = vars(item).items() if isinstance(item, type) else [("", item)]
    for value in (value for name, value in members if not (skip and name.startswith(skip))):
        function = _unwrap(getattr(value, "__func__", getattr(value, "fget", value)))
        if isinstance(function, types.FunctionType):
            yield function


def _unwrap(value: Any) -> Any:
    """The function under jit and other decorators."""
    try:
        return inspect.unwrap(value) if callable(value) and not isinstance(value, type) else value
    except ValueError:  # Wrapped in itself.
        return value


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _names(const)


def _imported_inside(names: set[str], package: str) -> Iterator[Path]:
    """Files of the modules that a function imports, found without importing them."""
    for name in sorted(n for n in names if n.startswith(f"{package}.") and not f"{n}.".startswith(_FRAMEWORK)):
        for root in getattr(sys.modules.get(package), "__path__", []):
            path = Path(root, *name.split(".")[1:])
            # `from package.folder import module`: the module's name is among the names of the function.
            files = [path.with_suffix(".py"), *(path / f"{n}.py" for n in sorted(names))]
            yield from (file for file in files if file.is_file())
