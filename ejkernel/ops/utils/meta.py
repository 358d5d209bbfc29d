"""Labels: how an ejkernel call is found again in a lowered or compiled program.

A label is `<prefix>#<op>:<call key>`, in `json` mode followed by `:<the call's signature>`. Everything that is not a
letter, a digit, `_`, `.` or `-` is written as `~` and two hex digits a byte: XLA cuts names at `@`, slashes separate
scopes, and quotes would be escaped differently in each text form.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import jax

from ejkernel.errors import EjkernelError
from ejkernel.ops.utils import env
from ejkernel.ops.utils.fingerprint import stable_json

if TYPE_CHECKING:
    from ejkernel.ops.core.kernel import Invocation

DEFAULT_PREFIX = "ejkernel_ops"
LABEL_RE = re.compile(r"(?P<prefix>[\w.~-]+)#(?P<op>[\w.~-]+):(?P<key>[0-9a-f]{16})(?::(?P<spec>[\w.~-]+))?", re.ASCII)

_ALPHABET = frozenset(string.ascii_letters + string.digits + "_.-")
_F = TypeVar("_F", bound=Callable[..., Any])


class LabelError(EjkernelError, ValueError):
    """A text is not a label, or a label cannot be matched with a call."""


class Label(NamedTuple):
    """The parts of a label."""

    prefix: str
    op_id: str
    call_key: str
    signature: Mapping[str, Any] | None


def escape(text: str) -> str:
    """`text` in the alphabet of labels; `unescape` takes it back."""
    return "".join(chr(b) if chr(b) in _ALPHABET else f"~{b:02x}" for b in text.encode())


def unescape(text: str) -> str:
    """Inverse of `escape`."""
    return re.sub(rb"~([0-9a-f]{2})", lambda m: bytes([int(m[1], 16)]), text.encode()).decode()


def format_label(inv: Invocation[Any, Any], prefix: str = DEFAULT_PREFIX, *, spec: bool = False) -> str:
    """The label of one call."""
    text = f"{escape(prefix)}#{escape(inv.op_id)}:{inv.call_key}"
    return f"{text}:{escape(stable_json(inv.signature))}" if spec else text


def parse_label(text: str) -> Label:
    """The parts of a label."""
    match = LABEL_RE.fullmatch(text)
    if match is None:
        raise LabelError(f"label: {text!r} is not of the form <prefix>#<op>:<16 hex digits>.")
    spec = match["spec"]
    try:
        signature = json.loads(unescape(spec)) if spec else None
        return Label(unescape(match["prefix"]), unescape(match["op"]), match["key"], signature)
    except ValueError as error:
        raise LabelError(f"label: {text!r} is damaged ({error}).") from error


def label_scope(inv: Invocation[Any, Any], prefix: str) -> AbstractContextManager[Any]:
    """The scope that operations of `inv` are traced in, as `EJKERNEL_OPS_STAMP` says."""
    mode = env.read("EJKERNEL_OPS_STAMP", "hash")
    if mode == "none" or not inv.stamp:
        return nullcontext()
    return jax.named_scope(format_label(inv, prefix, spec=mode == "json"))


def label(name: str) -> Callable[[_F], _F]:
    """Decorates a function so that its operations carry `name` in lowered and compiled programs."""
    if not isinstance(name, str) or not name:
        raise LabelError(f"label: name must be a non-empty string, got {name!r}.")
    return jax.named_scope(name)


def extract_labels_from_hlo_text(text: str) -> list[str]:
    """The labels in a program's text, each once, in order of first appearance."""
    return [found for found in dict.fromkeys(match[0] for match in LABEL_RE.finditer(text)) if _is_label(found)]


def _is_label(text: str) -> bool:
    """Whether what looks like a label is one, and not a chance resemblance."""
    try:
        parse_label(text)
    except LabelError:
        return False
    return True


def find_labels_in_lowered(lowered: jax.stages.Lowered | jax.stages.Compiled) -> list[str]:
    """The labels of a `jax.stages.Lowered` or `Compiled`, each once, in order of first appearance."""
    if isinstance(lowered, jax.stages.Lowered):
        # Names are debug information, which the plain text leaves out.
        return extract_labels_from_hlo_text(lowered.as_text(debug_info=True))
    return extract_labels_from_hlo_text(lowered.as_text() or "")


class _Chooser(Protocol):
    def choose(self, inv: Any, kernel: Any) -> Any: ...


def labels_to_configs(labels: Iterable[str], *, selector: _Chooser | None = None) -> dict[str, Any]:
    """The config that each label's call gets from `selector`, by default the default executor's.

    Raises:
      LabelError: A label's call was not traced in this process, so its kernel is not known.
    """
    # Imported here: labels are text, and only this function asks what they stand for.
    from ejkernel.ops import registry
    from ejkernel.ops.execution.executor import default_executor

    chooser = selector if selector is not None else default_executor().chooser
    configs = {}
    for text in labels:
        parts = parse_label(text)
        call = registry.traced(parts.op_id, parts.call_key)
        if call is None or call.kernel is None:
            raise LabelError(f"labels_to_configs: {text!r} was not traced in this process, so its kernel is unknown.")
        configs[text] = chooser.choose(call, call.kernel)
    return configs
