"""Flash attention: one function, several implementations, the best of them by measurement."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec, SingleDeviceSharding

from ejkernel.kernels.flash_attention import masks, reference, spaces, xla
from ejkernel.kernels.flash_attention.arguments import (
    AttentionArgumentError,
    Causal,
    Extras,
    Rules,
    canonical,
    keywords_of,
)
from ejkernel.kernels.flash_attention.config import MosaicBwdConfig, MosaicFwdConfig
from ejkernel.ops.core import dispatch
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.kernel import Invocation, Kernel
from ejkernel.ops.utils import arguments
from ejkernel.ops.utils.fingerprint import current_device, device_kind
from ejkernel.ops.utils.params import BwdParams, FwdParams

if TYPE_CHECKING:
    from jax.sharding import Mesh

Array = jax.Array
Platform = Literal["triton", "mosaic", "cudnn", "pallas", "xla"]


@dataclass(frozen=True)
class FlashAttentionConfig:
    """How a call is run: by which implementation, in which tiles.

    The forward and the backward are chosen apart. A config that is tuned for one has no parameters for the other. One
    with `bwd_params` that a forward runs with, as when it is given explicitly (`cfg=`), counts for both: nothing is
    looked up or measured for the backward.
    """

    fwd_params: FwdParams | MosaicFwdConfig | None = None
    bwd_params: BwdParams | MosaicBwdConfig | None = None
    platform: Platform | None = None


class Saved(NamedTuple):
    """What a forward leaves for any backward."""

    sums: masks.LogSum
    """Natural logarithms, [batch, heads, q], float32; float64 for float64 arguments."""


class FlashAttention(Kernel[FlashAttentionConfig, jax.Array]):
    """`softmax(query key^T scale + bias) value`, tiled; see `flash_attention` for the arguments.

    Arguments that get gradients are positional: query, key, value, bias, softmax_aux.

    Args:
      interpret: Run the Pallas implementations (`triton`, `pallas`) in JAX's interpreter, to test them on a CPU.
    """

    version = "1"

    def __init__(self, *, interpret: bool = False) -> None:
        super().__init__(name="flash_attention")
        self.interpret = interpret

    def prepare(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Checks the arguments; afterwards there are five positional ones, `rules` and the arrays that are given."""
        if "rules" in kwargs:
            return args, kwargs
        platform = kwargs.pop("platform", None)
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
        chosen = {} if platform is None else {"platform": platform}
        return (*qkv, extras.bias, extras.softmax_aux), {"rules": rules, **arrays, **chosen}

    def describe_keywords(self, inv: Invocation[Any, Any]) -> dict[str, Any]:
        """The keywords of `flash_attention` that give the rules of the call."""
        q, k, *_ = inv.args
        packed = "q_positions" in inv.kwargs
        written = keywords_of(inv.kwargs["rules"], q.shape[1], k.shape[1], q.shape[3], packed=packed)
        platform = inv.kwargs.get("platform")
        return written if platform is None else {**written, "platform": platform}

    # --- Which implementations can serve ---

    def supports(self, inv: Invocation[Any, Any], platform: str) -> bool | str:
        """Whether `platform` can serve the forward, or the backward if `inv` is one."""
        asked = inv.kwargs.get("platform")
        if asked not in (None, platform):
            return f"the call asks for platform={asked!r}"
        reason = self._unsupported(platform, inv, backward=isinstance(inv.kernel, BackwardKernel))
        return True if reason is None else reason

    def _unsupported(self, platform: str, inv: Invocation[Any, Any], *, backward: bool) -> str | None:
        q, k, v, *_ = inv.args
        extras, rules = _extras(inv.args, inv.kwargs), inv.kwargs["rules"]
        if platform == "xla":
            return None
        kind = "tpu" if platform == "pallas" else "gpu"
        interpreted = self.interpret and platform in ("triton", "pallas")
        if not interpreted and device_kind() != kind:
            return f"{platform} needs a {kind.upper()}, this is a {device_kind().upper()}"
        module = self._module(platform)
        if platform == "pallas":
            return module.unsupported(q, k, v, extras, rules)
        capability = (8, 0) if interpreted else _capability()
        if platform in ("mosaic", "cudnn"):
            return module.unsupported(q, k, v, extras, rules, capability=capability, backward=backward)
        return module.unsupported(q, k, v, extras, rules, capability)

    # --- Configs ---

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> FlashAttentionConfig:
        """Prefers cuDNN where it can serve, then what is written for the device, then XLA."""
        platform = self._serving(inv, backward=False)[0]
        return FlashAttentionConfig(fwd_params=spaces.forward_space(platform, inv)[0], platform=platform)

    def config_space(self, inv: Invocation[Any, Any]) -> list[FlashAttentionConfig]:
        """The tiles of every implementation that can serve the call."""
        platforms = self._serving(inv, backward=False)
        found = {on: spaces.few(on, platforms, spaces.forward_space(on, inv)) for on in platforms}
        return [FlashAttentionConfig(fwd_params=p, platform=on) for on in platforms for p in found[on]]

    def heuristic_cfg_vjp(self, inv: Invocation[Any, Any]) -> FlashAttentionConfig:
        """The forward's own implementation if it has a backward for the call, else the best that has."""
        serving = self._serving(inv, backward=True)
        platform = inv.platform if inv.platform in serving else serving[0]
        return FlashAttentionConfig(bwd_params=spaces.backward_space(platform, inv)[0], platform=platform)

    def config_space_vjp(self, inv: Invocation[Any, Any]) -> list[FlashAttentionConfig]:
        """The tiles of every implementation whose backward can serve the call."""
        platforms = self._serving(inv, backward=True)
        found = {on: spaces.few(on, platforms, spaces.backward_space(on, inv)) for on in platforms}
        return [FlashAttentionConfig(bwd_params=p, platform=on) for on in platforms for p in found[on]]

    def cfg_vjp(self, cfg: FlashAttentionConfig) -> FlashAttentionConfig | None:
        """The backward's part of a config that has one."""
        return None if cfg.bwd_params is None else FlashAttentionConfig(None, cfg.bwd_params, cfg.platform)

    def _serving(self, inv: Invocation[Any, Any], *, backward: bool) -> list[Platform]:
        """Implementations that can serve a call, the most promising first."""
        asked = inv.kwargs.get("platform")
        order: tuple[Platform, ...] = _PREFERENCE[device_kind()]
        if self.interpret and inv.platform is not None and inv.platform not in order:
            order = (inv.platform, *order)  # pyright: ignore[reportAssignmentType]
        return [p for p in order if asked in (None, p) and self._unsupported(p, inv, backward=backward) is None] or [
            "xla"
        ]

    # --- Running ---

    def run_xla(self, *args: Any, cfg: FlashAttentionConfig, **kwargs: Any) -> Array:
        """Tiles in plain XLA."""
        return self._forward("xla", args, kwargs, cfg)[0]

    def fwd_with_residuals_xla(self, *args: Any, cfg: FlashAttentionConfig, **kwargs: Any) -> tuple[Array, Saved]:
        """Tiles in plain XLA."""
        return self._forward("xla", args, kwargs, cfg)

    def vjp_xla(self, saved: Saved, out: Array, dout: Array, *args: Any, cfg: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Tiles in plain XLA."""
        return self._backward("xla", saved, out, dout, args, kwargs, cfg)

    def run_triton(self, *args: Any, cfg: FlashAttentionConfig, **kwargs: Any) -> Array:
        """A kernel in Pallas' Triton dialect."""
        return self._forward("triton", args, kwargs, cfg)[0]

    def fwd_with_residuals_triton(self, *args: Any, cfg: FlashAttentionConfig, **kwargs: Any) -> tuple[Array, Saved]:
        """A kernel in Pallas' Triton dialect."""
        return self._forward("triton", args, kwargs, cfg)

    def vjp_triton(self, saved: Saved, out: Array, dout: Array, *args: Any, cfg: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Two kernels in Pallas' Triton dialect: for queries, and for keys and values."""
        return self._backward("triton", saved, out, dout, args, kwargs, cfg)

    def run_pallas(self, *args: Any, cfg: FlashAttentionConfig, **kwargs: Any) -> Array:
        """A kernel in Pallas for TPUs."""
        return self._forward("pallas", args, kwargs, cfg)[0]

    def fwd_with_residuals_pallas(self, *args: Any, cfg: FlashAttentionConfig, **kwargs: Any) -> tuple[Array, Saved]:
        """A kernel in Pallas for TPUs."""
        return self._forward("pallas", args, kwargs, cfg)

    def vjp_pallas(self, saved: Saved, out: Array, dout: Array, *args: Any, cfg: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Two kernels in Pallas for TPUs: for queries, and for keys and values."""
        return self._backward("pallas", saved, out, dout, args, kwargs, cfg)

    def run_mosaic(self, *args: Any, cfg: FlashAttentionConfig, **kwargs: Any) -> Array:
        """A kernel in Pallas' Mosaic dialect, for Hopper."""
        return self._forward("mosaic", args, kwargs, cfg)[0]

    def fwd_with_residuals_mosaic(self, *args: Any, cfg: FlashAttentionConfig, **kwargs: Any) -> tuple[Array, Saved]:
        """A kernel in Pallas' Mosaic dialect, for Hopper."""
        return self._forward("mosaic", args, kwargs, cfg)

    def vjp_mosaic(self, saved: Saved, out: Array, dout: Array, *args: Any, cfg: Any, **kwargs: Any) -> tuple[Any, ...]:
        """One kernel in Pallas' Mosaic dialect, for Hopper, for all three gradients."""
        return self._backward("mosaic", saved, out, dout, args, kwargs, cfg)

    def run_cudnn(self, query: Array, key: Array, value: Array, *_: Any, rules: Rules, **kwargs: Any) -> Array:
        """The forward of cuDNN."""
        return self._module("cudnn").run(query, key, value, rules)

    def fwd_with_residuals_cudnn(self, *args: Any, cfg: FlashAttentionConfig, **kwargs: Any) -> tuple[Array, Saved]:
        """The forward of cuDNN."""
        return self._forward("cudnn", args, kwargs, cfg)

    def vjp_cudnn(self, saved: Saved, out: Array, dout: Array, *args: Any, cfg: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The backward of cuDNN."""
        return self._backward("cudnn", saved, out, dout, args, kwargs, cfg)

    def _forward(
        self, platform: str, args: tuple[Any, ...], kwargs: dict[str, Any], cfg: FlashAttentionConfig
    ) -> tuple[Array, Saved]:
        extras, rules = _extras(args, kwargs), kwargs["rules"]
        params = _checked(platform, "fwd_params", cfg.fwd_params, (FwdParams, MosaicFwdConfig))
        out, sums = self._module(platform).forward(*args[:3], extras, rules, params, **self._options(platform))
        return out, Saved(sums)

    def _backward(
        self,
        platform: str,
        saved: Saved,
        out: Array,
        dout: Array,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cfg: FlashAttentionConfig,
    ) -> tuple[Any, ...]:
        rules: Rules = kwargs["rules"]
        extras, module, options = _extras(args, kwargs), self._module(platform), self._options(platform)
        lse, rest = saved.sums
        params = _checked(platform, "bwd_params", cfg.bwd_params, (BwdParams, MosaicBwdConfig))
        delta = masks.row_products(out, dout, lse.dtype) if rules.normalize else jnp.zeros_like(lse)
        aux = extras.softmax_aux
        dsinks = None if aux is None else masks.sinks_gradient(saved.sums, delta, aux)
        if platform == "mosaic":
            options = {"out": out, "rest": rest}
        else:
            dout, delta = masks.unlost(dout, delta, rest)
            options = {"out": out} if platform == "cudnn" else options
        dq, dk, dv, dbias = module.backward(*args[:3], extras, rules, lse, delta, dout, params, **options)
        return dq, dk, dv, dbias, dsinks

    def _module(self, platform: str) -> Any:
        """The module with `forward` and `backward` for a platform."""
        if platform == "mosaic":
            from ejkernel.kernels.flash_attention import hopper

            return hopper
        if platform == "cudnn":
            from ejkernel.kernels.flash_attention import cudnn

            return cudnn
        if platform == "triton":
            from ejkernel.kernels.flash_attention import triton

            return triton
        if platform == "pallas":
            from ejkernel.kernels.flash_attention import pallas

            return pallas
        return xla

    def _options(self, platform: str) -> dict[str, Any]:
        return {"interpret": self.interpret} if platform in ("triton", "pallas") else {}

    # --- Proving and tuning ---

    def reference(self, *args: Any, rules: Rules, platform: str | None = None, **kwargs: Any) -> Array:
        """The textbook's attention in float32; above its size limit XLA tiles of float32 arguments."""
        (q, k, v, *_), extras = args, _extras(args, kwargs)
        if reference.too_large(q, k) is None:
            return reference.attention(q, k, v, extras, rules)
        return reference.tiled(args, extras, rules)

    def mismatch(self, got: Any, want: Any) -> str | None:
        """As a whole, gradients in 16 bits are good to a thousandth or so; single elements may be far off.

        Where a row sees few keys and one of them has nearly all the weight, its gradient is the small difference of
        large numbers, one of them from the rounded output: all implementations err there, by a tenth of a typical
        element.
        """
        from ejkernel.ops.execution import proving

        return proving.mismatch(got, want, {"bfloat16": 0.5, "float16": 0.1}) or proving.norm_mismatch(
            got, want, {"bfloat16": 1e-2, "float16": 2e-3}
        )

    def example_inputs(self, inv: Invocation[Any, Any], key: Array) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Normal floats, a few equal segments, masks that hide every eighth key."""
        keys = jax.random.split(key, len(inv.args))
        args = [
            None if x is None else jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, inv.args, strict=True)
        ]
        return tuple(args), {name: _example(name, x) for name, x in inv.kwargs.items()}


_ARGUMENTS = inspect.signature(canonical)
_POSITIONAL = ("bias", "softmax_aux")
_PREFERENCE: dict[str, tuple[Platform, ...]] = {
    "gpu": ("cudnn", "mosaic", "triton", "xla"),
    "tpu": ("pallas", "xla"),
    "cpu": ("xla",),
}


def _extras(args: tuple[Any, ...], kwargs: Any) -> Extras:
    arrays = {name: kwargs[name] for name in Extras._fields if name in kwargs}
    return Extras(bias=args[3], softmax_aux=args[4], **arrays)


def _capability() -> tuple[int, int]:
    """Compute capability of the NVIDIA GPU that calls run on; (0, 0) for others."""
    found = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(current_device(), "compute_capability", "")))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _checked(platform: str, name: str, params: Any, kinds: tuple[type, type]) -> Any:
    """`params`, if they are of the kind that the implementation takes."""
    kind = kinds[platform == "mosaic"]
    if params is not None and not isinstance(params, kind):
        raise AttentionArgumentError(
            f"cfg.{name} must be {kind.__name__} for platform {platform!r}, got {type(params).__name__}."
        )
    return params


# --- Data for tuning ---


def _example(name: str, x: Any) -> Any:
    """Legal data for a keyword argument of an abstract call."""
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


def flash_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    causal: Causal = False,
    softmax_scale: float | None = None,
    bias: Any = None,
    attention_mask: Any = None,
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
    """Attention with memory linear in the sequence, by the fastest implementation that serves the call.

    Args:
      query: [batch, q, heads, head_dim].
      key: [batch, kv, kv_heads, head_dim]; `heads` is a multiple of `kv_heads`.
      value: [batch, kv, kv_heads, value_dim].
      causal: True lets query i see keys j <= i; "lower_right" aligns at the end, j <= i + kv - q, for decoding.
      softmax_scale: Factor of the logits; by default head_dim ** -0.5.
      bias: Added to the logits after the soft cap; broadcastable to [batch, heads, q, kv].
      attention_mask: Boolean, True attends; broadcastable to [batch, heads, q, kv].
      q_segment_ids: Integers [batch, q]; queries see only keys of their own segment.
      kv_segment_ids: Integers [batch, kv]; by default those of the queries, and the reverse.
      cum_seqlens_q: Where packed sequences begin, and the end of the last: integers [sequences + 1] that start with 0,
        or [batch, sequences + 1]. What lies behind the end sees nothing. Causal and window bounds hold inside each
        sequence.
      cum_seqlens_k: The same for keys; by default that of the queries.
      sliding_window: (left, right): query i sees keys i - left to i + right; None is no bound, an integer w is (w, w),
        causal takes the right side away. With causal="lower_right", i counts from the end as well.
      logits_soft_cap: c bounds the logits to c * tanh(logits / c).
      softmax_aux: Sinks, logits that take part in the softmax and have no value: [heads] or [heads, sinks], or 1 in
        place of heads.
      dropout_prob: Share of weights that are dropped; the others grow to make up for it.
      dropout_seed: An integer. The same seed drops the same weights, in any implementation and in the backward.
      normalize_output: False leaves out the division by the sum of weights, exp(logit - largest logit of the row). The
        largest logit counts as a constant in gradients.
      precision: Of the matrix products, as in `jax.lax.dot`.
      logits_dtype: What logits are rounded to before the softmax, which is computed in float32.
      platform: "triton", "mosaic", "cudnn", "pallas", "xla": this implementation or an error. "reference" is the
        textbook's, which holds all scores at once and is refused above a size limit.
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
    platform = _agreed_platform(platform, cfg)
    arrays = {
        "attention_mask": attention_mask,
        "q_segment_ids": q_segment_ids,
        "kv_segment_ids": kv_segment_ids,
        "cum_seqlens_q": cum_seqlens_q,
        # Packed alike: then positions need not be compared.
        "cum_seqlens_k": None if cum_seqlens_k is cum_seqlens_q else cum_seqlens_k,
    }
    # Only what differs from its default: an eager call with few arguments is found fastest.
    given = {
        "causal": (_python(causal), False),
        "softmax_scale": (_python(softmax_scale), None),
        "sliding_window": (_hashable(sliding_window), None),
        "logits_soft_cap": (_python(logits_soft_cap), None),
        "dropout_prob": (_python(dropout_prob), 0.0),
        "normalize_output": (_python(normalize_output), True),
        "precision": (_hashable(precision), None),
        "platform": (platform, None),
    }
    kwargs = {name: x for name, x in arrays.items() if x is not None}
    kwargs |= {name: x for name, (x, default) in given.items() if x is not default}
    if logits_dtype is not jnp.float32:
        kwargs["logits_dtype"] = _dtype_name(logits_dtype)
    if dropout_seed is not None:
        # As an array: another seed is not another program.
        kwargs["dropout_seed"] = _seed(dropout_seed)
    args = (query, key, value, bias, softmax_aux)
    if mesh is not None:
        from ejkernel.modules.sharded_attention import sharded

        return sharded(_call, args, kwargs, cfg, mesh, in_specs, out_specs)
    if in_specs is not None or out_specs is not None:
        raise AttentionArgumentError("in_specs and out_specs need mesh.")
    if (spec := _explicit_spec(args)) is not None:
        arrays, statics = arguments.split((args, kwargs))

        def call(*arrays: Any) -> Array:
            args, kwargs = arguments.merge(arrays, statics)
            return _call(args, kwargs, cfg)

        automatic: Any = jax.sharding.auto_axes(call, out_sharding=spec)
        return automatic(*arrays)
    return _call(args, kwargs, cfg)


def _explicit_spec(args: tuple[Any, ...]) -> PartitionSpec | None:
    """The output's sharding, if those of the arguments are part of their types; inside, the compiler decides."""
    query, key, value, *_ = args
    # First what most calls have, because asking for types takes a tenth of an eager call's time.
    if _is_whole(query) and _is_whole(key) and _is_whole(value):
        return None
    types = [jax.typeof(x).sharding for x in (query, key, value) if isinstance(x, jax.Array)]
    if all(t.mesh.empty or all(axis is None for axis in t.spec) for t in types):
        return None
    # Not of the head dimension: the output has the value's.
    return PartitionSpec(*types[0].spec[:3], None)


def _is_whole(x: Any) -> bool:
    return not isinstance(x, Tracer) and type(getattr(x, "sharding", None)) is SingleDeviceSharding


def _call(args: tuple[Any, ...], kwargs: dict[str, Any], cfg: FlashAttentionConfig | None) -> Array:
    if kwargs.get("platform") == "reference":
        args, kwargs = _kernel.prepare(*args, **kwargs)
        return reference.attention(args[0], args[1], args[2], _extras(args, kwargs), kwargs["rules"])
    return _kernel(*args, **kwargs) if cfg is None else _kernel(*args, cfg=cfg, **kwargs)


def _agreed_platform(platform: Any, cfg: FlashAttentionConfig | None) -> Any:
    allowed = (*dispatch.ALL_PLATFORMS, "reference")
    if platform is not None and platform not in allowed:
        raise AttentionArgumentError(f"platform must be None or one of {', '.join(allowed)}, got {platform!r}.")
    named = None if cfg is None else cfg.platform
    if platform is not None and named is not None and platform != named:
        raise AttentionArgumentError(f"platform is {platform!r} and cfg.platform is {named!r}.")
    return platform if platform is not None else named


_PYTHON = frozenset({bool, int, float, str, type(None)})


def _hashable(x: Any) -> Any:
    return tuple(map(_python, x)) if isinstance(x, (list, tuple)) else _python(x)


def _python(x: Any) -> Any:
    """NumPy's and JAX's numbers as Python's: as arguments they would count as arrays, whose values tracing hides."""
    if type(x) in _PYTHON:
        return x
    known = isinstance(x, (np.generic, np.ndarray, jax.Array)) and not isinstance(x, Tracer)
    return x.item() if known and x.ndim == 0 else x


def _dtype_name(dtype: Any) -> Any:
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        return dtype  # Refused later, with the argument's name.


def _seed(seed: Any) -> Any:
    return np.uint32(int(seed) & 0xFFFFFFFF) if isinstance(seed, (int, np.integer)) else seed
