"""A small transformer's train step made of several kernels; run as a program, it is one stage of tuning offline.

python -m tests.offline_program lower OUT    lowers the step (never runs it) and writes its text
python -m tests.offline_program run          runs one step and prints the configs that its calls got
"""

import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ejkernel.ops import Kernel, default_executor

LAYERS, BATCH, LENGTH, WIDTH = 3, 2, 16, 32


@dataclass(frozen=True)
class Rows:
    rows: int = 1


class RmsNorm(Kernel[Rows, jax.Array]):
    """Normalises rows; its backward has configs of its own."""

    def run(self, x, scale, *, cfg):
        return self.fwd_with_residuals(x, scale, cfg=cfg)[0]

    def fwd_with_residuals(self, x, scale, *, cfg):
        inverse = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6 + 0.0 * cfg.rows)
        return x * inverse * scale, inverse

    def vjp(self, inverse, out, dout, x, scale, *, cfg):
        normal, dnormal = x * inverse, dout * scale + 0.0 * cfg.rows
        dx = inverse * (dnormal - normal * jnp.mean(dnormal * normal, axis=-1, keepdims=True))
        return dx, jnp.sum(dout * normal, axis=tuple(range(x.ndim - 1)))

    def heuristic_cfg(self, inv):
        return Rows(1)

    def config_space(self, inv):
        return [Rows(1), Rows(2)]

    heuristic_cfg_vjp = heuristic_cfg
    config_space_vjp = config_space


class Mixer(Kernel[Rows, jax.Array]):
    """Causal attention with itself; differentiated by JAX."""

    def run(self, x, *, cfg, causal=True):
        scores = jnp.einsum("btd,bsd->bts", x, x) / x.shape[-1] ** 0.5 + 0.0 * cfg.rows
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool)) if causal else True
        return jnp.einsum("bts,bsd->btd", jax.nn.softmax(jnp.where(mask, scores, -1e30)), x)

    def heuristic_cfg(self, inv):
        return Rows(1)

    def config_space(self, inv):
        return [Rows(1), Rows(4)]


class Feed(Kernel[Rows, jax.Array]):
    """A gated layer whose activation is an argument."""

    def run(self, x, w, *, cfg, activation):
        return activation(x @ w) + 0.0 * cfg.rows

    def heuristic_cfg(self, inv):
        return Rows(1)

    def config_space(self, inv):
        return [Rows(1), Rows(8)]


NORM, MIX, FEED = RmsNorm("norm"), Mixer("mix"), Feed("feed")


def layer(x, params):
    x = x + MIX(NORM(x, params["scale"]), causal=True)
    return x + FEED(NORM(x, params["scale"]), params["w"], activation=jax.nn.gelu), None


def loss(params, x):
    return (jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2).mean()


def step(params, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def shapes():
    params = {"scale": jnp.ones((LAYERS, WIDTH)), "w": jnp.ones((LAYERS, WIDTH, WIDTH)) * 0.01}
    return params, jnp.ones((BATCH, LENGTH, WIDTH))


def main(action, *args):
    if action == "lower":
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes())
        lowered = jax.jit(step).lower(*abstract)
        text = lowered.compile().as_text() if args[0].endswith(".hlo") else lowered.as_text(debug_info=True)
        with open(args[0], "w") as out:
            out.write(text)
        return
    events = []
    default_executor().chooser.on_event = lambda name, **data: events.append((name, data))
    value, _ = jax.jit(step)(*shapes())
    for op_id, tier in sorted({(data["op_id"], data["tier"]) for name, data in events if name == "select"}):
        print(op_id, tier)
    print(f"loss {value:.4f}")


if __name__ == "__main__":
    # Under its importable name, so that what it records can be made again elsewhere.
    from tests import offline_program

    offline_program.main(*sys.argv[1:])
