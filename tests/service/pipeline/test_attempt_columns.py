import numpy as np

from fleetcast.fleet.events import Queued, Started, Submitted
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.service.pipeline.attempt_columns import AttemptColumns

T0 = 1_760_000_000_000


def make_attempt(job: str, queue: str, submitted_ms: int | None, started_ms: int | None) -> JobAttempt:
    attempt = JobAttempt(job, 1)
    if submitted_ms is not None:
        attempt.fold(Submitted(job=job, sequence=0, time_ms=submitted_ms, queue=queue))
    if started_ms is not None:
        attempt.fold(Started(job=job, sequence=9, time_ms=started_ms, nodes=("n1",)))
    return attempt


def test_waits_are_grouped_by_queue_and_class_and_only_recent_starts_count() -> None:
    released = make_attempt("released", "a", T0, T0 + 5_000)
    released.fold(Queued(job="released", sequence=1, time_ms=T0 + 1_000, blocked=True))
    released.fold(Queued(job="released", sequence=2, time_ms=T0 + 3_000))
    attempts = [
        make_attempt("late", "b", T0, T0 + 7_000),
        make_attempt("old", "a", T0 - 9_000, T0 - 1_000),
        make_attempt("unsubmitted", "a", None, T0 + 1_000),
        make_attempt("waiting", "a", T0, None),
        make_attempt("early clock", "a", T0 + 2_000, T0 + 1_000),
        released,
    ]
    columns = AttemptColumns.from_attempts(attempts)
    class_ = attempts[0].class_
    assert columns.groups[0] == ("b", class_)
    assert [columns.groups[number][0] for number in columns.group.tolist()] == [row.queue for row in attempts]
    waits_s = {key: waits.tolist() for key, waits in columns.group_waits_since(T0).items()}
    assert waits_s == {("b", class_): [7.0], ("a", class_): [0.0, 2.0]}
    assert columns.group_waits_since(T0 + 7_000) == {}


def test_no_attempts_have_no_waits() -> None:
    columns = AttemptColumns.from_attempts([])
    assert columns.groups == []
    assert columns.group_waits_since(0) == {}
    assert np.array_equal(columns.started_ms, [])
