"""Starting JAX, with an error that people can act on."""

from __future__ import annotations

import os

from ejkernel.errors import EjkernelError


class BackendStartError(EjkernelError, RuntimeError):
    """JAX has no device to run on."""


def start() -> None:
    """Starts JAX's backend.

    Raises:
      BackendStartError: There is none, or not the one that `JAX_PLATFORMS` asks for.
    """
    import jax

    try:
        jax.local_devices()
    except (RuntimeError, AssertionError) as error:
        asked = os.environ.get("JAX_PLATFORMS")
        reason = str(error).splitlines()[0] if str(error) else "no such backend is available"
        hint = f"JAX_PLATFORMS is {asked!r}" if asked else "JAX_PLATFORMS is not set"
        raise BackendStartError(f"JAX cannot start: {reason} ({hint}).") from error
