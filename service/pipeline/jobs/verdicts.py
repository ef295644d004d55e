"""Verdicts on what slowed each job, as last judged. They outlive the job."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from features.ended_jobs import ENDED_KEPT_MS
from fleet.stateful import Dump, Stateful
from service.board.board import Section
from service.pipeline.capability import Capability
from service.pipeline.tick import Tick

SECTION = "doc.verdicts"
SLOW_KEPT_MS = 30 * 86_400_000
MOST_KEPT = 2_000  # of ended jobs; half a kilobyte each, on every board
Verdict = dict[str, Any]  # body of `/jobs/{id}/stragglers` with `attempt` and `judged_ms`, less `as_of_ms`


class Verdicts(Capability, Stateful):
    """The last verdict on each job.

    Verdicts on ended jobs stay for an hour, and those on slow jobs for a month. Beyond MOST_KEPT ended jobs,
    those that were not slow are dropped first, then the oldest. `sections`, `dump` and `move` are never
    called at the same time.
    """

    def __init__(self) -> None:
        self._live: dict[str, Verdict] = {}  # of what runs
        self._kept: dict[str, Verdict] = {}  # in the order of their ends
        self._shown: bytes | None = None

    def sections(self, tick: Tick) -> Sequence[Section]:
        """Fold a tick. Returns the section if it has changed, else nothing."""
        before, attempts = self._live, {attempt.job: attempt.attempt for attempt in tick.events.running}
        told = {job: body for job, body in tick.fleet.stragglers.items() if job in attempts}
        self._live = {job: {**body, "attempt": attempts[job], "judged_ms": tick.now_ms} for job, body in told.items()}
        for job in attempts:
            if job in before and job not in self._live:  # it goes on, unheard
                self._live[job] = before[job]
        changed = self._shown is None
        for job in before.keys() - attempts.keys():
            self._kept.pop(job, None)
            self._kept[job] = before[job]
            changed = True
        if not self._forget(tick.now_ms) and not changed:
            return ()
        self._shown = msgspec.json.encode(self._kept)
        return (Section(SECTION, self._shown, tick.now_ms),)

    def _forget(self, now_ms: int) -> bool:
        """Drop verdicts that are too old or too many. Return whether any was dropped."""
        young = {job: row for job, row in self._kept.items() if row["judged_ms"] >= now_ms - _kept_ms(row)}
        too_many = max(0, len(young) - MOST_KEPT)
        going = set(islice(sorted(young, key=lambda job: bool(young[job].get("slow"))), too_many))
        kept = {job: row for job, row in young.items() if job not in going}
        dropped, self._kept = len(kept) < len(self._kept), kept
        return dropped

    def dump(self) -> Dump:
        """Return all verdicts, packed at once."""
        return None, {"verdicts": np.frombuffer(msgspec.msgpack.encode([self._live, self._kept]), np.uint8)}

    def load(self, about: None, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore the result of `dump` into an empty object. Raises msgspec.MsgspecError."""
        self._live, self._kept = msgspec.msgpack.decode(
            arrays["verdicts"].tobytes(), type=tuple[dict[str, Verdict], dict[str, Verdict]]
        )

    def move(self, by_ms: int) -> None:
        """Move the verdicts on running jobs along with a clock that was set. Those on ended jobs stay."""
        for row in self._live.values():
            row["judged_ms"] += by_ms


def _kept_ms(verdict: Verdict) -> int:
    return SLOW_KEPT_MS if verdict.get("slow") else ENDED_KEPT_MS
