"""Flash attention: one function, several backends, the fastest of them by measurement."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec, SingleDeviceSharding

from ejkernel.kernels.flash_attention import masks, packing, reference, rule, xla
from ejkernel.kernels.flash_attention.arguments import Attention, Rules, canonical, keywords_of
from ejkernel.kernels.flash_attention.bands import Causal
from ejkernel.kernels.flash_attention.checks import AttentionArgumentError, is_int
from ejkernel.kernels.flash_attention.config import MosaicBwdConfig, MosaicFwdConfig
from ejkernel.ops.core import dispatch, explicit
from ejkernel.ops.core.backend import Backend, Platform
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.core.operation import DifferentiableOperation
from ejkernel.ops.utils import arguments
from ejkernel.ops.utils.fingerprint import compute_capability
from ejkernel.ops.utils.params import BwdParams, FwdParams
from ejkernel.ops.utils.promotion import usual_promotion
from ejkernel.ops.utils.services import services

if TYPE_CHECKING:
    from jax.sharding import Mesh

Array = jax.Array


@dataclass(frozen=True)
class FlashAttentionConfig:
    """How a call is run: by which backend, in which tiles.

    The forward and the backward are chosen separately. A config that is tuned for one has no parameters for the other.
    If a forward runs with a config that has `bwd_params`, as with an explicit `cfg=`, the config is used for both:
    nothing is looked up or measured for the backward.
    """

    fwd_params: FwdParams | MosaicFwdConfig | None = None
    bwd_params: BwdParams | MosaicBwdConfig | None = None
    platform: Platform | None = None


_KERNELS = "ejkernel.kernels.flash_attention"


class Saved(NamedTuple):
    """What a forward leaves for any backward."""

    sums: masks.LogSum
    """Natural logarithms, [batch, heads, q], float32; float64 for float64 arguments."""


class FlashAttention(DifferentiableOperation[FlashAttentionConfig, jax.Array]):
    """`softmax(query key^T scale + bias) value`, tiled; see `flash_attention` for the arguments.

    Arguments that get gradients are positional: query, key, value, bias, softmax_aux.

    Args:
      interpret: Run the Pallas backends (`triton`, `pallas`) in JAX's interpreter, to test them on a CPU.
    """

    version = "1"
    backends = (
        Backend("cudnn", f"{_KERNELS}.cudnn", capability=(8, 0)),
        Backend("mosaic", f"{_KERNELS}.hopper", MosaicFwdConfig, MosaicBwdConfig, capability=(9, 0), thorough=True),
        Backend("triton", f"{_KERNELS}.triton", FwdParams, BwdParams, capability=(8, 0), interpret=True),
        Backend("pallas", f"{_KERNELS}.pallas", FwdParams, BwdParams, interpret=True),
        Backend("xla", xla, FwdParams, BwdParams),
    )
    workload_module = f"{_KERNELS}.workloads"

    def __init__(self, *, interpret: bool = False) -> None:
        super().__init__("flash_attention", interpret=interpret)

    def prepare(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Checks the arguments; afterwards there are five positional ones, `rules` and the arrays that are given."""
        if "rules" in kwargs:
            return args, kwargs
        chosen = {name: x for name in _OPTIONS if (x := kwargs.pop(name, None))}
        try:
            _ARGUMENTS.bind(*args, **kwargs)
        except TypeError as error:
            keywords = ", ".join(name for name, p in _ARGUMENTS.parameters.items() if p.kind == p.KEYWORD_ONLY)
            raise AttentionArgumentError(
                f"{error}. A call takes query, key and value, each [batch, sequence, heads, head_dim], then bias and "
                f"softmax_aux, and by keyword {keywords}, platform; got {len(args)} by position."
            ) from error
        qkv, extras, rules = canonical(*args, **kwargs)
        arrays = {name: x for name, x in extras._asdict().items() if x is not None and name not in _POSITIONAL}
        return (*qkv, extras.bias, extras.softmax_aux), {"rules": rules, **arrays, **chosen}

    def describe_keywords(self, inv: Invocation[Any, Any]) -> dict[str, Any]:
        """The keywords of `flash_attention` that give the rules of the call."""
        q, k, *_ = inv.args
        packed = "q_positions" in inv.kwargs
        written = keywords_of(inv.kwargs["rules"], q.shape[1], k.shape[1], q.shape[3], packed=packed)
        return {**written, **{name: inv.kwargs[name] for name in _OPTIONS if name in inv.kwargs}}

    # --- Running ---

    def _forward(
        self, backend: Backend, args: tuple[Any, ...], kwargs: dict[str, Any], cfg: FlashAttentionConfig
    ) -> tuple[Any, Saved]:
        call, params = _call_on(backend, args, kwargs), self._params(backend, cfg)
        out, sums = backend.functions.forward(call, params, **self._options(backend))
        return (out, sums.lse) if kwargs.get("log_sum") else out, Saved(sums)

    def run_cudnn(self, *args: Any, cfg: FlashAttentionConfig, **kwargs: Any) -> Any:
        """The forward of cuDNN."""
        if kwargs.get("log_sum"):
            return self._forward(self.backend("cudnn"), args, kwargs, cfg)[0]
        return self.backend("cudnn").functions.run(Attention.of(args, kwargs))

    def vjp_on(
        self, backend: Backend, saved: Saved, out: Any, dout: Any, /, *args: Any, cfg: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        """The gradients, one per positional argument; those through a log-sum-exp are left out."""
        if kwargs.get("log_sum"):
            out, dout = out[0], dout[0]
        call, (lse, rest) = _call_on(backend, args, kwargs), saved.sums
        params = self._params(backend, cfg, backward=True)
        delta = masks.row_products(out, dout, lse.dtype) if call.rules.normalize else jnp.zeros_like(lse)
        aux = call.extras.softmax_aux
        dsinks = None if aux is None else masks.sinks_gradient(saved.sums, delta, aux)
        if backend.platform == "mosaic":
            options: dict[str, Any] = {"out": out, "rest": rest}
        elif backend.platform == "cudnn":
            options = {"out": out}  # Without the rest, as after its own forward: another pass over dout costs more.
        else:
            dout, delta = masks.unlost(dout, delta, rest)
            options = self._options(backend)
        dq, dk, dv, dbias = backend.functions.backward(call, lse, delta, dout, params, **options)
        return dq, dk, dv, dbias, dsinks

    # --- Choosing ---

    def ranked(self, inv: Invocation[Any, Any], *, backward: bool) -> list[Backend]:
        """The backends in the order that `rule` gives for the call."""
        facts = rule.Facts.of(Attention.of(inv.args, inv.kwargs))
        return [self.backend(name) for name in rule.order(facts, backward=backward)]

    def heuristic_cfg_vjp(self, inv: Invocation[Any, Any]) -> FlashAttentionConfig:
        """The guess of the backend that is fastest by `rule`; where nothing was measured, of the forward's own."""
        if self.interpret or not rule.is_known(compute_capability()):
            return super().heuristic_cfg_vjp(inv)
        return self._cfgs(inv, self._first(inv, backward=True), backward=True)[0]

    def transfers(self, inv: Invocation[Any, Any], cfg: FlashAttentionConfig) -> bool:
        """Not to a backend that is known to be slower for the call than its guess."""
        backward = isinstance(inv.kernel, BackwardKernel)
        if cfg.platform is None or not rule.is_known(compute_capability()):
            return True
        serving = self.serving(inv, backward=backward)
        return not serving or cfg.platform == serving[0].platform

    # --- Checking and tuning ---

    def reference(self, *args: Any, rules: Rules, platform: str | None = None, **kwargs: Any) -> Any:
        """The plain formulation in float32; above its size limit, XLA tiles of float32 arguments."""
        call = Attention.of(args, {"rules": rules, **kwargs})
        if kwargs.get("log_sum"):
            return reference.with_log_sum(*call)
        if reference.too_large(call.query, call.key) is None:
            return reference.attention(*call)
        return reference.tiled(args, call.extras, rules)

    def mismatch(self, got: Any, want: Any) -> str | None:
        """Gradients in 16 bits are exact to about a thousandth as a whole; single elements may be far off.

        If a row sees few keys and one of them has nearly all the weight, its gradient is the small difference of large
        numbers, one of them from the rounded output: all backends are wrong there by a tenth of a typical element.
        """
        from ejkernel.ops.tuning import comparison

        return comparison.mismatch(got, want, {"bfloat16": 0.5, "float16": 0.1}) or comparison.norm_mismatch(
            got, want, {"bfloat16": 1e-2, "float16": 2e-3}
        )

    def example_inputs(self, inv: Invocation[Any, Any], key: Array) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Normal floats, a few equal segments, masks that hide every eighth key."""
        keys = jax.random.split(key, len(inv.args))
        args = [
            None if x is None else jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, inv.args, strict=True)
        ]
        return tuple(args), {name: _example(name, x) for name, x in inv.kwargs.items()}


def _call_on(backend: Backend, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Attention:
    """The call as a backend takes it: only XLA's compares ids of 64 bits."""
    call = Attention.of(args, kwargs)
    extras = call.extras
    if extras.q_segment_ids is None or backend.platform == "xla":
        return call
    q_ids, kv_ids = packing.in_32_bits(extras.q_segment_ids, extras.kv_segment_ids)
    return call._replace(extras=extras._replace(q_segment_ids=q_ids, kv_segment_ids=kv_ids))


_ARGUMENTS = inspect.signature(canonical)
_POSITIONAL = ("bias", "softmax_aux")
_OPTIONS = ("platform", "log_sum")
"""What a call may ask for beside its rules, absent unless it does. With `log_sum` the output is a pair: the second is
the log-sum-exp of each row, [batch, heads, q], float32, +inf for rows that see nothing."""


# --- Data for tuning ---


def _example(name: str, x: Any) -> Any:
    """Valid data for a keyword argument of an abstract call."""
    if not isinstance(x, jax.ShapeDtypeStruct):
        return x
    place = jnp.arange(x.shape[-1] if x.shape else 1)
    if name in ("q_segment_ids", "kv_segment_ids"):
        return jnp.broadcast_to(place * 4 // max(x.shape[-1], 1), x.shape).astype(x.dtype)
    if name in ("q_positions", "kv_positions"):
        return jnp.broadcast_to(place % max(-(-x.shape[-1] // 4), 1), x.shape).astype(x.dtype)
    if name == "mask":
        return jnp.broadcast_to(place % 8 != 7, x.shape)
    return jnp.ones(x.shape, x.dtype)


# --- The function ---

_kernel = FlashAttention()
_FLOAT32 = jnp.float32  # Found faster than through a module.


def flash_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    causal: Causal = False,
    softmax_scale: float | None = None,
    bias: Any = None,
    attention_mask: Any = None,
    mask: Any = None,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    cum_seqlens_q: Any = None,
    cum_seqlens_k: Any = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_aux: Any = None,
    dropout_prob: float = 0.0,
    dropout_seed: Any = None,
    normalize_output: bool = True,
    precision: Any = None,
    logits_dtype: Any = jnp.float32,
    platform: Platform | Literal["reference"] | None = None,
    cfg: FlashAttentionConfig | None = None,
    mesh: Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Array:
    """Attention with memory linear in the sequence, by the fastest backend that supports the call.

    Args:
      query: [batch, q, heads, head_dim].
      key: [batch, kv, kv_heads, head_dim]; `heads` is a multiple of `kv_heads`.
      value: [batch, kv, kv_heads, value_dim].
      causal: True lets query i see keys j <= i; "lower_right" aligns at the end, j <= i + kv - q, for decoding.
      softmax_scale: Factor of the logits; by default head_dim ** -0.5.
      bias: Added to the logits after the soft cap; broadcastable to [batch, heads, q, kv]. Three axes are
        [heads, q, kv].
      attention_mask: Boolean, True attends: [batch, heads, q, kv] with 1 in place of any of them, or [q, kv] for all
        batches and heads alike. Three axes are refused: [batch, q, kv] and [heads, q, kv] cannot be told apart.
      mask: Another name of `attention_mask`.
      q_segment_ids: Integers [batch, q]; queries see only keys of their own segment.
      kv_segment_ids: Integers [batch, kv]; by default those of the queries, and the reverse.
      cum_seqlens_q: Where packed sequences begin, and the end of the last: integers [sequences + 1] that start with 0,
        or [batch, sequences + 1]. Queries after the end see nothing. Causal and window bounds apply inside each
        sequence.
      cum_seqlens_k: The same for keys; by default that of the queries.
      sliding_window: (left, right): query i sees keys i - left to i + right; None is no bound, an integer w is (w, w),
        causal removes the right side. With causal="lower_right", i counts from the end as well.
      logits_soft_cap: c bounds the logits to c * tanh(logits / c).
      softmax_aux: Sinks, logits that take part in the softmax and have no value: [heads] or [heads, sinks], or 1 in
        place of heads.
      dropout_prob: Share of weights that are dropped; the others grow to make up for it.
      dropout_seed: An integer, or a key of `jax.random`. The same seed drops the same weights, in any backend and in
        the backward.
      normalize_output: False leaves out the division by the sum of weights, exp(logit - largest logit of the row). The
        largest logit counts as a constant in gradients.
      precision: Of the matrix products, as in `jax.lax.dot`.
      logits_dtype: What logits are rounded to before the softmax, which is computed in float32.
      platform: "triton", "mosaic", "cudnn", "pallas", "xla": this backend or an error. "reference" is the plain
        formulation, which holds all scores at once and is refused above a size limit.
      cfg: How to run it; by default what was tuned, else a guess.
      mesh: Run under `jax.shard_map` on this mesh.
      in_specs: With `mesh`: the PartitionSpec of query, key and value, or a tuple of three. Batch and heads may be
        sharded; the other arguments follow.
      out_specs: With `mesh`: by default the query's.

    Returns:
      [batch, q, heads, value_dim], in the dtype of the query. Rows that attend to nothing are zeros.
    """
    if cfg is not None and not isinstance(cfg, FlashAttentionConfig):
        raise AttentionArgumentError(f"cfg must be a FlashAttentionConfig, got {type(cfg).__name__}.")
    # Only what differs from its default: an eager call with few arguments is found fastest.
    kwargs: dict[str, Any] = {}
    if causal is not False:
        kwargs["causal"] = causal is True or _python(causal)
    if softmax_scale is not None:
        kwargs["softmax_scale"] = _python(softmax_scale)
    if sliding_window is not None:
        kwargs["sliding_window"] = _hashable(sliding_window)
    if logits_soft_cap is not None:
        kwargs["logits_soft_cap"] = _python(logits_soft_cap)
    if attention_mask is not None:
        kwargs["attention_mask"] = attention_mask
    if mask is not None:
        if attention_mask is not None:
            raise AttentionArgumentError("mask and attention_mask are one argument with two names; give one of them.")
        kwargs["attention_mask"] = mask
    if q_segment_ids is not None:
        kwargs["q_segment_ids"] = q_segment_ids
    if kv_segment_ids is not None:
        kwargs["kv_segment_ids"] = kv_segment_ids
    if cum_seqlens_q is not None:
        _check_cumulative("cum_seqlens_q", cum_seqlens_q, query)
        kwargs["cum_seqlens_q"] = cum_seqlens_q
    if cum_seqlens_k is not None:
        _check_cumulative("cum_seqlens_k", cum_seqlens_k, key)
        if cum_seqlens_k is not cum_seqlens_q or query.shape[1] != key.shape[1]:  # Else packed alike, at equal places.
            kwargs["cum_seqlens_k"] = cum_seqlens_k
    if type(dropout_prob) is not float or dropout_prob:
        kwargs["dropout_prob"] = _python(dropout_prob)
    if dropout_seed is not None:
        kwargs["dropout_seed"] = _seed(dropout_seed)  # As an array: another seed is not another program.
    if normalize_output is not True:
        kwargs["normalize_output"] = _python(normalize_output)
    if precision is not None:
        kwargs["precision"] = _hashable(precision)
    if logits_dtype is not _FLOAT32:
        kwargs["logits_dtype"] = _dtype_name(logits_dtype)
    if platform is not None or cfg is not None:
        platform = _agreed_platform(platform, cfg)
        if platform is not None:
            kwargs["platform"] = platform
    args = (query, key, value)
    if bias is not None or softmax_aux is not None:
        args = (*args, bias, softmax_aux)
    if mesh is not None:
        from ejkernel.modules.sharded_attention import sharded

        return sharded(_call, args, kwargs, cfg, mesh, in_specs, out_specs)
    if in_specs is not None or out_specs is not None:
        raise AttentionArgumentError("in_specs and out_specs need mesh.")
    # First what most calls are, because asking for types takes a tenth of an eager call's time.
    if platform is None and cfg is None and _are_whole(query, key, value):
        return services.run(_kernel, None, args, kwargs)  # As `_kernel(...)` does, and `_call` too.
    if (found := explicit.typed((*args, *kwargs.values()))) is not None:
        return _call_typed(args, kwargs, cfg, found)
    return _call(args, kwargs, cfg)


def _call_typed(
    args: tuple[Any, ...], kwargs: dict[str, Any], cfg: FlashAttentionConfig | None, found: explicit.Typed
) -> Any:
    """A call whose arguments have shardings in their types: each device runs its part alone if it can."""
    from ejkernel.modules.sharded_attention import runs_alone, sharded

    batch, length, heads = (*found.specs[0], None, None, None)[:3]
    # Not of the head dimension: the output has the value's.
    outs: Any = PartitionSpec(batch, length, heads, None)
    if kwargs.get("log_sum"):
        outs = outs, PartitionSpec(batch, heads, length)
    if runs_alone(found.specs[:3], args):
        return sharded(_call, args, kwargs, cfg, found.mesh, found.specs[:3], outs)
    call, arrays = arguments.on_arrays(lambda args, kwargs: _call(args, kwargs, cfg), (args, kwargs))
    return explicit.automatic(call, outs)(*arrays)


def with_log_sum(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Array, Array]:
    """Attention, and the log-sum-exp of each row, [batch, heads, q], which has no gradient."""
    kwargs = {**kwargs, "log_sum": True}
    found = explicit.typed((*args, *kwargs.values()))
    out, sums = _call(args, kwargs, None) if found is None else _call_typed(args, kwargs, None, found)
    return out, jax.lax.stop_gradient(sums)


def _are_whole(query: Any, key: Any, value: Any) -> bool:
    """Whether arrays are each on one device, with no sharding in their types."""
    try:
        # Not `sharding`, which is a property in Python: reading it takes three times as long.
        return type(query._sharding) is type(key._sharding) is type(value._sharding) is SingleDeviceSharding
    except AttributeError:  # NumPy's, or traced.
        return False


def _call(args: tuple[Any, ...], kwargs: dict[str, Any], cfg: FlashAttentionConfig | None) -> Any:
    if "platform" in kwargs and kwargs["platform"] == "reference":
        return usual_promotion()(reference.attention)(*Attention.of(*_kernel.prepare(*args, **kwargs)))
    return services.run(_kernel, cfg, args, kwargs)


def _agreed_platform(platform: Any, cfg: FlashAttentionConfig | None) -> Any:
    allowed = (*dispatch.ALL_PLATFORMS, "reference")
    if platform is not None and platform not in allowed:
        raise AttentionArgumentError(f"platform must be None or one of {', '.join(allowed)}, got {platform!r}.")
    named = None if cfg is None else dispatch.forced_platform(_kernel, cfg)
    if platform is not None and named is not None and platform != named:
        raise AttentionArgumentError(f"platform is {platform!r} and cfg.platform is {named!r}.")
    return platform if platform is not None else named


_PYTHON = frozenset({bool, int, float, str, type(None)})


def _hashable(x: Any) -> Any:
    x = _python(x)
    return tuple(map(_python, x)) if isinstance(x, (list, tuple)) else x


def _python(x: Any) -> Any:
    """Converts NumPy's and JAX's numbers to Python's: as arrays, their values would be hidden by tracing."""
    if type(x) in _PYTHON:
        return x
    known = isinstance(x, (np.generic, np.ndarray, jax.Array)) and not isinstance(x, Tracer)
    return x.tolist() if known else x


def _check_cumulative(name: str, x: Any, packed: Any) -> None:
    """Refuses ends of sequences that are known and impossible, such as lengths that are not summed up."""
    listed = isinstance(x, (list, tuple)) and all(type(n) is int for n in x)
    known, shape = arguments.readable(np.asarray(x) if listed else x), np.shape(packed)
    if known is None or not np.issubdtype(known.dtype, np.integer):
        return  # Not known, or refused later.
    if len(shape) != 4 or known.ndim not in (1, 2) or known.shape[-1] < 2:
        return
    known = known.astype(np.int64)  # Differences of unsigned integers are never negative.
    if known[..., 0].any() or (np.diff(known) < 0).any() or known.max() > shape[1]:
        raise AttentionArgumentError(
            f"{name} must start with 0, not decrease, and end at {shape[1]} or before, got {known.tolist()}. "
            "Of lengths it is [0, *itertools.accumulate(lengths)]."
        )


def _dtype_name(dtype: Any) -> Any:
    try:
        return None if dtype is None else jnp.dtype(dtype).name  # NumPy takes None for float64.
    except TypeError:
        return dtype  # Refused later, with the argument's name.


def _seed(seed: Any) -> Any:
    return np.uint32(int(seed) & 0xFFFFFFFF) if is_int(seed) else seed
