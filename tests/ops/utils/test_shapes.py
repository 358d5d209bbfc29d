import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import pytest

from ejkernel.ops.utils.shapes import wrong


def positive(x):
    """A positive number."""
    return isinstance(x, float) and x > 0


@dataclasses.dataclass
class Part:
    name: str
    value: float | None = None


@dataclasses.dataclass
class Whole:
    part: Part | None
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    more: Any = None


@pytest.mark.parametrize(
    ("data", "shape", "fault"),
    [
        ({"a": 1}, {"a": int}, None),
        ({"a": 1, "b": 2}, {"a": int}, None),
        ({}, {"a": int}, "'a' is missing"),
        ({}, {"a?": int}, None),
        ({"a": "1"}, {"a?": int}, "a: must be a int, got '1'"),
        ({"a": True}, {"a": int}, "a: must be a int, got True"),
        ({"a": True}, {"a": bool}, None),
        ({"a": 1}, {"a": float}, None),
        ({"a": True}, {"a": float}, "a: must be a float, got True"),
        ({"a": None}, {"a": (dict, None)}, None),
        ({"a": 3}, {"a": (dict, None)}, "a: must be a dict or None, got 3"),
        ([1], {"a": int}, "must be a dict, got [1]"),
        ({"a": [1, "x"]}, {"a": [int]}, "a[1]: must be a int, got 'x'"),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": str}}}, "a.b.c: must be a str, got 1"),
        ({"x": 1.0, "y": -1.0}, {...: positive}, "y: must be A positive number, got -1.0"),
        ("b", Literal["a", "c"], "must be one of 'a', 'c', got 'b'"),
        ({"part": None}, Whole, None),
        ({"part": {"name": "n", "value": 1}, "parts": {"a": 1.5}, "more": [1]}, Whole, None),
        ({"part": {"name": 1}}, Whole, "part: must be a dict or None, got {'name': 1}"),
        ({"part": None, "parts": {"a": "b"}}, Whole, "parts.a: must be a float, got 'b'"),
        ({"part": None, "z": 1}, Whole, "'z' is unknown"),
        ({"a": [{}]}, {"a": [{"b": int}]}, "a[0]: 'b' is missing"),
        (3, Whole, "must be a dict, got 3"),
    ],
)
def test_faults_say_where_and_what(data, shape, fault):
    assert wrong(data, shape) == fault
