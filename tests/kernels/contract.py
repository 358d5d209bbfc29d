"""What every backend of every operation must do: serve a case like float64 does, with gradients, or refuse it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor
from ejkernel.ops.core.dispatch import UnsupportedCallError

LIMITS = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}
"""Of the largest element of the truth, by the dtype of the arguments."""


@dataclass(frozen=True, eq=False)
class OperationCase:
    """One call: `make(rng)` gives the positional arguments in float64; floats among them are cast to `dtype`."""

    name: str
    make: Callable[[np.random.Generator], list[Any]]
    kwargs: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    refused_by: frozenset[str] = frozenset()
    limit: float | None = None

    def arrays(self):
        """The positional arguments and the keyword arguments."""
        cast = lambda x: jnp.asarray(x, self.dtype if np.issubdtype(x.dtype, np.floating) else x.dtype)
        return [None if x is None else cast(x) for x in self.make(np.random.default_rng(0))], self.kwargs


def cotangent(shape):
    """What all backends of all operations are differentiated with."""
    return np.random.default_rng(99).normal(size=shape)


def quick_jit(fn):
    """The small programs of a test run once: compiling them well would take longer than running them."""
    return jax.jit(
        fn, compiler_options={"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    )


def outputs(fn, args, kwargs):
    """The outputs of `fn(*args, **kwargs)`, then the gradients of all float arguments, by what they are."""
    moving = [i for i, x in enumerate(args) if x is not None and jnp.issubdtype(x.dtype, jnp.floating)]

    def both(*moved):
        merged = lambda moved: (dict(enumerate(args)) | dict(zip(moving, moved, strict=True))).values()
        out, pull = jax.vjp(lambda *moved: fn(*merged(moved), **kwargs), *moved)
        return jax.tree.leaves(out), pull(jax.tree.map(lambda x: jnp.asarray(cotangent(x.shape), x.dtype), out))

    out, grads = quick_jit(both)(*(args[i] for i in moving))
    return {f"result {n}": x for n, x in enumerate(out)} | {
        f"gradient {i}": x for i, x in zip(moving, grads, strict=True)
    }


def exact(oracle, args, kwargs):
    """What an oracle in plain JAX, differentiated by JAX, says in float64."""
    with jax.enable_x64(True):
        wide = lambda x: jnp.asarray(x, jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else np.asarray(x)
        args = [None if x is None else wide(np.asarray(x)) for x in args]
        return {name: np.asarray(x) for name, x in outputs(oracle, args, kwargs).items()}


def assert_close(got, want, limit, least=1e-30, where=""):
    """`least` is the size of what an array may be compared with, if its own elements are smaller."""
    assert got.keys() == want.keys()
    for name, expected in want.items():
        actual = np.asarray(got[name], np.float64)
        assert actual.shape == np.shape(expected), f"{where}{name} has another shape"
        assert np.isfinite(actual).all(), f"{where}{name} is not finite"
        error = np.abs(actual - expected).max(initial=0) / max(np.abs(expected).max(initial=0), least)
        assert error <= limit, f"{where}{name}: error {error:.1e} above {limit:.1e}"


def through(kernel_class, platform, **params):
    """A call of the operation by one backend, through the whole pipeline; on a CPU, those that can be are interpreted.

    `params` are fields of the config, as small tiles for small arrays.
    """
    kernel = kernel_class(interpret=jax.default_backend() == "cpu")
    executor, cfg = Executor(ConfigSelectorChain(cache=ConfigCache())), kernel.cfg_type(platform=platform, **params)
    return lambda *args, **kwargs: executor(kernel, *args, cfg=cfg, platform=platform, **kwargs)


def check_refusal(kernel_class, platform, case, **params):
    args, kwargs = case.arrays()
    with pytest.raises(UnsupportedCallError, match=f"{platform}: "):
        outputs(through(kernel_class, platform, **params), args, kwargs)


def check(kernel_class, platform, case, oracle, **params):
    """`oracle(*args, **kwargs)` is plain JAX, without code of the library."""
    if platform in case.refused_by:
        return check_refusal(kernel_class, platform, case, **params)
    args, kwargs = case.arrays()
    got = outputs(through(kernel_class, platform, **params), args, kwargs)
    limit = case.limit or LIMITS[case.dtype]
    assert_close(got, exact(oracle, args, kwargs), limit, where=f"{case.name} on {platform}: ")
    return None


def check_inside_shard_map(kernel_class, platform, case, in_specs, out_specs, **params):
    """Values and gradients on a mesh of four devices are those of the whole."""
    (args, kwargs), call = case.arrays(), through(kernel_class, platform, **params)
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    whole = lambda *args: call(*args, **kwargs)
    given = [x for x in args if x is not None]

    def spread(*args):
        rest = [x for x in args if x is not None]
        local = lambda *rest: whole(*rest, *[None] * (len(args) - len(rest)))
        # Pallas' interpreter slices what varies by what does not, which JAX refuses if it is told to look.
        checked = {"check_vma": platform == "xla" or jax.default_backend() != "cpu"}
        return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **checked)(*rest)

    assert len(given) == len(in_specs)
    got, want = outputs(spread, args, {}), outputs(whole, args, {})
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-4, err_msg=name)
