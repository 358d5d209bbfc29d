"""The `ejkernel` command."""

from __future__ import annotations

import io
import os
import sys
import warnings
from typing import Any

from ejkernel.errors import EjkernelError


def main(args: list[str] | None = None) -> None:
    """Runs the command line and exits: 0 for yes, 1 for no (different, wrong, not found), 2 for an error."""
    # As with `python -m ejkernel`: kernels of modules in the current directory can be named.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A locale may lack characters that a store holds; an escape is better than an error.
        sys.stdout.reconfigure(errors="backslashreplace")
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = _show_warning
        try:
            # Imported here: `import ejkernel.cli` is free.
            from ejkernel.cli.app import app

            app(args=args, prog_name="ejkernel")
        except (EjkernelError, OSError) as e:
            _say(f"error: {e}")
            sys.exit(2)


def _show_warning(message: Warning | str, *_: Any) -> None:
    _say(f"warning: {message}")


def _say(text: str) -> None:
    from ejkernel.cli.output import tell

    tell(text, error=True)
