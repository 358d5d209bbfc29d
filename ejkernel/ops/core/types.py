"""Type variables shared by everything that is generic over a kernel's config and output."""

from typing import TypeVar

Cfg = TypeVar("Cfg")
Out = TypeVar("Out")
