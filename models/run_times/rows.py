"""RunRows: moments at which a job's run time is forecast, with the known part of its outcome.

If a job still runs at a fit, only a lower limit of its run time is known (right-censored). Without such
jobs, quantiles would be too short. So each such job is replaced by three copies, at quantiles of the others'
survival (Kaplan-Meier) beyond its age (mass redistributed to the right, Efron 1967).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

COPIES = (1 / 6, 1 / 2, 5 / 6)
MAX_POINTS = 400  # points of a survival curve
PARETO = 1.0  # beyond all that was seen, half of what has run t runs another t


@dataclass(frozen=True, slots=True)
class RunRows:
    """Moments at which a run time is forecast, one row each. All times are in seconds on one clock.

    at_s: when the forecast is made (at the submission, or while the job runs). begin_s: the start, inf
    if the job waits. end_s: the end, NaN if unknown. features: (row, feature), as known at `at_s`.
    """

    features: NDArray[np.float32]
    at_s: Array
    begin_s: Array
    end_s: Array

    def __len__(self) -> int:
        return len(self.at_s)

    def select_rows(self, rows: NDArray[np.bool_] | NDArray[np.int64]) -> "RunRows":
        """Return only the rows that `rows` selects, by mask or by index."""
        return RunRows(self.features[rows], self.at_s[rows], self.begin_s[rows], self.end_s[rows])

    @property
    def elapsed_s(self) -> Array:
        """(row,) the seconds that the job had run at that moment, 0 at its submission."""
        return np.where(np.isfinite(self.begin_s), np.maximum(0.0, self.at_s - self.begin_s), 0.0)

    def truncate(self, now_s: float) -> "RunRows":
        """Return the rows as known at `now_s`. Later rows, starts and ends are removed."""
        rows = self.select_rows(self.at_s <= now_s)
        begin_s = np.where(rows.begin_s <= now_s, rows.begin_s, np.inf)
        return RunRows(rows.features, rows.at_s, begin_s, np.where(rows.end_s <= now_s, rows.end_s, np.nan))


@dataclass(frozen=True, slots=True)
class FitRows:
    """Rows with known or assumed run times, ready for a fit.

    row: index into the RunRows. run_s: the whole run time, at least 1. weight: 1, or less for a copy of
    a job that still runs.
    """

    row: NDArray[np.int64]
    run_s: Array
    weight: Array


@dataclass(frozen=True, slots=True)
class Survival:
    """A Kaplan-Meier curve of run times.

    alive: (point,) the share of jobs that run longer than `time_s` (point,), which ascends.
    """

    time_s: Array
    alive: Array

    @classmethod
    def from_run_times(cls, run_s: Array, ended: NDArray[np.bool_]) -> "Survival":
        """Estimate the curve from run times. A job that still runs counts with its time so far.

        run_s: (job,). ended: (job,) whether the job has ended.
        """
        if not ended.any():
            return cls(np.empty(0), np.empty(0))
        times, where = np.unique(run_s, return_inverse=True)
        ends = np.bincount(where, ended, len(times))
        at_risk = np.cumsum(np.bincount(where, minlength=len(times))[::-1])[::-1]
        alive = np.asarray(np.cumprod(1 - ends / at_risk), np.float64)
        if len(times) > MAX_POINTS:  # evenly by share, so that the tail keeps its points
            wanted = np.concatenate((np.linspace(1, 0.02, MAX_POINTS // 2), np.geomspace(0.02, 1e-5, MAX_POINTS // 2)))
            at = np.unique(np.concatenate((np.searchsorted(-alive, -wanted).clip(0, len(times) - 1), [len(times) - 1])))
            times, alive = times[at], alive[at]
        return cls(times, alive)

    def estimate_run_s(self, elapsed_s: Array, level: float) -> Array:
        """Return (row,) the whole run time in seconds at a level, among jobs that run longer than `elapsed_s`."""
        if not len(self.time_s):
            return np.asarray(elapsed_s + np.maximum(elapsed_s, 60.0) * ((1 - level) ** -PARETO - 1))
        at = np.searchsorted(self.time_s, elapsed_s, side="right")
        alive = np.concatenate(([1.0], self.alive))[at]
        wanted = alive * (1 - level)
        row = np.searchsorted(-self.alive, -wanted)  # the first time at which no more than that is alive
        known = (row < len(self.time_s)) & (alive > 0)
        tail = np.maximum(elapsed_s, 1.0) * (1 - level) ** (-1 / PARETO)
        return np.where(known, np.maximum(self.time_s[np.minimum(row, len(self.time_s) - 1)], elapsed_s + 1), tail)


def make_fit_rows(rows: RunRows, now_s: float) -> tuple[FitRows, Survival]:
    """Return the rows with known or assumed run times at `now_s`, and the survival curve of the jobs.

    Copies of jobs that still run have smaller weights. The curve uses only rows at the submission
    of a job, if there are any.
    """
    begun = np.flatnonzero(np.isfinite(rows.begin_s))
    ended = np.isfinite(rows.end_s[begun])
    run_s = np.maximum(1.0, np.where(ended, rows.end_s[begun], now_s) - rows.begin_s[begun])
    first = rows.elapsed_s[begun] == 0
    survival = (
        Survival.from_run_times(run_s[first], ended[first]) if first.any() else Survival.from_run_times(run_s, ended)
    )
    open_ = np.flatnonzero(~ended)
    copies = [survival.estimate_run_s(run_s[open_], level) for level in COPIES]
    row = np.concatenate([begun[ended], *([begun[open_]] * len(COPIES))])
    whole = np.concatenate([run_s[ended], *copies])
    weight = np.concatenate([np.ones(int(ended.sum())), np.full(len(open_) * len(COPIES), 1 / len(COPIES))])
    return FitRows(row, whole, weight), survival
