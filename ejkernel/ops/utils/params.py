"""Block sizes, warps and stages of attention-like kernels, as configs carry them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ejkernel.errors import EjkernelError


class ParamsError(EjkernelError, ValueError):
    """A tile parameter is not a positive whole number."""


@dataclass(frozen=True, kw_only=True)
class _Params:
    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ParamsError(
                    f"{type(self).__name__}: {field.name} must be a positive integer or None, got {value!r}."
                )


@dataclass(frozen=True, kw_only=True)
class FwdParams(_Params):
    """Tile of the forward pass; None lets the backend choose a parameter."""

    q_blocksize: int | None = None
    kv_blocksize: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None


@dataclass(frozen=True, kw_only=True)
class BwdParams(_Params):
    """Tile of the backward pass; None lets the backend choose a parameter."""

    q_blocksize: int | None = None
    kv_blocksize: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
