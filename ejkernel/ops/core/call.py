"""A kernel's call as one JAX operation, so that `jax.vmap` sees the call and not only its equations.

The operation holds the kernel's equations and stands for them in every respect: it is lowered, differentiated and
transposed as a jitted function of them. Only batching uses the call itself.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax.core import Tracer
from jax.interpreters import ad, batching, mlir

from ejkernel import _compat
from ejkernel.ops.core.kernel import KernelDefinitionError
from ejkernel.ops.utils import arguments

Flat = Callable[..., Sequence[Any]]
"""A function of arrays that returns arrays."""


class Batching(Protocol):
    """What a call does under `jax.vmap`."""

    def batched(self, axis: _compat.Axis, operands: Sequence[Any], dims: Sequence[int | None]) -> Sequence[Any] | None:
        """The call for a whole batch, outputs with the batch axis first; None maps the equations as they are."""
        ...

    def seen_from_inside(self, operands: Sequence[Any]) -> Flat | None:
        """The call for one example of a batch that `operands` show; None if they show none."""
        ...

    def divisible(self, devices: int) -> Flat | None:
        """The call in a form that the compiler can split over devices; None if it is, or if there is none."""
        ...


_call = _compat.Primitive("ejkernel_call")
_call.multiple_results = True


def bind(fn: Flat, batching: Batching, operands: Sequence[Any], name: str) -> Sequence[Any]:
    """`fn(*operands)` as one operation."""
    _register()
    # Effects have an order and references an identity, which JAX keeps for equations of its own only.
    if any(map(_compat.is_ref, operands)):
        return fn(*operands)
    jaxpr = jax.make_jaxpr(fn)(*operands)
    if jaxpr.effects:
        return fn(*operands)
    consts, closed = _compat.without_consts(jaxpr)
    # Traced values that the kernel closes over are only valid in their trace; after that, only the equations have them.
    params = {"jaxpr": closed, "consts": len(consts), "fixed": any(isinstance(x, Tracer) for x in consts)}
    params |= {"batching": batching, "name": re.sub(r"\W", "_", name)}
    return _call.bind(*consts, *operands, **params)


def _jitted(jaxpr: Any, name: str) -> Callable[..., list[Any]]:
    """The equations as a jitted function, the same one for the same equations: JAX lowers it once per program."""
    known = _functions.setdefault(jaxpr, {})
    if name not in known:

        def run(*operands: Any) -> list[Any]:
            return _compat.jaxpr_as_fun(closed())(*operands)

        closed = weakref.ref(jaxpr)
        run.__name__ = run.__qualname__ = name
        known[name] = jax.jit(run)
    return known[name]


_functions: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def _run(*operands: Any, jaxpr: Any, name: str, **_: Any) -> list[Any]:
    return _jitted(jaxpr, name)(*operands)


def _jvp(primals: Any, tangents: Any, *, consts: int, batching: Batching, fixed: bool, **params: Any) -> Any:
    equations = functools.partial(_run, **params)
    varies = [type(t) is not ad.Zero for t in tangents]
    chosen = lambda values: tuple(x for x, v in zip(values, varies, strict=True) if v)

    def differentiated(run: Callable[..., Any]) -> Any:
        def of_varying(*varying: Any) -> Any:
            rest = iter(varying)
            return run(*(next(rest) if v else x for x, v in zip(primals, varies, strict=True)))

        return jax.jvp(of_varying, chosen(primals), chosen(tangents))

    seen = None if fixed else batching.seen_from_inside(primals[consts:])
    try:
        found = differentiated(equations if seen is None else lambda *operands: seen(*operands[consts:]))
    except NotImplementedError:
        if seen is None:
            raise
        found = differentiated(equations)  # The equations of a backend that supports the call.
    outs, outs_dot = found
    return outs, [_symbolic(x, t) for x, t in zip(outs, outs_dot, strict=True)]


def _symbolic(x: Any, tangent: Any) -> Any:
    return ad.Zero(_compat.tangent_type(x)) if tangent.dtype == jax.dtypes.float0 else tangent


def _transpose(cotangents: Any, *operands: Any, **params: Any) -> list[Any]:
    linear = [ad.is_undefined_primal(x) for x in operands]

    def of_linear(*values: Any) -> Any:
        rest = iter(values)
        return _run(*(next(rest) if v else x for x, v in zip(operands, linear, strict=True)), **params)

    avals = [x.aval for x, v in zip(operands, linear, strict=True) if v]
    found = iter(jax.linear_transpose(of_linear, *avals)([ad.instantiate_zeros(ct) for ct in cotangents]))
    return [next(found) if v else None for v in linear]


def _batch(
    axis: Any, operands: Any, dims: Any, *, consts: int, batching: Batching, fixed: bool, **params: Any
) -> tuple[Sequence[Any], Sequence[int | None]]:
    batch = _compat.Axis.of(axis)
    if all(d is None for d in dims):
        outs = _call.bind(*operands, consts=consts, batching=batching, fixed=fixed, **params)
        return outs, (None,) * len(outs)
    # A new call would not know that values which the kernel closed over are batched.
    closed_over = any(d is not None for d in dims[:consts])
    outs = None if fixed or closed_over else batching.batched(batch, operands[consts:], dims[consts:])
    if outs is None:
        outs = batch.vmap(functools.partial(_run, **params), dims)(*operands)
    else:
        _check_batch(outs, params["jaxpr"].out_avals, batch.size, params["name"])
    return outs, (0,) * len(outs)


def _check_batch(outs: Sequence[Any], single: Sequence[Any], size: int, name: str) -> None:
    """Refuses what a kernel returned for a batch if it is not what one call returns, with the batch axis first."""
    got = [(tuple(x.shape), x.dtype) for x in outs]
    want = [((size, *x.shape), x.dtype) for x in single]
    if got != want:
        told = lambda kinds: ", ".join(f"{dtype}{list(shape)}" for shape, dtype in kinds) or "nothing"
        raise KernelDefinitionError(
            f"{name}: run_batched, or run with leading_batch, must return for a batch of {size} what one call returns, "
            f"with the batch axis first: {told(want)}. It returned {told(got)}."
        )


def _lower(ctx: Any, *operands: Any, batching: Batching, consts: int, fixed: bool, **params: Any) -> Any:
    run = functools.partial(_run, **params)
    devices = _compat.automatic_devices(ctx)
    if devices > 1 and not fixed and (divisible := batching.divisible(devices)) is not None:
        other = lambda *operands: divisible(*operands[consts:])
        kinds = lambda avals: [(x.shape, x.dtype) for x in avals]
        if kinds(jax.eval_shape(other, *ctx.avals_in)) == kinds(ctx.avals_out):
            run = other
    return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


_call.def_impl(_run)
# JAX 0.12 lowers equations with types of its own (references in an interpreted kernel) to simpler ones; the call stays.
_call.to_lojax = lambda *operands, jaxpr, **params: _call.bind(*operands, jaxpr=_compat.lowered_types(jaxpr), **params)
_call.def_abstract_eval(lambda *_, jaxpr, **__: jaxpr.out_avals)
mlir.register_lowering(_call, _lower)
ad.primitive_jvps[_call] = _jvp
ad.primitive_transposes[_call] = _transpose
batching.fancy_primitive_batchers[_call] = _batch


@functools.cache
def _register() -> None:
    """The rules whose modules `import jax` does not load: nothing asks for them before there is a call."""
    _compat.def_as_jit(_call, lambda *, jaxpr, name, **_: _jitted(jaxpr, name))


# --- Configs that are missing ---

_demand = _compat.Primitive("ejkernel_demand")


def demanded(tree: Any, error: Exception) -> Any:
    """`tree`, whose arrays raise `error` when a program that needs them is compiled or run.

    Dead code, and what a batching rule replaces, raises nothing.
    """
    is_real = lambda x: arguments.is_array(x) and x.dtype != jax.dtypes.float0
    return jax.tree.map(lambda x: _demand.bind(x, miss=error) if is_real(x) else x, tree)


def _missing(*_: Any, miss: Exception) -> Any:
    raise miss.with_traceback(None)


_demand.def_impl(_missing)
_demand.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_demand, _missing)
ad.deflinear2(_demand, lambda ct, _, *, miss: [_demand.bind(ct, miss=miss)])
batching.defvectorized(_demand)
