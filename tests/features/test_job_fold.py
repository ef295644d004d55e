"""One fold of job events, whatever their order, their repetition and the rest between them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.features.job_fold import JobFold
from fleetcast.features.past_runs import JobShape
from fleetcast.fleet.events import Finished, JobEvent, Preempted, Started, Step, Submitted
from tests.fuzz.bounds import examples

MINUTE_MS = 60_000
T0 = 1_700_002_800_000
DAY_MS = 86_400_000


def at(minute: int) -> int:
    return T0 + minute * MINUTE_MS


def one_job(job: str, minute: int) -> list[JobEvent]:
    """Preempted, and nobody says that; then run to its end."""
    return [
        Submitted(job=job, sequence=0, time_ms=at(minute), queue="q", user="ada", gpus_per_node=4),
        Started(job=job, sequence=1, time_ms=at(minute + 3), nodes=("n1",)),
        Started(job=job, attempt=2, sequence=0, time_ms=at(minute + 20), nodes=("n2",)),
        Finished(job=job, attempt=2, sequence=1, time_ms=at(minute + 40)),
    ]


EVENTS = [event for number in range(4) for event in one_job(f"j{number}", 7 * number)]


def demand_of(fold: JobFold) -> list[list[float]]:
    targets = ("running", "queued", "arriving")
    return [
        fold.demand.read_series(pool, target, at(80), 600, 8).tolist() for pool in ("q", "all") for target in targets
    ]


def straight(events: list[JobEvent], *, learns_runs: bool = True) -> JobFold:
    fold = JobFold(learns_runs=learns_runs)
    for event in events:
        fold.apply(event)
    return fold


@examples(100)
@given(st.permutations(EVENTS * 2), st.integers(1, 9))
def test_order_repetition_and_rest_change_nothing(events: list[JobEvent], every: int) -> None:
    fold = JobFold()
    for number, event in enumerate(events):
        if number % every == 0:
            fold.pack_old_attempts(at(200), forget_before_ms=0)
        fold.apply(event)
    expected = straight(EVENTS)
    np.testing.assert_equal(demand_of(fold), demand_of(expected))
    assert len(fold.runs) == len(expected.runs) == 0
    for number in range(4):
        assert fold.jobs.get(f"j{number}", 1).state == "failed"
        assert fold.jobs.get(f"j{number}").run_s == 1200


def test_an_event_changes_its_attempt_and_the_one_whose_place_it_takes() -> None:
    fold, events = JobFold(), one_job("j", 0)
    assert [row.attempt for row in fold.apply(events[0])] == [1]
    assert [row.attempt for row in fold.apply(events[1])] == [1]
    first = fold.jobs.get("j", 1)
    assert fold.apply(events[2]) == [fold.jobs.get("j", 2), first]
    assert first.over_ms == at(20)
    assert fold.apply(events[1]) == []


def test_an_event_of_a_job_at_rest_wakes_it_and_counts_once() -> None:
    fold = straight(EVENTS)
    before = demand_of(fold)
    rested = fold.pack_old_attempts(at(200), forget_before_ms=0)
    assert {row.job for row in rested} == {f"j{number}" for number in range(4)}
    assert fold.apply(EVENTS[0]) == []  # a repeat wakes it, too
    fold.apply(Preempted(job="j1", attempt=1, sequence=2, time_ms=at(17)))
    assert set(fold.jobs.resting) == {"j2", "j3"}
    after = demand_of(fold)
    assert after != before
    np.testing.assert_equal(after, demand_of(straight([*EVENTS, Preempted(job="j1", sequence=2, time_ms=at(17))])))


def test_jobs_that_ended_long_ago_are_forgotten() -> None:
    fold = straight(EVENTS)
    assert fold.pack_old_attempts(at(0), forget_before_ms=at(0) + DAY_MS) == []
    assert list(fold.jobs) == []


def test_an_attempt_whose_events_are_not_known_counts_like_one_that_was_folded() -> None:
    told, put = straight(EVENTS[:3]), JobFold()
    for attempt in told.jobs:
        put.add_attempt(attempt.copy())
    np.testing.assert_equal(demand_of(put), demand_of(told))
    assert len(put.runs) == len(told.runs)
    assert [row.attempt for row in put.jobs.list_running()] == [2]


def test_runs_are_learnt_of_what_ended_unless_they_are_not_wanted() -> None:
    shape, now_ms = JobShape(user="ada", queue="q", gpus=4), at(90)
    learnt, none = straight(EVENTS), straight(EVENTS, learns_runs=False)
    assert (
        np.isfinite(learnt.runs.compute_features(shape, now_ms)).sum()
        > np.isfinite(none.runs.compute_features(shape, now_ms)).sum()
    )
    assert len(none.runs) == 0
    steps = JobFold()
    assert steps.apply(Step(job="j", sequence=5, time_ms=at(1), step=1, duration_s=1.0))
    assert len(steps.runs) == 0
