"""Kernels that many tests share: one operation, written with each of the three gradient styles."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Kernel


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
    """The same with a gradient from primals and cotangents."""

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        x, y = primals
        (dout,) = cotangents
        return cfg.factor * dout * jnp.cos(x) * y, cfg.factor * dout * jnp.sin(x)


class Residuals(Plain):
    """The same with a forward that keeps what the backward needs."""

    def fwd_with_residuals(self, x, y, *, cfg):
        return self.run(x, y, cfg=cfg), (jnp.sin(x), jnp.cos(x))

    def vjp(self, residuals, out, dout, x, y, *, cfg):
        sin, cos = residuals
        return cfg.factor * dout * cos * y, cfg.factor * dout * sin


class OwnBackward(Residuals):
    """The same with a config of its own for the backward, which shows in the gradient."""

    def heuristic_cfg_vjp(self, inv):
        return Scale(1)

    def config_space_vjp(self, inv):
        return [Scale(1), Scale(3)]


STYLES = [Plain, CustomVjp, Residuals, OwnBackward]


def reference(x, y):
    return jnp.sin(x) * y


def new_executor(**kwargs):
    return Executor(ConfigSelectorChain(cache=ConfigCache(), **kwargs))
