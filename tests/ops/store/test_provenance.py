"""Every entry says where it comes from."""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path

import jax
import jaxlib
import pytest

import ejkernel
from ejkernel.ops.store import provenance
from ejkernel.ops.store.persistent import PersistentCache

ROOT = Path(__file__).parents[3]


class Kernel:
    def run(self, x):
        return x


def test_versions_host_time_and_source_are_collected():
    found = provenance.collect(Kernel())
    assert (found["ejkernel"], found["jax"], found["jaxlib"]) == (
        ejkernel.__version__,
        jax.__version__,
        jaxlib.__version__,
    )
    assert found["kernel_source"] == provenance.collect(Kernel)["kernel_source"]
    measured = datetime.datetime.fromisoformat(found["time"])
    assert abs((datetime.datetime.now(datetime.UTC) - measured).total_seconds()) < 60
    assert "kernel_source" not in provenance.collect()


def test_the_driver_is_told_once_a_backend_runs():
    jax.numpy.zeros(1).block_until_ready()
    assert provenance.collect()["driver"] == jax.devices()[0].client.platform_version.strip()


def test_storing_starts_no_backend(tmp_path):
    script = f"""
from ejkernel.ops.store.persistent import PersistentCache
cache = PersistentCache({str(tmp_path)!r})
cache.put("k", 1)
assert cache.get("k") == 1 and PersistentCache({str(tmp_path)!r}).get("k") == 1
from jax._src import xla_bridge
print(xla_bridge.backends_are_initialized(), "driver" in cache.lookup("k").provenance)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False False\n", done.stderr


def test_the_tuner_adds_what_it_knows(tmp_path):
    cache = PersistentCache(tmp_path)
    cache.put("k", 1, provenance={"timer": "cupti", "host": "elsewhere"})
    found = cache.lookup("k").provenance
    assert (found["timer"], found["host"]) == ("cupti", "elsewhere")


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({}, None),
        ({"jax": jax.__version__, "driver": "other", "host": "other"}, None),
        ({"jax": "0.1"}, f"jax 0.1 -> {jax.__version__}"),
        ({"kernel_source": "x", "jaxlib": "0.1"}, f"kernel source changed; jaxlib 0.1 -> {jaxlib.__version__}"),
    ],
)
def test_only_what_is_known_on_both_sides_can_have_changed(stored, expected):
    assert provenance.changes(stored, Kernel) == expected
