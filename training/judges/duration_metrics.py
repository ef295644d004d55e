"""Metrics of run times on log seconds: pinball loss, error, share within a factor of 2, and coverage.

A further metric is the share of jobs whose predicted time was too short.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.run_past import LEVELS
from fleetcast.training.reports.results import ResultRow, Results, compute_interval
from fleetcast.training.reports.window_rows import make_window_rows
from fleetcast.training.sets.job_sets import HistoryJobs
from fleetcast.training.windows import RollingWindow

Array = NDArray[np.float64]

ELAPSED_S = (600, 3600, 21_600, 86_400)
BANDS = ((80, 0.1, 0.9), (90, 0.05, 0.95))
POINT = LEVELS.index(0.5)
WITHIN = np.log(2) + 1e-9
BLOCKS = 60  # blocks of the bootstrap: jobs of one sweep are alike
MODEL = {"ours": "boosted+tracker", "group": "last 20 and 200", "group_train": "train quantiles"}


@dataclass(frozen=True, slots=True)
class JudgedDurations:
    """The predictions of one set in the test span, as logarithms of seconds.

    runs: method → (row, level) for the jobs `job`, NaN if the method has none. A point forecast has
    only the median. remaining: method → (row,) medians for the jobs `late_job` after `elapsed_s`.
    windows: the rolling windows, each with a fit of its own. run_in, late_in: (row,) the number of each
    row's window.
    """

    dataset: str
    table: HistoryJobs
    job: NDArray[np.int64]
    runs: dict[str, Array]
    late_job: NDArray[np.int64]
    elapsed_s: Array
    remaining: dict[str, Array]
    windows: Sequence[RollingWindow] = ()
    run_in: NDArray[np.intp] = field(default_factory=lambda: np.zeros(0, np.intp))
    late_in: NDArray[np.intp] = field(default_factory=lambda: np.zeros(0, np.intp))

    def select_window(self, number: int) -> "JudgedDurations":
        """Return the predictions of one window."""
        run, late = self.run_in == number, self.late_in == number
        return replace(
            self,
            job=self.job[run],
            runs={name: values[run] for name, values in self.runs.items()},
            late_job=self.late_job[late],
            elapsed_s=self.elapsed_s[late],
            remaining={name: values[late] for name, values in self.remaining.items()},
        )


def judge_windows(results: Results, judged: JudgedDurations, seed: int) -> None:
    """Add the metrics of each window to the results. A window without jobs gets no rows."""
    for number, window in enumerate(judged.windows):
        one, found = judged.select_window(number), Results("duration")
        if len(one.job):
            judge_run_times(found, one, seed)
        if len(one.late_job):
            judge_remaining_times(found, one, seed)
        results.windows += make_window_rows(window, found.rows)


def judge_run_times(results: Results, judged: JudgedDurations, seed: int) -> None:
    """Add the rows and predictions of the run times."""
    actual = np.log(judged.table.run_s[judged.job])
    block = max(1, len(actual) // BLOCKS)
    for method, values in judged.runs.items():
        for metric, scores in _score_predictions(actual, values):
            _add_row(results, judged.dataset, "run_s", None, method, metric, scores, block, seed)
    ours = judged.runs["ours"]
    jobs = np.repeat(_name_jobs(judged, judged.job), len(LEVELS))
    results.predictions.append(
        {
            "dataset": [judged.dataset] * ours.size,
            "job": jobs.tolist(),
            "target": ["run_s"] * ours.size,
            "series": ["all"] * ours.size,
            "horizon_s": np.zeros(ours.size, np.int64).tolist(),
            "quantile": np.tile(LEVELS, len(ours)).tolist(),
            "value": np.exp(ours).ravel().tolist(),
            "actual": np.repeat(np.exp(actual), len(LEVELS)).tolist(),
            "model": [MODEL["ours"]] * ours.size,
        }
    )


def judge_remaining_times(results: Results, judged: JudgedDurations, seed: int) -> None:
    """Add the rows and predictions of the remaining times, grouped by the time that the job had run.

    That time is in the rows' `horizon_s`.
    """
    if not len(judged.late_job):
        results.skipped.append(f"{judged.dataset}: no judged job ran for {ELAPSED_S[0]} s")
        return
    left_s = judged.table.run_s[judged.late_job] - judged.elapsed_s
    actual = np.log(np.maximum(1.0, left_s))
    for elapsed_s in ELAPSED_S:
        rows = judged.elapsed_s == elapsed_s
        if rows.any():
            for method, values in judged.remaining.items():
                scores = np.abs(actual - values)[rows]
                block = max(1, len(scores) // BLOCKS)
                name = "remaining_log_mae"
                _add_row(results, judged.dataset, "remaining_s", elapsed_s, method, name, scores, block, seed)
    ours, many = judged.remaining["ours"], len(actual)
    results.predictions.append(
        {
            "dataset": [judged.dataset] * many,
            "job": _name_jobs(judged, judged.late_job).tolist(),
            "target": ["remaining_s"] * many,
            "series": ["all"] * many,
            "horizon_s": judged.elapsed_s.astype(np.int64).tolist(),
            "quantile": [0.5] * many,
            "value": np.exp(ours).tolist(),
            "actual": left_s.tolist(),
            "model": ["survival+boosted"] * many,
        }
    )


def _score_predictions(actual: Array, values: Array) -> Iterator[tuple[str, Array]]:
    """Yield (metric, score of each job) of a method's predictions.

    A score is NaN if the job's end is unknown, and then does not count.
    """
    for at, level in enumerate(LEVELS):
        left = actual - values[:, at]
        if np.isfinite(left).any():
            yield f"pinball_{round(level * 100):02}", np.maximum(level * left, (level - 1) * left)
    left = actual - values[:, POINT]
    known = np.isfinite(left)
    ended = np.isfinite(actual)
    yield "log_mae", np.abs(left)
    yield "within_2x", np.where(known, np.abs(left) <= WITHIN, np.nan)
    yield "under_share", np.where(known, left > 0, np.nan)
    for percent, low, high in BANDS:
        below, above = values[:, LEVELS.index(low)], values[:, LEVELS.index(high)]
        inside = (below <= actual) & (actual <= above)
        if np.isfinite(below).any():
            yield f"coverage_{percent}", np.where(np.isfinite(below) & ended, inside, np.nan)


def _add_row(
    results: Results, dataset: str, target: str, elapsed_s: int | None, method: str, metric: str, scores: Array,
    block: int, seed: int,
) -> None:  # fmt: skip
    value, low, high = compute_interval(scores, block=block, seed=seed)
    model = MODEL.get(method, method) if target == "run_s" else method
    n = int(np.isfinite(scores).sum())
    results.rows.append(ResultRow(dataset, target, "all", elapsed_s, method, model, metric, value, low, high, n))


def _name_jobs(judged: JudgedDurations, jobs: NDArray[np.int64]) -> NDArray[np.object_]:
    """Return the set's names of jobs, or row numbers where there is no name."""
    names = judged.table.job[jobs]
    return np.where(names != "", names, np.array([f"row {row}" for row in jobs.tolist()], object))
