"""Tunes the train step of `transformer.py` without running it, ships the result, and trains with exactly that.

The second training is a process of its own that has only the shipped file: its policy is `frozen`, so a call without a
tuned config would be an error.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
from transformer import batches, new_training, train

from ejkernel.ops import Autotuner, ConfigSelectorChain, PersistentCache, autotune_lowered, get_invocations
from ejkernel.ops.store import packs
from ejkernel.ops.store.layers import entries_of


def tune(pack, budget_s):
    """Lowers the step, measures each of its calls alone, and writes what was found."""
    state, step = new_training()
    lowered = jax.jit(step).lower(state, next(batches()))
    with tempfile.TemporaryDirectory() as store:
        selector = ConfigSelectorChain(persistent=PersistentCache(store))
        result = autotune_lowered(selector, lowered, tuner=Autotuner(budget_s=budget_s))
        packs.write(pack, entries_of(store))
    assert not result.unmatched, result.unmatched
    for entry in result.entries:
        print(f"tuned {entry.op_id} {entry.call_key}: {entry.cfg}")


def train_frozen(pack):
    """A training in a new process that may use the pack's configs only."""
    with tempfile.TemporaryDirectory() as empty:
        env = {
            **os.environ,
            "EJKERNEL_CACHE_PACKS": str(pack),
            "EJKERNEL_CACHE_DIR": empty,
            "EJKERNEL_AUTOTUNE": "frozen",
            "EJKERNEL_OPS_RECORD": "1",
        }
        subprocess.run([sys.executable, __file__, "--frozen"], env=env, check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=60, help="seconds that each call may take to tune")
    parser.add_argument("--frozen", action="store_true", help="only train, with what the environment says")
    options = parser.parse_args()
    if options.frozen:
        losses = train(5)
        calls = sum(len(by_key) for by_key in get_invocations().values())
        print(f"frozen: {calls} distinct calls, all configured; loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        return
    with tempfile.TemporaryDirectory() as folder:
        pack = Path(folder) / "train_step.json"
        tune(pack, options.budget)
        print(f"{pack.name}: {pack.stat().st_size} bytes, to be reviewed and shipped with the program")
        train_frozen(pack)


if __name__ == "__main__":
    main()
