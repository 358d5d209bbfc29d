"""The command line that tunes a call."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax

from ejkernel.ops.config.asking import forward_of
from ejkernel.ops.core.batched import BatchedKernel
from ejkernel.ops.core.kernel import Invocation, Kernel
from ejkernel.ops.utils import arguments
from ejkernel.ops.utils.fingerprint import abstractify

_RECORDED = "EJKERNEL_OPS_RECORD=1 EJKERNEL_AUTOTUNE=off <your program>, then `ejkernel tune`"


def shown(inv: Invocation[Any, Any]) -> str:
    """The arguments of a call in one line: `float32[8,4], mode='a'`."""
    keywords = [f"{name}={_text(value)}" for name, value in inv.abstract_kwargs.items()]
    return ", ".join([*map(_text, inv.abstract_args), *keywords])


def tune_command(inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> str:
    """What to type so that a call gets a config; if its arguments cannot be typed, how to record it first."""
    owner = forward_of(kernel)
    arrays = list(itertools.takewhile(arguments.is_array, inv.abstract_args))
    # A kernel whose `prepare` changes its keywords says in `describe_keywords` what they were.
    keywords = dict(inv.abstract_kwargs)
    if type(owner).describe_keywords is not Kernel.describe_keywords:
        given = {name: value for name, value in keywords.items() if arguments.is_array(value)}
        keywords = {**owner.describe_keywords(replace(inv, kernel=owner)), **given}
    if not _is_made_by_name(owner) or not _is_same_call(inv, owner, arrays, keywords):
        return _RECORDED
    words = ["ejkernel", "tune", f"{type(owner).__module__}:{type(owner).__qualname__}"]
    words += ["--args", ",".join(map(_text, arrays))] if arrays else []
    words += [word for name, value in keywords.items() for word in ("--set", f"{name}={_typed(value)}")]
    return shlex.join(words + (["--grad"] if owner is not kernel else []))


def _is_made_by_name(kernel: Kernel[Any, Any]) -> bool:
    """Whether the class, called without arguments, gives this kernel: that is how a command creates it."""
    cls = type(kernel)
    if isinstance(kernel, BatchedKernel) or cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        return False
    try:
        made = cls()
    except TypeError:  # It needs arguments.
        return False
    return made.op_id == kernel.op_id and made.state() == kernel.state()


def _is_same_call(
    inv: Invocation[Any, Any], kernel: Kernel[Any, Any], arrays: list[Any], keywords: Mapping[str, Any]
) -> bool:
    """Whether a call with these arguments is `inv` after `prepare`; all must be arrays, or values that can be typed."""
    if not all(arguments.is_array(value) or _is_plain(value) for value in keywords.values()):
        return False
    traced = {name: value for name, value in keywords.items() if arguments.is_array(value)}
    static = {name: value for name, value in keywords.items() if name not in traced}
    found: list[Any] = []

    def trace(arrays: list[Any], traced: dict[str, Any]) -> tuple[()]:
        args, kwargs = kernel.prepare(*arrays, **static, **traced)
        found.append(
            replace(inv, kernel=kernel, op_id=kernel.op_id, args=abstractify(args), kwargs=abstractify(kwargs))
        )
        return ()

    try:
        jax.eval_shape(trace, arrays, traced)
    except Exception:  # noqa: BLE001 - a kernel may raise any error for wrong arguments.
        return False
    wanted = replace(inv, kernel=kernel, op_id=kernel.op_id)
    return inv.context is None and found[0].call_key == wanted.call_key


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _typed(value: Any) -> str:
    """A value as `--set` takes it: JSON, or text that is not."""
    return _text(value) if arguments.is_array(value) else json.dumps(value)


def _text(value: Any) -> str:
    if arguments.is_array(value):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    leaves, treedef = jax.tree.flatten(value)
    return repr(value) if treedef.num_leaves == 1 or not leaves else str(treedef.unflatten([*map(_text, leaves)]))
