"""`fleetcast evaluate duration`: run times at submission and what is left while jobs run, beside fair baselines.

Trees are fitted once, on what the train folder knew at its end: jobs that still ran are right-censored. In the test
span history features and the tracker move on, with the jobs that ended (submission + wait, where known, + run time).
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from features.past_runs import COLUMN, EMPIRICAL
from features.run_past import LEVELS
from models.run_times.duration import DurationModel, capped
from models.run_times.rows import Survival
from models.run_times.tracker import RunTracker
from training.judges.duration_metrics import ELAPSED_S, Judged, judge_remaining, judge_run
from training.reports.results import Results
from training.sets.duration_rows import LANDMARKS_S, DurationRows, replay
from training.sets.job_sets import HistoryJobs, JobHistory, read_job_sets

Array = NDArray[np.float64]
Say = Callable[[str], None]

WATCHED = 15_000  # train jobs whose landmarks are fitted on
FEWEST_OF_GROUP = 20
POINT = LEVELS.index(0.5)
_SIMILAR = [COLUMN[name] for name in EMPIRICAL]


def evaluate(train: Path, test: Path, seed: int, say: Say) -> Results:
    """Judge every job history that is in both folders."""
    skipped: list[str] = []
    results = evaluate_sets(read_job_sets(train, test, skipped), seed, say)
    results.skipped = skipped + results.skipped
    return results


def evaluate_sets(sets: Sequence[JobHistory], seed: int, say: Say) -> Results:
    """Judge these histories."""
    results = Results("duration")
    for one in sets:
        for reason, count in sorted(one.skipped.items()):
            say(f"{one.dataset}: left out {count:,} rows: {reason}")
        judged = predict(one, seed, say)
        judge_run(results, judged, seed)
        judge_remaining(results, judged, seed)
    return results


def predict(one: JobHistory, seed: int, say: Say) -> Judged:
    """Fit on the train folder, then go through the test span in order of time."""
    table, judged = one.table, one.judged
    watched = judged | _some(~one.in_test, seed)
    rows = replay(table, watched=watched, landmarks_s=tuple(sorted({*LANDMARKS_S, *ELAPSED_S})))
    in_train = rows.take(~one.in_test[rows.job])
    fit_rows = in_train.of(table)
    say(f"{one.dataset}: fitting on {len(one.train):,} jobs, judging {int(judged.sum()):,}")
    model = DurationModel(seed).fit(fit_rows, one.train_end_s)
    in_span = rows.take(judged[rows.job])
    first = in_span.elapsed_s == 0
    submissions, late = in_span.take(first), in_span.take(~first & np.isin(in_span.elapsed_s.round(), ELAPSED_S))
    runs = baselines(one, submissions)
    runs["ours"] = tracked(model, table, submissions)
    remaining = conditionals(one, late)
    if len(late.job):
        remaining["ours"] = np.log(model.remaining_s(late.features, late.elapsed_s, (0.5,))[:, 0])
    return Judged(one.dataset, table, submissions.job, runs, late.job, late.elapsed_s.round(), remaining)


def _some(mask: NDArray[np.bool_], seed: int) -> NDArray[np.bool_]:
    rows = np.flatnonzero(mask)
    if len(rows) <= WATCHED:
        return mask
    chosen = np.zeros(len(mask), np.bool_)
    chosen[np.random.default_rng(seed).choice(rows, WATCHED, replace=False)] = True
    return chosen


def tracked(model: DurationModel, table: HistoryJobs, rows: DurationRows) -> Array:
    """(row, level) the model's quantiles, moved by the outcomes known at each submission, capped by the limit."""
    issued = model.log_run(rows.features)
    similar = rows.features[:, _SIMILAR].astype(np.float64)
    kinds = list(zip(kin(table)[rows.job].tolist(), table.gpus[rows.job].tolist(), strict=True))
    actual, ends = np.log(table.run_s[rows.job]), table.end_s[rows.job]
    tracker = RunTracker()
    events = sorted(
        [(at, 1, row) for row, at in enumerate(table.submit_s[rows.job].tolist())]
        + [(at, 0, row) for row, at in enumerate(ends.tolist()) if math.isfinite(at)]
    )
    for at, kind, row in events:
        if kind == 1:
            issued[row] = tracker.served(issued[row : row + 1], similar[row : row + 1], kinds[row : row + 1])[0]
        else:
            tracker.learn(issued[row], similar[row], kinds[row], float(actual[row]), at)
    return capped(issued, rows.features)


def kin(table: HistoryJobs) -> NDArray[np.object_]:
    """Each job's group, or where it has none its queue."""
    return np.where(table.group != "", table.group, table.queue)


def baselines(one: JobHistory, rows: DurationRows) -> dict[str, Array]:
    """last_two: mean of the user's (else the group's) last two runs. group: median of the last 20 and quantiles of the
    last 200 runs of its group with as many GPUs. group_train: the same group's quantiles in the train folder.
    limit: what the user asked for."""
    features = rows.features.astype(np.float64)
    two = features[:, COLUMN["user_mean_two"]]
    for other in ("group_mean_two", "all_mean_two"):
        two = np.where(np.isnan(two), features[:, COLUMN[other]], two)
    group = rows.group[:, 1:].copy()
    group[:, POINT] = rows.group[:, 0]
    found = {
        "last_two": _point(two),
        "group": np.sort(group, axis=1),
        "group_train": _train_quantiles(one, rows.job),
        "limit": _point(features[:, COLUMN["log_limit"]]),
    }
    return {name: values for name, values in found.items() if np.isfinite(values).any()}


def _point(values: Array) -> Array:
    found = np.full((len(values), len(LEVELS)), np.nan)
    found[:, POINT] = values
    return found


def _train_quantiles(one: JobHistory, jobs: NDArray[np.int64]) -> Array:
    """(row, level) quantiles of the group's ended jobs in the train folder; all jobs' where it has few."""
    train = one.train
    ended = np.isfinite(train.run_s)
    if not ended.any():
        return np.full((len(jobs), len(LEVELS)), np.nan)
    log_run = np.log(train.run_s[ended])
    groups = _sized(train)[ended]
    names, where = np.unique(groups, return_inverse=True)
    order = np.argsort(where, kind="stable")
    parts = np.split(log_run[order], np.flatnonzero(np.diff(where[order])) + 1)
    known = {
        name: np.quantile(part, LEVELS)
        for name, part in zip(names.tolist(), parts, strict=True)
        if len(part) >= FEWEST_OF_GROUP
    }
    everyone = np.quantile(log_run, LEVELS)
    return np.array([known.get(name, everyone) for name in _sized(one.table)[jobs].tolist()])


def _sized(table: HistoryJobs) -> NDArray[np.str_]:
    pairs = zip(kin(table).tolist(), table.gpus.tolist(), strict=True)
    return np.array([f"{group}|{gpus:g}" for group, gpus in pairs], np.str_)


def conditionals(one: JobHistory, rows: DurationRows) -> dict[str, Array]:
    """Medians of what is left, from the train folder's runs that lasted longer: of all jobs, and of the group's."""
    train = one.train
    curve = _survival(train, one.train_end_s)
    everyone = np.log(np.maximum(1.0, curve.beyond(rows.elapsed_s, 0.5) - rows.elapsed_s))
    own = everyone.copy()
    train_of, rows_of = _places(kin(train)), _places(kin(one.table)[rows.job])
    for name, mine in rows_of.items():
        if name not in train_of:
            continue
        part = train.take(train_of[name])
        ended_s = np.sort(part.run_s[np.isfinite(part.run_s)])
        longer = len(ended_s) - np.searchsorted(ended_s, rows.elapsed_s[mine], side="right")
        mine = mine[longer >= FEWEST_OF_GROUP]
        left = _survival(part, one.train_end_s).beyond(rows.elapsed_s[mine], 0.5) - rows.elapsed_s[mine]
        own[mine] = np.log(np.maximum(1.0, left))
    return {"global": everyone, "group": own}


def _places(names: NDArray[np.object_]) -> dict[str, NDArray[np.int64]]:
    """Where each name stands."""
    found, where = np.unique(names.astype(np.str_), return_inverse=True)
    order = np.argsort(where, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(where[order])) + 1)
    return dict(zip(found.tolist(), parts, strict=True)) if len(names) else {}


def _survival(table: HistoryJobs, now_s: float) -> Survival:
    begun = np.isfinite(table.begin_s)
    ended = np.isfinite(table.run_s[begun])
    run_s = np.where(ended, table.run_s[begun], np.maximum(1.0, now_s - table.begin_s[begun]))
    return Survival.of(run_s, ended)
