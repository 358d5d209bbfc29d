"""Kernels to tune: the config says how much useless work is done, or what goes wrong.

In a module of their own, because worker processes import them.
"""

import os
import signal
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops import Invocation, Kernel

FAST, MIDDLE, SLOW = 1, 1000, 10000


@dataclass(frozen=True)
class Work:
    """`loops` rounds of useless work; `fault` is what goes wrong; `tag` changes nothing."""

    loops: int = MIDDLE
    fault: str = ""
    tag: int = 0


def busy(x, loops):
    """`x` itself, after work that no compiler may leave out."""
    if loops <= 1:
        return x
    wasted = jax.lax.fori_loop(0, loops, lambda _, y: jnp.tanh(y) + 0.1, x.astype(jnp.float32))
    return x + (0 * wasted).astype(x.dtype)


def _callback(fn, x):
    return jax.pure_callback(fn, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")


def _sleep(x):
    time.sleep(1000)
    return np.asarray(x)


def _die(x):
    os.kill(os.getpid(), signal.SIGSEGV)
    return np.asarray(x)


def _allocate(x):
    held = []
    while True:
        held.append(np.ones(64 << 20, np.uint8))


def _raise(x):
    raise ValueError("the callback is broken")


FAULTS = {
    "": lambda x: 2 * x,
    "wrong": lambda x: 2.1 * x,
    "nan": lambda x: (2 * x).at[0].set(jnp.nan),
    "inf": lambda x: (2 * x).at[0].set(jnp.inf),
    "shape": lambda x: (2 * x)[None],
    "dtype": lambda x: (2 * x).astype(jnp.bfloat16),
    "structure": lambda x: (2 * x,),
    "raise": lambda x: 1 / 0,
    "raise in run": lambda x: _callback(_raise, 2 * x),
    "exit": lambda x: exit(3),
    "segfault": lambda x: _die(x),
    "segfault in run": lambda x: _callback(_die, 2 * x),
    "sleep": lambda x: _sleep(x),
    "sleep in run": lambda x: _callback(_sleep, 2 * x),
    "allocate in run": lambda x: _callback(_allocate, 2 * x),
}


class Doubling(Kernel[Work, jax.Array]):
    """`2 * x`. The space is an attribute of the class, so that tests can change it without changing the source."""

    space: object = (Work(MIDDLE), Work(FAST), Work(SLOW))
    guess = Work(MIDDLE)

    def __init__(self, name="tests.doubling"):
        super().__init__(name=name)

    def run(self, x, *, cfg):
        return busy(FAULTS[cfg.fault](x), cfg.loops)

    def heuristic_cfg(self, inv):
        return self.guess

    def config_space(self, inv):
        return self.space


class Referenced(Doubling):
    """The same with a truth of its own."""

    def reference(self, x):
        return x + x


class BrokenReference(Doubling):
    """A kernel whose reference fails."""

    def reference(self, x):
        raise ValueError("no truth today")


class WithCustomVjp(Doubling):
    """The fault is in the gradient."""

    def run(self, x, *, cfg):
        return busy(2 * x, cfg.loops)

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        return (FAULTS[cfg.fault](cotangents[0]),)


class WithResiduals(Doubling):
    """The same in the other style."""

    def run(self, x, *, cfg):
        return busy(2 * x, cfg.loops)

    def fwd_with_residuals(self, x, *, cfg):
        return self.run(x, cfg=cfg), x

    def vjp(self, residuals, out, dout, x, *, cfg):
        return (FAULTS[cfg.fault](dout),)


class OwnBackward(WithResiduals):
    """The same with configs of its own for the backward."""

    backward_space: object = (Work(MIDDLE), Work(FAST), Work(FAST, "wrong"))

    def vjp(self, residuals, out, dout, x, *, cfg):
        return (busy(FAULTS[cfg.fault](dout), cfg.loops),)

    def heuristic_cfg_vjp(self, inv):
        return Work(MIDDLE)

    def config_space_vjp(self, inv):
        return self.backward_space


class Gathering(Doubling):
    """`2 * x[index]`: integers that must be legal."""

    def run(self, x, index, *, cfg):
        return busy(2 * x[index], cfg.loops)


class GatheringBackward(Gathering):
    """The same with a backward of its own."""

    def fwd_with_residuals(self, x, index, *, cfg):
        return self.run(x, index, cfg=cfg), None

    def vjp(self, residuals, out, dout, x, index, *, cfg):
        return busy(jnp.zeros_like(x).at[index].add(2 * dout), cfg.loops), None

    def heuristic_cfg_vjp(self, inv):
        return Work()

    def config_space_vjp(self, inv):
        return [Work(MIDDLE), Work(FAST)]


class GatheringWithExamples(Gathering):
    """The same, with legal data for abstract calls."""

    examples = 0

    def example_inputs(self, inv, key):
        type(self).examples += 1
        x, index = inv.args
        return (jax.random.normal(key, x.shape, x.dtype), jnp.zeros(index.shape, index.dtype)), {}


def call(kernel, *args):
    """The invocation of a call, as the executor makes it."""
    return Invocation(kernel=kernel, args=args)


def _late(x):
    """Runs well for a while, over all workers together, and then no more."""
    path = os.environ["TESTS_CRASH_FILE"]
    with open(path, "a") as file:
        file.write("x")
    if os.path.getsize(path) > 20:
        _die(x)
    return np.asarray(x)


class Late(Doubling):
    """Crashes after it was found right."""

    def run(self, x, *, cfg):
        return busy(_callback(_late, 2 * x) if cfg.fault == "late" else 2 * x, cfg.loops)


class ByValue(Kernel[Work, jax.Array]):
    """`2 * x`; a config is slow where the values are of the other sign than its tag."""

    def run(self, x, *, cfg):
        loops = jnp.where(x[0] * cfg.tag < 0, SLOW, 1) if cfg.tag else 300
        wasted = jax.lax.fori_loop(0, loops, lambda _, y: jnp.tanh(y) + 0.1, x)
        out = 2 * x + 0 * wasted
        return out if not cfg.fault else jnp.where(x[0] < 0, 3 * x, out)

    def heuristic_cfg(self, inv):
        return Work(tag=1)

    def config_space(self, inv):
        return [Work(tag=1), Work(tag=0), Work(tag=1, fault="wrong")]

    def example_cases(self, inv, key):
        x = jnp.linspace(0.1, 1, inv.args[0].size)
        return {"positive": ((x,), {}), "negative": ((-x,), {}), "short": ((x[1:],), {})}
