"""Short names of configs: the fields in which they differ."""

from __future__ import annotations

import ast
from collections.abc import Sequence


def columns(reprs: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Names of the fields in which configs differ, and each config's values; configs are given by their `repr`.

    A field is named by its last part if that is unique. If one of them is not the `repr` of a record, there is one
    column without a name, the texts themselves.
    """
    known = [each for text in reprs if (each := fields_of(text)) is not None]
    paths = list(dict.fromkeys(path for each in known for path in each))
    differing = [path for path in paths if len({each.get(path) for each in known}) > 1] if len(known) > 1 else paths
    if len(known) < len(reprs) or not differing:
        return [""], [[text] for text in reprs]
    return _short_names(differing), [[each.get(path, "-") for path in differing] for each in known]


def compact(text: str) -> str:
    """A config's `repr` in one short line: `Config(q_block=64, platform=xla)`, without fields that are None."""
    fields = fields_of(text)
    if fields is None:
        return text
    shown = zip(_short_names(list(fields)), fields.values(), strict=True)
    return f"{text.partition('(')[0]}({', '.join(f'{name}={value}' for name, value in shown)})"


def _short_names(paths: list[str]) -> list[str]:
    """Each path's last part, if no other has the same."""
    lasts = [path.rpartition(".")[2] for path in paths]
    return [last if lasts.count(last) == 1 else path for path, last in zip(paths, lasts, strict=True)]


def fields_of(text: str) -> dict[str, str] | None:
    """Leaf fields of a record's `repr` by dotted path, without those that are None; None if it is not a record."""
    try:
        node = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return dict(_leaves(node)) if isinstance(node, ast.Call) else None


def _leaves(node: ast.Call, prefix: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    named = [(k.arg, k.value) for k in node.keywords if k.arg is not None]
    for name, value in [*((str(i), v) for i, v in enumerate(node.args)), *named]:
        path = f"{prefix}{name}"
        if isinstance(value, ast.Call) and value.keywords:
            found += _leaves(value, f"{path}.")
        elif not (isinstance(value, ast.Constant) and value.value is None):
            found.append((path, _text(value)))
    return found


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ast.unparse(node)
