"""What a search strategy is."""

import dataclasses
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

Cfg = TypeVar("Cfg")


@dataclasses.dataclass(frozen=True, slots=True)
class Trial(Generic[Cfg]):
    """A config that was measured; one that failed has infinite seconds."""

    cfg: Cfg
    seconds: float


class Strategy(Protocol[Cfg]):
    """Proposes what to measure next, only from the trials so far: replaying the trials resumes a search."""

    def propose(self, trials: Sequence[Trial[Cfg]]) -> list[Cfg]:
        """Returns a batch of configs that were not tried yet; an empty one ends the search."""
        ...
