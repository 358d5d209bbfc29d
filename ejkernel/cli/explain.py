"""`ejkernel explain`: why a call gets its config."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer

from ejkernel.cli import ahead, calls, operations
from ejkernel.cli.options import AsJson, Grad, Settings, Store
from ejkernel.cli.output import counted, print_json, short_arguments, short_cfg, tell, working
from ejkernel.cli.store import open_store
from ejkernel.errors import EjkernelError
from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.config.selection import ConfigSelectorChain
from ejkernel.ops.core import dispatch
from ejkernel.ops.core.backward import BackwardKernel
from ejkernel.ops.core.kernel import Invocation
from ejkernel.ops.execution.executor import Executor, Explanation
from ejkernel.ops.store.persistent import PersistentCache
from ejkernel.ops.store.signatures import closest
from ejkernel.ops.utils import targets

_STORED = ("memory", "persistent")


def explain(
    target: Annotated[
        str | None,
        typer.Argument(
            help="Name of an operation or module:Kernel, record.json, or a file with the text of a program. By default "
            "the record file of EJKERNEL_OPS_RECORD=1.",
            autocompletion=operations.complete,
        ),
    ] = None,
    args: Annotated[str, typer.Option(help="Arrays of the call: f32[1024,64],s32[16].")] = "",
    settings: Settings = None,
    grad: Grad = False,
    specs_file: Annotated[Path | None, typer.Option("--specs", help="Record file for the calls of a program.")] = None,
    for_target: Annotated[
        str | None,
        typer.Option("--for", help="On a device that is not here: v6e, sm_100a, ...", autocompletion=ahead.complete),
    ] = None,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Say why calls get their configs, and for a miss which stored call is nearest and how it differs.

    Exit code 1 if a call has no config of its own in the store: it would be guessed, or refused where
    EJKERNEL_AUTOTUNE is frozen.

    For example:

    ejkernel explain flash_attention --args "f32[1,1024,4,64],f32[1,1024,4,64],f32[1,1024,4,64]" --set causal=true

    ejkernel explain record.json --json
    """
    away = contextlib.nullcontext() if for_target is None else targets.compiling_for(targets.find(for_target))
    with working("starting JAX"), away:
        found, missing = calls.find(target, specs_file, args, settings or [], grad)
        cache = open_store(store)
        executor = Executor(ConfigSelectorChain(persistent=cache, policy=AutotunePolicy.from_environment()))
        told = [_told(executor, cache, inv) for inv in found]
    stored = sum(data["stored"] for data, _ in told)
    if as_json:
        print_json({"calls": [data for data, _ in told], "stored": stored, "failed": missing})
    else:
        tell("\n\n".join([*(text for _, text in told), *([] if args or settings else [_summary(stored, len(told))])]))
    for line in missing:
        tell(f"not explained: {line}", error=True)
    raise typer.Exit(1 if missing or stored < len(told) else 0)


def _summary(stored: int, calls: int) -> str:
    rest = "" if stored == calls else " `ejkernel tune` measures the others."
    return f"{stored} of {counted(calls, 'call')} with a config of their own.{rest}"


def _told(executor: Executor, cache: PersistentCache, inv: Invocation[Any, Any]) -> tuple[dict[str, Any], str]:
    try:
        found = _explained(executor, inv)
    except Exception as error:  # noqa: BLE001 - a kernel may raise anything, and the other calls are still shown.
        text = str(error) if isinstance(error, EjkernelError) else f"{type(error).__name__}: {error}"
        return {**_place(inv), "stored": False, "error": text}, f"{inv.op_id} {inv.call_key}: {text}"
    stored = found.tier in _STORED
    data = {**_place(found.selection.inv), **_chosen(found), "stored": stored, "error": None}
    lines = [str(found)]
    if not stored:
        data["nearest"] = _nearest(cache, found.selection.inv)
        lines += _nearest_lines(data["nearest"])
    return data, "\n".join(lines)


def _explained(executor: Executor, inv: Invocation[Any, Any]) -> Explanation:
    if not isinstance(inv.kernel, BackwardKernel):
        return executor.explain_call(inv)
    # A backward runs on the platform of its forward; only its config is chosen.
    assert isinstance(executor.chooser, ConfigSelectorChain)
    selection = executor.chooser.explain(inv, inv.kernel)
    platform = dispatch.forced_platform(inv.kernel.forward, selection.cfg) or inv.platform or "-"
    method = dispatch.find(inv.kernel.forward, "vjp", inv.context, platform)
    return Explanation(selection, platform, getattr(method, "__name__", "custom_vjp"))


def _place(inv: Invocation[Any, Any]) -> dict[str, Any]:
    device, op_id, call_key = inv.key
    return {"device": device, "op_id": op_id, "call_key": call_key, "arrays": short_arguments(inv.signature)}


def _chosen(found: Explanation) -> dict[str, Any]:
    tiers = [{"name": t.name, "cfg": _text(t.cfg), "note": t.note} for t in found.selection.tiers]
    return {
        "cfg": _text(found.cfg),
        "tier": found.tier,
        "policy": found.selection.policy.autotune,
        "platform": found.platform,
        "method": found.method,
        "tiers": tiers,
    }


def _text(cfg: Any) -> str | None:
    return None if cfg is None else repr(cfg)


def _nearest(cache: PersistentCache, inv: Invocation[Any, Any]) -> dict[str, Any] | None:
    """The stored call of this op that differs least, on this device or else on any."""
    device, op_id, _ = inv.key
    found = closest(cache.entries(device, op_id), inv.signature) or closest(cache.entries(None, op_id), inv.signature)
    if found is None:
        return None
    entry, fields = found
    fields = [*([f"device: {entry.place.device} -> {device}"] if entry.place.device != device else []), *fields]
    return {**entry.place._asdict(), "cfg": short_cfg(entry.cfg_data), "layer": entry.layer, "differs": fields}


def _nearest_lines(nearest: dict[str, Any] | None) -> list[str]:
    if nearest is None:
        return ["   nothing is stored for this operation; `ejkernel tune` measures it"]
    lines = [f"   nearest stored call {nearest['call_key']}, {nearest['cfg']}, differs in"]
    return lines + [f"     {field}" for field in nearest["differs"]]
