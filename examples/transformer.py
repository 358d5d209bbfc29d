"""A small Flax NNX transformer with ejkernel's flash attention, trained for a few steps on its own source code."""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from ejkernel.modules import flash_attention

BATCH, LENGTH, WIDTH, HEADS, LAYERS, LETTERS = 8, 128, 64, 4, 2, 128


class Block(nnx.Module):
    """Attention, then two linear layers, each added to its input."""

    def __init__(self, rngs):
        self.attention_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        heads = self.qkv(self.attention_norm(x)).reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        q, k, v = (heads[:, :, i] for i in range(3))
        x = x + self.out(flash_attention(q, k, v, causal=True).reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    """Predicts the next letter."""

    def __init__(self, rngs):
        self.letters = nnx.Embed(LETTERS, WIDTH, rngs=rngs)
        self.places = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, LETTERS, rngs=rngs)

    def __call__(self, text):
        x = self.letters(text) + self.places(jnp.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def new_training():
    """The state of a fresh training, and a pure function that makes one step of it: (state, text) -> (state, loss)."""
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def step(state, text):
        model, optimizer = nnx.merge(graph, state)

        def loss(model):
            logits = model(text[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), value

    return state, step


def batches(seed=0):
    """Pieces of this file, endlessly."""
    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int32) % LETTERS
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(text) - LENGTH - 1, BATCH)
        yield jnp.asarray(np.stack([text[s : s + LENGTH + 1] for s in starts]))


def train(steps):
    """Losses of so many steps."""
    (state, step), data, losses = new_training(), batches(), []
    step = jax.jit(step)
    for _ in range(steps):
        state, loss = step(state, next(data))
        losses.append(float(loss))
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    losses = train(parser.parse_args().steps)
    for number, loss in enumerate(losses, start=1):
        print(f"step {number:3}: loss {loss:.3f}")
    assert losses[-1] < losses[0], "it learns nothing"


if __name__ == "__main__":
    main()
