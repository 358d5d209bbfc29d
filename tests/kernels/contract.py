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

LIMITS = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}
"""Of the largest element of the truth, by the dtype of the first argument."""


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
        cast = lambda x: jnp.asarray(x, self.dtype if np.issubdtype(x.dtype, np.floating) else x.dtype)
        return [None if x is None else cast(x) for x in self.make(np.random.default_rng(0))]


def outputs(fn, args):
    """The outputs as a list, then the gradients of all float arguments for fixed random cotangents."""
    moving = [i for i, x in enumerate(args) if x is not None and jnp.issubdtype(x.dtype, jnp.floating)]

    def both(*moved):
        out, pull = jax.vjp(
            lambda *m: fn(*(dict(enumerate(args)) | dict(zip(moving, m, strict=True))).values()), *moved
        )
        rng = np.random.default_rng(1)
        weights = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), out)
        return [*jax.tree.leaves(out), *pull(weights)]

    return [np.asarray(x, np.float64) for x in jax.jit(both)(*(args[i] for i in moving))]


def through(kernel_class, platform, **params):
    """A call of the operation by one backend; on a CPU, those that can be are interpreted."""
    kernel = kernel_class(interpret=jax.default_backend() == "cpu")
    executor, cfg = Executor(ConfigSelectorChain(cache=ConfigCache())), kernel.cfg_type(platform=platform, **params)
    return lambda *args, **kwargs: executor(kernel, *args, cfg=cfg, platform=platform, **kwargs)


def check(kernel_class, platform, case, oracle, **params):
    """`oracle(*args, **kwargs)` is plain JAX, differentiated by JAX in float64, without code of the library.

    `params` are fields of the config, as small tiles for small arrays.
    """
    args, call = case.arrays(), through(kernel_class, platform, **params)
    if platform in case.refused_by:
        with pytest.raises(UnsupportedCallError, match=f"{platform}: "):
            call(*args, **case.kwargs)
        return
    got = outputs(lambda *args: call(*args, **case.kwargs), args)
    with jax.enable_x64(True):
        exact = [None if x is None else np.asarray(x) for x in args]
        wide = [
            x if x is None or not jnp.issubdtype(x.dtype, jnp.floating) else jnp.asarray(x, jnp.float64) for x in exact
        ]
        want = outputs(lambda *args: oracle(*args, **case.kwargs), wide)
    limit = case.limit or LIMITS[case.dtype]
    assert len(got) == len(want)
    for place, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape
        error = np.max(np.abs(a - b), initial=0.0) / max(np.max(np.abs(b), initial=0.0), 1e-30)
        assert error <= limit, f"{case.name} on {platform}: result {place} is off by {error:.1e} of its largest element"


def check_inside_shard_map(kernel_class, platform, case, in_specs, out_specs, **params):
    """Values and gradients on a mesh of four devices are those of the whole."""
    args, call = case.arrays(), through(kernel_class, platform, **params)
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    whole = lambda *args: call(*args, **case.kwargs)
    given = [x for x in args if x is not None]

    def spread(*args):
        rest = [x for x in args if x is not None]
        local = lambda *rest: whole(*rest, *[None] * (len(args) - len(rest)))
        # Pallas' interpreter slices what varies by what does not, which JAX refuses if it is told to look.
        checked = {"check_vma": platform == "xla" or jax.default_backend() != "cpu"}
        return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **checked)(*rest)

    assert len(given) == len(in_specs)
    for a, b in zip(outputs(spread, args), outputs(whole, args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
