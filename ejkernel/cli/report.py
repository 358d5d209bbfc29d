"""`ejkernel report`: the results of tunings, as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ejkernel.cli import documents
from ejkernel.cli.options import AsJson, OnlyDevice, OnlyOp, Store
from ejkernel.cli.output import check_file, counted, print_json, printable, tell, working
from ejkernel.cli.store import open_store, why_nothing
from ejkernel.errors import EjkernelError
from ejkernel.ops.store import files, layers


def report(
    source: Annotated[
        str | None, typer.Argument(help="A pack (file or URL) or the directory of a store; the store by default.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write, or - for the standard output.")] = Path(
        "report.html"
    ),
    store: Store = None,
    device: OnlyDevice = None,
    op: OnlyOp = None,
    with_packs: Annotated[bool, typer.Option("--packs", help="The packs under the store, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the results of tunings as one HTML page that needs no network.

    Exit code 1, and nothing written, if there is nothing to show.

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
        found = list(cache.entries(packs=with_packs) if source is None else layers.entries_of(source))
        chosen = [e for e in found if device in (None, e.place.device) and op in (None, e.place.op_id)]
        name = source if source is not None else str(cache.path)
        # If a pack is named, the page is about its tunings; packs beside a store are somebody else's tunings.
        data = pages.summarise(chosen, name, packs_are_others=source is None)
        page = pages.render(data, f"ejkernel: {printable(Path(name).name)}")
    if not chosen:
        hint = "" if source is not None or with_packs else " --packs shows those of packs."
        tell(f"nothing written: {why_nothing(found, name, device, op)}{hint}", error=True)
        raise typer.Exit(1)
    if to_stdout:
        documents.write_utf8(page)
    else:
        _write(page, out, len(chosen), as_json)


def _write(page: str, out: Path, calls: int, as_json: bool) -> None:
    data = page.encode()
    files.write(out.expanduser().absolute(), data)
    if as_json:
        print_json({"path": str(out), "calls": calls, "bytes": len(data)})
    else:
        tell(f"{counted(calls, 'call')} in {out}.")
