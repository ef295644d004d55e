"""JobRecords: waits, run times and cold starts of the newest attempts."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fleetcast.fleet.jobs import JobAttempt

MAX_RECORDS = 10_000
OBSERVED_WITHIN_MS = 300_000  # of a start: who hears of it later does not know what came before


class JobRecord(NamedTuple):
    """The times of one attempt. None means unknown or not known yet."""

    arrived_ms: int
    queue: str
    class_: str
    gpus: int
    started_ms: int | None
    waited_s: float | None  # from submission to start, or until it was cancelled unstarted
    gave_up: bool  # it was cancelled unstarted
    run_s: float | None  # of one that finished
    tolerated_s: float | None  # the wait that its request tolerates
    cold_s: float | None  # from its start to its first steady phase or step; None where its start was heard late
    is_start_observed: bool = False  # whether its start was reported as it happened


class JobRecords:
    """The newest MAX_RECORDS attempts that requested GPUs, in order of arrival. Repeating a state changes nothing."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, int], JobRecord] = {}
        self._order: list[tuple[int, str, int]] = []  # arrived_ms, job, attempt

    def update(self, attempt: JobAttempt, received_ms: int | None = None) -> None:
        """Record the current state of an attempt. Its first step is stored now, because later states lack it.

        received_ms: the present time if the source is live, None for a complete history.
        """
        key = (attempt.job, attempt.attempt)
        old = self._rows.get(key)
        new = _make_record(attempt, old, received_ms)
        if new == old:
            return
        if old is not None:
            self._remove_record(key, old)
        if new is not None:
            self._rows[key] = new
            insort(self._order, (new.arrived_ms, *key))
            if len(self._order) > MAX_RECORDS:
                _, job, number = self._order.pop(0)
                del self._rows[job, number]

    def _remove_record(self, key: tuple[str, int], row: JobRecord) -> None:
        del self._rows[key]
        del self._order[bisect_left(self._order, (row.arrived_ms, *key))]

    def list_records(self) -> list[JobRecord]:
        """Return a copy of all records, in no order."""
        return list(self._rows.values())

    def dump(self) -> dict[str, Any]:
        """Return a JSON-able copy."""
        return {"rows": [(*key, *row) for key, row in self._rows.items()]}

    def load(self, state: Mapping[str, Iterable[Any]]) -> None:
        """Restore the result of `dump`. Drops a cold start if the job's start was not observed as it happened."""
        self._rows = {
            (job, attempt): _drop_unobserved_cold_start(JobRecord(*row)) for job, attempt, *row in state["rows"]
        }
        self._order = sorted((row.arrived_ms, *key) for key, row in self._rows.items())


def _drop_unobserved_cold_start(row: JobRecord) -> JobRecord:
    return row if row.is_start_observed else row._replace(cold_s=None)


def _make_record(attempt: JobAttempt, old: JobRecord | None, received_ms: int | None) -> JobRecord | None:
    """Return the record of an attempt in its current state. old: its record from earlier states."""
    submitted, started, over = attempt.eligible_ms, attempt.started_ms, attempt.over_ms
    arrived = submitted if submitted is not None else started
    stands_for_many = attempt.submission is not None and attempt.submission.tasks != 1
    if arrived is None or attempt.gpus <= 0 or stands_for_many:
        return None
    is_observed = _is_observed(started, old, received_ms)
    gave_up = started is None and attempt.failure is not None and attempt.failure.category == "cancelled"
    waited_to = over if gave_up else started
    waited_s = None if submitted is None or waited_to is None else max(0.0, (waited_to - submitted) / 1000)
    if attempt.submission is not None and attempt.submission.sequence < 0:
        waited_s = None  # labels tell of no wait
    return JobRecord(
        arrived,
        attempt.queue,
        attempt.class_,
        attempt.gpus,
        started,
        waited_s,
        gave_up,
        attempt.run_s if attempt.outcome == "finished" and not attempt.has_unseen_start else None,
        attempt.submission.tolerated_wait_s if attempt.submission else None,
        _choose_sooner(old.cold_s if old else None, _measure_cold_start(attempt)) if is_observed else None,
        is_observed,
    )


def _is_observed(started_ms: int | None, old: JobRecord | None, received_ms: int | None) -> bool:
    """Return whether an attempt's start was reported as it happened. Only the first report decides."""
    if started_ms is None:
        return False
    if old is not None and old.started_ms is not None:
        return old.is_start_observed
    return received_ms is None or received_ms - started_ms <= OBSERVED_WITHIN_MS


def _measure_cold_start(attempt: JobAttempt) -> float | None:
    """Return the seconds from the start to the end of the first known step.

    If the steady phase began earlier, it counts instead. Returns None if the start, or both of these times, are
    unknown.
    """
    if attempt.started_ms is None or attempt.source == "sdk":  # a start that its first step implies
        return None
    times = [attempt.steps[0].time_ms] if attempt.steps else []
    if attempt.phase == "steady" and attempt.phase_since_ms is not None:
        times.append(attempt.phase_since_ms)
    return max(0.0, (min(times) - attempt.started_ms) / 1000) if times else None


def _choose_sooner(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else min(one, other)
