"""A fused kernel of one's own: a linear layer and its cross entropy, without the logits ever being in memory at once.

How many tokens to take at a time is the config, forward and backward apart. The example tunes both here and compares
time and memory with the plain formulation.
"""

import argparse
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ejkernel.ops import (
    Autotuner,
    ConfigSelectorChain,
    Executor,
    Kernel,
    autotune_lowered,
    benchmark,
    default_executor,
)

TOKENS, WIDTH, VOCABULARY = 512, 128, 4096


@dataclass(frozen=True)
class Chunk:
    tokens: int = 64


class LinearCrossEntropy(Kernel[Chunk, jax.Array]):
    """`mean(logsumexp(x w) - (x w)[label])`, a chunk of tokens at a time, forward and backward."""

    def run(self, x, w, labels, *, cfg):
        return self.fwd_with_residuals(x, w, labels, cfg=cfg)[0]

    def fwd_with_residuals(self, x, w, labels, *, cfg):
        def chunk(part):
            x, labels = part
            logits = x @ w
            lse = jax.nn.logsumexp(logits, axis=-1)
            return lse, lse - jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]

        lse, losses = jax.lax.map(chunk, self._chunks(cfg, x, labels))
        return losses.mean(), lse.reshape(-1)

    def vjp(self, lse, out, dout, x, w, labels, *, cfg):
        def chunk(dw, part):
            x, labels, lse = part
            slope = jnp.exp(x @ w - lse[:, None]).at[jnp.arange(len(labels)), labels].add(-1.0)
            return dw + x.T @ slope, slope @ w.T

        dw, dx = jax.lax.scan(chunk, jnp.zeros_like(w), self._chunks(cfg, x, labels, lse))
        scale = dout / len(labels)
        return scale * dx.reshape(x.shape), scale * dw, None

    def _chunks(self, cfg, *arrays):
        return tuple(a.reshape(-1, cfg.tokens, *a.shape[1:]) for a in arrays)

    # --- What tuning needs to know ---

    def heuristic_cfg(self, inv):
        return Chunk(min(64, len(inv.args[0])))

    def config_space(self, inv):
        tokens = len(inv.args[0])
        # At most half of them: all at once would be the plain formulation with its memory.
        return [Chunk(n) for n in (32, 64, 128, 256) if tokens % n == 0 and n < tokens]

    # The backward is a problem of its own, with a winner of its own.
    heuristic_cfg_vjp = heuristic_cfg
    config_space_vjp = config_space

    def reference(self, x, w, labels):
        return plain(x, w, labels)

    def example_inputs(self, inv, key):
        x, w, labels = inv.args
        keys = jax.random.split(key, 3)
        legal = jax.random.randint(keys[2], labels.shape, 0, w.shape[1], labels.dtype)
        return (jax.random.normal(keys[0], x.shape), jax.random.normal(keys[1], w.shape) * 0.1, legal), {}


def plain(x, w, labels):
    logits = x @ w
    return (jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]).mean()


def fused(x, w, labels):
    return KERNEL(x, w, labels)


def guessed(x, w, labels):
    return UNTUNED(KERNEL, x, w, labels)


KERNEL = LinearCrossEntropy("linear_cross_entropy")
UNTUNED = Executor(ConfigSelectorChain(autotune=False))  # It has no store, so it guesses.


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=20, help="seconds that tuning each pass may take")
    budget_s = parser.parse_args().budget
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (TOKENS, WIDTH))
    w = jax.random.normal(keys[1], (WIDTH, VOCABULARY)) * 0.1
    labels = jax.random.randint(keys[2], (TOKENS,), 0, VOCABULARY)
    steps = {fn.__name__: jax.jit(jax.value_and_grad(fn, argnums=(0, 1))) for fn in (plain, guessed, fused)}

    result = autotune_lowered(
        default_executor().chooser, steps["fused"].lower(x, w, labels), tuner=Autotuner(budget_s=budget_s)
    )
    for entry in result.entries:
        print(f"{entry.op_id}: {entry.cfg}")

    want = steps["plain"](x, w, labels)
    print("\nloss and gradients        time     memory beside arguments")
    for name, step in steps.items():
        got = step(x, w, labels)
        assert all(
            jnp.allclose(a, b, atol=1e-4) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
        )
        memory = step.lower(x, w, labels).compile().memory_analysis().temp_size_in_bytes
        print(f"  {name:<15} {benchmark(step, x, w, labels):9.1f} ms {memory / 2**20:9.1f} MiB")


if __name__ == "__main__":
    main()
