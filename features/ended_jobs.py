"""EndedJobs: the attempts that ended within the last hour.

The API still answers for them, and the outcomes of their forecasts are recorded.
"""

from collections.abc import Iterable
from itertools import islice

from fleetcast.fleet.jobs import JobAttempt

ENDED_RETENTION_MS = 3_600_000
MOST_ENDED = 60_000  # attempts that are over and held in full, some 5 KB each


class EndedJobs:
    """The newest MOST_ENDED attempts that have ended, in the order in which their ends became known."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, int], JobAttempt] = {}

    def restore_attempts(self, attempts: Iterable[JobAttempt], now_ms: int) -> None:
        """Restore the attempts of a snapshot, in order of their ends. Ignores those that ended over an hour ago."""
        self.record(sorted(attempts, key=lambda row: row.ended_ms or 0), now_ms)

    def record(self, attempts: Iterable[JobAttempt], now_ms: int) -> None:
        """Add the attempts that ended within the last hour. Ignore all others."""
        for attempt in attempts:
            if _has_ended_within(attempt, now_ms):
                self._rows[attempt.job, attempt.attempt] = attempt

    def list_recent(self, now_ms: int) -> list[JobAttempt]:
        """Return the attempts that ended within the hour before `now_ms`. Drops all others."""
        late = {key: row for key, row in self._rows.items() if _has_ended_within(row, now_ms)}
        self._rows = dict(islice(late.items(), max(0, len(late) - MOST_ENDED), None))
        return list(self._rows.values())


def _has_ended_within(attempt: JobAttempt, now_ms: int) -> bool:
    return attempt.ended_ms is not None and attempt.ended_ms >= now_ms - ENDED_RETENTION_MS
