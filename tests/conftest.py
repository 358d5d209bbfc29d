"""Shared set-up: four host devices, and no trace of one test in the next."""

import collections
import gc
import itertools
import os
import signal
import tempfile
import threading
from pathlib import Path

import hypothesis
import pytest

# All of this before JAX is imported. Workers share a GPU, whose memory none of them may take as a whole.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# Most of the suite's time is XLA compiling small programs, three of four not for the first time. On a CPU, what is
# compiled is kept for the run: for later tests, and for the programs that tests start.
_compiled = tempfile.TemporaryDirectory(prefix="ejkernel-tests-", ignore_cleanup_errors=True)
_KEEP_COMPILED = {
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": _compiled.name,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
if not [*Path("/dev").glob("nvidia*"), *Path("/dev").glob("accel*")]:
    os.environ.update({name: os.environ.get(name, value) for name, value in _KEEP_COMPILED.items()})

# Tracing makes many objects and few circles, and looking for those in a heap that grows with every test takes long.
gc.set_threshold(100_000, 20, 100)

# A busy machine makes no property false, and neither does the first example that compiles something.
hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("patient")

# A shell that starts the suite in the background has it ignore Ctrl-C, and programs that tests start inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items):
    _thin_out(items)
    yield  # Tests are chosen by their marks.
    # Long ones first, so that no worker is left alone with one at the end.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if any(item.get_closest_marker("gpu") or item.get_closest_marker("tpu") for item in items):
        _skip_where_there_is_no_device(items)


def _skip_where_there_is_no_device(items):
    import jax

    backend = jax.default_backend()
    for item in items:
        for name, present in (("gpu", backend in ("gpu", "cuda")), ("tpu", backend == "tpu")):
            if item.get_closest_marker(name) and not present:
                item.add_marker(pytest.mark.skip(reason=f"needs a {name.upper()}, this machine has {backend}"))


def _thin_out(items):
    """Of tests marked `thin(n)`, the short suite has every n-th case."""
    places = collections.Counter()
    for item in items:
        if (thin := item.get_closest_marker("thin")) is not None:
            name = item.nodeid.partition("[")[0]
            if places[name] % thin.args[0]:
                item.add_marker(pytest.mark.full)
            places[name] += 1


def pytest_collection_finish():
    _forget_what_is_alive()


def _forget_what_is_alive():
    """Tests that collect garbage need not walk through JAX, and what other tests have left in it, each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def programs_share_contexts():
    """What JAX does since 0.12: ten programs of a thread are lowered in one MLIR context.

    Making one takes 4 ms, as long as lowering the small program of a test.
    """
    from jax._src.interpreters import mlir

    if hasattr(mlir, "_thread_local_context"):
        yield
        return
    kept, make = threading.local(), mlir.make_ir_context

    def shared():
        if next(getattr(kept, "left", iter(())), None) is None:
            kept.context, kept.left = make(), iter(range(9))
        return kept.context

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlir, "make_ir_context", shared)
        yield


_tests_since = itertools.count(1)


@pytest.fixture(autouse=True)
def clean_state(monkeypatch, request, tmp_path):
    """No environment, registry, default executor, user store or pack of this machine reaches a test."""
    for name in [n for n in os.environ if n.startswith("EJKERNEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "ejkernel-store"))
    from ejkernel.ops import registry, set_default_executor
    from ejkernel.ops.config import kinds
    from ejkernel.ops.store import packs

    # Otherwise the machine that a pack is for would run other configs than all others, and check them first.
    if request.node.get_closest_marker("shipped_packs") is None:
        monkeypatch.setattr(packs, "from_packages", list)

    registry.clear()
    kinds.forget_owners()
    set_default_executor(None)
    if next(_tests_since) % 100 == 0:
        _forget_what_is_alive()
    yield
    set_default_executor(None)
