"""The `ejkernel` command."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from ejkernel.errors import EjkernelError


def main(args: list[str] | None = None) -> None:
    """Runs the command line and exits: 0 for yes, 1 for no (different, wrong, not found), 2 for an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = _show_warning
        try:
            app()(args=args, prog_name="ejkernel")
        except (EjkernelError, OSError) as e:
            print(f"error: {e}", file=sys.stderr)
            sys.exit(2)


def app() -> Any:
    """The typer application, put together when it is needed: `import ejkernel.cli` is free."""
    import typer

    from ejkernel.cli import cache, tune

    root = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    root.callback()(_root)
    root.command()(tune.tune)
    root.command()(tune.labels)
    root.add_typer(cache.app, name="cache")
    return root


def _root() -> None:
    """Operations that find, prove and remember their fastest configuration."""


def _show_warning(message: Warning | str, *_: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)
