"""What earlier tunings of a call left behind: an interrupted one goes on, and nothing is measured twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.provenance import collect
from ejkernel.ops.execution.bench import Rejected
from ejkernel.ops.utils.fingerprint import short_hash


def cfg_id(cfg: Any) -> str:
    """A config's name among the trials of a call."""
    return short_hash(repr(cfg))


class History:
    """The trials of one call that were made with the same kernel source, toolchain and clock as here."""

    def __init__(self, store: PersistentCache | None, key: Any, kernel: Any, clock: str) -> None:
        self._store = store
        self._key = key
        found = collect(kernel)
        self._at = short_hash([found.get(name) for name in ("jax", "jaxlib", "driver", "kernel_source")] + [clock])
        records = store.read_trials(key) if store is not None else []
        self._records = [record for record in records if record.get("at") == self._at]
        rejected = (record["rejected"] for record in self._records if "rejected" in record)
        self.rejected = {each["id"]: Rejected(each["outcome"], each["reason"]) for each in rejected}

    @property
    def raced(self) -> set[str]:
        """Configs that took part in a race that was decided."""
        decided = [record["decided"] for record in self._records if "decided" in record]
        return {each for race in decided for each in race}

    def reject(self, cfg: Any, rejected: Rejected) -> None:
        """Notes a candidate that must not be tried again."""
        record = {"id": cfg_id(cfg), "cfg": repr(cfg), "outcome": rejected.outcome, "reason": rejected.reason}
        self._append({"rejected": record})

    def start_race(self, ids: Sequence[str]) -> list[dict[str, float]]:
        """Notes a race among these, and returns the rounds of an earlier one that was interrupted."""
        wanted, rounds, same = sorted(ids), [], False
        for record in self._records:
            if "race" in record:
                same, rounds = record["race"] == wanted, rounds if record["race"] == wanted else []
            elif "round" in record and same:
                rounds.append(record["round"])
            elif "decided" in record and same:
                same, rounds = False, []
        if not rounds:
            self._append({"race": wanted})
        return rounds

    def add_round(self, seconds: Mapping[str, float]) -> None:
        """Notes one round."""
        self._append({"round": dict(seconds)})

    def decide(self, ids: Sequence[str]) -> None:
        """Notes that the race among these is over."""
        self._append({"decided": sorted(ids)})

    def _append(self, record: dict[str, Any]) -> None:
        if self._store is not None:
            self._store.append_trial(self._key, {"at": self._at, **record})
