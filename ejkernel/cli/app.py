"""The commands, put together."""

from __future__ import annotations

from typing import Annotated

import typer

import ejkernel
from ejkernel.cli import cache, tune

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(tune.tune)
app.command()(tune.labels)
app.add_typer(cache.app, name="cache")


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Operations that find, prove and remember their fastest configuration."""
    if version:
        print(f"ejkernel {ejkernel.__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())
