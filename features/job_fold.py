"""JobFold: the fold of job events into attempts, demand and past runs.

The order of events and their repetition do not matter.
"""

from fleetcast.features.demand_series import DemandSeries
from fleetcast.features.past_runs import PastRuns
from fleetcast.features.similarity import make_job_shape
from fleetcast.fleet.events import Checkpoint, JobEvent, NodeLost, Phase, Queued, Step
from fleetcast.fleet.job_table import JobTable
from fleetcast.fleet.jobs import JobAttempt


class JobFold:
    """The state that follows from all job events so far. Only one task may change it.

    learns_runs: if False, `runs` stays empty, which saves a quarter of the time.
    """

    def __init__(self, *, learns_runs: bool = True) -> None:
        self.jobs = JobTable()
        self.demand = DemandSeries()
        self.runs = PastRuns()
        self._learns_runs = learns_runs

    def apply(self, event: JobEvent, received_ms: int | None = None) -> list[JobAttempt]:
        """Fold one event, and return the attempts that it changed. Returns [] for a repeat.

        These are the event's own attempt, and the previous one if the event implies that it has ended.
        received_ms: the present time if the source is live, None for a complete history.
        """
        for woken in self.jobs.unpack_job(event.job):
            self.demand.restore_attempt(woken)  # so that its demand is changed, not added again
        attempt = self.jobs.apply(event)
        if attempt is None:
            return []
        before = self.jobs.find_previous_attempt(attempt)
        changed = [attempt] if before is None else [attempt, before]
        for row in changed:
            self._record_attempt_change(row, event, received_ms)
        return changed

    def add_attempt(self, attempt: JobAttempt, received_ms: int | None = None) -> None:
        """Add an attempt in its present state, without its events."""
        self.jobs.add_attempt(attempt)
        self._record_attempt_change(attempt, received_ms=received_ms)

    def pack_old_attempts(
        self, before_ms: int, forget_before_ms: int, most_over: int | None = None
    ) -> list[JobAttempt]:
        """Pack jobs that no longer change, as `JobTable.pack_old_jobs` does, and return their attempts.

        Drops attempts that ended before `forget_before_ms`.
        """
        self.jobs.drop_ended_before(forget_before_ms)
        rested = self.jobs.pack_old_jobs(before_ms, most_over)
        for attempt in rested:
            self.demand.drop_attempt(attempt)
        return rested

    def _record_attempt_change(
        self, attempt: JobAttempt, event: JobEvent | None = None, received_ms: int | None = None
    ) -> None:
        self.demand.update(attempt, received_ms)
        if self._learns_runs and not isinstance(event, Step | Phase | Checkpoint | Queued | NodeLost):
            record_attempt(self.runs, attempt)


def record_attempt(runs: PastRuns, attempt: JobAttempt) -> None:
    """Record an attempt in the past runs. Repeating it changes nothing.

    An end that only a later attempt implies counts as a preemption. The end of an attempt whose start was not
    observed also counts as a preemption, so its run time does not count.
    """
    if attempt.submission is not None and attempt.submission.tasks != 1:
        return  # it stands for many, each of which is learnt by its own name
    job, number = attempt.job, attempt.attempt
    if attempt.submission is not None or attempt.over_ms is not None:
        runs.record_submission(job, number, make_job_shape(attempt))
    if attempt.started_ms is not None:
        runs.record_start(job, number, attempt.started_ms)
    if attempt.over_ms is not None:
        outcome = "preempted" if attempt.has_unseen_start else attempt.outcome
        runs.record_end(job, number, attempt.over_ms, outcome or "preempted")
