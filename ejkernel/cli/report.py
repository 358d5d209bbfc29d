"""`ejkernel report`: what tunings found, as a page."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from ejkernel.cli import documents
from ejkernel.cli.options import AsJson, Store
from ejkernel.cli.output import check_file, print_json, working
from ejkernel.cli.store import open_store
from ejkernel.errors import EjkernelError
from ejkernel.ops.config import layers, store_files
from ejkernel.ops.config.entry import StoredEntry


def report(
    source: Annotated[
        str | None, typer.Argument(help="A pack (file or URL) or the directory of a store; the store by default.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write, or - for the standard output.")] = Path(
        "report.html"
    ),
    store: Store = None,
    device: Annotated[str | None, typer.Option(help="Only entries of this device.")] = None,
    op: Annotated[str | None, typer.Option(help="Only entries of this op.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write what tunings found as one HTML page that needs no network; exit code 1 if there is nothing to show.

    For example:

    ejkernel report -o report.html

    ejkernel report tuned.json --op flash_attention -o attention.html
    """
    from ejkernel import report as pages

    to_stdout = str(out) == "-"
    if to_stdout and as_json:
        raise EjkernelError("--json: the page itself goes to the standard output. Write it to a file with --out.")
    if not to_stdout:
        check_file("--out", out)
    with working("reading"):
        cache = open_store(store)
        found: Iterable[StoredEntry] = layers.entries_of(source) if source is not None else cache.entries()
        chosen = [e for e in found if device in (None, e.place.device) and op in (None, e.place.op_id)]
        name = source if source is not None else str(cache.path)
        data = pages.summarise(chosen, name)
        page = pages.render(data, f"ejkernel: {Path(name).name}")
    if to_stdout:
        documents.write_utf8(page)
    else:
        _write(page, out, len(chosen), as_json)
    raise typer.Exit(0 if chosen else 1)


def _write(page: str, out: Path, calls: int, as_json: bool) -> None:
    data = page.encode()
    store_files.write(out.expanduser().absolute(), data)
    if as_json:
        print_json({"path": str(out), "calls": calls, "bytes": len(data)})
    else:
        print(f"{calls} calls in {out}.")
