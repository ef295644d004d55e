"""The attempts that ended within the last hour."""

import pytest

from fleetcast.features import ended_jobs
from fleetcast.features.ended_jobs import ENDED_RETENTION_MS, EndedJobs
from fleetcast.features.job_fold import JobFold
from fleetcast.fleet.events import Failed, Finished, JobEvent, Started, Step

T0 = 1_700_000_000_000


def started(job: str) -> Started:
    return Started(job=job, sequence=0, time_ms=T0, nodes=("n1",))


def finished(job: str, after_ms: int) -> Finished:
    return Finished(job=job, sequence=1, time_ms=T0 + after_ms)


class Watched:
    """A fold whose ends are noted."""

    def __init__(self) -> None:
        self.fold, self.ended = JobFold(), EndedJobs()

    def take(self, *events: JobEvent, now_ms: int = T0) -> None:
        for event in events:
            self.ended.record(self.fold.apply(event), now_ms)

    def names(self, now_ms: int = T0) -> list[str]:
        return [row.job for row in self.ended.list_recent(now_ms)]


def test_they_stand_in_the_order_in_which_their_ends_became_known() -> None:
    work = Watched()
    work.take(started("a"), started("b"), finished("b", 20), finished("a", 10), finished("b", 20))
    assert work.names() == ["b", "a"]


def test_what_waits_or_runs_has_not_ended() -> None:
    work = Watched()
    work.take(started("a"), Step(job="a", sequence=3, time_ms=T0, step=1, duration_s=1.0), now_ms=0)
    assert work.names(0) == []


def test_after_an_hour_they_are_dropped_and_old_ends_are_not_taken() -> None:
    work = Watched()
    work.take(finished("a", 0), finished("b", 60_000))
    assert work.names(T0 + ENDED_RETENTION_MS + 1) == ["b"]
    assert work.names() == ["b"]
    work.take(finished("c", 0), now_ms=T0 + ENDED_RETENTION_MS + 1)
    assert work.names() == ["b"]


def test_what_is_learnt_of_an_end_later_counts() -> None:
    work = Watched()
    work.take(finished("a", 10), Failed(job="a", sequence=2, time_ms=T0 + 20, category="user"))
    assert [row.outcome for row in work.ended.list_recent(T0)] == ["failed"]


def test_the_newest_stay_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended_jobs, "MOST_ENDED", 2)
    work = Watched()
    work.take(finished("a", 1), finished("b", 2), finished("c", 3))
    assert work.names() == ["b", "c"]


def test_after_a_restart_they_stand_in_the_order_of_their_ends() -> None:
    work, again = Watched(), EndedJobs()
    work.take(finished("b", 20), finished("a", 10), started("c"))
    again.restore_attempts(work.fold.jobs.attempts.values(), T0)
    assert [row.job for row in again.list_recent(T0)] == ["a", "b"]
