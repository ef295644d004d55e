"""DurationModel: quantiles of how long a job runs, at its submission and while it runs.

    log run = boosted + offset, capped by the limit

A back-test inside the training data gives the offset of each level: trees are fitted on the first
part, and errors measured on the last (split conformal). The offset is half of the error, because the tracker
of outcomes corrects the rest. The quantiles of similar jobs are features. Without a fit they are the answer
(user and size, else group and size, else all: see `fleetcast.features.past_runs`). Files are LightGBM text
and JSON.
"""

import math
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.features.past_runs import COLUMN, EMPIRICAL, FEATURES
from fleetcast.features.run_past import LEVELS
from fleetcast.fleet.errors import ModelError
from fleetcast.models.run_times.boosted_quantiles import BoostedQuantiles
from fleetcast.models.run_times.remaining import RemainingModel, _interpolate_level
from fleetcast.models.run_times.rows import FitRows, RunRows, make_fit_rows

Array = NDArray[np.float64]
Features = NDArray[np.float32]

FILE = "duration.json"
VERSION = 1
HELD_OUT = 0.2
FEWEST_ROWS = 50
ROWS_FITTED = 40_000
ROWS_TRIED = 15_000  # of the fit that the offsets are measured with
LARGEST_OFFSET = 0.7
LIMIT_GRACE = 1.01  # a job that is killed at its limit runs seconds longer
NOTHING_KNOWN = np.log([10.0, 20.0, 120.0, 900.0, 7200.0, 43_200.0, 86_400.0, 259_200.0])  # at LEVELS
_EMPIRICAL = [COLUMN[name] for name in EMPIRICAL]
_LIMIT = COLUMN["log_limit"]


class DurationModel:
    """The run-time model: its trees, the offset (level,), and the model of remaining times.

    threads: the number of LightGBM threads.
    """

    def __init__(self, seed: int = 0, threads: int = 1) -> None:
        self.seed, self.threads = seed, threads
        self.fitted_until_ms: int | None = None
        self._boosted: BoostedQuantiles | None = None
        self._offset = np.zeros(len(LEVELS))
        self._remaining = RemainingModel(seed=seed, threads=threads)

    def fit(self, rows: RunRows, until_s: float) -> "DurationModel":
        """Fit the model on submissions, and on moments at which jobs ran.

        Outcomes after `until_s` do not count: a job that still runs at that time is right-censored. With fewer than
        FEWEST_ROWS ended jobs, the model stays without a fit.
        """
        known = rows.truncate(until_s)
        first = known.elapsed_s == 0
        everyone = known.select_rows(first)
        submissions = self._sample_rows(everyone)
        outcomes, _ = make_fit_rows(submissions, until_s)
        if int((outcomes.weight == 1).sum()) < FEWEST_ROWS:
            return self
        boundary_s = float(np.quantile(submissions.at_s, 1 - HELD_OUT))
        before = self._sample_rows(submissions.truncate(boundary_s), ROWS_TRIED)
        self._boosted = self._fit_trees(before, make_fit_rows(before, boundary_s)[0])
        self._measure_offset(submissions.select_rows(submissions.at_s > boundary_s), until_s)
        self._boosted = self._fit_trees(submissions, outcomes)
        self._remaining.fit(self._sample_rows(known.select_rows(~first)), until_s, everyone)
        self.fitted_until_ms = int(until_s * 1000)
        return self

    def _sample_rows(self, rows: RunRows, most: int = ROWS_FITTED) -> RunRows:
        if len(rows) <= most:
            return rows
        chosen = np.random.default_rng(self.seed).choice(len(rows), most, replace=False)
        return rows.select_rows(np.sort(chosen))

    def _fit_trees(self, rows: RunRows, outcomes: FitRows) -> BoostedQuantiles | None:
        if len(outcomes.row) < FEWEST_ROWS:
            return None
        model = BoostedQuantiles(LEVELS, seed=self.seed, threads=self.threads)
        return model.fit(rows.features[outcomes.row], np.log(outcomes.run_s), outcomes.weight)

    def _measure_offset(self, rows: RunRows, until_s: float) -> None:
        """Set the offset of each level from the errors of trees on rows that were held out.

        The offset is half of the error, at most LARGEST_OFFSET in either direction.
        """
        outcomes, _ = make_fit_rows(rows, until_s)
        if self._boosted is None or len(outcomes.row) < FEWEST_ROWS:
            return
        actual, features = np.log(outcomes.run_s), rows.features[outcomes.row]
        boosted = self._boosted.predict(features)
        for at, level in enumerate(LEVELS):
            offset = _compute_quantile(actual - boosted[at], outcomes.weight, level) / 2
            self._offset[at] = np.clip(offset, -LARGEST_OFFSET, LARGEST_OFFSET)

    def predict_log_run(self, features: Features) -> Array:
        """Return (row, level) log seconds of the run time at LEVELS, without the job's time limit."""
        if self._boosted is None or not len(features):
            return self._estimate_from_similar_jobs(features)
        known = self._boosted.predict(features).T + self._offset
        return np.sort(known, axis=1)

    def predict_run_s(self, features: Features, levels: tuple[float, ...] = LEVELS) -> Array:
        """Return (row, level) the run time in seconds from the job's start, at most the job's time limit."""
        known = cap_by_limit(self.predict_log_run(features), features)
        return np.exp(np.stack([_interpolate_level(known, LEVELS, level) for level in levels], axis=1))

    def predict_median_s(self, features: Features) -> Array:
        """Return (row,) the median run time in seconds."""
        return np.asarray(self.predict_run_s(features, (0.5,))[:, 0])

    def predict_remaining_s(self, features: Features, elapsed_s: Array, levels: tuple[float, ...] = LEVELS) -> Array:
        """Return (row, level) the remaining seconds of jobs that have run for `elapsed_s` (row,).

        The job's time limit caps the remaining seconds.
        """
        left = self._remaining.predict_remaining_s(self._fill_similar_quantiles(features), elapsed_s, levels)
        limit_s = np.exp(features[:, _LIMIT].astype(np.float64)) * LIMIT_GRACE - elapsed_s
        limit_s = np.where(limit_s > 0, limit_s, np.nan)[:, None]  # past its limit: the limit says nothing
        return np.fmin(left, np.maximum(limit_s, 1.0))

    def _fill_similar_quantiles(self, features: Features) -> Features:
        """Return the features with default values in place of unknown run times of similar jobs.

        Other unknown features stay NaN.
        """
        filled = features.copy()
        filled[:, _EMPIRICAL] = self._estimate_from_similar_jobs(features)
        return filled

    def _estimate_from_similar_jobs(self, features: Features) -> Array:
        """Return (row, level) log seconds of the run times of similar jobs.

        If no similar job has ended yet, the result has default values (NOTHING_KNOWN).
        """
        known = features[:, _EMPIRICAL].astype(np.float64)
        return np.where(np.isnan(known), NOTHING_KNOWN, known)

    def save(self, folder: Path) -> None:
        """Write the model's files into a folder that exists."""
        about = {
            "version": VERSION,
            "features": FEATURES,
            "fitted_until_ms": self.fitted_until_ms,
            "offset": self._offset.tolist(),
            "run": None if self._boosted is None else self._boosted.save(folder, "run"),
            "remaining": self._remaining.save(folder),
        }
        (folder / FILE).write_bytes(msgspec.json.format(msgspec.json.encode(about), indent=1) + b"\n")

    @classmethod
    def load(cls, folder: Path, threads: int = 1) -> "DurationModel":
        """Load a model that `save` wrote. Raises ModelError if the folder is damaged or has other features."""
        path = folder / FILE
        try:
            about = msgspec.json.decode(path.read_bytes())
            if about["version"] != VERSION or tuple(about["features"]) != FEATURES:
                raise ModelError(f"{path} was fitted on other features: fit it again with `fleetcast train duration`")
            made = cls(threads=threads)
            made.fitted_until_ms = about["fitted_until_ms"]
            made._offset = np.array(about["offset"], np.float64)
            if made._offset.shape != (len(LEVELS),):
                raise ModelError(f"{path} has {made._offset.size} levels, expected {len(LEVELS)}")
            if about["run"] is not None:
                made._boosted = BoostedQuantiles.load(folder, "run", about["run"], threads)
            made._remaining = RemainingModel.load(folder, about["remaining"], threads)
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from None
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"{path} is no fitted duration model: {error!r}") from None
        return made


def cap_by_limit(log_run: Array, features: Features) -> Array:
    """Return (row, level) log seconds, at most the job's time limit."""
    limit = features[:, _LIMIT].astype(np.float64)[:, None] + math.log(LIMIT_GRACE)
    return np.fmin(log_run, limit)


def _compute_quantile(values: Array, weight: Array, level: float) -> float:
    """Return the quantile of weighted values at `level`."""
    order = np.argsort(values)
    share = np.cumsum(weight[order]) / weight.sum()
    return float(values[order][min(len(values) - 1, int(np.searchsorted(share, level)))])
