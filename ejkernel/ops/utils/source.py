"""Hash of a class's code: not of its comments, docstrings, formatting or place in the file."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import inspect
import sys
import textwrap
import threading
import tokenize
import types
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_FRAMEWORK = "ejkernel.ops."  # Its changes are visible in the version of ejkernel.

_CURRENT = "2:"
"""What hashes begin with. Those of the first definition have no prefix, and do not cover constants of modules."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))

_Skip = tuple[str, ...]
_ONLY_WORDS = ("describe_keywords",)
"""Methods that say something about a call and change nothing about how it runs."""
_hashes: weakref.WeakKeyDictionary[type, dict[tuple[_Skip, bool], str | None]] = weakref.WeakKeyDictionary()
_KEPT = 512
"""How many files, classes and functions are kept as they were read: several hashes cover the same ones."""
_parsing = threading.Lock()
"""Two threads that parse at the same time make Python 3.11 raise SystemError ("recursion depth mismatch")."""


def source_hash(item: Any, *, skip: _Skip = (), first: bool = False) -> str | None:
    """A hash of the code of a class, given itself or as an instance.

    Covers its bases, and what they name of the same package: global functions and classes, constants of modules as they
    are written there, modules imported inside a function, and those that its `source_modules` names. Methods whose
    names begin with one of `skip` are left out. Without source (a class typed into a prompt) the compiled code counts,
    which differs between Python versions. None without either. `first` is the hash as it was first defined, without
    constants.
    """
    cls = item if isinstance(item, type) else type(item)
    known, skip = _hashes.setdefault(cls, {}), (*skip, *_ONLY_WORDS)
    if (skip, first) not in known:
        with _parsing:
            if (skip, first) not in known:
                known[skip, first] = _hash(cls, skip, constants=not first)
    return known[skip, first]


def is_source(item: Any, stored: str) -> bool:
    """Whether a hash that was stored is that of `item` now, by the definition that it was made with.

    True if there is nothing to compare it with.
    """
    found = source_hash(item, first=not stored.startswith(_CURRENT))
    return found is None or found == stored


@dataclass(frozen=True)
class _Constant:
    """A global name that is not a function, class or module."""

    module: str
    name: str
    value: Any = field(compare=False)


def _hash(cls: type, skip: _Skip, *, constants: bool) -> str | None:
    package = cls.__module__.partition(".")[0]
    code: dict[Any, str] = {}
    typed = _source(cls, skip) is None
    if typed and not _compiled(cls, skip):
        return None
    waiting: list[Any] = [c for c in cls.__mro__ if _is_ours(c, package)]
    waiting += {file for name in getattr(cls, "source_modules", ()) for file in _module_files(name, package)}
    while waiting:
        item = waiting.pop()
        if item in code:
            continue
        text = _source(item, skip)
        if text is None and typed and not isinstance(item, Path | _Constant):
            text = _compiled(item, skip)
        if text is None:
            continue
        code[item] = text
        if not isinstance(item, Path):
            found = _named_by(item, package) if isinstance(item, _Constant) else _referred(item, package, skip)
            waiting += [x for x in found if constants or not isinstance(x, _Constant)]
    # Without names and in order of content: moving a module is not a change.
    digest = hashlib.sha256("\n".join(sorted(code.values())).encode()).hexdigest()[:16]
    return f"{_CURRENT}{digest}" if constants else digest


def _source(item: Any, skip: _Skip) -> str | None:
    """The source of a class, function, file or constant in normal form; None if there is none."""
    if isinstance(item, _Constant):
        return _written(item)
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
    # The order of a set differs between processes.
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def normal(source: str, skip: _Skip = ()) -> str:
    """Code as text that is equal for equal syntax trees, in every Python version; without the methods in `skip`."""
    # Only those that are there: hashes with other names to skip find most files in the cache.
    return _normal(source, tuple(name for name in skip if f"def {name}" in source))


@functools.lru_cache(maxsize=_KEPT)
def _normal(source: str, skip: _Skip) -> str:
    return _shape(ast.parse(textwrap.dedent(source)), skip)


def _shape(node: Any, skip: _Skip = ()) -> str:
    if isinstance(node, list):
        return f"[{','.join([_shape(each, skip) for each in node])}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, getattr(node, name, None)) for name in node._fields]
    if isinstance(node, _DOCUMENTED):
        fields = [(name, _body(node, skip) if name == "body" else value) for name, value in fields]
    elif isinstance(node, ast.JoinedStr):  # Python 3.12 may end an f-string with an empty text.
        fields = [("values", [v for v in node.values if not (isinstance(v, ast.Constant) and v.value == "")])]
    # Python versions differ in the empty fields that they add to a node.
    shapes = [f"{name}={_shape(value, skip)}" for name, value in fields if value is not None and value != []]
    return f"{type(node).__name__}({','.join(shapes)})"


_DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)


def _body(node: Any, skip: _Skip) -> list[ast.stmt]:
    """The statements of a class, function or module without its docstring, and without the methods in `skip`."""
    body = node.body if ast.get_docstring(node, clean=False) is None else node.body[1:]
    if not (skip and isinstance(node, ast.ClassDef)):
        return body
    return [n for n in body if not (isinstance(n, ast.FunctionDef) and n.name.startswith(skip))]


def _is_ours(item: Any, package: str) -> bool:
    return _is_of(getattr(item, "__module__", None) or "", package)


def _is_of(module: str, package: str) -> bool:
    return module.partition(".")[0] == package and not f"{module}.".startswith(_FRAMEWORK)


def _referred(item: Any, package: str, skip: _Skip) -> Iterator[Any]:
    for function in _functions(item, skip):
        names = set(_names(function.__code__))
        yield from _reached(names, function.__globals__, package)
        yield from _imported_inside(names, package)


def _reached(names: set[str], scope: Mapping[str, Any], package: str) -> Iterator[Any]:
    """The values of `names` in the globals of a module, and in modules that are named there."""
    for name in sorted(names & scope.keys()):
        value = scope[name]
        if isinstance(value, types.ModuleType):
            found = [(n, v) for n, v in vars(value).items() if n in names]
            yield from _ours(found, vars(value), package)
        else:
            yield from _ours([(name, value)], scope, package)


def _ours(found: list[tuple[str, Any]], scope: Mapping[str, Any], package: str) -> Iterator[Any]:
    """Of names with their values, those functions, classes and constants that are of the package."""
    module = scope.get("__name__", "")
    for name, value in found:
        code = _unwrap(value)
        if isinstance(code, types.FunctionType | type):
            if _is_ours(code, package):
                yield code
        elif not (isinstance(value, types.ModuleType) or name.startswith("__")) and _is_of(module, package):
            yield _Constant(module, name, value)


# --- Constants ---


def _written(constant: _Constant) -> str | None:
    """How a module sets a name: its text, not its value, which may be a count or a cache that changes as it runs.

    Without text, the value if it is a plain one.
    """
    tree = _tree(constant.module)
    nodes = [] if tree is None else _settings(tree, constant.name)
    if nodes:
        # The module that it is imported from is left out: moving it is not a change.
        return ",".join(_shape(node) for node in nodes if not isinstance(node, ast.ImportFrom))
    plain = constant.value if isinstance(constant.value, tuple) else (constant.value,)
    return f"{constant.name}={constant.value!r}" if all(type(x) in _PLAIN for x in plain) else None


def _named_by(constant: _Constant, package: str) -> Iterator[Any]:
    """What the text that sets a constant names."""
    module, tree = sys.modules.get(constant.module), _tree(constant.module)
    if module is None or tree is None:
        return
    for node in _settings(tree, constant.name):
        names = {n.id if isinstance(n, ast.Name) else n.attr for n in ast.walk(node) if isinstance(n, _NAMES)}
        yield from _reached(names - {constant.name}, vars(module), package)
        if isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), module.__package__)
            there = vars(sys.modules[source]) if source in sys.modules else {}
            named = [alias.name for alias in node.names if constant.name == (alias.asname or alias.name)]
            yield from _ours([(name, constant.value) for name in named if name in there], there, package)


_NAMES = (ast.Name, ast.Attribute)


def _settings(tree: ast.Module, name: str) -> list[ast.stmt]:
    """Statements of a module that set a name, or a part of its value."""
    return [node for node in _statements(tree.body) if name in _targets(node)]


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when a module is loaded, under conditions too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _targets(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {n.id for target in targets if target is not None for n in ast.walk(target) if isinstance(n, ast.Name)}


@functools.lru_cache(maxsize=16)
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def _tree(module: str) -> ast.Module | None:
    """A loaded module's syntax tree; None if it has no source."""
    found = sys.modules.get(module)
    try:
        return None if found is None else _parsed(inspect.getsource(found))
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):
        return None


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


def _module_files(name: str, package: str) -> set[Path]:
    """The file of a module, and those of the modules of the same package that it imports; none of them is imported."""
    files: set[Path] = set()
    waiting, seen = [name], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen or name.partition(".")[0] != package or f"{name}.".startswith(_FRAMEWORK):
            continue
        seen.add(name)
        for root in getattr(sys.modules.get(package), "__path__", []):
            path = Path(root, *name.split(".")[1:]).with_suffix(".py")
            if path.is_file():
                files.add(path)
                waiting += _imports(path.read_text())
    return files


@functools.lru_cache(maxsize=_KEPT)
def _imports(source: str) -> tuple[str, ...]:
    """Names that a file imports, each of which may be a module or what is in one."""
    found: list[str] = []
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        waiting += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]
    return tuple(found)
