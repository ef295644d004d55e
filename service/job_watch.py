"""What a pipeline tells of jobs beside its scores: what they look like, what they share, and which ended lately."""

import logging
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from fleet.clock import Clock
from fleet.events import JobEvent
from fleet.jobs import JobAttempt, JobTable
from service.board import Section
from service.fingerprints import Fingerprints
from service.interference import Sharing
from service.job_metrics import JobMetrics
from service.publish import ENDED_KEPT_MS, Tick
from service.snapshot import Kept
from service.state import FleetState

logger = logging.getLogger(__name__)

RESTS_AFTER_MS = 2 * ENDED_KEPT_MS
MOST_ENDED = 60_000  # attempts that are over and held in full, some 5 KB each
MOST_RESTING = 1_000_000  # jobs; their names and a few hundred bytes each


class JobWatch:
    """Of the jobs that run."""

    def __init__(self, kept: Kept, clock: Clock) -> None:
        self.fingerprints = Fingerprints(clock)
        self.sharing = Sharing(kept.co_runs)
        self._metrics = JobMetrics()

    def sections(self, tick: Tick, mig: Mapping[str, Mapping[str, float | None]]) -> list[Section]:
        """mig: GPU -> instance -> GiB."""
        return [*self.fingerprints.sections, *self.sharing.sections(tick, mig)]

    def page(self, tick: Tick) -> bytes:
        """Metrics."""
        return self._metrics.page(tick, self.fingerprints.sections, self._print_of)

    def _print_of(self, attempt: JobAttempt) -> Mapping[str, Any] | None:
        """A thread may just renew it, so it is asked for by its key and nobody walks over all."""
        found = self.fingerprints.answers.get((attempt.job, attempt.attempt))
        return None if found is None else found.fingerprint


class Ended:
    """Attempts that ended within ENDED_KEPT_MS, in order of their ends as these were told; the latest MOST_ENDED."""

    def __init__(self, jobs: JobTable, now_ms: int) -> None:
        since_ms = now_ms - ENDED_KEPT_MS
        rows = sorted((row for row in jobs.attempts.values() if (row.ended_ms or 0) > since_ms), key=_ended_ms)
        self._rows = {(row.job, row.attempt): row for row in rows}

    def note(self, jobs: JobTable, events: Iterable[JobEvent], now_ms: int) -> None:
        """Take in attempts that these events may have ended."""
        for event in events:
            attempt = jobs.get(event.job, event.attempt)
            if attempt is not None and _ended_ms(attempt) > now_ms - ENDED_KEPT_MS:
                self._rows.setdefault((attempt.job, attempt.attempt), attempt)

    def lately(self, now_ms: int) -> Iterable[JobAttempt]:
        late = {key: row for key, row in self._rows.items() if _ended_ms(row) >= now_ms - ENDED_KEPT_MS}
        self._rows = dict(islice(late.items(), max(0, len(late) - MOST_ENDED), None))
        return self._rows.values()


def _ended_ms(row: JobAttempt) -> int:
    return row.ended_ms or 0


def lay_to_rest(state: FleetState, now_ms: int, history_days: int) -> None:
    """What is long over needs little room, and some day none; nor does what more ended of late than is held in full."""
    jobs = state.jobs
    jobs.forget_ended_before(now_ms - history_days * 86_400_000)
    for attempt in jobs.rest(now_ms - RESTS_AFTER_MS, MOST_ENDED):
        state.demand.forget(attempt)
    if forgotten := jobs.forget_oldest(MOST_RESTING):
        logger.warning("forgot %d jobs at rest before their time: at most %d are kept", forgotten, MOST_RESTING)
