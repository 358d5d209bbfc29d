"""The parts of a call that are one JAX operation each: the whole call, and its gradient's forward and backward.

Each is batched as a whole: the config is chosen for the batch, and a kernel that can run batches gets the batch.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax

from ejkernel import _compat
from ejkernel.ops.core import autodiff, call, dispatch
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.batched import Batch, BatchedKernel, batches_around, native
from ejkernel.ops.core.call import Flat
from ejkernel.ops.core.kernel import (
    Invocation,
    KernelDefinitionError,
    has_own_gradient,
    runs_as_operation,
)
from ejkernel.ops.execution.pipeline import Args, Attempt, Choice, Fixed, Kwargs, Pipeline, any_tracer, residual_pair
from ejkernel.ops.utils import arguments
from ejkernel.ops.utils.canonical import same_cfg

WHOLE_PLATFORMS = ("pallas", "mosaic", "triton")
"""Those whose kernels the compiler cannot split over devices; cuDNN's attention has rules for it."""


class DivisionWarning(UserWarning):
    """A kernel cannot be split over devices by the compiler, so another backend runs."""


@cache
def _warn_of_division(op_id: str, platform: str, instead: str, devices: int) -> None:
    warnings.warn(
        f"{op_id}: its arrays are on {devices} devices and the compiler is to split the call, which it cannot do with "
        f"the {platform} kernel: {instead} runs instead. Pass mesh= and in_specs=, call it inside jax.shard_map, or "
        "use a mesh with explicit axes.",
        DivisionWarning,
        stacklevel=2,
    )


@dataclass(frozen=True, eq=False)
class Part:
    """A function of arrays that may run with one attempt or another.

    Attributes:
      name: Of the operation in profiles.
      make: Makes the function that runs with an attempt.
      choose: The attempt for a batch of calls, given the batch's data or None.
      first: How many operands come before the call's own arrays.
      pinned: Gives the attempt, if it must not be chosen again.
      at_once: The function that runs a whole batch with an attempt, if there is one.
      is_alive: Whether the kernel still exists; if not, its equations are mapped as they are.
      divide: The attempt whose equations the compiler can split over devices, if there is one.
      platform: That of the attempt it is bound with.
      batches: The `jax.vmap` applied so far, innermost first.
    """

    name: str
    make: Callable[[Attempt], Flat]
    choose: Callable[[Sequence[Batch], Sequence[Any] | None], Attempt]
    first: int = 0
    pinned: Callable[[], Attempt] | None = None
    at_once: Callable[[Attempt, Batch], Flat | None] = lambda attempt, batch: None
    is_alive: Callable[[], bool] = lambda: True
    divide: Callable[[], Attempt | None] = lambda: None
    platform: str = ""
    batches: tuple[Batch, ...] = ()

    def __repr__(self) -> str:
        return f"<{self.name} under {len(self.batches)} vmap>" if self.batches else f"<{self.name}>"

    def bind(self, operands: Sequence[Any], attempt: Attempt) -> Sequence[Any]:
        """The part as one operation, with `attempt` unless a batch replaces it."""
        return call.bind(self._mapped(attempt), replace(self, platform=attempt.platform), operands, self.name)

    def seen(self, operands: Sequence[Any]) -> Attempt | None:
        """The attempt for the batches that operands show; None if they show none."""
        axes, values = _compat.visible_batches(operands)
        if not axes:
            return None
        data = None if any_tracer((values,), {}) else values[self.first :]
        return self._choose((*self.batches, *(Batch(axis, tuple(dims)) for axis, dims in axes)), data)

    def seen_from_inside(self, operands: Sequence[Any]) -> Flat | None:
        """The part for one example of a batch that `operands` show."""
        attempt = self.seen(operands) if self.pinned is None and self.is_alive() else None
        return None if attempt is None else self._mapped(attempt)

    def batched(self, axis: _compat.Axis, operands: Sequence[Any], dims: Sequence[int | None]) -> Sequence[Any] | None:
        """The part for a whole batch."""
        if not self.is_alive():
            return None
        part = replace(self, batches=(*self.batches, Batch(axis, tuple(dims))))
        attempt = part._choose(part.batches, None) if self.pinned is None else self.pinned()
        try:
            return part.bind(operands, attempt)
        except NotImplementedError:
            return None  # The equations are those of a backend that supports the call.

    def divisible(self, devices: int) -> Flat | None:
        """The part in a form that the compiler can split over devices, if as it is it cannot."""
        if self.platform not in WHOLE_PLATFORMS or not self.is_alive() or (attempt := self.divide()) is None:
            return None
        _warn_of_division(attempt.inv.op_id, self.platform, attempt.platform, devices)
        return self._mapped(attempt)

    def _choose(self, batches: Sequence[Batch], data: Sequence[Any] | None) -> Attempt:
        return self.choose([replace(b, dims=b.dims[self.first :]) for b in batches], data)

    def _mapped(self, attempt: Attempt) -> Flat:
        """One example's function under every `jax.vmap`, or the innermost batch's if the kernel runs it at once."""
        fn, batches = self.make(attempt), self.batches
        if batches and (whole := self.at_once(attempt, batches[0])) is not None:
            fn, batches = whole, batches[1:]
        for batch in batches:
            fn = batch.vmap(fn)
        return fn


class _Flattened:
    """A function as one of arrays that returns arrays, and the structure of what it returned at first."""

    def __init__(self) -> None:
        self.structure: Any = None

    def __call__(self, fn: Callable[..., Any]) -> Flat:
        def flat(*operands: Any) -> list[Any]:
            leaves, structure = jax.tree.flatten(fn(*operands))
            self.structure = structure if self.structure is None else self.structure
            return leaves

        return flat

    def restore(self, leaves: Sequence[Any]) -> Any:
        return self.structure.unflatten(leaves)


class WholeCall:
    """A call: run, differentiated in the kernel's own way, labelled.

    It outlives the trace that it was made in, so it keeps none of its arrays.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        fixed: Fixed,
        inv: Invocation[Any, Any],
        statics: arguments.Statics,
        *,
        final: bool = False,
    ) -> None:
        self.pipeline = pipeline
        self._final = final
        kernel = fixed.kernel
        # Equations stay in JAX's caches. They must not keep a kernel alive that shares its programs with no other,
        # unless it is needed for their gradient.
        weak = kernel.state() is None and not has_own_gradient(kernel)
        self._kernel = weakref.ref(kernel) if weak else lambda: kernel
        self._cfgs = fixed[1:]
        self._inv = replace(inv, kernel=None)
        self._statics = statics
        self._flat = _Flattened()
        own = {"at_once": self._at_once, "is_alive": self._is_alive, "divide": self._divide}
        self._part = Part(kernel.op_id, self._make, self._choose, **own)

    def _is_alive(self) -> bool:
        return self._kernel() is not None

    @property
    def fixed(self) -> Fixed:
        """The kernel, and the configs that were given."""
        kernel = self._kernel()
        assert kernel is not None
        return Fixed(kernel, *self._cfgs)

    @property
    def inv(self) -> Invocation[Any, Any]:
        """The call."""
        return replace(self._inv, kernel=self._kernel())

    def seen(self, arrays: Sequence[Any]) -> Attempt | None:
        """The attempt for the batches that the arguments show."""
        return self._part.seen(arrays)

    def run(self, attempt: Attempt, arrays: Sequence[Any]) -> Any:
        """Runs the call with an attempt."""
        is_final = self._final and attempt.platform not in WHOLE_PLATFORMS  # Arrays may be on several devices.
        if is_final and runs_as_operation(self.fixed.kernel):
            # Not as one operation, which takes all arguments: JAX leaves out those that no equation uses.
            residual_pair(self.fixed.kernel, attempt)  # Refuses half a gradient.
            args, kwargs = arguments.merge(arrays, self._statics)
            return self.pipeline.labelled(attempt, attempt.run, *args, **kwargs)
        part = self._part if attempt.batch is None else replace(self._part, pinned=self._again(attempt))
        return self._flat.restore(self._bound(part, arrays, attempt))

    def _again(self, attempt: Attempt) -> Callable[[], Attempt]:
        """Data to make an attempt for a batch again: the attempt itself would keep its kernel alive."""
        assert attempt.batch is not None
        assert attempt.batch.kernel is not None
        batches = batches_around(attempt.batch.kernel)
        choice = Choice(attempt.platform, attempt.cfg, attempt.error)
        return lambda: self.pipeline.attempt_again(self.fixed, self.inv, batches, choice)

    def _bound(self, part: Part, operands: Sequence[Any], attempt: Attempt) -> Sequence[Any]:
        if runs_as_operation(self.fixed.kernel):
            return part.bind(operands, attempt)
        if attempt.error is not None and _compat.trace_state.value is _compat.EAGER:
            raise attempt.error  # Before anything runs.
        return part.make(attempt)(*operands)

    def _choose(self, batches: Sequence[Batch], data: Sequence[Any] | None) -> Attempt:
        return self.pipeline.batched_attempt(self.fixed, self.inv, batches, data)

    def _divide(self, *, backward: bool = False) -> Attempt | None:
        return self.pipeline.divisible_attempt(self.fixed, self.inv, backward=backward)

    def _make(self, attempt: Attempt) -> Flat:
        def run(*arrays: Any) -> Any:
            args, kwargs = arguments.merge(arrays, self._statics)
            return self._differentiable(attempt, args, kwargs)

        return self._flat(run)

    def _at_once(self, attempt: Attempt, batch: Batch) -> Flat | None:
        method = native(self.fixed.kernel, attempt.inv.context, attempt.platform)
        if method is None:
            return None
        whole = BatchedKernel(self.fixed.kernel, batch).natively(method)

        def run(*arrays: Any) -> Any:
            args, kwargs = arguments.merge(arrays, self._statics)
            return self.pipeline.labelled(attempt, whole, *args, **kwargs)

        if not self._has_gradient(attempt):
            return self._flat(run)
        positional = len(arguments.split(self._inv.abstract_args)[0])
        return autodiff.with_gradient_of(self._flat(run), batch.vmap(self._make(attempt)), positional)

    # --- Gradients ---

    def _has_gradient(self, attempt: Attempt) -> bool:
        kernel = self.fixed.kernel
        return residual_pair(kernel, attempt) is not None or hasattr(kernel, "custom_vjp")

    def _differentiable(self, attempt: Attempt, args: Args, kwargs: Kwargs) -> Any:
        primal = partial(self.pipeline.labelled, attempt, attempt.run)
        if not self._has_gradient(attempt):
            return primal(*args, **kwargs)
        op_id = self.fixed.kernel.op_id
        forward, backward = partial(self._forward, attempt), self._backward
        return autodiff.with_gradient(op_id, primal, forward, backward, args, kwargs)

    def _forward(self, first: Attempt, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The output, and what the backward needs."""
        arrays, statics = arguments.split((args, kwargs))
        flat = _Flattened()

        def make(attempt: Attempt) -> Flat:
            def run(*arrays: Any) -> Any:
                args, kwargs = arguments.merge(arrays, statics)
                return self._with_residuals(attempt, args, kwargs)

            return flat(run)

        pinned = (lambda: first) if first.batch is not None or self._shares_cfg(first) else None
        choose = partial(self._agreeing, first)
        part = Part(f"{self.fixed.kernel.op_id}.fwd", make, choose, pinned=pinned, divide=self._divide)
        return flat.restore(self._bound(part, arrays, first))

    def _with_residuals(self, first: Attempt, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
        """`fwd_with_residuals` of the attempt that runs the call, or of the next one that can."""
        kernel, run = self.fixed.kernel, self.pipeline.labelled
        if residual_pair(kernel, first) is None:
            # With its gradient: the backward is a function of the arguments, so the gradient of a gradient works too.
            return self._differentiable(first, args, kwargs), (None, None, autodiff.Note(first))
        reasons: dict[str, str] = {}
        others = (a for a in self.pipeline.attempts(first.inv, reasons) if a.platform != first.platform)
        for attempt in itertools.chain([first], others):
            pair = residual_pair(kernel, attempt)
            if pair is None:
                continue
            try:
                found = run(attempt, pair[0], *args, **kwargs)
            except NotImplementedError as error:
                reasons[attempt.platform] = str(error) or "not implemented"
            else:
                out, residuals = autodiff.checked_pair(kernel.op_id, found)
                return out, (residuals, out, autodiff.Note(attempt))
        raise dispatch.UnsupportedCallError(first.inv, reasons)

    def _agreeing(self, first: Attempt, batches: Sequence[Batch], data: Sequence[Any] | None) -> Attempt:
        """The attempt for a batch, if its residuals have the same types, which are fixed once they are traced."""
        attempt = self.pipeline.batched_attempt(self.fixed, self.inv, batches)
        if same_cfg(attempt.cfg, first.cfg) or self._residual_types(attempt) == self._residual_types(first):
            return attempt
        # The batch's config is needed; if there is one, nothing is missing.
        return first._replace(batch=attempt.batch, error=attempt.error)

    def _residual_types(self, attempt: Attempt) -> Any:
        pair = residual_pair(self.fixed.kernel, attempt)
        if pair is None:
            return None
        arrays, statics = arguments.split((self.inv.abstract_args, self.inv.abstract_kwargs))

        def residuals(arrays: list[Any]) -> Any:
            args, kwargs = arguments.merge(arrays, statics)
            return pair[0](*args, cfg=attempt.cfg, **kwargs)[1]

        leaves, structure = jax.tree.flatten(jax.eval_shape(residuals, arrays))
        return structure, [(x.shape, x.dtype) for x in leaves]

    def _backward(self, saved: Any, cotangent: Any, args: Args, kwargs: Kwargs) -> Any:
        (residuals, out, note) = saved
        forward: Attempt = note.value
        arrays, statics = arguments.split((args, kwargs))
        leaves, structure = jax.tree.flatten((residuals, out, cotangent))
        # Cotangents of integers have no values, and JAX no arrays of them.
        real = [arguments.is_array(x) and x.dtype != jax.dtypes.float0 for x in leaves]
        first = [x for x, r in zip(leaves, real, strict=True) if r]
        others = [None if r else x for x, r in zip(leaves, real, strict=True)]
        flat = _Flattened()

        def make(attempt: Attempt) -> Flat:
            def run(*operands: Any) -> Any:
                rest = iter(operands)
                given = structure.unflatten([next(rest) if r else x for x, r in zip(others, real, strict=True)])
                return self._gradients(attempt, given, *arguments.merge(rest, statics))

            return flat(run)

        choose, divide = partial(self._backward_choice, forward), partial(self._divide, backward=True)
        part = Part(f"{self.fixed.kernel.op_id}.bwd", make, choose, len(first), divide=divide)
        operands = [*first, *arrays]
        if self._shares_cfg(forward):
            attempt = forward
        else:
            attempt = part.seen(operands) if forward.batch is None else self._backward_of_batch(forward)
        if attempt is None:
            attempt = self.pipeline.backward_attempt(self.fixed, forward)
        else:
            part = replace(part, pinned=lambda attempt=attempt: attempt)
        return flat.restore(self._bound(part, operands, attempt))

    def _shares_cfg(self, forward: Attempt) -> bool:
        """Whether the backward must have the config that its residuals were made with.

        It cannot be chosen again for a later batch: JAX batches the two parts one after the other, and they may show
        different batches.
        """
        kernel = self.fixed.kernel
        return BackwardKernel.of(kernel) is None and residual_pair(kernel, forward) is not None

    def _backward_choice(self, forward: Attempt, batches: Sequence[Batch], data: Sequence[Any] | None) -> Attempt:
        # If only cotangents are batched, there is no batch of calls: the forward ran once, with its own config.
        batches = [batch for batch in batches if any(d is not None for d in batch.dims)]
        if not batches:
            return self.pipeline.backward_attempt(self.fixed, forward)
        return self._backward_of_batch(self._agreeing(forward, batches, None))

    def _backward_of_batch(self, forward: Attempt) -> Attempt:
        """The backward of a forward that was chosen for a batch."""
        if BackwardKernel.of(self.fixed.kernel) is None:
            return forward
        assert forward.batch is not None
        assert forward.batch.kernel is not None
        fixed = self.fixed._replace(kernel=forward.batch.kernel)
        attempt = self.pipeline.backward_attempt(fixed, forward._replace(inv=forward.batch, batch=None))
        return attempt._replace(batch=attempt.inv)

    def _gradients(self, attempt: Attempt, saved: Any, args: Args, kwargs: Kwargs) -> Any:
        kernel, (residuals, out, cotangent) = self.fixed.kernel, saved
        pair = residual_pair(kernel, attempt)
        if pair is not None:
            return self.pipeline.labelled(attempt, partial(pair[1], residuals, out, cotangent), *args, **kwargs)
        if not hasattr(kernel, "custom_vjp"):
            raise KernelDefinitionError(
                f"{attempt.inv.op_id}: the backward's config names platform {attempt.platform!r}, for which the kernel "
                "has no fwd_with_residuals and vjp."
            )
        cotangents = tuple(cotangent) if isinstance(cotangent, (tuple, list)) else (cotangent,)
        own: Any = kernel.custom_vjp  # pyright: ignore[reportAttributeAccessIssue]
        return self.pipeline.labelled(attempt, lambda cfg: own(args, cfg, kwargs, cotangents))
