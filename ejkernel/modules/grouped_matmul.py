"""Grouped products: rows that are sorted by group, each group times its own weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec

from ejkernel.errors import EjkernelError
from ejkernel.kernels.grouped_matmul import exact
from ejkernel.kernels.grouped_matmul.backends import CONTRACTION, PRODUCT
from ejkernel.kernels.grouped_matmul.config import MosaicConfig, MosaicDrhsConfig
from ejkernel.kernels.grouped_matmul.dimensions import common_dtype, rounded
from ejkernel.kernels.grouped_matmul.groups import covered, local_groups
from ejkernel.kernels.grouped_matmul.tiles import TpuConfig, TritonConfig
from ejkernel.kernels.grouped_matmul.workloads import DISTRIBUTIONS, Distribution, draw_group_sizes
from ejkernel.kernels.grouped_matmul.xla import XlaConfig
from ejkernel.modules import static
from ejkernel.ops.core.backend import Backend, Platform
from ejkernel.ops.core.explicit import Split
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.core.operation import Operation
from ejkernel.ops.core.types import Cfg
from ejkernel.ops.utils import arguments

Array = jax.Array
ForwardParams = MosaicConfig | TritonConfig | TpuConfig | XlaConfig
DrhsParams = MosaicDrhsConfig | TritonConfig | TpuConfig | XlaConfig


@dataclass(frozen=True)
class GroupedMatmulConfig:
    """How a call is run: by which backend, in which tiles.

    The gradients are separate calls: chosen, tuned and stored separately. Params for them in an explicit `cfg=` are
    taken as they are.
    """

    fwd_params: ForwardParams | None = None
    dlhs_params: ForwardParams | None = None
    drhs_params: DrhsParams | None = None
    platform: Platform | None = None


@dataclass(frozen=True)
class GroupedDrhsConfig:
    """How the gradient of the weights is computed."""

    fwd_params: DrhsParams | None = None
    platform: Platform | None = None


class GroupedMatmulArgumentError(EjkernelError, ValueError):
    """An argument of a grouped product does not fit the others."""

    def __init__(self, message: str, where: str = "grouped_matmul") -> None:
        super().__init__(f"{where}: {message}")


class _Grouped(Operation[Cfg, Array]):
    """What both products share."""

    def run_on(self, backend: Backend, /, *args: Any, cfg: Any, precision: Any = None, **kwargs: Any) -> Array:
        """Runs a call; only XLA has several precisions, other backends use the highest."""
        if backend.platform == "xla":
            kwargs["precision"] = precision
        return super().run_on(backend, *args, cfg=cfg, **kwargs)

    def _nested(
        self, cfg: Any, kwargs: dict[str, Any], operation: Any, args: tuple[Any, ...], params: Any = None, **own: Any
    ) -> Array:
        """A product that is part of a gradient, on the platform and with the precision of the original call."""
        shared = {name: kwargs[name] for name in ("platform", "precision") if name in kwargs}
        return self.nested(operation, args, {**own, **shared}, cfg, params)

    def example_inputs(self, inv: Invocation[Any, Any], key: Array) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Normal floats, and groups of uneven sizes that hold all rows."""
        return self._example(inv, key, "uneven")

    def example_cases(
        self, inv: Invocation[Any, Any], key: Array
    ) -> dict[Distribution, tuple[tuple[Any, ...], dict[str, Any]]]:
        """The same with every way in which rows may fall on groups."""
        return {name: self._example(inv, key, name) for name in DISTRIBUTIONS}

    def _example(
        self, inv: Invocation[Any, Any], key: Array, distribution: Distribution
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        lhs, other, sizes, *rest = inv.args
        keys = jax.random.split(key, 3)
        seed = int(jax.random.randint(keys[2], (), 0, 1 << 30))
        draw = lambda k, x: None if x is None else jax.random.normal(k, x.shape, x.dtype)
        drawn = jnp.asarray(draw_group_sizes(lhs.shape[0], sizes.shape[0], distribution, seed=seed), sizes.dtype)
        offset, existing = [*rest, None][:2]
        offset = None if offset is None else jnp.zeros(offset.shape, offset.dtype)
        args = (draw(keys[0], lhs), draw(keys[1], other), drawn, offset)
        return (*args, *([draw(keys[1], existing)] if len(rest) > 1 else [])), dict(inv.kwargs)


class GroupedMatmul(_Grouped[GroupedMatmulConfig], op_id="grouped_matmul"):
    """`lhs[rows of group g] @ rhs[g]`; positional: lhs, rhs, group_sizes, group_offset, existing_out."""

    backends = PRODUCT
    workload_module = "ejkernel.kernels.grouped_matmul.workloads"

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any], specs: Sequence[PartitionSpec]) -> Split:
        """Columns of the weights may lie on any device; rows, and what is summed over, are for the compiler."""
        lhs, rhs, sizes, *rest = (_filled(spec, x) for spec, x in zip(specs, args, strict=True))
        k, n = (2, 1) if kwargs.get("transpose_rhs") else (1, 2)
        alone = all(axis is None for axis in (*lhs, rhs[0], rhs[k], *sizes))
        taken = lhs[0] if rhs[n] is None or lhs[0] is None else None  # A mesh axis can be used once.
        out = PartitionSpec(taken, rhs[n])
        existing = out if len(rest) > 1 and args[4] is not None else PartitionSpec()
        weights = PartitionSpec(*(rhs[n] if i == n else None for i in range(3)))
        whole = PartitionSpec()
        return Split((whole, weights, whole, whole, existing)[: len(args)], out, local=alone)

    def arguments(
        self,
        lhs: Any,
        rhs: Any,
        group_sizes: Any,
        group_offset: Any = None,
        existing_out: Any = None,
        *,
        transpose_rhs: bool = False,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_dtype: Any = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Checks the arguments; afterwards `out_dtype` says what the result is."""
        lhs, rhs, sizes = (jnp.asarray(x) if isinstance(x, (list, tuple)) else x for x in (lhs, rhs, group_sizes))
        transpose_rhs = static.flag("transpose_rhs", transpose_rhs, GroupedMatmulArgumentError)
        _check_operands(lhs, rhs, transposed=transpose_rhs)
        _check_groups(self.op_id, sizes, group_offset, rhs.shape[0])
        if out_dtype is None:
            out_dtype = _result_dtype(lhs, rhs, preferred_element_type)
        shape = (lhs.shape[0], rhs.shape[1 if transpose_rhs else 2])
        if existing_out is not None:
            wanted = f"existing_out must be {jnp.dtype(out_dtype)}{list(shape)}, as the result"
            if not hasattr(existing_out, "shape"):
                raise GroupedMatmulArgumentError(f"{wanted}, got {type(existing_out).__name__}.")
            if existing_out.shape != shape or existing_out.dtype != jnp.dtype(out_dtype):
                got = f"{existing_out.dtype}{list(existing_out.shape)}"
                raise GroupedMatmulArgumentError(f"{wanted}, got {got}.")
        kwargs = {"transpose_rhs": transpose_rhs, "out_dtype": jnp.dtype(out_dtype).name}
        return (lhs, rhs, sizes, group_offset, existing_out), _with(kwargs, precision)

    def run_on(self, backend: Backend, /, *args: Any, cfg: Any, **kwargs: Any) -> Array:
        """The product; rows of no group come from existing_out."""
        operands, existing_out = args[:4], args[4]
        out = super().run_on(backend, *operands, cfg=cfg, **kwargs)
        return out if existing_out is None else jnp.where(_inside(*operands)[:, None], out, existing_out)

    def custom_vjp(self, primals: Any, cfg: Any, kwargs: dict[str, Any], cotangents: Any) -> tuple[Any, ...]:
        """Dlhs is a product with the weights transposed, drhs is a separate operation."""
        lhs, rhs, sizes, offset, existing_out = primals
        (dout,) = cotangents
        transposed, nested = kwargs["transpose_rhs"], partial(self._nested, cfg, kwargs)
        narrow = rounded(dout, lhs.dtype, rhs.dtype)
        options = {"transpose_rhs": not transposed, "out_dtype": lhs.dtype.name}
        dlhs = nested(GroupedMatmul, (narrow, rhs, sizes, offset), cfg.dlhs_params, **options)
        pair = (narrow, lhs) if transposed else (lhs, narrow)
        options = {"groups": rhs.shape[0], "out_dtype": rhs.dtype.name}
        drhs = nested(GroupedDrhs, (*pair, sizes, offset), cfg.drhs_params, **options)
        inside = None if existing_out is None else _inside(lhs, rhs, sizes, offset)[:, None]
        return dlhs, drhs, None, None, None if inside is None else jnp.where(inside, 0, dout)

    def reference(self, lhs: Array, rhs: Array, sizes: Array, offset: Any, existing_out: Any, **kwargs: Any) -> Array:
        """Pieces of rows by XLA, at the highest precision."""
        local = local_groups(sizes, offset, rhs.shape[0], lhs.shape[0])
        out: Any = exact.product(lhs, rhs, local.sizes, local.first_row, kwargs["transpose_rhs"], kwargs["out_dtype"])
        return out if existing_out is None else jnp.where(_inside(lhs, rhs, sizes, offset)[:, None], out, existing_out)


class GroupedDrhs(_Grouped[GroupedDrhsConfig], op_id="grouped_matmul_drhs"):
    """The gradient of the weights, `lhs[rows of g].T @ dout[rows of g]`; its own gradients are grouped products again.

    Positional: lhs, dout, group_sizes, group_offset.
    """

    backends = CONTRACTION

    def arguments(
        self,
        lhs: Any,
        dout: Any,
        group_sizes: Any,
        group_offset: Any = None,
        *,
        groups: int | None = None,
        out_dtype: Any = None,
        precision: Any = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Checks the arguments."""
        lhs, dout, group_sizes = (
            jnp.asarray(x) if isinstance(x, (list, tuple)) else x for x in (lhs, dout, group_sizes)
        )
        groups = int(group_sizes.shape[0]) if groups is None else groups
        _check_groups(self.op_id, group_sizes, group_offset, groups)
        if lhs.ndim != 2 or dout.ndim != 2 or lhs.shape[0] != dout.shape[0]:
            raise GroupedMatmulArgumentError(
                f"lhs and dout must be [rows, k] and [rows, n] with the same rows, got {lhs.shape} and {dout.shape}.",
                self.op_id,
            )
        out_dtype = common_dtype(lhs.dtype, dout.dtype) if out_dtype is None else jnp.dtype(out_dtype)
        kwargs = {"groups": groups, "out_dtype": out_dtype.name}
        return (lhs, dout, group_sizes, group_offset), _with(kwargs, precision)

    def custom_vjp(self, primals: Any, cfg: Any, kwargs: dict[str, Any], cotangents: Any) -> tuple[Any, ...]:
        """Products of the rows with the gradient's gradient."""
        lhs, dout, sizes, offset = primals
        nested = partial(self._nested, cfg, kwargs, GroupedMatmul)
        narrow = rounded(cotangents[0], lhs.dtype, dout.dtype)
        dlhs = nested((dout, narrow, sizes, offset), transpose_rhs=True, out_dtype=lhs.dtype.name)
        return dlhs, nested((lhs, narrow, sizes, offset), out_dtype=dout.dtype.name), None, None

    def reference(self, lhs: Array, dout: Array, sizes: Array, offset: Any, **kwargs: Any) -> Array:
        """Pieces of rows by XLA, at the highest precision."""
        local = local_groups(sizes, offset, kwargs["groups"], lhs.shape[0])
        return exact.contraction(lhs, dout, local.sizes, local.first_row, kwargs["out_dtype"])


def _inside(lhs: Any, rhs: Any, sizes: Any, offset: Any) -> Array:
    local = local_groups(sizes, offset, rhs.shape[0], lhs.shape[0])
    return covered(local.sizes, lhs.shape[0], local.first_row)


def _filled(spec: PartitionSpec, x: Any) -> tuple[Any, ...]:
    return (*spec, *(None,) * (np.ndim(x) - len(spec)))


def _with(kwargs: dict[str, Any], precision: Any) -> dict[str, Any]:
    return kwargs if precision is None else {**kwargs, "precision": precision}


def _result_dtype(lhs: Any, rhs: Any, preferred: Any) -> Any:
    """That of `jax.lax.ragged_dot`, which has `dot_general`'s; on an explicit mesh only the latter can be asked."""
    shapes = [jax.ShapeDtypeStruct((1, 1), x.dtype) for x in (lhs, rhs)]
    call = lambda a, b: jax.lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=preferred)
    return jax.eval_shape(call, *shapes).dtype


def _check_operands(lhs: Any, rhs: Any, *, transposed: bool) -> None:
    if lhs.ndim == 2 and rhs.ndim == 3 and lhs.shape[1] == rhs.shape[2 if transposed else 1]:
        return
    form, other = ("[groups, n, k]", 1) if transposed else ("[groups, k, n]", 2)
    hint = ""
    if lhs.ndim > 2:
        hint = " Reshape lhs to two axes: groups are of rows."
    elif lhs.ndim == 2 and rhs.ndim == 3 and lhs.shape[1] == rhs.shape[other]:
        hint = f" Weights of this shape need transpose_rhs={not transposed}."
    raise GroupedMatmulArgumentError(
        f"lhs must be [rows, k] and rhs {form} with the same k, got {lhs.shape} and {rhs.shape}.{hint}"
    )


def _check_groups(where: str, sizes: Any, offset: Any, groups: int) -> None:
    if sizes.ndim != 1 or not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise GroupedMatmulArgumentError(
            f"group_sizes must be integers [groups], got {sizes.dtype}{list(sizes.shape)}.", where
        )
    if offset is None and sizes.shape[0] != groups:
        raise GroupedMatmulArgumentError(
            f"group_sizes must have one entry per group of rhs, {groups}, got {sizes.shape[0]}. With group_offset it "
            "covers all groups, and rhs those from the offset on.",
            where,
        )
    if offset is not None and not hasattr(offset, "dtype") and not isinstance(offset, (int, float)):
        raise GroupedMatmulArgumentError(f"group_offset must be one integer, got {type(offset).__name__}.", where)
    if offset is not None and (np.size(offset) != 1 or not jnp.issubdtype(jnp.result_type(offset), jnp.integer)):
        shape = np.shape(offset)
        raise GroupedMatmulArgumentError(
            f"group_offset must be one integer, got {jnp.result_type(offset)}{list(shape)}.", where
        )


def _check_values(sizes: Any, offset: Any, lhs: Any) -> None:
    """Refuses sizes and offsets that are known and invalid."""
    known = _known(sizes) if np.ndim(sizes) == 1 and np.ndim(lhs) == 2 else None
    rows = np.shape(lhs)[0] if known is not None else None
    if known is not None and known.size and isinstance(rows, int) and (known.min() < 0 or known.sum() > rows):
        raise GroupedMatmulArgumentError(
            f"group_sizes must be 0 or more and add up to {rows} rows at most, got a least size of {known.min()} and a "
            f"sum of {known.sum()}."
        )
    known = _known(offset) if offset is not None and np.size(offset) == 1 else None
    first = offset if isinstance(offset, int) else None if known is None else known.item()
    if first is not None and not 0 <= first <= np.size(sizes):
        raise GroupedMatmulArgumentError(
            f"group_offset must be from 0 to {np.size(sizes)}, the number of groups, got {first}."
        )


def _known(x: Any) -> np.ndarray | None:
    """Integers as int64, if they can be read; on an accelerator they are not, because the call would wait."""
    known = np.asarray(x) if isinstance(x, (int, np.integer)) else arguments.readable(x)
    return known.astype(np.int64) if known is not None and np.issubdtype(known.dtype, np.integer) else None


# --- The functions ---

_kernel = GroupedMatmul()


def grouped_matmul(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    group_offset: Any = None,
    existing_out: Any = None,
    *,
    transpose_rhs: bool = False,
    precision: Any = None,
    preferred_element_type: Any = None,
    platform: Platform | None = None,
    cfg: GroupedMatmulConfig | None = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Array:
    """Each group's rows times the group's weights, by the fastest backend that supports the call.

    Args:
      lhs: [rows, k]; the rows of group 0 come first, then those of group 1, and so on.
      rhs: [groups, k, n].
      group_sizes: Integers [groups]: the rows of each group. They may add up to less than there are rows.
      group_offset: An integer. `group_sizes` then covers all groups, and rhs holds those from this one on.
      existing_out: [rows, n] in the dtype of the result: what rows of no group, or of one whose weights are not here,
        get; by default zeros.
      transpose_rhs: rhs is [groups, n, k].
      precision: As in `jax.lax.dot`. Only the backend "xla" has several; the others use the highest.
      preferred_element_type: The dtype of the result; by default that of `jax.lax.ragged_dot`.
      platform: "mosaic", "triton", "pallas" or "xla": this backend or an error.
      cfg: How to run it; by default what was tuned, else a guess.
      mesh: Run under `jax.shard_map` on this mesh.
      in_specs: With `mesh`: the PartitionSpecs of lhs, rhs, group_sizes, and of group_offset and existing_out if given.
      out_specs: With `mesh`: that of the output.

    Returns:
      [rows, n].

    Raises:
      GroupedMatmulArgumentError: Arguments do not fit each other. The values of sizes on an accelerator are not read:
        negative ones count as 0, and rows past the last one are ignored.
    """
    args = (lhs, rhs, group_sizes, group_offset, existing_out)
    args = tuple(jnp.asarray(x) if isinstance(x, (list, tuple)) else x for x in args)
    for name, x in zip(("lhs", "rhs", "group_sizes"), args, strict=False):
        if not hasattr(x, "shape"):
            raise GroupedMatmulArgumentError(f"{name} must be an array, got {type(x).__name__}.")
    _check_values(args[2], args[3], args[0])
    # Only arguments that differ from their default: the lookup of an eager call is faster with few arguments.
    flag = transpose_rhs is not False and static.flag("transpose_rhs", transpose_rhs, GroupedMatmulArgumentError)
    kwargs: dict[str, Any] = {"transpose_rhs": True} if flag else {}
    if precision is not None:
        kwargs["precision"] = _precision(precision)
    if preferred_element_type is not None:
        kwargs["preferred_element_type"] = _dtype_name(preferred_element_type)
    return _kernel.call(args, kwargs, cfg=cfg, platform=platform, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def ragged_dot(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Any = None,
    out_sharding: None = None,
) -> Array:
    """`jax.lax.ragged_dot`, argument for argument; see `grouped_matmul`. Of `out_sharding` only None is supported."""
    if out_sharding is not None:
        raise GroupedMatmulArgumentError(
            f"out_sharding must be None, got {out_sharding!r}. Give the result a sharding by jax.reshard, or call "
            "grouped_matmul with mesh=, in_specs= and out_specs=.",
            "ragged_dot",
        )
    options = {"precision": precision, "preferred_element_type": preferred_element_type}
    return grouped_matmul(lhs, rhs, group_sizes, group_offset, **options)


def _dtype_name(dtype: Any) -> str:
    """The name of the dtype that arrays get: without 64 bits enabled, `float` is float32."""
    try:
        found = jax.dtypes.canonicalize_dtype(dtype)
        if found == np.bool_ or jnp.issubdtype(found, np.number):
            return found.name
    except TypeError:
        pass
    got = static.described(dtype)
    raise GroupedMatmulArgumentError(f"preferred_element_type must be a dtype, known while tracing, got {got}.")


def _precision(precision: Any) -> Any:
    """As its name, which is the same in every process."""
    if isinstance(precision, Tracer):
        got = static.described(precision)
        raise GroupedMatmulArgumentError(f"precision must be known while tracing, got {got}.")
    if isinstance(precision, (tuple, list)) and len(precision) == 2:
        return tuple(map(_precision, precision))
    if isinstance(precision, (str, jax.lax.Precision)):  # Not 1, or what equals it: True, an array.
        try:
            return jax.lax.Precision(precision).name.lower()
        except ValueError:
            pass
    name: Any = getattr(precision, "name", precision)
    try:
        return jax.lax.DotAlgorithmPreset[name].name
    except (KeyError, TypeError):
        raise GroupedMatmulArgumentError(
            "precision must be None, a jax.lax.Precision, a jax.lax.DotAlgorithmPreset, the name of one, or a pair of "
            f"precisions, got {precision!r}."
        ) from None
