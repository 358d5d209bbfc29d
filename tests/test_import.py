"""Importing the package starts nothing and brings in nothing heavy; the public names are where the contract says."""

import importlib
import os
import subprocess
import sys

import pytest


def run(code):
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


def test_import_starts_no_backend_and_touches_no_file(tmp_path):
    code = (
        "import sys, jax\n"
        "already = set(sys.modules)\n"
        "import ejkernel, ejkernel.ops\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, xla_bridge._backends\n"
        "new = set(sys.modules) - already\n"
        "heavy = {'pydantic', 'filelock', 'rich', 'typer', 'triton', 'scipy'} & new\n"
        "assert not heavy, heavy\n"
    )
    env_dir = tmp_path / "cache"
    done = run(f"import os; os.environ['EJKERNEL_CACHE_DIR'] = {str(env_dir)!r}\n" + code)
    assert done.returncode == 0, done.stderr
    assert not env_dir.exists()


@pytest.mark.parametrize(
    "call",
    [
        "from tests.support import Plain; f = lambda x: Plain()(x, x)",
        # As on an accelerator, whose kernels are loaded by the trace that first needs them.
        "from ejkernel.modules import flash_attention; import importlib\n"
        "def f(x):\n"
        "    importlib.import_module('ejkernel.kernels.flash_attention.pallas')\n"
        "    return flash_attention(x, x, x)",
    ],
)
def test_first_call_of_a_process_has_nothing_traced_again(call):
    code = (
        "import jax, jax.numpy as jnp\n"
        f"{call}\n"
        "traced, x = [], jnp.ones((1, 16, 2, 8))\n"
        "before = jax.jit(lambda x: traced.append('before') or x)\n"
        "here = jax.jit(lambda x: traced.append('here') or f(x))\n"
        "before(x), here(x), here(x), before(x)\n"
        "assert traced == ['before', 'here'], traced\n"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr


HOMES = {
    "core.kernel": ["Kernel", "Invocation"],
    "core": ["Kernel", "Invocation"],
    "core.types": ["Cfg", "Out"],
    "config.cache": ["ConfigCache", "overlay_cache"],
    "config.persistent": ["PersistentCache"],
    "utils.serialize": ["to_json", "from_json"],
    "config.selection": ["ConfigSelectorChain", "AutotunePolicy", "policy_override", "Tuner"],
    "execution.executor": ["Executor", "ConfigChooser"],
    "execution.tuning": [
        "Autotuner", "AutotuningResult", "Entry", "Measurement", "autotune", "autotune_recorded", "benchmark",
    ],
    "execution.batch": ["vmap_with_config", "pmap_with_config"],
    "registry": ["record_invocation", "get_invocations"],
    "utils.fingerprint": [
        "device_kind", "get_device_platform", "device_fingerprint", "sharding_fingerprint",
        "default_key_builder_with_sharding", "abstractify", "short_hash", "stable_json",
    ],
    "utils.meta": [
        "label", "find_labels_in_lowered", "extract_labels_from_hlo_text", "labels_to_configs", "LABEL_RE",
    ],
    "utils.params": ["FwdParams", "BwdParams"],
}  # fmt: skip


@pytest.mark.parametrize(("home", "name"), [(h, n) for h, names in HOMES.items() for n in names])
def test_public_name_is_at_home_and_in_ops(home, name):
    ops = importlib.import_module("ejkernel.ops")
    assert getattr(ops, name) is getattr(importlib.import_module(f"ejkernel.ops.{home}"), name)


def test_star_import_brings_every_public_name():
    ops, scope = importlib.import_module("ejkernel.ops"), {}
    exec("from ejkernel.ops import *", scope)
    names = {name for names in HOMES.values() for name in names}
    assert names <= scope.keys()
    assert set(ops._LAZY) <= set(ops.__all__) <= set(dir(ops))


def test_protocols_can_be_asked_for():
    from ejkernel.ops import Autotuner, ConfigChooser, ConfigSelectorChain, Tuner

    assert isinstance(ConfigSelectorChain(), ConfigChooser)
    assert isinstance(Autotuner(), Tuner)
    assert not isinstance(Autotuner(), ConfigChooser)
