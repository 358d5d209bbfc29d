"""Schedules: what a TPU's compiler says a kernel costs, read from the bundles that libtpu dumps.

A TPU core starts one bundle of instructions per cycle, and the compiler decides what goes into it: the bundles of a
loop are the least number of cycles that one round of it takes. What is waited for (memory, above all) comes on top.
`LIBTPU_INIT_ARGS` in the environment, before libtpu is loaded, makes it write them: see `dump_flags`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ejkernel.errors import EjkernelError

_BUNDLE = re.compile(r"^ *(0x[0-9a-f]+|0) +(?:[A-Z]{2})? *: *(?:> *)*\{")
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_BRANCH = re.compile(r"sbr\.rel[^;}]*target = \$region(\d+)")
_TRIPS = re.compile(r"scmp\.ge\.s32\.totalorder %s\w+, (\d+) /\* loop exit test")
_KERNEL = re.compile(r"%([\w.-]+) = [^\n]*? custom-call\([^\n]*custom_call_target=\"tpu_custom_call\"", re.MULTILINE)


class ScheduleError(EjkernelError, ValueError):
    """A folder holds no bundles, or bundles that are not written as expected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSchedule:
    """The bundles of one Mosaic kernel.

    Attributes:
      name: Of its operation in the compiled program: the `name` of its `pallas_call` and perhaps a number.
      total: All bundles, once each.
      loop: Bundles of its loop over the grid; 0 if the grid has one step, which needs no loop.
      iterations: How often the loop runs, with the rounds that fill and drain its pipeline; 0 if that is not known.
      bodies: Bundles of the innermost conditional parts (`pl.when`) of the loop, in their order.
    """

    name: str
    total: int
    loop: int
    iterations: int
    bodies: tuple[int, ...]

    @property
    def step_bundles(self) -> int:
        """Bundles of what a step of the grid computes: of the largest conditional part, else of the whole loop."""
        return max(self.bodies, default=self.loop or self.total)

    @property
    def steps(self) -> tuple[int, ...]:
        """All conditional parts of nearly that size: a kernel may treat the edges of a mask in a part of their own."""
        return tuple(n for n in self.bodies if 3 * n >= 2 * self.step_bundles) or (self.step_bundles,)

    @property
    def overhead(self) -> int:
        """Bundles of a step of the grid that computes nothing."""
        return max(self.loop - sum(self.bodies), 0)


def dump_flags(folder: Path) -> str:
    """The value of `LIBTPU_INIT_ARGS` with which libtpu writes its bundles into `folder`."""
    return f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_pass_label_regex=.*final.*"


def read(folder: Path) -> list[KernelSchedule]:
    """The Mosaic kernels of the programs that were dumped into `folder`, in the order of their compilation.

    Raises:
      ScheduleError: Nothing was dumped there, or a file is not written as expected.
    """
    programs = sorted(folder.glob("*-TLP-hlo.txt"))
    if not programs:
        raise ScheduleError(
            f"{folder} holds no dumped program. Set LIBTPU_INIT_ARGS to '{dump_flags(folder)}' before JAX loads "
            "libtpu, and compile for a TPU."
        )
    names = {name for path in programs for name in _KERNEL.findall(path.read_text())}
    found = []
    for path in sorted(folder.glob("*-final_bundles.txt")):
        match = re.fullmatch(r"\d+-(.+?)-\d+-final_bundles\.txt", path.name)
        if match and match[1] in names:
            found.append(parse(match[1], path.read_text()))
    return found


def parse(name: str, text: str) -> KernelSchedule:
    """The schedule of one kernel from its `final_bundles` file."""
    bundles = _bundles(text)
    if not bundles:
        raise ScheduleError(f"the bundles of {name} are not written as expected: there are none in the file.")
    starts = {int(n): place for place, text in enumerate(bundles) for n in _REGION.findall(text)}
    jumps = [(place, starts.get(int(n), -1)) for place, text in enumerate(bundles) for n in _BRANCH.findall(text)]
    if any(target < 0 for _, target in jumps):
        raise ScheduleError(f"the bundles of {name} are not written as expected: a branch has no target.")
    loop = max(((target, place) for place, target in jumps if target <= place), key=_length, default=None)
    inside = [] if loop is None else [x for x in jumps if loop[0] <= x[0] < x[1] <= loop[1]]
    trips = [] if loop is None else [int(n) for text in bundles[loop[0] : loop[1] + 1] for n in _TRIPS.findall(text)]
    return KernelSchedule(
        name=name,
        total=len(bundles),
        loop=0 if loop is None else _length(loop) + 1,
        iterations=trips[-1] if trips else 0,
        bodies=tuple(_length(x) - 1 for x in inside if not any(_within(y, x) for y in inside)),
    )


def _bundles(text: str) -> list[str]:
    """The text of each bundle: a comment may go on for lines."""
    found: list[str] = []
    for line in text.splitlines():
        if _BUNDLE.match(line):
            found.append(line)
        elif found:
            found[-1] += "\n" + line
    return found


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def _within(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return inner != outer and outer[0] <= inner[0] and inner[1] <= outer[1]
