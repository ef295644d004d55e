"""Job histories replayed through PastRuns: features of each job at its submission and while it ran."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.past_runs import FEATURES, JobShape, PastRuns
from fleetcast.features.run_past import LEVELS
from fleetcast.models.run_times.rows import RunRows
from fleetcast.training.sets.job_sets import HistoryJobs

Array = NDArray[np.float64]

LANDMARKS_S = (300, 600, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400, 172_800, 345_600)
_END, _SUBMIT, _START, _LANDMARK = range(4)  # at the same moment: in this order


@dataclass(frozen=True, slots=True)
class DurationRows:
    """A table of features, with one row for each job at its submission, or `elapsed_s` after its start.

    elapsed_s is 0 at a submission. features: (row, feature). group: (row, 1 + level) the median of the
    last 20 and quantiles of the last 200 log run times of the job's group. These are known only at submissions,
    and NaN if no job had ended.
    """

    job: NDArray[np.int64]
    elapsed_s: Array
    features: NDArray[np.float32]
    group: Array

    def select_rows(self, rows: NDArray[np.bool_]) -> "DurationRows":
        """Return the rows that `rows` (row,) selects."""
        return DurationRows(self.job[rows], self.elapsed_s[rows], self.features[rows], self.group[rows])

    def join_run_times(self, table: HistoryJobs) -> RunRows:
        """Return the same rows with the starts and ends of their jobs, for fitting a model."""
        begin_s = table.begin_s[self.job]
        at_s = np.where(self.elapsed_s > 0, begin_s + self.elapsed_s, table.submit_s[self.job])
        return RunRows(self.features, at_s, begin_s, table.end_s[self.job])


def make_job_shape(table: HistoryJobs, row: int) -> JobShape:
    """Return the facts that the job states at submission. NaN becomes None."""
    cpus, limit_s = float(table.cpus[row]), float(table.limit_s[row])
    return JobShape(
        user=table.user[row],
        group=table.group[row],
        name=table.name[row],
        queue=table.queue[row],
        gpus=float(table.gpus[row]),
        cpus=None if math.isnan(cpus) else cpus,
        limit_s=None if math.isnan(limit_s) else limit_s,
        submitted_ms=int(table.submit_s[row] * 1000),
    )


def replay_history(
    table: HistoryJobs,
    *,
    submissions: NDArray[np.bool_] | None = None,
    watched: NDArray[np.bool_] | None = None,
    landmarks_s: tuple[int, ...] = LANDMARKS_S,
    history: PastRuns | None = None,
) -> DurationRows:
    """Replay a history, and return features of jobs at submission and at landmarks.

    submissions: the jobs that get a row at their submission. Landmarks are ages at which the `watched`
    jobs are sampled while they run. A job without an end (NaN) runs until the end of the table. A job without a
    start (inf) waits. No feature uses an event that comes later.
    """
    history = history or PastRuns()
    chosen = np.ones(len(table), np.bool_) if submissions is None else submissions
    times, kinds, jobs = _list_events(table, watched, landmarks_s)
    wanted = (kinds == _LANDMARK) | ((kinds == _SUBMIT) & chosen[jobs])
    found = np.empty((int(wanted.sum()), len(FEATURES)), np.float32)
    group = np.full((len(found), 1 + len(LEVELS)), np.nan)
    failed = table.failed == 1
    at = 0
    for time_ms, kind, job, want in zip(times.tolist(), kinds.tolist(), jobs.tolist(), wanted.tolist(), strict=True):
        features = None
        if kind == _SUBMIT:
            shape = make_job_shape(table, job)
            past = history.find_group_runs(shape) if want else None
            if past is not None:
                group[at] = (past.compute_short_median(), *past.compute_quantiles())
            features = history.record_submission(str(job), 1, shape, wanted=want)
        elif kind == _START:
            history.record_start(str(job), 1, time_ms)
        elif kind == _LANDMARK:
            features = history.compute_open_job_features(str(job), 1, time_ms)
        else:
            history.record_end(str(job), 1, time_ms, "failed" if failed[job] else "finished")
        if want:
            found[at] = np.nan if features is None else features
            at += 1
    begin_ms = _convert_to_ms(table.begin_s)
    late = kinds[wanted] == _LANDMARK
    rows = jobs[wanted]
    elapsed_s = np.where(late, (times[wanted] - begin_ms[rows]) / 1000, 0.0)
    return DurationRows(rows, elapsed_s, found, group)


def _convert_to_ms(times_s: Array) -> NDArray[np.int64]:
    return np.asarray(np.round(np.where(np.isfinite(times_s), times_s, 0.0) * 1000), np.int64)


def _list_events(
    table: HistoryJobs, watched: NDArray[np.bool_] | None, landmarks_s: tuple[int, ...]
) -> tuple[NDArray[np.int64], NDArray[np.int8], NDArray[np.int64]]:
    """Return (time_ms, kind, job) of every event, in order."""
    begin_s, end_s = table.begin_s, table.end_s
    every = np.arange(len(table))
    started = np.flatnonzero(np.isfinite(begin_s))
    ended = np.flatnonzero(np.isfinite(end_s))
    parts = [
        (_convert_to_ms(table.submit_s), np.full(len(every), _SUBMIT), every),
        (_convert_to_ms(begin_s)[started], np.full(len(started), _START), started),
        (_convert_to_ms(end_s)[ended], np.full(len(ended), _END), ended),
    ]
    if watched is not None:
        for elapsed_s in landmarks_s:
            rows = np.flatnonzero(watched & (table.run_s > elapsed_s))
            parts.append((_convert_to_ms(begin_s)[rows] + elapsed_s * 1000, np.full(len(rows), _LANDMARK), rows))
    times, kinds, jobs = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((jobs, kinds, times))
    return times[order], kinds[order].astype(np.int8), jobs[order]
