"""The cross entropy of a linear layer's outputs, without all of them in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ejkernel.errors import EjkernelError
from ejkernel.kernels.linear_cross_entropy.params import ChunkParams
from ejkernel.kernels.linear_cross_entropy.reference import plain, plain_gradients
from ejkernel.kernels.linear_cross_entropy.rule import Rule
from ejkernel.modules import static
from ejkernel.ops.core.backend import Backend, Platform
from ejkernel.ops.core.explicit import Split
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.core.operation import Operation
from ejkernel.ops.core.types import Cfg

Array = jax.Array
Reduction = Literal["mean", "sum", "none"]


@dataclass(frozen=True)
class LinearCrossEntropyConfig:
    """How a call is run: by which backend, in which chunks.

    Attributes:
      fwd_params: Chunks of the loss alone.
      bwd_params: Chunks of the loss with gradients; None: they are chosen separately.
      platform: The backend.
    """

    fwd_params: ChunkParams | None = None
    bwd_params: ChunkParams | None = None
    platform: Platform | None = None


@dataclass(frozen=True)
class LossGradientsConfig:
    """How the loss with its gradients is computed."""

    fwd_params: ChunkParams | None = None
    platform: Platform | None = None


class LossStatistics(NamedTuple):
    """What is known of each row beside its loss, also of one that does not count; no gradient flows through it.

    Attributes:
      log_sum_exp: Of its logits, float32.
      correct: Whether the label has the largest logit.
    """

    log_sum_exp: Any
    correct: Any


class LossArgumentError(EjkernelError, ValueError):
    """An argument of a loss does not fit the others."""

    def __init__(self, message: str) -> None:
        super().__init__(f"linear_cross_entropy: {message}")


def _backends(part: str) -> tuple[Backend, ...]:
    where = "ejkernel.kernels.linear_cross_entropy"
    return (
        Backend("triton", f"{where}.triton{part}", ChunkParams, capability=(8, 0), interpret=True),
        # Never the guess: not timed yet.
        Backend("mosaic", f"{where}.mosaic{part}", ChunkParams, capability=(9, 0)),
        Backend("xla", f"{where}.xla{part}", ChunkParams),
    )


class _Loss(Operation[Cfg, Any]):
    """What the loss, and the loss with gradients, share."""

    def example_inputs(self, inv: Invocation[Any, Any], key: Array) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Normal floats, weights as at the start of a training, labels of the vocabulary, and factors as of a mean."""
        x, weights, labels, bias, *factor = inv.args
        keys = jax.random.split(key, 5)
        draw = lambda k, a: jax.random.normal(k, a.shape, a.dtype)
        drawn = jax.random.randint(keys[2], labels.shape, 0, weights.shape[1], labels.dtype)
        scaled = draw(keys[1], weights) * jnp.asarray(weights.shape[0] ** -0.5, weights.dtype)
        factors = [(1 + jax.random.uniform(keys[4], f.shape, f.dtype)) / max(f.size, 1) for f in factor]
        args = draw(keys[0], x), scaled, drawn, None if bias is None else draw(keys[3], bias)
        return (*args, *factors), dict(inv.kwargs)


class LossGradients(_Loss[LossGradientsConfig], op_id="linear_cross_entropy_gradients"):
    """Each row's loss, and the gradients of `sum(factor · loss)`; positional: x, weights, labels, bias, factor.

    A chunk's logits are computed once, and its part of all gradients at once: three products.
    """

    backends = _backends("_gradients")

    def arguments(
        self,
        x: Any,
        weights: Any,
        labels: Any,
        bias: Any,
        factor: Any,
        *,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        logits_soft_cap: float | None = None,
        axis_name: Any = None,
        batch_axis_name: Any = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Checks the arguments."""
        _check_shapes(x, weights, labels, bias)
        if not hasattr(factor, "shape") or factor.shape != labels.shape:
            got = getattr(factor, "shape", type(factor).__name__)
            raise LossArgumentError(f"factor must be an array of shape {labels.shape}, one per row of x, got {got}.")
        kind = _checked_kind(ignore_index, label_smoothing, z_loss, logits_soft_cap)
        return (x, weights, labels, bias, factor), {**kind, "axis_name": axis_name, "batch_axis_name": batch_axis_name}

    def reference(self, *args: Any, platform: str | None = None, **kwargs: Any) -> Any:
        """Plain JAX, with all logits in memory."""
        return plain_gradients(*args, **kwargs)


class LinearCrossEntropy(_Loss[LinearCrossEntropyConfig], op_id="linear_cross_entropy"):
    """`cross_entropy(x @ weights + bias, labels)`; positional: x, weights, labels, bias.

    Where a mean or sum is differentiated, its gradients are computed with it, and a scalar cotangent scales them
    afterwards. With `reduction="none"` the cotangent is one number per row, and the weights' gradient sums over rows:
    it cannot be scaled afterwards. Keeping all logits is what this operation is there to avoid, so the backward
    computes them again: four products.
    """

    backends = _backends("")
    _by_backend = ("run", "fwd_with_residuals", "vjp")
    workload_module = "ejkernel.kernels.linear_cross_entropy.workloads"

    def arguments(
        self,
        x: Any,
        weights: Any,
        labels: Any,
        bias: Any = None,
        *,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        logits_soft_cap: float | None = None,
        reduction: Reduction = "mean",
        axis_name: Any = None,
        batch_axis_name: Any = None,
        stats: bool = False,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Checks the arguments."""
        _check_shapes(x, weights, labels, bias)
        if reduction not in get_args(Reduction):
            raise LossArgumentError(
                f"reduction must be one of {', '.join(get_args(Reduction))}, known while tracing, got "
                f"{static.described(reduction)}."
            )
        kwargs = {
            **_checked_kind(ignore_index, label_smoothing, z_loss, logits_soft_cap),
            "reduction": reduction,
            "axis_name": axis_name,
            "batch_axis_name": batch_axis_name,
            "stats": bool(stats),
        }
        return (x, weights, labels, bias), kwargs

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any], specs: Sequence[PartitionSpec]) -> Split:
        """The compiler splits it, because a mean is one over all devices."""
        rows = PartitionSpec(*specs[2]) if kwargs.get("reduction") == "none" else PartitionSpec()
        out = (rows, (PartitionSpec(*specs[2]),) * 2) if kwargs.get("stats") else rows
        return Split(tuple(specs), out, local=False)

    def fwd_with_residuals_on(self, backend: Backend, /, *args: Any, cfg: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The loss, and its gradients for a cotangent of 1; none where the cotangent has one number per row."""
        reduction, (x, weights, labels, _) = kwargs["reduction"], args
        if reduction == "none":
            return self.run_on(backend, *args, cfg=cfg, **kwargs), None
        rule = Rule(**_kind(kwargs))
        stored = jnp.result_type(x.dtype, weights.dtype)
        each = 1 / rule.count(labels) if reduction == "mean" else 1.0
        # Of many rows, a probability's part of the mean is less than any float16, and no cotangent brings it back.
        late = stored == jnp.float16
        factor = jnp.full(labels.shape, 1.0 if late else each, jnp.promote_types(stored, jnp.float32))
        rows, grads = self._gradients(args, factor, cfg, kwargs)
        grads = jax.tree.map(lambda g: g * each, grads) if late else grads
        return rule.outputs(rows, labels, reduction, kwargs["stats"]), grads

    def vjp_on(
        self, backend: Backend, residuals: Any, out: Any, dout: Any, /, *args: Any, cfg: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        """The gradients of x, weights, labels (none) and bias."""
        x, weights, labels, bias = args
        wide = jnp.promote_types(jnp.result_type(x.dtype, weights.dtype), jnp.float32)
        reduced = kwargs["reduction"] != "none"
        dout = Rule(**_kind(kwargs)).cotangent(dout[0] if kwargs["stats"] else dout, reduced=reduced)
        if reduced:
            found, scaled = residuals, lambda g: g.astype(wide) * dout
        else:
            found, scaled = self._gradients(args, dout.astype(wide), cfg, kwargs)[1], lambda g: g
        pairs = ((found.x, x), (found.weights, weights), (None, labels), (found.bias, bias))
        return tuple(None if g is None else scaled(g).astype(like.dtype).reshape(like.shape) for g, like in pairs)

    def _gradients(self, args: tuple[Any, ...], factor: Array, cfg: Any, kwargs: dict[str, Any]) -> Any:
        own = {name: x for name, x in kwargs.items() if name not in ("reduction", "stats")}
        return self.nested(LossGradients, (*args, factor), own, cfg, cfg.bwd_params)

    def reference(self, *args: Any, platform: str | None = None, **kwargs: Any) -> Any:
        """Plain JAX, with all logits in memory."""
        return plain(*args, **kwargs)


def _checked_kind(ignore_index: Any, label_smoothing: Any, z_loss: Any, logits_soft_cap: Any) -> dict[str, Any]:
    """What kind of loss it is."""
    known = partial(static.number, error=LossArgumentError)
    label_smoothing, z_loss = known("label_smoothing", label_smoothing), known("z_loss", z_loss)
    if not 0.0 <= label_smoothing < 1.0:
        raise LossArgumentError(f"label_smoothing must be at least 0 and less than 1, got {label_smoothing}.")
    if not 0.0 <= z_loss < math.inf:
        raise LossArgumentError(f"z_loss must be at least 0 and finite, got {z_loss}.")
    if logits_soft_cap is not None and not 0.0 < known("logits_soft_cap", logits_soft_cap) < math.inf:
        raise LossArgumentError(
            f"logits_soft_cap must be above 0 and finite, or None for no cap, got {logits_soft_cap}."
        )
    return {
        "ignore_index": _index(ignore_index),
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "logits_soft_cap": None if logits_soft_cap is None else float(logits_soft_cap),
    }


def _kind(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The fields of a rule."""
    return {name: x for name, x in kwargs.items() if name not in ("reduction", "stats", "platform")}


def _check_shapes(x: Any, weights: Any, labels: Any, bias: Any) -> None:
    floats = (("x", x), ("weights", weights), *((("bias", bias),) if bias is not None else ()))
    for name, a in (*floats, ("labels", labels)):
        if not hasattr(a, "shape") or not hasattr(a, "dtype"):
            raise LossArgumentError(f"{name} must be an array, got {type(a).__name__}.")
    for name, a in floats:
        if not jnp.issubdtype(a.dtype, jnp.floating):
            raise LossArgumentError(f"{name} must be of a floating dtype, got {a.dtype}.")
        if a.dtype.itemsize < 2:
            raise LossArgumentError(f"{name} must have at least 16 bits, got {a.dtype}: cast it first.")
    if weights.ndim != 2 or x.ndim < 1 or x.shape[-1] != weights.shape[0]:
        raise LossArgumentError(
            f"weights must be [columns of x, vocabulary], got {weights.shape} for x of shape {x.shape}. "
            "Transpose weights that are [vocabulary, columns]."
        )
    if not all(isinstance(size, int) for size in (*x.shape, *weights.shape)):
        raise LossArgumentError(
            f"the sizes of x and weights must be known, got {x.shape} and {weights.shape}: symbolic ones (jax.export) "
            "are not supported."
        )
    if 0 in weights.shape:
        raise LossArgumentError(f"weights must not be empty, got shape {weights.shape}.")
    if labels.shape != x.shape[:-1] or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise LossArgumentError(
            f"labels must be integers of shape {x.shape[:-1]}, one per row of x, "
            f"got {labels.dtype}{list(labels.shape)}."
        )
    if bias is not None and bias.shape != weights.shape[1:]:
        raise LossArgumentError(f"bias must have shape {weights.shape[1:]}, got {bias.shape}.")


def _index(ignore_index: Any) -> int | None:
    return None if ignore_index is None else static.integer("ignore_index", ignore_index, LossArgumentError)


_kernel = LinearCrossEntropy()


def linear_cross_entropy(
    x: Any,
    weights: Any,
    labels: Any,
    *,
    bias: Any = None,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_soft_cap: float | None = None,
    reduction: Reduction = "mean",
    axis_name: Any = None,
    batch_axis_name: Any = None,
    return_stats: bool = False,
    platform: Platform | None = None,
    cfg: LinearCrossEntropyConfig | None = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Any:
    """The cross entropy of `x @ weights + bias` and integer labels; logits are in memory a chunk at a time.

    Sums are in float32, and the loss is float32; with float64 in x or weights, both are float64.

    Args:
      x: [..., columns], of a floating dtype.
      weights: [columns, vocabulary].
      labels: Integers [...]. One outside of the vocabulary makes the loss nan.
      bias: [vocabulary].
      ignore_index: The label of rows that count neither in the loss nor in the mean.
      label_smoothing: The share of the target that is spread evenly over the vocabulary.
      z_loss: The weight of `log_sum_exp²`, which is added to each row's loss.
      logits_soft_cap: `cap · tanh(logits / cap)` takes the place of the logits.
      reduction: "mean" over rows that count, "sum", or "none": the loss of each row, 0 for those that do not count.
      axis_name: Inside `jax.shard_map`: the mesh axis over which the vocabulary is spread. Weights and bias are the
        device's part, labels count in the whole vocabulary.
      batch_axis_name: Inside `jax.shard_map`: the mesh axes over which rows are spread. "mean" and "sum" are then those
        of all rows, else those of the device's.
      return_stats: Also return `LossStatistics`.
      platform: "triton", "mosaic" or "xla": this backend or an error.
      cfg: In which chunks; by default what was tuned, else a guess.
      mesh: Run under `jax.shard_map` on this mesh.
      in_specs: With `mesh`: the PartitionSpecs of x, weights, labels and bias.
      out_specs: With `mesh`: that of the result.

    Returns:
      The loss, or a pair of it and the statistics.
    """
    numbers = {"label_smoothing": label_smoothing, "z_loss": z_loss, "logits_soft_cap": logits_soft_cap}
    numbers = {name: static.number(name, x, LossArgumentError) for name, x in numbers.items() if x is not None}
    names = {"axis_name": axis_name, "batch_axis_name": batch_axis_name}
    names = {name: tuple(x) if isinstance(x, list) else x for name, x in names.items()}
    kwargs: dict[str, Any] = {"ignore_index": _index(ignore_index)}
    kwargs |= {name: x for name, x in numbers.items() if x or name == "logits_soft_cap"}
    kwargs |= {name: x for name, x in names.items() if x is not None}
    return_stats = return_stats is not False and static.flag("return_stats", return_stats, LossArgumentError)
    kwargs |= {"reduction": reduction} | ({"stats": True} if return_stats else {})
    shared = {"cfg": cfg, "platform": platform, "mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}
    out = _kernel.call((x, weights, labels, bias), kwargs, **shared)
    if not return_stats:
        return out
    return out[0], LossStatistics(*(jax.lax.stop_gradient(a) for a in out[1]))
