"""What commands print: tables for people, JSON for scripts."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ejkernel.cli import documents
from ejkernel.errors import EjkernelError
from ejkernel.report.naming import compact
from ejkernel.report.summary import arrays

_MAX_RICH_ROWS = 500  # For more rows, drawing a table takes too long.


def check_file(name: str, path: str | os.PathLike[str]) -> None:
    """Refuses a file that cannot be written, before anything is measured."""
    file = Path(path).expanduser().absolute()
    if file.is_dir():
        raise EjkernelError(f"{name}: {os.fspath(path)} is a directory; name the file to write.")
    folder = next(parent for parent in file.parents if parent.exists())
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as e:
        raise EjkernelError(f"{name}: {os.fspath(path)} cannot be written: {folder}: {e.strerror}.") from e


@contextlib.contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Shows at a terminal that something takes long; gives a function that changes the text."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status(escape(text)) as status:
        yield lambda text: status.update(escape(text))


def printable(text: str) -> str:
    """`text` in one line that a terminal shows as it is: invisible characters are written as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def tell(text: str, *, error: bool = False) -> None:
    """Prints text that may contain names from files, each line through `printable`."""
    print("\n".join(map(printable, text.split("\n"))), file=sys.stderr if error else sys.stdout)


def print_json(value: Any) -> None:
    """One JSON document."""
    print(json.dumps(value, indent=1), file=documents.stream())


def print_json_list(items: Iterable[Any]) -> None:
    """A JSON list, one item per line, printed while it is being computed."""
    separator, out = "[", documents.stream()
    for item in items:
        print(separator + json.dumps(item), end="", file=out)
        separator = ",\n"
    print("[]" if separator == "[" else "]", file=out)


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A drawn table on a terminal, aligned text elsewhere."""
    rows = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty() and len(rows) <= _MAX_RICH_ROWS:
        from rich.console import Console
        from rich.table import Table

        table = Table(*headers, header_style="bold", box=None, pad_edge=False)
        for row in rows:
            table.add_row(*(cell.replace("[", r"\[") for cell in row))
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    for row in (headers, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def short_arguments(signature: Mapping[str, Any] | None) -> str:
    """Arrays of a signature in one line: `float32[128,256] int32[]`."""
    return " ".join(arrays(signature or {}))


def counted(count: int, one: str, many: str | None = None) -> str:
    """A number of things in words: `1 entry`, `2 entries`."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def short_cfg(data: Mapping[str, Any]) -> str:
    """A stored config in one line: `Config(block=128, tile=(1, 2))`."""
    name = str(data.get("type", "")).rpartition(":")[2].rpartition(".")[2]
    value = data.get("value")
    try:
        return compact(_short_fields(name, value)) if isinstance(value, dict) and not _tag(value) else _short(value)
    except (TypeError, AttributeError):  # Not as we write it; `cache verify` says so.
        return json.dumps(value)


def short_repr(cfg: Any) -> str:
    """A config in one line, without the fields that are None: `Config(block=128)`."""
    return compact(repr(cfg))


def _tag(value: Mapping[str, Any]) -> str | None:
    return next((key for key in value if key.startswith("$")), None)


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_short, value))}]"
    if not isinstance(value, dict):
        return repr(value)
    tag = _tag(value)
    if tag is None:
        return _short_fields("", value)
    if tag == "$type":
        return _short_fields(value[tag].rpartition(":")[2].rpartition(".")[2], value.get("fields", {}))
    if tag == "$enum":
        return f"{value[tag].rpartition(':')[2]}.{value.get('name', value.get('value'))}"
    if tag == "$tuple":
        return f"({', '.join(map(_short, value[tag]))})"
    return str(value[tag])


def _short_fields(name: str, fields: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={_short(value)}' for key, value in fields.items())})"
