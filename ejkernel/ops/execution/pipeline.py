"""One call while it is traced: prepare, select, record, label and run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jax.core import Tracer

from ejkernel import _compat
from ejkernel.ops import registry
from ejkernel.ops.config.asking import heuristic
from ejkernel.ops.config.kinds import check_explicit
from ejkernel.ops.config.selection import ConfigNotFoundError
from ejkernel.ops.core import dispatch
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.batched import Batch, BatchedKernel
from ejkernel.ops.core.call import demanded
from ejkernel.ops.core.kernel import Invocation, Kernel, KernelDefinitionError
from ejkernel.ops.core.refusals import InputsWanted
from ejkernel.ops.utils import arguments
from ejkernel.ops.utils.fingerprint import abstractify
from ejkernel.ops.utils.meta import label_scope

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Choose = Callable[[Invocation[Any, Any], Kernel[Any, Any]], Any]


@runtime_checkable
class ConfigChooser(Protocol):
    """Anything that chooses configs."""

    def choose(self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Any:
        """The config to run `inv` with."""
        ...


class Fixed(NamedTuple):
    """What is fixed about a call before it is traced."""

    kernel: Kernel[Any, Any]
    cfg: Any = None
    vjp_cfg: Any = None


class Attempt(NamedTuple):
    """One backend that may run a call, with the config that it would get."""

    inv: Invocation[Any, Any]
    platform: str
    run: Callable[..., Any]
    cfg: Any
    batch: Invocation[Any, Any] | None = None
    """The batch of calls that it was chosen for."""
    error: Exception | None = None
    """Why it may not run, if so; it is not raised at once, because the call may be part of a batch, or dead code."""


class Choice(NamedTuple):
    """What is chosen in an attempt; it keeps no kernel alive."""

    platform: str
    cfg: Any
    error: Exception | None


class Pipeline:
    """The steps of a call, with the chooser that they use."""

    def __init__(self, chooser: ConfigChooser, stamp_prefix: str) -> None:
        self.chooser = chooser
        self.stamp_prefix = stamp_prefix
        self._local = threading.local()

    def run(
        self, fixed: Fixed, args: Args, kwargs: Kwargs, batches: Sequence[Batch] = (), *, final: bool = False
    ) -> Any:
        """Runs a call on what are usually tracers, for one example of `batches` if there are any.

        What is `final` is compiled as it is, and never batched or differentiated.

        Raises:
          InputsWanted: The chooser will measure; call again inside `with_inputs`.
          UnsupportedCallError: No backend supports the call.
        """
        from ejkernel.ops.execution.parts import WholeCall

        kernel = fixed.kernel
        batches = _batches_after_prepare(kernel, batches, args, kwargs) if batches else ()
        args, kwargs = prepared(kernel, args, kwargs)
        inv = replace(invocation(kernel, args, kwargs), override_cfg=fixed.cfg)
        arrays, statics = arguments.split((args, kwargs))
        call = WholeCall(self, fixed, inv, statics, final=final)
        reasons: dict[str, str] = {}
        last = None
        attempt = self.batched_attempt(fixed, inv, batches, ask=True) if batches else call.seen(arrays)
        if attempt is not None:
            try:
                return call.run(attempt, arrays)
            except NotImplementedError as error:
                reasons[attempt.platform], last = str(error) or "not implemented", error
        registry.note_traced(kernel, inv)
        choose = self._chooser_with_data(inv, args, kwargs)
        for attempt in self.attempts(inv, reasons, choose):
            try:
                return call.run(attempt, arrays)
            except NotImplementedError as error:
                reasons[attempt.platform], last = str(error) or "not implemented", error
        raise dispatch.UnsupportedCallError(inv, reasons) from last

    # --- Data for tuning ---

    def needs_inputs(self, inv: Invocation[Any, Any]) -> bool:
        """Whether choosing for `inv` would measure something."""
        ask = getattr(self.chooser, "needs_inputs", None)
        return ask is not None and ask(inv, inv.kernel)

    def with_inputs(self, inputs: tuple[Args, Kwargs], call: Callable[[], Any]) -> Any:
        """`call()`, during which the trace can read the data that tuning needs, if there is any."""
        self._local.inputs = inputs
        try:
            return call()
        finally:
            self._local.inputs = None

    def _chooser_with_data(self, inv: Invocation[Any, Any], args: Args, kwargs: Kwargs) -> Choose:
        """`chooser.choose`, with the call's data only while it chooses."""
        # The inputs are removed, not only read: a kernel may call other kernels, which have other inputs.
        inputs, self._local.inputs = getattr(self._local, "inputs", None), None
        if inputs is None and self.needs_inputs(inv):
            if any_tracer(args, kwargs):
                raise InputsWanted
            inputs = args, kwargs
        if not inputs or not (inputs[0] or inputs[1]):
            return self.chooser.choose
        data = dict(zip(("args", "kwargs"), inputs, strict=True))
        return lambda inv, kernel: self.chooser.choose(replace(inv, **data), kernel)

    # --- Choosing a backend and its config ---

    def attempts(
        self, inv: Invocation[Any, Any], reasons: dict[str, str], choose: Choose | None = None
    ) -> Iterator[Attempt]:
        """The backends that may run `inv`, best first; `reasons` collects why the others may not."""
        kernel, explicit = inv.kernel, inv.override_cfg
        assert kernel is not None
        if explicit is not None:
            check_explicit(inv, kernel, explicit)
        if (forced := dispatch.forced_platform(kernel, explicit)) is not None:
            yield from self._forced(inv, forced, explicit, reasons)
            return
        choose = choose or self.chooser.choose
        for platform, run in dispatch.implementations(kernel, inv.context):
            here = replace(inv, platform=platform)
            if (reason := dispatch.refusal(kernel, here, platform)) is not None:
                reasons[platform] = reason
                continue
            cfg, error = (explicit, None) if explicit is not None else chosen_or_guess(choose, here, kernel)
            named = dispatch.forced_platform(kernel, cfg)
            if named not in (None, platform):
                yield from self._forced(inv, named, cfg, reasons)
                # The chosen backend does not support the call after all: continue with the guess of this one.
                cfg = heuristic(here, kernel)
                if dispatch.forced_platform(kernel, cfg) not in (None, platform):
                    continue
            yield Attempt(here, platform, run, cfg, error=error)

    def _forced(self, inv: Invocation[Any, Any], platform: str, cfg: Any, reasons: dict[str, str]) -> Iterable[Attempt]:
        assert inv.kernel is not None
        here = replace(inv, platform=platform)
        run = dispatch.forced_implementation(inv.kernel, inv.context, platform)
        if (reason := dispatch.refusal(inv.kernel, here, platform)) is not None:
            reasons[platform] = reason
            return ()
        return (Attempt(here, platform, run, cfg),)

    def batched_attempt(
        self,
        fixed: Fixed,
        inv: Invocation[Any, Any],
        batches: Sequence[Batch],
        data: Sequence[Any] | None = None,
        *,
        ask: bool = False,
    ) -> Attempt:
        """The first backend that may run a batch of calls like `inv`, with the config chosen for the batch.

        Raises:
          InputsWanted: The chooser will measure, and the caller said to `ask` for the batch's data then.
        """
        whole = _whole(fixed, inv, batches)
        assert whole.kernel is not None
        registry.note_traced(whole.kernel, whole)
        if ask and self.needs_inputs(whole):
            raise InputsWanted
        choose = self.chooser.choose if data is None else partial(self._choose_on, data)
        reasons: dict[str, str] = {}
        for attempt in self.attempts(whole, reasons, choose):
            return self.attempt_again(fixed, inv, batches, attempt)
        raise dispatch.UnsupportedCallError(whole, reasons)

    def attempt_again(
        self, fixed: Fixed, inv: Invocation[Any, Any], batches: Sequence[Batch], chosen: Attempt | Choice
    ) -> Attempt:
        """The attempt for one call of a batch, with what was chosen for the batch."""
        run = dispatch.forced_implementation(fixed.kernel, inv.context, chosen.platform)
        whole = replace(_whole(fixed, inv, batches), platform=chosen.platform)
        here = replace(inv, platform=chosen.platform)
        return Attempt(here, chosen.platform, run, chosen.cfg, whole, chosen.error)

    def divisible_attempt(self, fixed: Fixed, inv: Invocation[Any, Any], *, backward: bool) -> Attempt | None:
        """XLA's own, with its guess, unless the call asks for another backend or there is none.

        The compiler can split it over devices. Nothing is looked up: what is stored is for calls on one device.
        """
        kernel, here = fixed.kernel, replace(inv, platform="xla")
        if fixed.cfg is not None or "platform" in inv.kwargs or not hasattr(kernel, "run_xla"):
            return None
        own = BackwardKernel.of(kernel) if backward else None
        if own is not None:
            here = replace(backward_invocation(own, here), platform="xla")
        if dispatch.refusal(kernel, here, "xla") is not None:
            return None
        owner, cfg_on = here.kernel, getattr(kernel, "cfg_on", None)
        assert owner is not None
        cfg = heuristic(here, owner) if cfg_on is None else cfg_on("xla", here, backward=own is not None)
        run = dispatch.forced_implementation(kernel, inv.context, "xla")
        return Attempt(here, "xla", run, cfg)

    def _choose_on(self, data: Sequence[Any], inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Any:
        args, kwargs = arguments.merge(data, arguments.split((inv.args, dict(inv.kwargs)))[1])
        return self.chooser.choose(replace(inv, args=args, kwargs=kwargs), kernel)

    def labelled(self, attempt: Attempt, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Runs a method with the attempt's config, under its label.

        A program has a label for each config that it needs, so `autotune_lowered` finds all of them.
        """
        with label_scope(attempt.batch or attempt.inv, self.stamp_prefix, attempt.cfg):
            out = method(*args, cfg=attempt.cfg, **kwargs)
            return out if attempt.error is None else demanded(out, attempt.error)

    def backward_attempt(
        self, fixed: Fixed, forward: Attempt, data: Callable[[], tuple[Args, Kwargs]] | None = None
    ) -> Attempt:
        """The forward's attempt, or one with the backward's own config and label if the kernel has them.

        `data()` gives the forward's arguments, if there are values to tune with.
        """
        backward = BackwardKernel.of(fixed.kernel)
        if backward is None:
            return forward
        inv = backward_invocation(backward, forward.inv)
        # The backward's inputs depend on the forward that ran, so tuning it needs the forward.
        inv = replace(inv, platform=forward.platform, metadata={**inv.metadata, "forward_cfg": forward.cfg})
        registry.note_traced(backward, inv)
        cfg, error = fixed.vjp_cfg, None
        if cfg is None:
            cfg = backward.covered_by(forward.cfg, inv, forward.platform)
        if cfg is None:
            shown = inv
            if data is not None and self.needs_inputs(inv):
                args, kwargs = data()
                shown = replace(inv, args=args, kwargs=kwargs)
            cfg, error = chosen_or_guess(self.chooser.choose, shown, backward)
        platform = dispatch.forced_platform(fixed.kernel, cfg) or forward.platform
        return Attempt(inv, platform, forward.run, cfg, error=error)


def _whole(fixed: Fixed, inv: Invocation[Any, Any], batches: Sequence[Batch]) -> Invocation[Any, Any]:
    """The batch of calls like `inv`, by the kernel under `batches`, innermost first."""
    kernel, whole = fixed.kernel, replace(inv, override_cfg=fixed.cfg, platform=None)
    for batch in batches:
        kernel = BatchedKernel(kernel, batch)
        whole = kernel.invocation(whole)
    return whole


def chosen_or_guess(
    choose: Choose, inv: Invocation[Any, Any], kernel: Kernel[Any, Any]
) -> tuple[Any, ConfigNotFoundError | None]:
    """The config for a call; if there is none, the guess and the error: a batch may still have a config."""
    try:
        return choose(inv, kernel), None
    except ConfigNotFoundError as error:
        return heuristic(inv, kernel), error.with_traceback(None)


def residual_pair(kernel: Kernel[Any, Any], attempt: Attempt) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """`fwd_with_residuals` and `vjp` for the platform of an attempt, if the kernel has both."""
    found = [dispatch.find(kernel, m, attempt.inv.context, attempt.platform) for m in ("fwd_with_residuals", "vjp")]
    if found[0] is not None and found[1] is not None:
        return found[0], found[1]
    if any(method is not None for method in found):
        _check_pair(kernel)
    return None


def _check_pair(kernel: Kernel[Any, Any]) -> None:
    """Refuses a kernel that has only half of a gradient in all backends: JAX would differentiate `run`."""
    pair = ("fwd_with_residuals", "vjp")
    missing = [m for m in pair if not any(name == m or name.startswith(f"{m}_") for name in dir(kernel))]
    if missing and not hasattr(kernel, "custom_vjp"):
        have = next(m for m in pair if m not in missing)
        raise KernelDefinitionError(
            f"{kernel.op_id}: has {have} and no {missing[0]}, so its own gradient would never be used. Write both, or "
            "custom_vjp, or neither."
        )


def backward_invocation(backward: BackwardKernel, inv: Invocation[Any, Any]) -> Invocation[Any, Any]:
    """The backward of a forward call: the same arguments, without their data."""
    abstract = {"args": inv.abstract_args, "kwargs": inv.abstract_kwargs}
    return replace(inv, kernel=backward, op_id=backward.op_id, override_cfg=None, **abstract)


def invocation(kernel: Kernel[Any, Any], args: Args, kwargs: Kwargs) -> Invocation[Any, Any]:
    """The call that is being traced, without its tracers."""
    context = dispatch.current_context()
    axes = _compat.manual_axes() if kernel.collective else None
    return Invocation(kernel=kernel, args=abstractify(args), kwargs=abstractify(kwargs), context=context, axes=axes)


def prepared(kernel: Kernel[Any, Any], args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """What `kernel.prepare` makes of the arguments."""
    result = kernel.prepare(*args, **kwargs)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise KernelDefinitionError(
            f"{kernel.op_id}: prepare must return (args, kwargs), a sequence and a dict, got {type(result).__name__}."
        )
    return tuple(result[0]), result[1]


def _batches_after_prepare(
    kernel: Kernel[Any, Any], batches: Sequence[Batch], args: Args, kwargs: Kwargs
) -> list[Batch]:
    """The batches of a call's arguments after `kernel.prepare`, innermost first."""
    if getattr(kernel.prepare, "__func__", None) is Kernel.prepare:
        return list(batches)
    arrays, statics = arguments.split((args, kwargs))
    found: list[Batch] = []

    def trace(*arrays: Any) -> tuple[()]:
        made = arguments.split(prepared(kernel, *arguments.merge(arrays, statics)))[0]
        found.extend(Batch(axis, tuple(dims)) for axis, dims in _compat.visible_batches(made)[0])
        return ()

    for batch in batches:
        trace, arrays = batch.vmap(trace), batch.whole(arrays)
    jax.eval_shape(trace, *arrays)
    return found


def known(kernel: Kernel[Any, Any], args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The arguments after `prepare`, shapes in place of tracers; it adds nothing to the trace."""
    if not any_tracer(args, kwargs):
        return prepared(kernel, args, kwargs)
    leaves, treedef = jax.tree.flatten((args, kwargs))
    found: list[tuple[Args, Kwargs]] = []

    def trace(traced: list[Any]) -> tuple[()]:
        rest = iter(traced)
        args, kwargs = treedef.unflatten([next(rest) if isinstance(x, Tracer) else x for x in leaves])
        shown = lambda x: abstractify(x) if isinstance(x, Tracer) else x
        found.append(jax.tree.map(shown, prepared(kernel, args, kwargs)))
        return ()

    jax.eval_shape(trace, [x for x in leaves if isinstance(x, Tracer)])
    return found[0]


def any_tracer(args: Args, kwargs: Kwargs) -> bool:
    """Whether some argument has no value yet."""
    return any(isinstance(x, Tracer) for x in jax.tree.leaves((args, kwargs)))
