"""The only place that knows how JAX 0.10, 0.11 and 0.12 differ."""

import contextlib
import enum
import importlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import ad_util as _ad_util
from jax._src import config as _config
from jax._src import core as _core
from jax._src import distributed as _distributed
from jax._src import pmap as _pmap
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import partial_eval as _pe

# --- Operations ---

# Not from `jax.extend`, which loads Pallas in 0.12: see `load_pallas`.
Primitive = _core.Primitive
jaxpr_as_fun = _core.jaxpr_as_fun


# --- Values ---


def zeros_of(aval: Any) -> jax.Array:
    """Zeros of a type, with its sharding and the mesh axes over which it varies."""
    return _ad_util.zeros_like_aval(aval)


def is_symbolic(x: Any) -> bool:
    """Whether an array has dimensions that are not known, as in `jax.export` of symbolic shapes."""
    return not _core.is_constant_shape(x.shape)


def is_ref(x: Any) -> bool:
    """Whether `x` is a `jax.Ref`, or stands for one while tracing."""
    return hasattr(_core.typeof(x), "inner_aval")


def tangent_type(x: Any) -> Any:
    """The type of the tangents of a value."""
    return _core.typeof(x).to_tangent_aval()


def without_consts(jaxpr: Any) -> tuple[list[Any], Any]:
    """The constants of equations, and the equations as a function of them and of their arguments."""
    return jaxpr.consts, _pe.close_jaxpr(_pe.convert_constvars_jaxpr(jaxpr.jaxpr))


def lowered_types(jaxpr: Any) -> Any:
    """The equations with JAX's simple types only; the same ones in versions that have no other."""
    lower = getattr(_pe, "lower_jaxpr2", None)
    return jaxpr if lower is None else lower(jaxpr)


def def_as_jit(primitive: Any, fn: Callable[..., Any]) -> None:
    """Makes `jax.checkpoint`, `checkify` and `jet` treat a primitive as the jitted function that `fn(**params)` gives.

    `jax.checkpoint` keeps its equation as one if nothing inside it has to be saved.
    """
    from jax._src import checkify
    from jax.experimental import jet

    def as_jit(avals: Sequence[Any], params: dict[str, Any]) -> Any:
        with jax.disable_jit(False):
            (eqn,) = jax.make_jaxpr(fn(**params))(*avals).eqns
        return eqn

    def partial_eval(saveable: Any, unknown: Any, instantiated: Any, eqn: Any) -> Any:
        jit = as_jit([x.aval for x in eqn.invars], eqn.params)
        rule = _pe.partial_eval_jaxpr_custom_rules[jit.primitive]
        split = rule(saveable, unknown, instantiated, eqn.replace(primitive=jit.primitive, params=jit.params))
        *_, unknown_out, instantiated_out, residuals = split
        saved = [x for x in residuals if not any(x is given for given in eqn.invars)]
        if saved or any(unknown_out) or len(set(instantiated_out)) != 1:
            return split
        again = instantiated_out[0]
        return eqn, eqn if again else None, unknown_out, instantiated_out, residuals if again else []

    # The first arguments are an error and the set of checks; since JAX 0.12 also a context.
    first = list(inspect.signature(checkify.default_checkify_rule).parameters).index("invals") - 1

    def check(*given: Any, **params: Any) -> Any:
        jit = as_jit(list(map(_core.typeof, given[first:])), params)
        return checkify.error_checks[jit.primitive](*given, **jit.params)

    def taylor(primals: Any, series: Any, /, **params: Any) -> Any:
        jit = as_jit(list(map(_core.typeof, primals)), params)
        return jet.jet_rules[jit.primitive](primals, series, **jit.params)

    _pe.partial_eval_jaxpr_custom_rules[primitive] = partial_eval
    checkify.error_checks[primitive] = check
    jet.jet_rules[primitive] = taylor


INLINE: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True  # pyright: ignore[reportAttributeAccessIssue]
"""`jax.jit(..., inline=INLINE)` leaves only its equations where it is called while tracing."""


# --- Batches (vmap) ---


@dataclass(frozen=True)
class Axis:
    """An axis that `jax.vmap` maps over."""

    size: int
    name: Any = None
    spmd_name: Any = None

    @classmethod
    def of(cls, data: Any) -> "Axis":
        """The axis in the form that JAX passes to batching rules."""
        name = None if data.name is _core.no_axis_name else data.name
        return cls(data.size, name, data.spmd_name)

    def vmap(self, fn: Callable[..., Any], dims: Sequence[int | None]) -> Callable[..., Any]:
        """`jax.vmap` of a function of arrays over this axis, which comes first in its outputs."""
        return jax.vmap(
            fn, in_axes=tuple(dims), axis_name=self.name, axis_size=self.size, spmd_axis_name=self.spmd_name
        )


trace_state = _core.trace_state_strong_ref
"""`trace_state.value` is the innermost transformation around the code that runs, or `EAGER`."""
EAGER = _core.eval_trace


def is_transforming() -> bool:
    """Whether the innermost transformation around the code that runs is a derivative or `jax.vmap`."""
    return type(trace_state.value) in (_ad.LinearizeTrace, _ad.JVPTrace, _batching.BatchTrace)


def differentiates_batch(values: Sequence[Any]) -> bool:
    """Whether values show that a derivative is taken inside `jax.vmap`."""
    derivatives, batches = [-1], []
    for x in values:
        while isinstance(x, (_ad.JVPTracer, _ad.LinearizeTracer, _batching.BatchTracer)):
            is_batched = isinstance(x, _batching.BatchTracer)
            (batches if is_batched else derivatives).append(_depth(x._trace))
            x = x.val if is_batched else x.primal
    return bool(batches) and max(derivatives) > min(batches)


def shows_batch(x: Any) -> bool:
    """Whether `x` is the value of one example inside `jax.vmap`, differentiated or not."""
    return isinstance(_undifferentiated(x), _batching.BatchTracer)


def _undifferentiated(x: Any) -> Any:
    while isinstance(x, (_ad.JVPTracer, _ad.LinearizeTracer)):
        x = x.primal
    return x


def visible_batches(values: Sequence[Any]) -> tuple[list[tuple[Axis, list[int | None]]], list[Any]]:
    """The batch axes that can be seen from inside `jax.vmap`, innermost first, and the values that have them all.

    Each axis comes with its position in every value.
    """
    found: list[tuple[Axis, list[int | None]]] = []
    values = list(map(_undifferentiated, values))
    while traces := [x._trace for x in values if shows_batch(x)]:
        inner = max(traces, key=_depth)
        mapped = [shows_batch(x) and x._trace.tag is inner.tag for x in values]
        dims = [x.batch_dim if m else None for x, m in zip(values, mapped, strict=True)]
        found.append((Axis.of(inner.axis_data), dims))
        values = [_undifferentiated(x.val) if m else x for x, m in zip(values, mapped, strict=True)]
    return found, values


def _depth(trace: Any) -> int:
    parent = getattr(trace, "parent_trace", None)
    return 0 if parent is None else 1 + _depth(parent)


# --- Manual axes (shard_map, pmap) ---


def varying_axes(x: Any) -> frozenset[Any]:
    """Mesh axes over which `x` may differ inside shard_map; empty elsewhere and where JAX does not track it."""
    aval = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)
    return manual.varying if manual is not None else getattr(aval, "vma", frozenset())


def inside_shard_map() -> bool:
    """Whether the code being traced is the body of a `jax.shard_map`; the body of a pmap is not."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes:
        return False
    # In JAX 0.10 to 0.12 pmap is written with shard_map, so only the stack tells the two apart: one mesh axis, all
    # manual.
    return len(mesh.axis_names) > 1 or not _called_from(_pmap.__file__)


def manual_axes() -> dict[str, int]:
    """The mesh axes that code inside shard_map or pmap can communicate over, with their sizes."""
    mesh = jax.sharding.get_abstract_mesh()
    return {name: mesh.shape[name] for name in mesh.manual_axes}


def automatic_devices(ctx: Any) -> int:
    """Over how many devices the compiler will split what is being lowered; 1 if it will not split it."""
    axes = ctx.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    if mesh is None:
        return getattr(axes, "num_devices", 1)  # None in an exported program that runs anywhere.
    manual = {*axes.manual_axes, *mesh.manual_axes}
    return math.prod(size for name, size in mesh.shape.items() if name not in manual)


def _called_from(filename: str) -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == filename:
            return True
        frame = frame.f_back
    return False


# --- Devices that are not here ---


def mesh_device() -> Any | None:
    """The abstract device of the mesh around the code that is traced; None if there is no mesh, or it names none."""
    return getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)


def compiles_only(device: Any) -> bool:
    """Whether a device is part of a described topology: programs can be compiled for it, and not run."""
    client = getattr(device, "client", None)
    return isinstance(device, jax.sharding.AbstractDevice) or type(client).__name__ == "CompileOnlyPyClient"


# --- Many processes ---


def distributed_client() -> Any | None:
    """The client of the key-value store that `jax.distributed.initialize` connects to; None without it."""
    return _distributed.global_state.client


def process_place() -> tuple[int, int]:
    """This process's number, and how many there are; starts no backend."""
    state = _distributed.global_state
    return state.process_id or 0, state.num_processes or 1


def key_value_insert(client: Any, key: str, value: str) -> bool:
    """Inserts a value where there is none; False if there is one already."""
    try:
        client.key_value_set(key, value, allow_overwrite=False)
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("ALREADY_EXISTS"):
            raise
        return False
    return True


def key_value_increment(client: Any, key: str) -> int:
    """Adds one to a counter, which starts at zero, and returns its new value."""
    return client.key_value_increment(key, 1)


def key_value_get(client: Any, key: str, timeout_s: float) -> str | None:
    """Waits for the value of a key; None if it does not come within the time."""
    try:
        if timeout_s <= 0:
            return client.key_value_try_get(key)
        return client.blocking_key_value_get(key, max(1, int(timeout_s * 1000)))
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith(("DEADLINE_EXCEEDED", "NOT_FOUND")):
            raise
        return None


# --- Timing ---


def cupti() -> Any | None:
    """The extension that times CUDA kernels (`_cupti_init`, `_cupti_get_timings`); None without JAX's CUDA plugin."""
    try:
        from jax._src.lib import mosaic_gpu
    except ImportError:
        return None
    return getattr(mosaic_gpu, "_mosaic_gpu_ext", None)


# --- Config of a thread ---

# Not copied when work moves to another thread or process: what a transformation sets while it traces, and guards for
# the caller's own code.
_STAYS_BEHIND = frozenset(
    {
        "check_vma",
        "eager_constant_folding",
        "jax_array_garbage_collection_guard",
        "jax_check_tracer_leaks",
        "jax_disable_jit",
        "jax_no_collectives",
        "jax_no_execution",
        "jax_no_tracing",
        "jax_thread_guard",
        "jax_transfer_guard",
        "jax_transfer_guard_device_to_device",
        "jax_transfer_guard_device_to_host",
        "jax_transfer_guard_host_to_device",
    }
)
# Contexts that are not options but change what is compiled. Meshes and axes are not copied: they belong to the caller.
_CONTEXTS = ("compute_on_context_manager", "xla_metadata_context_manager", "pallas_tpu_interpret_mode_context_manager")


def thread_config() -> list[tuple[Any, Any]]:
    """What blocks like `with jax.enable_x64(True)` have set in this thread only; for `entered_config` in another."""
    states = [state for name, state in _config.config_states.items() if name not in _STAYS_BEHIND]
    contexts = [getattr(_config, name) for name in _CONTEXTS if hasattr(_config, name)]
    local = [(state, state.get_local()) for state in (*states, *contexts)]
    return [(state, value) for state, value in local if value is not _config.config_ext.unset]


@contextlib.contextmanager
def entered_config(captured: list[tuple[Any, Any]]) -> Iterator[None]:
    """Sets in this thread what `thread_config` found in another."""
    with contextlib.ExitStack() as stack:
        for state, value in captured:
            if isinstance(state, _config.State):
                stack.enter_context(state(value))
            else:
                stack.callback(state.set_local, state.swap_local(value))
        yield


def config_values() -> dict[str, Any]:
    """The options that apply in this thread, as plain values that another process can set."""
    values = {name: state.value for name, state in _config.config_states.items() if name not in _STAYS_BEHIND}
    plain = {name: value.value if isinstance(value, enum.Enum) else value for name, value in values.items()}
    return {name: value for name, value in plain.items() if isinstance(value, bool | int | float | str | None)}


def set_config_values(values: dict[str, Any]) -> None:
    """Sets the options of another process; those that this JAX does not have, or has already, are skipped."""
    for name, value in config_values().items():
        if name in values and values[name] != value:
            jax.config.update(name, values[name])


# --- Pallas ---


def load_pallas() -> None:
    """Loads Pallas early: in JAX 0.12, loading it changes the key of every jit cache, so all are traced again."""
    if jax.__version_info__ >= (0, 12):
        importlib.import_module("jax._src.pallas.fuser.jaxpr_fusion")


def load_with_layout(ref: Any, *, layout: Any, optimized: bool = True) -> jax.Array:
    """Loads all of a Mosaic GPU reference into registers in `layout`; 0.10 wants an index, later versions none."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    load: Any = plgpu.load
    whole = (...,) if jax.__version_info__ < (0, 11) else ()
    return load(ref, *whole, layout=layout, optimized=optimized)


def mosaic_kernels_take_refs() -> bool:
    """Whether `plgpu.kernel` accepts a `jax.Ref` and may change what it holds."""
    return jax.__version_info__ >= (0, 11)


# --- cuDNN's attention ---


def cudnn_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float, causal: bool, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """Output, and log-sum-exp [batch, heads, q] in float32, which JAX's public call rounds to the type of `q`."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    rules = _cudnn_rules(scale, causal, window)
    return cudnn._dot_product_attention_fwd_p_wrapper.bind(q, k, v, *_cudnn_unused(q), is_training=True, **rules)


def cudnn_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    *,
    scale: float,
    causal: bool,
    window: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of query, key and value after any forward that left its output and log-sum-exp."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    rules = _cudnn_rules(scale, causal, window)
    return tuple(cudnn._dot_product_attention_bwd_p_wrapper.bind(q, k, v, *_cudnn_unused(q), lse, out, dout, **rules))


def _cudnn_unused(q: jax.Array) -> list[jax.Array]:
    """Bias, lengths, offsets and page tables: empty arrays where they are not used."""
    return [jax.numpy.zeros(0, q.dtype)] * 7


def _cudnn_rules(scale: float, causal: bool, window: int | None) -> dict[str, Any]:
    from jax._src.cudnn.fused_attention_stablehlo import AttentionLayout, MaskType

    later = {"score_mod": None} if jax.__version_info__ >= (0, 12) else {}
    return {
        "scale": scale,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": MaskType.CAUSAL if causal else MaskType.NO_MASK,
        "layout": AttentionLayout.BTNH.value,
        "sliding_window_length": window,
        **later,
    }


# --- Programs as text ---


def module_text(bytecode: bytes) -> str | None:
    """The text of an MLIR module without its locations, as Pallas puts one into a program; None if it is no module."""
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir

    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    with contextlib.suppress(ImportError):  # JAX may be built without it, and will be one day (deprecated in 0.12).
        # Operations of a dialect that is not registered are printed without their properties.
        from jax._src.lib.triton import dialect as triton

        triton.register_dialect(context)
    try:
        with context:
            return str(ir.Module.parse(bytecode))
    except ir.MLIRError:
        return None
