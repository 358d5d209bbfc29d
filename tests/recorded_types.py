"""Types that a recorded call names and its kernel's module does not import."""

import dataclasses
import enum

import jax


class Mode(enum.Enum):
    FAST = 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Node:
    x: jax.Array
    mode: str = dataclasses.field(metadata={"static": True})


class Act:
    def scaled(self, x):
        return 2 * x
