"""Kernels that many tests share: one operation, written with each of the three gradient styles."""

import itertools
import threading
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest

from ejkernel import _compat
from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Kernel

GAIN = 3


@dataclass(frozen=True)
class Scale:
    """A config that shows in the result, so that a test sees which one a call got."""

    factor: int = 1


class Plain(Kernel[Scale, jax.Array]):
    """`factor * sin(x) * y`, differentiated by JAX."""

    def __init__(self, name=None):
        super().__init__(name=name or f"tests.{type(self).__name__.lower()}")

    def run(self, x, y, *, cfg):
        return cfg.factor * jnp.sin(x) * y

    def heuristic_cfg(self, inv):
        return Scale(1)

    def config_space(self, inv):
        return [Scale(1), Scale(2)]


class CustomVjp(Plain):
    """The same with a gradient from primals and cotangents, `GAIN` times the true one: it shows who computed it."""

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        x, y = primals
        (dout,) = cotangents
        return GAIN * cfg.factor * dout * jnp.cos(x) * y, GAIN * cfg.factor * dout * jnp.sin(x)


class Residuals(Plain):
    """The same with a forward that keeps what the backward needs."""

    def fwd_with_residuals(self, x, y, *, cfg):
        return self.run(x, y, cfg=cfg), (jnp.sin(x), jnp.cos(x))

    def vjp(self, residuals, out, dout, x, y, *, cfg):
        sin, cos = residuals
        return GAIN * cfg.factor * dout * cos * y, GAIN * cfg.factor * dout * sin


class OwnBackward(Residuals):
    """The same with a config of its own for the backward, which shows in the gradient."""

    def vjp(self, residuals, out, dout, x, y, *, cfg):
        sin, cos = residuals
        return cfg.factor * dout * cos * y, cfg.factor * dout * sin

    def heuristic_cfg_vjp(self, inv):
        return Scale(1)

    def config_space_vjp(self, inv):
        return [Scale(1), Scale(GAIN)]


class MarkedBackward(OwnBackward):
    """The same with a guess for the backward that shows."""

    def heuristic_cfg_vjp(self, inv):
        return Scale(GAIN)


STYLES = [Plain, CustomVjp, Residuals, MarkedBackward]


def true(x, y):
    return jnp.sin(x) * y


@jax.custom_vjp
def marked(x, y):
    return true(x, y)


marked.defvjp(
    lambda x, y: (true(x, y), (x, y)),
    lambda saved, dout: (
        _shared(GAIN * dout * jnp.cos(saved[0]) * saved[1], saved[0]),
        _shared(GAIN * dout * jnp.sin(saved[0]), saved[1]),
    ),
)


def _shared(grad, arg):
    """The sum over the devices that share an argument, as plain JAX asks of a gradient inside shard_map."""
    return jax.lax.psum(grad, tuple(_compat.varying_axes(grad) - _compat.varying_axes(arg)))


def reference_of(style):
    """The same function in plain JAX, with the same gradient."""
    return true if style is Plain else marked


def new_executor(**kwargs):
    return Executor(ConfigSelectorChain(cache=ConfigCache(), **kwargs))


def table(ways, styles, whole=()):
    """Parameters for `(way, style)`: all styles for the ways in `whole`, one in turn for the others.

    The rest of the product is in `make test-full`.
    """
    name = lambda x: getattr(x, "__name__", None) or str(x)
    rows = []
    for place, way in enumerate(ways):
        for number, style in enumerate(styles):
            short = way in whole or number == place % len(styles)
            marks = () if short else pytest.mark.full
            rows.append(pytest.param(way, style, id=f"{name(way)}-{name(style)}", marks=marks))
    return rows


def fully(*values):
    """Parameters that only the full suite has."""
    return [pytest.param(value, marks=pytest.mark.full) for value in values]


def pairwise(*choices):
    """Parameters for all combinations of three choices of two; the short suite has every pair of values."""
    rows = []
    for places in itertools.product(*(range(len(values)) for values in choices)):
        row = [values[place] for values, place in zip(choices, places, strict=True)]
        rows.append(pytest.param(*row, marks=() if sum(places) % 2 == 0 else pytest.mark.full))
    return rows


def within(seconds, fn):
    """`fn()`, or a failure if it takes longer: for what may wait without end."""
    found = []
    thread = threading.Thread(target=lambda: found.append(fn()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"still running after {seconds} s"
    assert found, "it raised"
    return found[0]
