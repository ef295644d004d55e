"""`fleetcast evaluate duration`: run times and remaining times of jobs, compared with fair baselines.

Run times are predicted at submission, and remaining times while jobs run. Before each rolling window, the
trees and the baselines of the train folder are fitted again on everything known by then. Jobs that are still
running are right-censored. Each fit begins with a new tracker, as in the service. Within a window, the
history features and the tracker are updated as jobs end (submission + wait, where known, + run time).
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.past_runs import COLUMN, EMPIRICAL
from fleetcast.features.run_past import LEVELS
from fleetcast.models.run_times.duration import DurationModel, cap_by_limit
from fleetcast.models.run_times.rows import Survival
from fleetcast.models.run_times.tracker import RunTracker
from fleetcast.training.judges.duration_metrics import (
    ELAPSED_S,
    JudgedDurations,
    judge_remaining_times,
    judge_run_times,
    judge_windows,
)
from fleetcast.training.reports.results import Results
from fleetcast.training.sets.duration_rows import LANDMARKS_S, DurationRows, replay_history
from fleetcast.training.sets.job_sets import HistoryJobs, JobHistory, read_job_sets
from fleetcast.training.windows import find_window_numbers, make_rolling_windows

Array = NDArray[np.float64]
Say = Callable[[str], None]

WATCHED = 15_000  # train jobs whose landmarks are fitted on
FEWEST_OF_GROUP = 20
POINT = LEVELS.index(0.5)
_SIMILAR = [COLUMN[name] for name in EMPIRICAL]


def evaluate(train: Path, test: Path, seed: int, say: Say, windows: int = 0) -> Results:
    """Evaluate every job history that is in both folders.

    windows: the number of windows, 0 for as many as each history allows.
    """
    skipped: list[str] = []
    results = evaluate_sets(read_job_sets(train, test, skipped), seed, say, windows)
    results.skipped = skipped + results.skipped
    return results


def evaluate_sets(sets: Sequence[JobHistory], seed: int, say: Say, windows: int = 0) -> Results:
    """Evaluate run times and remaining times of these histories."""
    results = Results("duration")
    for one in sets:
        for reason, count in sorted(one.skipped.items()):
            say(f"{one.dataset}: left out {count:,} rows: {reason}")
        judged = predict_test_span(one, seed, say, windows)
        judge_run_times(results, judged, seed)
        judge_remaining_times(results, judged, seed)
        judge_windows(results, judged, seed)
    return results


def predict_test_span(one: JobHistory, seed: int, say: Say, windows: int = 0) -> JudgedDurations:
    """Predict the jobs of the test span in order of time.

    The models are fitted before each window on the jobs known by then.
    """
    table, judged = one.table, one.is_judged
    rows = replay_history(table, watched=judged | _draw_watched_jobs(~one.in_test, seed), landmarks_s=_list_landmarks())
    in_span = rows.select_rows(judged[rows.job])
    first = in_span.elapsed_s == 0
    submissions, late = (
        in_span.select_rows(first),
        in_span.select_rows(~first & np.isin(in_span.elapsed_s.round(), ELAPSED_S)),
    )
    rolling = make_rolling_windows(one.train_end_s, float(table.submit_s.max(initial=0.0)) + 1, windows)
    run_in, late_in = (
        find_window_numbers(rolling, table.submit_s[submissions.job]),
        find_window_numbers(rolling, late.join_run_times(table).at_s),
    )
    late_in = np.where(late_in < 0, len(rolling) - 1, late_in)  # it was submitted in the last window
    runs: dict[str, Array] = {}
    remaining: dict[str, Array] = {}
    for number, window in enumerate(rolling):
        train = table.select_known_at(window.begin_s) if number else one.train_jobs
        past = rows if number else rows.select_rows(~one.in_test[rows.job])
        say(
            f"{one.dataset}: fitting on {len(train):,} jobs, judging {int((run_in == number).sum()):,}, "
            f"window {number + 1} of {len(rolling)}"
        )
        model = DurationModel(seed).fit(past.join_run_times(table), window.begin_s)
        mine, aged = submissions.select_rows(run_in == number), late.select_rows(late_in == number)
        predicted = {**predict_by_baselines(table, train, mine), "ours": predict_with_outcomes(model, table, mine)}
        left = estimate_conditional_medians(table, train, window.begin_s, aged)
        if len(aged.job):
            left["ours"] = np.log(model.predict_remaining_s(aged.features, aged.elapsed_s, (0.5,))[:, 0])
        _fill_rows(runs, predicted, run_in == number)
        _fill_rows(remaining, left, late_in == number)
    known = {name: values for name, values in runs.items() if np.isfinite(values).any()}
    spans = (rolling, run_in, late_in)
    return JudgedDurations(
        one.dataset, table, submissions.job, known, late.job, late.elapsed_s.round(), remaining, *spans
    )


def _list_landmarks() -> tuple[int, ...]:
    return tuple(sorted({*LANDMARKS_S, *ELAPSED_S}))


def _fill_rows(whole: dict[str, Array], part: dict[str, Array], rows: NDArray[np.bool_]) -> None:
    """Write the predictions of some rows into the arrays of all rows. Rows without a prediction are NaN.

    rows: (row,) whether the row has a prediction in `part`.
    """
    for name, values in part.items():
        if name not in whole:
            whole[name] = np.full((len(rows), *values.shape[1:]), np.nan)
        whole[name][rows] = values


def _draw_watched_jobs(mask: NDArray[np.bool_], seed: int) -> NDArray[np.bool_]:
    rows = np.flatnonzero(mask)
    if len(rows) <= WATCHED:
        return mask
    chosen = np.zeros(len(mask), np.bool_)
    chosen[np.random.default_rng(seed).choice(rows, WATCHED, replace=False)] = True
    return chosen


def predict_with_outcomes(model: DurationModel, table: HistoryJobs, rows: DurationRows) -> Array:
    """Return (row, level) the model's quantiles, corrected by known outcomes of earlier predictions.

    The correction uses what was known at each submission. The quantiles are capped by the job's limit.
    """
    issued = model.predict_log_run(rows.features)
    similar = rows.features[:, _SIMILAR].astype(np.float64)
    kinds = list(zip(find_groups(table)[rows.job].tolist(), table.gpus[rows.job].tolist(), strict=True))
    actual, ends = np.log(table.run_s[rows.job]), table.end_s[rows.job]
    tracker = RunTracker()
    events = sorted(
        [(at, 1, row) for row, at in enumerate(table.submit_s[rows.job].tolist())]
        + [(at, 0, row) for row, at in enumerate(ends.tolist()) if math.isfinite(at)]
    )
    for at, kind, row in events:
        if kind == 1:
            issued[row] = tracker.correct_quantiles(
                issued[row : row + 1], similar[row : row + 1], kinds[row : row + 1]
            )[0]
        else:
            tracker.learn_outcome(issued[row], similar[row], kinds[row], float(actual[row]), at)
    return cap_by_limit(issued, rows.features)


def find_groups(table: HistoryJobs) -> NDArray[np.object_]:
    """Return (job,) the group of each job, or its queue if it has no group."""
    return np.where(table.group != "", table.group, table.queue)


def predict_by_baselines(table: HistoryJobs, train: HistoryJobs, rows: DurationRows) -> dict[str, Array]:
    """Return method → (row, level) forecasts of each baseline, as logarithms of seconds.

    last_two: the mean of the last two runs of the user, or else of the group. group: the median of the last 20 and
    quantiles of the last 200 runs of the same group and number of GPUs. group_train: quantiles of all such runs
    known at the fit. limit: the limit that the user requested.

    train: the history known at the fit.
    """
    features = rows.features.astype(np.float64)
    two = features[:, COLUMN["user_mean_two"]]
    for other in ("group_mean_two", "all_mean_two"):
        two = np.where(np.isnan(two), features[:, COLUMN[other]], two)
    group = rows.group[:, 1:].copy()
    group[:, POINT] = rows.group[:, 0]
    return {
        "last_two": _make_point_quantiles(two),
        "group": np.sort(group, axis=1),
        "group_train": _estimate_group_quantiles(table, train, rows.job),
        "limit": _make_point_quantiles(features[:, COLUMN["log_limit"]]),
    }


def _make_point_quantiles(values: Array) -> Array:
    found = np.full((len(values), len(LEVELS)), np.nan)
    found[:, POINT] = values
    return found


def _estimate_group_quantiles(table: HistoryJobs, train: HistoryJobs, jobs: NDArray[np.int64]) -> Array:
    """Return (row, level) quantiles of the runs of each job's group that had ended at the fit.

    A group with few such runs gets the quantiles of all jobs.
    """
    ended = np.isfinite(train.run_s)
    if not ended.any():
        return np.full((len(jobs), len(LEVELS)), np.nan)
    log_run = np.log(train.run_s[ended])
    groups = _name_sized_groups(train)[ended]
    names, where = np.unique(groups, return_inverse=True)
    order = np.argsort(where, kind="stable")
    parts = np.split(log_run[order], np.flatnonzero(np.diff(where[order])) + 1)
    known = {
        name: np.quantile(part, LEVELS)
        for name, part in zip(names.tolist(), parts, strict=True)
        if len(part) >= FEWEST_OF_GROUP
    }
    everyone = np.quantile(log_run, LEVELS)
    return np.array([known.get(name, everyone) for name in _name_sized_groups(table)[jobs].tolist()])


def _name_sized_groups(table: HistoryJobs) -> NDArray[np.str_]:
    pairs = zip(find_groups(table).tolist(), table.gpus.tolist(), strict=True)
    return np.array([f"{group}|{gpus:g}" for group, gpus in pairs], np.str_)


def estimate_conditional_medians(
    table: HistoryJobs, train: HistoryJobs, now_s: float, rows: DurationRows
) -> dict[str, Array]:
    """Return method → (row,) logarithms of the median remaining seconds.

    One method uses the runs of all jobs, the other those of the job's group. Both use only runs that were known at
    the fit and lasted longer than the job has run so far.
    """
    curve = _fit_survival_curve(train, now_s)
    everyone = np.log(np.maximum(1.0, curve.estimate_run_s(rows.elapsed_s, 0.5) - rows.elapsed_s))
    own = everyone.copy()
    train_of, rows_of = _group_rows_by_name(find_groups(train)), _group_rows_by_name(find_groups(table)[rows.job])
    for name, mine in rows_of.items():
        if name not in train_of:
            continue
        part = train.select_rows(train_of[name])
        ended_s = np.sort(part.run_s[np.isfinite(part.run_s)])
        longer = len(ended_s) - np.searchsorted(ended_s, rows.elapsed_s[mine], side="right")
        mine = mine[longer >= FEWEST_OF_GROUP]
        left = _fit_survival_curve(part, now_s).estimate_run_s(rows.elapsed_s[mine], 0.5) - rows.elapsed_s[mine]
        own[mine] = np.log(np.maximum(1.0, left))
    return {"global": everyone, "group": own}


def _group_rows_by_name(names: NDArray[np.object_]) -> dict[str, NDArray[np.int64]]:
    """Return name → the rows that have it."""
    found, where = np.unique(names.astype(np.str_), return_inverse=True)
    order = np.argsort(where, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(where[order])) + 1)
    return dict(zip(found.tolist(), parts, strict=True)) if len(names) else {}


def _fit_survival_curve(table: HistoryJobs, now_s: float) -> Survival:
    begun = np.isfinite(table.begin_s)
    ended = np.isfinite(table.run_s[begun])
    run_s = np.where(ended, table.run_s[begun], np.maximum(1.0, now_s - table.begin_s[begun]))
    return Survival.from_run_times(run_s, ended)
