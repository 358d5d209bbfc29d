"""Results of earlier tunings of a call: an interrupted one resumes, and nothing is measured twice."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from ejkernel.ops.store.persistent import PersistentCache
from ejkernel.ops.store.provenance import collect
from ejkernel.ops.tuning.bench import Fault, Rejected
from ejkernel.ops.tuning.standings import Measurement, Ratio
from ejkernel.ops.utils.fingerprint import short_hash
from ejkernel.ops.utils.serialize import cfg_id
from ejkernel.ops.utils.shapes import wrong
from ejkernel.ops.utils.source import source_hash

_COMPARABLE = ("jax", "jaxlib", "driver")
_SPACE = ("config_space", "candidate_cfgs", "heuristic_cfg")
"""Methods that say what to try; a change to them does not affect earlier results."""


@dataclass(frozen=True, kw_only=True)
class Decided:
    """A finished race.

    Attributes:
      winner: The `cfg_id` of the winner.
      seconds: Time of every entrant, and of those that share a program with one.
      measurement: The winner's.
      speedup: Over the guess.
    """

    winner: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    measurement: Measurement | None = None
    speedup: Ratio | None = None

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Self:
        """A race read from a file."""
        kinds = {"measurement": Measurement, "speedup": Ratio}
        parts: dict[str, Any] = {k: kinds[k](**data[k]) for k in kinds if data.get(k) is not None}
        return cls(**{**data, **parts})


def _is_sound(record: Mapping[str, Any]) -> bool:
    """Whether a line of a file has the form that this version writes: another version or a damaged file may differ."""
    return all(wrong(record[kind], shape) is None for kind, shape in _SHAPES if kind in record)


def _is_time(value: Any) -> bool:
    """A positive number."""
    return type(value) in (int, float) and 0 < value < math.inf


def _is_limit(value: Any) -> bool:
    """The name of a limit and its value."""
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and _is_time(value[1])


_SHAPES: list[tuple[str, Any]] = [
    ("proof", {"id": str, "reason": (str, None)}),
    ("rejected", {"id": str, "outcome": Fault, "reason": str, "limit?": (_is_limit, None)}),
    ("decided", Decided),
    ("decided", {"seconds?": {...: _is_time}}),
    ("race", {"goes_on": bool, "clock": str, "entrants": [str]}),
    ("round", {...: _is_time}),
]


class History:
    """The trials of one call that were made with the same kernel source and toolchain as here.

    Args:
      store: Where they are stored; with None they are kept for this tuning only.
      key: Of the call.
      kernel: The kernel whose source counts.
      aim: What was measured, if not the ordinary time.
      limits: The present limits by name: a candidate that failed at a tighter one is tried again.
    """

    def __init__(
        self,
        store: PersistentCache | None = None,
        key: Any = None,
        kernel: Any = None,
        *,
        aim: str = "",
        limits: Mapping[str, float | None] | None = None,
    ) -> None:
        self._store = store
        self._key = key
        self._limits = dict(limits or {})
        found = collect()

        def place(*, first: bool = False) -> str:
            source = None if kernel is None else source_hash(kernel, skip=_SPACE, first=first)
            return short_hash([*(found.get(name) for name in _COMPARABLE), source, aim])

        self._at = place()
        records = store.read_trials(key) if store is not None else []
        # Older measurements have hashes without constants, which are compared without them.
        places = {self._at, place(first=True)} if records else {self._at}
        self._records = [record for record in records if record.get("at") in places and _is_sound(record)]
        pardoned = max((i + 1 for i, record in enumerate(self._records) if "pardoned" in record), default=0)
        self.rejected = {
            each["id"]: Rejected(each["outcome"], each["reason"])
            for each in (record["rejected"] for record in self._records[pardoned:] if "rejected" in record)
            if not self._is_looser(each.get("limit"))
        }

    def _all(self, kind: str) -> list[Any]:
        return [record[kind] for record in self._records if kind in record]

    def _is_looser(self, limit: Sequence[Any] | None) -> bool:
        """Whether the limit that a candidate failed at is wider now."""
        if limit is None:
            return False
        name, value = limit
        now = self._limits.get(name)
        return now is not None and now > value

    def reject(self, cfg: Any, rejected: Rejected) -> None:
        """Notes a candidate that must not be tried again."""
        record = {"id": cfg_id(cfg), "cfg": repr(cfg), **asdict(rejected)}
        self._append({"rejected": record})

    def pardon(self) -> None:
        """Forgets all rejections: candidates that still fail will be rejected again."""
        self.rejected = {}
        self._append({"pardoned": True})

    # --- Checks of other calls' configs ---

    @property
    def proofs(self) -> dict[str, str | None]:
        """Configs of other calls by name: why each may not be used for this one, None if the check passed."""
        return {each["id"]: each["reason"] for each in self._all("proof")}

    def add_proof(self, name: str, cfg: Any, reason: str | None) -> None:
        """Notes whether a config of another call may be used for this one."""
        self._append({"proof": {"id": name, "cfg": repr(cfg), "reason": reason}}, quiet=True)

    # --- Races ---

    def start_race(self, ids: Sequence[str], clock: str) -> list[dict[str, float]]:
        """Notes a race among these, and returns the rounds of one that was interrupted and had them all."""
        entrants: set[str] = set()
        rounds: list[dict[str, float]] = []
        for record in self._records:
            if (race := record.get("race")) is not None:
                rounds = rounds if race["goes_on"] else []
                entrants = set(race["entrants"]) if race["clock"] == clock else set()
            elif "round" in record:
                rounds.append(record["round"])
            elif "decided" in record:
                entrants = set()
        goes_on = entrants >= set(ids)
        self._append({"race": {"entrants": sorted(ids), "clock": clock, "goes_on": goes_on}})
        return rounds if goes_on else []

    def add_round(self, seconds: Mapping[str, float]) -> None:
        """Notes one round."""
        self._append({"round": dict(seconds)})

    def decide(self, decided: Decided) -> None:
        """Notes that the race is over."""
        self._append({"decided": asdict(decided)})

    @property
    def decided(self) -> Decided | None:
        """The last finished race, with the times of all finished ones."""
        races = [Decided.read(each) for each in self._all("decided")]
        if not races:
            return None
        seconds = {name: value for race in races for name, value in race.seconds.items()}
        return replace(races[-1], seconds=seconds)

    # --- Searches ---

    def finish(self, space: str) -> None:
        """Notes that a whole space was searched."""
        self._append({"searched": space})

    def has_searched(self, space: str) -> bool:
        """Whether a search of exactly this space was finished."""
        return space in self._all("searched")

    def _append(self, record: dict[str, Any], *, quiet: bool = False) -> None:
        record = {"at": self._at, **record}
        self._records.append(record)
        if self._store is not None:
            self._store.append_trial(self._key, record, quiet=quiet)
