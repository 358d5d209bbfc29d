"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from ejkernel.cli import documents, operations
from ejkernel.cli.store import stored_names


def _leave_alone(context: typer.Context, as_json: bool) -> bool:
    if as_json and not context.resilient_parsing:
        context.with_resource(documents.alone())
    return as_json


AsJson = Annotated[
    bool,
    typer.Option("--json", callback=_leave_alone, help="Print one JSON document for scripts, and nothing else."),
]
Store = Annotated[str | None, typer.Option(help="Directory of the store, instead of the default one.")]
OnlyDevice = Annotated[
    str | None,
    typer.Option(help="Only entries of this device.", autocompletion=stored_names("device")),
]
OnlyOp = Annotated[str | None, typer.Option(help="Only entries of this op.", autocompletion=stored_names("op_id"))]
NoTrials = Annotated[
    bool,
    typer.Option(
        "--no-trials", help="Of the candidates only the winner and the guess: a small pack, for version control."
    ),
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Keyword argument: causal=true, or an array: q_segment_ids=s32[2,64].")
]
Grad = Annotated[
    bool,
    typer.Option("--grad", help="What is tuned of its gradient as well: its backward, or calls of other operations."),
]
Operation = Annotated[
    str,
    typer.Argument(
        metavar="OP",
        help="Name of an installed operation (see `ejkernel kernels`), or module:Kernel.",
        autocompletion=operations.complete,
    ),
]
