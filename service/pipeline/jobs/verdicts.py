"""The last verdicts on what slowed each job. They stay after the job has ended."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.features.ended_jobs import ENDED_RETENTION_MS
from fleetcast.fleet.stateful import Dump, Stateful
from fleetcast.service.board.board import Section
from fleetcast.service.pipeline.capability import Capability
from fleetcast.service.pipeline.tick import Tick

SECTION = "doc.verdicts"
SLOW_RETENTION_MS = 30 * 86_400_000
MAX_REMEMBERED = 2_000  # of ended jobs; half a kilobyte each, on every board
Verdict = dict[str, Any]  # body of `/jobs/{id}/stragglers` with `attempt` and `judged_ms`, less `as_of_ms`


class Verdicts(Capability, Stateful):
    """The last verdict on each job.

    Verdicts on ended jobs stay for an hour, and verdicts on slow jobs for a month. Beyond MAX_REMEMBERED
    ended jobs, verdicts on jobs that were not slow are dropped first, then the oldest. `make_sections`, `dump` and
    `shift_times` must not run at the same time.
    """

    def __init__(self) -> None:
        self._live: dict[str, Verdict] = {}  # of what runs
        self._ended: dict[str, Verdict] = {}  # in the order of their ends
        self._shown: bytes | None = None

    def make_sections(self, tick: Tick) -> Sequence[Section]:
        """Record the verdicts of a tick. Returns the section if it has changed, and () otherwise."""
        before, running = self._live, tick.events.running
        attempts = tick.memory.get_or_make("attempts", (running,), lambda: {row.job: row.attempt for row in running})
        verdicts = {job: body for job, body in tick.fleet.stragglers.items() if job in attempts}
        self._live = {
            job: {**body, "attempt": attempts[job], "judged_ms": tick.now_ms} for job, body in verdicts.items()
        }
        for job in attempts:
            if job in before and job not in self._live:  # it goes on, unheard
                self._live[job] = before[job]
        changed = self._shown is None
        for job in before.keys() - attempts.keys():
            self._ended.pop(job, None)
            self._ended[job] = before[job]
            changed = True
        if not self._drop_old_verdicts(tick.now_ms) and not changed:
            return ()
        self._shown = msgspec.json.encode(self._ended)
        return (Section(SECTION, self._shown, tick.now_ms),)

    def _drop_old_verdicts(self, now_ms: int) -> bool:
        """Drop old verdicts, and verdicts beyond MAX_REMEMBERED. Returns whether any was dropped."""
        young = {job: row for job, row in self._ended.items() if row["judged_ms"] >= now_ms - _choose_retention_ms(row)}
        too_many = max(0, len(young) - MAX_REMEMBERED)
        going = set(islice(sorted(young, key=lambda job: bool(young[job].get("slow"))), too_many))
        waiting = {job: row for job, row in young.items() if job not in going}
        dropped, self._ended = len(waiting) < len(self._ended), waiting
        return dropped

    def dump(self) -> Dump:
        """Pack all verdicts into one array."""
        return None, {"verdicts": np.frombuffer(msgspec.msgpack.encode([self._live, self._ended]), np.uint8)}

    def load(self, about: None, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore the result of `dump` into an empty object.

        Raises msgspec.MsgspecError if it is invalid.
        """
        self._live, self._ended = msgspec.msgpack.decode(
            arrays["verdicts"].tobytes(), type=tuple[dict[str, Verdict], dict[str, Verdict]]
        )

    def shift_times(self, by_ms: int) -> None:
        """Shift the times of verdicts on running jobs after the clock was set. Verdicts on ended jobs stay."""
        for row in self._live.values():
            row["judged_ms"] += by_ms


def _choose_retention_ms(verdict: Verdict) -> int:
    return SLOW_RETENTION_MS if verdict.get("slow") else ENDED_RETENTION_MS
