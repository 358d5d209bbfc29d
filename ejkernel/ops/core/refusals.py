"""Why the compiled program of a call cannot run it as it is: raised while it is traced, before anything runs."""

from __future__ import annotations


class StaticFound(Exception):
    """Raised while tracing: an argument is a Python scalar, which is static here but an array for `jax.jit`."""


class InputsWanted(Exception):
    """The config is about to be measured, so the call's own data is needed if there is any."""


REFUSED = (StaticFound, TypeError, ValueError, OverflowError)
"""What comes of arguments that are not arrays: the first from us, the others from `jax.jit`; integers may be large."""
