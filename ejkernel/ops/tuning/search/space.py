"""Space: the configs that a kernel may take, and which of them are neighbours.

A kernel describes its space in whichever form is shortest:

    [MyConfig(64), MyConfig(128)]                                       a list
    (MyConfig(2**i) for i in range(5, 10))                              a generator
    {"block": (64, 128, 256), "warps": (4, 8),                          axes, multiplied out from the heuristic config,
     "fits": lambda cfg: cfg.block * cfg.warps <= 1024}                 and conditions that every config must meet

An axis may name a field of a nested config: `"fwd.block"`.
"""

import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from ejkernel.errors import EjkernelError
from ejkernel.ops.utils.canonical import distinct, same_cfg, token
from ejkernel.ops.utils.records import get

logger = logging.getLogger(__name__)

Cfg = TypeVar("Cfg")
Point = tuple[int, ...]  # The position on each axis.

MAX_LISTED = 4096


class SpaceError(EjkernelError):
    """A config space cannot be understood."""


class Space(Generic[Cfg]):
    """Configs at points of a grid; some points may have none."""

    def __init__(self, axes: Mapping[str, Sequence[Any]], at: Callable[[Point], Cfg | None]) -> None:
        self.axes = {name: tuple(values) for name, values in axes.items()}
        self._at = at

    @classmethod
    def of(cls, description: Mapping[str, Any] | Iterable[Any], template: Cfg) -> "Space[Cfg]":
        """Returns the space that a kernel described; `template` is the config that axes are applied to."""
        if isinstance(description, Mapping):
            return _grid(description, template)
        return _listed(description)

    @property
    def points(self) -> int:
        """How many points the grid has; the number of configs is at most this."""
        return math.prod(len(values) for values in self.axes.values())

    def __iter__(self) -> Iterator[Cfg]:
        for point in itertools.product(*(range(len(values)) for values in self.axes.values())):
            if (cfg := self._at(point)) is not None:
                yield cfg

    def locate(self, cfg: Cfg) -> Point:
        """Returns the point nearest to any config, one from another shape or an older space included."""
        return tuple(_nearest(values, get(cfg, name), self._positions[name]) for name, values in self.axes.items())

    @functools.cached_property
    def _positions(self) -> dict[str, dict[Hashable, int]]:
        """Where each value of an axis is."""
        return {name: {token(value): i for i, value in enumerate(values)} for name, values in self.axes.items()}

    def around(self, cfg: Cfg, steps: int = 1) -> Iterator[Cfg]:
        """Yields the configs that differ from `cfg` by one position on up to `steps` axes, nearest first.

        On an axis of numbers the positions next to this one count, on any other axis all of them do.
        """
        here = self.locate(cfg)
        for moved in range(1, steps + 1):
            for chosen in itertools.combinations(range(len(here)), moved):
                for there in itertools.product(*(self._next(axis, here[axis]) for axis in chosen)):
                    point = dict(enumerate(here)) | dict(zip(chosen, there, strict=True))
                    if (other := self._at(tuple(point.values()))) is not None:
                        yield other

    def sample(self, rng: np.random.Generator, n: int) -> list[Cfg]:
        """Returns up to `n` distinct configs from random points."""
        if self.points <= 4 * n:
            everything = list(self)
            return [everything[i] for i in rng.permutation(len(everything))[:n]]
        found: dict[Point, Cfg] = {}
        for _ in range(20 * n):
            point = tuple(int(rng.integers(len(values))) for values in self.axes.values())
            if point not in found and (cfg := self._at(point)) is not None:
                found[point] = cfg
            if len(found) == n:
                break
        return list(found.values())

    def _next(self, axis: int, position: int) -> list[int]:
        values = list(self.axes.values())[axis]
        if _numeric(values):
            return [p for p in (position - 1, position + 1) if 0 <= p < len(values)]
        return [p for p in range(len(values)) if p != position]


def put(cfg: Any, path: str, value: Any) -> Any:
    """Returns the config with a field replaced."""
    name, _, rest = path.partition(".")
    if rest:
        value = put(get(cfg, name), rest, value)
    if isinstance(cfg, Mapping):
        return {**cfg, name: value}
    return dataclasses.replace(cfg, **{name: value})


def _grid(description: Mapping[str, Any], template: Any) -> Space[Any]:
    conditions = [value for value in description.values() if callable(value)]
    axes = {name: _ordered(name, value, template) for name, value in description.items() if not callable(value)}

    def at(point: Point) -> Any:
        cfg = template
        for (name, values), position in zip(axes.items(), point, strict=True):
            cfg = put(cfg, name, values[position])
        return cfg if all(condition(cfg) for condition in conditions) else None

    return Space(axes, at)


def _ordered(name: str, values: Any, template: Any) -> tuple[Any, ...]:
    """Returns an axis' distinct values, numbers in rising order."""
    try:
        get(template, name)
    except (AttributeError, KeyError) as error:
        raise SpaceError(
            f"config_space: axis {name!r} must be a field of {type(template).__name__}. "
            "Name a field (dotted for nested ones), or give a list of configs."
        ) from error
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise SpaceError(f"config_space: axis {name!r} must list its values, got {values!r}.")
    unique = distinct(values)
    if not unique:
        raise SpaceError(f"config_space: axis {name!r} must have at least one value, got none.")
    return tuple(sorted(unique)) if _numeric(unique) else tuple(unique)


def _listed(configs: Iterable[Any]) -> Space[Any]:
    members = distinct(itertools.islice(configs, MAX_LISTED + 1))
    if len(members) > MAX_LISTED:
        logger.warning("config_space: only the first %d configs are tuned; use axes for more.", MAX_LISTED)
        members = members[:MAX_LISTED]
    axes = _axes_of(members)
    if axes is None:  # They cannot be compared: one axis of unrelated values.
        return Space({"": tuple(members)}, lambda point: members[point[0]])
    space: Space[Any] = Space(axes, lambda point: table.get(point))
    table: dict[Point, Any] = {}
    for member in members:
        if not same_cfg(table.setdefault(space.locate(member), member), member):
            return Space({"": tuple(members)}, lambda point: members[point[0]])
    return space


def _axes_of(members: Sequence[Any]) -> dict[str, tuple[Any, ...]] | None:
    """Returns the fields in which configs of one type differ, with their values; None for configs without fields."""
    if not members or len({type(member) for member in members}) > 1:
        return None
    paths = _leaves(members[0])
    if not paths:
        return None
    axes = {}
    for path in paths:
        try:
            values = distinct(get(member, path) for member in members)
        except (AttributeError, KeyError):  # A nested config that some members leave out.
            return None
        if len(values) > 1:
            axes[path] = tuple(sorted(values)) if _numeric(values) else tuple(values)
    return axes


def _leaves(cfg: Any, prefix: str = "") -> list[str]:
    if dataclasses.is_dataclass(cfg):
        fields = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
    elif isinstance(cfg, Mapping):
        fields = dict(cfg)
    else:
        return []
    return [
        path for name, value in fields.items() for path in _leaves(value, f"{prefix}{name}.") or [f"{prefix}{name}"]
    ]


def _numeric(values: Iterable[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _nearest(values: Sequence[Any], value: Any, positions: Mapping[Hashable, int]) -> int:
    if (found := positions.get(token(value))) is not None:
        return found
    if _numeric((*values, value)):
        return min(range(len(values)), key=lambda i: abs(_log(values[i]) - _log(value)))
    return 0


def _log(value: float) -> float:
    """Returns a scale on which 64 is as far from 128 as 128 from 256, zero included."""
    return math.copysign(math.log2(1 + abs(value)), value)
