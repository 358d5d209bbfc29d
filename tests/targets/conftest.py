"""Skips what needs a compiler that is not installed."""

import importlib.util

import pytest

NEEDED = {"tpu": "libtpu", "cuda": "jax_cuda13_plugin"}


@pytest.fixture(autouse=True)
def compiler(request):
    """A test that names a target, in a case or by itself, needs the compiler of that target."""
    from ejkernel.ops.utils.targets import TARGETS

    params = getattr(request.node, "callspec", None)
    named = [] if params is None else [getattr(value, "target", value) for value in params.params.values()]
    wanted = {TARGETS[name].platform for name in named if isinstance(name, str) and name in TARGETS} or {"tpu", "cuda"}
    for platform in wanted:
        if importlib.util.find_spec(NEEDED[platform]) is None:
            pytest.skip(f"needs {NEEDED[platform]}, which `make test-targets` installs")
