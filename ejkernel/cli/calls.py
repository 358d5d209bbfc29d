"""Calls given on the command line: a record file, the text of a program, or an operation with shapes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax

from ejkernel.cli import gradients, jax_start, operations
from ejkernel.cli.arguments import ArgumentTextError, parse_arrays, parse_settings
from ejkernel.errors import EjkernelError
from ejkernel.ops.core.kernel import Invocation, Kernel
from ejkernel.ops.execution.pipeline import invocation, prepared
from ejkernel.ops.offline import lowered, specs

Call = Invocation[Any, Any]
_MISSING = re.compile(r"missing \d+ required (?P<kind>positional|keyword-only) arguments?: (?P<names>.+)")


def find(
    target: str | None, specs_file: Path | None, args: str, settings: list[str], grad: bool
) -> tuple[list[Call], list[str]]:
    """The calls that the command line names, and what could not be understood."""
    jax_start.start()
    path = Path(target) if target is not None else specs.record_path()
    is_named = target is not None and not path.exists() and _is_name(target)
    if specs_file is not None and (is_named or path.suffix == ".json"):
        raise EjkernelError(f"--specs goes with the text of a program, which {target or path} is not.")
    if target is not None and is_named:
        return named(target, args, settings, grad), []
    if args or settings or grad:
        module, _, name = str(target).rpartition(".")
        hint = f" Did you mean {module}:{name}?" if name.isidentifier() and not path.exists() else ""
        raise EjkernelError(f"--args, --set and --grad go with module:Kernel or the name of an operation.{hint}")
    return _recorded(path) if path.suffix == ".json" else _labelled(path, specs_file)


def named(name: str, args: str, settings: list[str], grad: bool) -> list[Call]:
    """An abstract call of an operation, and what is tuned of its gradient if asked for.

    Raises:
      ArgumentTextError: The kernel cannot be called with such arguments, or has no such backward.
    """
    kernel, arrays, keywords = operations.make(name), parse_arrays(args), parse_settings(settings)
    if not arrays and not keywords:
        raise ArgumentTextError(
            f'--args: {name} needs the arrays of a call, for example --args "f32[1024,64],s32[16]".'
        )
    call = abstract(kernel, arrays, keywords, f"{name} with --args {args!r}")
    if not grad:
        return [call]
    found = gradients.calls_of(kernel, arrays, keywords, call)
    if not found:
        raise ArgumentTextError(
            f"--grad: the backward of {name} takes the forward's config; it has neither heuristic_cfg_vjp nor "
            "config_space_vjp."
        )
    return [call, *found]


def abstract(kernel: Kernel[Any, Any], arrays: tuple[Any, ...], keywords: dict[str, Any], what: str) -> Call:
    """A call of `kernel`; errors of its own code about wrong arguments are shown in one line."""
    found: list[Call] = []
    traced = {k: v for k, v in keywords.items() if isinstance(v, jax.ShapeDtypeStruct)}
    static = {k: v for k, v in keywords.items() if k not in traced}

    def trace(a: tuple[Any, ...], k: dict[str, Any]) -> tuple[()]:
        found.append(invocation(kernel, *prepared(kernel, a, {**static, **k})))
        return ()

    try:
        jax.eval_shape(trace, arrays, traced)
    except EjkernelError:
        raise
    except Exception as error:
        if (missing := _MISSING.search(str(error))) is not None:
            option = "--args" if missing["kind"] == "positional" else "--set"
            raise ArgumentTextError(f"{what}: {missing['names']} missing; {option} gives what a call needs.") from error
        raise ArgumentTextError(f"{what}: not a call of {kernel.op_id} ({type(error).__name__}: {error}).") from error
    return found[0]


def _is_name(target: str) -> bool:
    # Paths have dots and slashes, names of operations have neither.
    return ":" in target or not re.search(r"[./\\]", target)


def _recorded(path: Path) -> tuple[list[Call], list[str]]:
    if not path.exists():
        raise EjkernelError(f"{path}: there is no record. A program that runs with EJKERNEL_OPS_RECORD=1 writes one.")
    calls, missing = [], []
    for spec in specs.read(path):
        try:
            calls.append(specs.from_spec(spec))
        except EjkernelError as error:
            missing.append(f"{spec['op_id']} {spec['call_key']}: {error}")
    return calls, missing if calls or missing else [f"{path}: the record has no calls."]


def no_labels(path: Path) -> str:
    """What is said of a program in which nothing was found."""
    return f"{path}: the program has no labels; the text of a Lowered has them only with as_text(debug_info=True)."


def _labelled(path: Path, specs_file: Path | None) -> tuple[list[Call], list[str]]:
    labels = lowered.labels_of(path)
    calls, missing = lowered.match(labels, specs_file)
    if not labels:
        return [], [no_labels(path)]
    if missing and specs_file is None:
        missing = [f"{path}: which calls its labels stand for is not known here; --specs record.json says it."]
    return calls, missing
