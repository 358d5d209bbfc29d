"""The commands, put together."""

from __future__ import annotations

from typing import Annotated

import typer

import ejkernel
from ejkernel.cli import bench, cache, explain, info, report, tune

app = typer.Typer(pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]})
app.command()(info.info)
app.command()(info.kernels)
app.command()(tune.tune)
app.command()(bench.bench)
app.command()(explain.explain)
app.command()(report.report)
app.command()(tune.labels)
app.add_typer(cache.app, name="cache")


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Operations that find, check and store their fastest configuration.

    Exit codes: 0 for yes, 1 for no (different, wrong, not found), 2 for an error.
    """
    if version:
        print(f"ejkernel {ejkernel.__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())
