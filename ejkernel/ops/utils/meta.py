"""Labels: how an ejkernel call is found again in a lowered or compiled program.

A label is `<prefix>#<op>:<call key>`, in `json` mode followed by `:` and JSON that holds the operation, the key, the
call's signature and the config in use. In a program's text everything that is not a letter, a digit, `_`, `.` or `-` is
written as `~` and two hex digits per byte: XLA cuts names at `@`, slashes separate scopes, and quotes would be escaped
differently in each text form. Labels that are found are returned with readable JSON.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar

import jax

from ejkernel.errors import EjkernelError
from ejkernel.ops.utils import env
from ejkernel.ops.utils.fingerprint import stable_json
from ejkernel.ops.utils.services import services

DEFAULT_PREFIX = "ejkernel_ops"
# Only from where such characters begin: a constant of a program is one word of millions of digits, and looking for a
# label from each of them would take the square of that.
LABEL_RE = re.compile(
    r"(?<![\w.~-])(?P<prefix>[\w.~-]++)#(?P<op>[\w.~-]+):(?P<key>[0-9a-f]{16})(?::(?P<spec>[\w.~-]+|\{.*\}))?", re.ASCII
)

_ALPHABET = frozenset(string.ascii_letters + string.digits + "_.-")
_F = TypeVar("_F", bound=Callable[..., Any])


class LabelError(EjkernelError, ValueError):
    """A text is not a label, or a label cannot be matched with a call."""


class ProgramError(EjkernelError, TypeError):
    """The argument is not a program."""


class Label(NamedTuple):
    """The parts of a label; signature and config are JSON-able data, and None if it does not hold them."""

    prefix: str
    op_id: str
    call_key: str
    signature: Mapping[str, Any] | None
    cfg: Any = None


def escape(text: str) -> str:
    """`text` in the alphabet of labels; `unescape` takes it back."""
    return "".join(chr(b) if chr(b) in _ALPHABET else f"~{b:02x}" for b in text.encode())


def unescape(text: str) -> str:
    """Inverse of `escape`."""
    return re.sub(rb"~([0-9a-f]{2})", lambda m: bytes([int(m[1], 16)]), text.encode()).decode()


def format_label(inv: Any, prefix: str = DEFAULT_PREFIX, *, spec: bool = False, cfg: Any = None) -> str:
    """The label of one call, as a program's text holds it."""
    text = f"{escape(prefix)}#{escape(inv.op_id)}:{inv.call_key}"
    if not spec:
        return text
    told = {"op": inv.op_id, "key": inv.call_key, "signature": inv.signature, "cfg": cfg}
    return f"{text}:{escape(stable_json(told))}"


def parse_label(text: str) -> Label:
    """The parts of a label, its JSON escaped or not."""
    match = LABEL_RE.fullmatch(text)
    if match is None:
        raise LabelError(f"label: {text!r} is not of the form <prefix>#<op>:<16 hex digits>.")
    spec = match["spec"]
    try:
        told = json.loads(_clear(spec)) if spec else {"signature": None}
        if "signature" not in told:  # ejkernel 0.1 wrote only the signature.
            told = {"signature": told}
        return Label(unescape(match["prefix"]), unescape(match["op"]), match["key"], told["signature"], told.get("cfg"))
    except (ValueError, TypeError) as error:
        raise LabelError(f"label: {text!r} is damaged ({error}).") from error


def _clear(spec: str) -> str:
    return spec if spec.startswith("{") else unescape(spec)


def label_scope(inv: Any, prefix: str, cfg: Any = None) -> AbstractContextManager[Any]:
    """The scope that operations of `inv` are traced in, as `EJKERNEL_OPS_STAMP` says."""
    mode = env.read("EJKERNEL_OPS_STAMP", "hash")
    if mode == "none" or not inv.stamp:
        return nullcontext()
    return jax.named_scope(format_label(inv, prefix, spec=mode == "json", cfg=cfg))


def label(name: str) -> Callable[[_F], _F]:
    """Decorates a function so that its operations carry `name` in lowered and compiled programs."""
    if not isinstance(name, str) or not name:
        raise LabelError(f"label: name must be a non-empty string, got {name!r}.")
    return jax.named_scope(name)


def extract_labels_from_hlo_text(text: str) -> list[str]:
    """The labels in a program's text, each once, in order of first appearance, with readable JSON."""
    found = dict.fromkeys(match[0] for match in LABEL_RE.finditer(text))
    return list(dict.fromkeys(_readable(label) for label in found if _is_label(label)))


def _is_label(text: str) -> bool:
    """Whether text that looks like a label is one."""
    try:
        parse_label(text)
    except LabelError:
        return False
    return True


def _readable(text: str) -> str:
    head, key, *spec = text.split(":", 2)
    return ":".join([head, key, *map(_clear, spec)])


def find_labels_in_lowered(lowered: Any) -> list[str]:
    """The labels of a `jax.stages.Lowered` or `Compiled`, each once, in order of first appearance.

    Also of an object that holds one, such as `flax.nnx.jit(f).lower(...)`.

    Raises:
      ProgramError: It is neither.
    """
    program = _program_in(lowered)
    if program is None:
        raise ProgramError(
            "A program is what jax.jit(f).lower(...) returns, compiled or not, or holds that in an attribute; got "
            f"{type(lowered).__name__}. For a program's text there is extract_labels_from_hlo_text."
        )
    if isinstance(program, jax.stages.Lowered):
        # Names are debug information, which the plain text leaves out.
        return extract_labels_from_hlo_text(program.as_text(debug_info=True))
    return extract_labels_from_hlo_text(program.as_text() or "")


_PROGRAMS = (jax.stages.Lowered, jax.stages.Compiled)


def _program_in(x: Any) -> jax.stages.Lowered | jax.stages.Compiled | None:
    """A program, or the one that a wrapper holds in one of its attributes."""
    if isinstance(x, _PROGRAMS):
        return x
    held = {*getattr(x, "__dict__", ()), *getattr(type(x), "__slots__", ())}
    values = [getattr(x, name, None) for name in sorted(held)]
    return next((value for value in values if isinstance(value, _PROGRAMS)), None)


class _Chooser(Protocol):
    def choose(self, inv: Any, kernel: Any) -> Any: ...


def labels_to_configs(labels: Iterable[str], *, selector: _Chooser | None = None) -> dict[str, Any]:
    """The config that each label's call gets from `selector`, by default the default executor's.

    Raises:
      LabelError: A label's call was not traced in this process, so its kernel is not known.
    """
    chooser = selector if selector is not None else services.default_chooser()
    configs = {}
    for text in labels:
        parts = parse_label(text)
        call = services.traced(parts.op_id, parts.call_key)
        if call is None or call.kernel is None:
            raise LabelError(f"labels_to_configs: {text!r} was not traced in this process, so its kernel is unknown.")
        configs[text] = chooser.choose(call, call.kernel)
    return configs
