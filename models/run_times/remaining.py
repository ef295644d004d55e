"""RemainingModel: how much longer a job runs that has run for `elapsed_s`.

    log remaining at a level = (1 - near) * (base + trust * boosted correction) + near * similar

base is from the survival curve (Kaplan-Meier) of all jobs that ran longer than elapsed_s, so the
model learns only how this job differs. similar is from the last 200 similar jobs. A back-test inside the
training data gives the values of trust and near at each elapsed time. If it covers n jobs, its values have the
weight n / (n + PRIOR_JOBS), and a usual blend has the rest. Few jobs run for days, so from LONG_S on the usual
blend is the survival curve alone.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.past_runs import COLUMN, EMPIRICAL
from fleetcast.features.run_past import LEVELS
from fleetcast.features.sums import divide
from fleetcast.models.run_times.boosted_quantiles import BoostedQuantiles
from fleetcast.models.run_times.rows import RunRows, Survival, make_fit_rows

Array = NDArray[np.float64]
Features = NDArray[np.float32]

REMAINING_LEVELS = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
BLENDS = np.array([(trust, near) for trust in (0.0, 0.5, 1.0) for near in (0.0, 0.25, 0.5, 0.75, 1.0)])
USUAL_BLEND, LONG_BLEND = (1.0, 0.5), (0.0, 0.0)
LONG_S = 86_400.0
PRIOR_JOBS = 200
KNOTS_S = (300.0, 1800.0, 3600.0, 10_800.0, 21_600.0, 43_200.0, 86_400.0, 172_800.0)
FEWEST_ROWS = 50
TRIED = (0.5, 0.75)  # parts of the rows that are fitted on, to choose the weights on those up to the next
SHORTEST_S = 1.0
_EMPIRICAL = [COLUMN[name] for name in EMPIRICAL]


class RemainingModel:
    """A model of remaining run times. It is fitted on moments at which jobs were running."""

    def __init__(self, *, seed: int = 0, threads: int = 1) -> None:
        self._options = {"seed": seed, "threads": threads}
        self._survival = Survival(np.empty(0), np.empty(0))
        self._boosted: BoostedQuantiles | None = None
        self._blend = _make_usual_blend()

    def fit(self, rows: RunRows, until_s: float, submissions: RunRows) -> "RemainingModel":
        """Fit the model on data that was known by `until_s`.

        rows: moments at which jobs ran. submissions: the submissions of all jobs.
        """
        known = rows.truncate(until_s)
        if len(known) >= FEWEST_ROWS:
            bounds = [*np.quantile(known.at_s, TRIED).tolist(), until_s]
            tried = [self._fit_and_test(known, submissions, *window, until_s) for window in pairwise(bounds)]
            self._blend = _choose_best_blend([one for one in tried if one is not None])
        self._survival = make_fit_rows(submissions.truncate(until_s), until_s)[1]
        self._boosted = self._fit_trees(known, until_s) if len(known) >= FEWEST_ROWS else None
        return self

    def _fit_and_test(
        self, rows: RunRows, submissions: RunRows, fit_s: float, end_s: float, until_s: float
    ) -> "_BackTest | None":
        """Fit the model on data known at `fit_s`, and measure its errors on rows from `fit_s` to `end_s`.

        The outcomes of these rows are those known at `until_s`. Returns None if there are too few rows.
        """
        self._survival = make_fit_rows(submissions.truncate(fit_s), fit_s)[1]
        boosted = self._fit_trees(rows.truncate(fit_s), fit_s, (0.5,))
        later = rows.select_rows((rows.at_s > fit_s) & (rows.at_s <= end_s))
        outcomes, _ = make_fit_rows(later, until_s)
        if boosted is None or not len(outcomes.row):
            return None
        later = later.select_rows(outcomes.row)
        elapsed_s, features = later.elapsed_s, later.features
        base = self._compute_base(elapsed_s, (0.5,))[:, 0]
        correction = boosted.predict(self._make_inputs(features, elapsed_s))[0]
        similar = _compute_log_left_s(estimate_left_s(features[:, _EMPIRICAL].astype(np.float64), elapsed_s, 0.5), base)
        actual = np.log(np.maximum(SHORTEST_S, outcomes.run_s - elapsed_s))
        trust, near = BLENDS.T[:, :, None]
        errors = np.abs(actual - (1 - near) * (base + trust * correction) - near * similar)
        return _BackTest(elapsed_s, later.begin_s, outcomes.weight, errors)

    def _fit_trees(
        self, rows: RunRows, until_s: float, levels: tuple[float, ...] = REMAINING_LEVELS
    ) -> BoostedQuantiles | None:
        outcomes, _ = make_fit_rows(rows, until_s)
        if len(outcomes.row) < FEWEST_ROWS:
            return None
        elapsed_s = rows.elapsed_s[outcomes.row]
        target = np.log(np.maximum(SHORTEST_S, outcomes.run_s - elapsed_s))[:, None] - self._compute_base(
            elapsed_s, levels
        )
        model = BoostedQuantiles(levels, **self._options)
        return model.fit(self._make_inputs(rows.features[outcomes.row], elapsed_s), target, outcomes.weight)

    def predict_remaining_s(self, features: Features, elapsed_s: Array, levels: tuple[float, ...]) -> Array:
        """Return (row, level) the remaining seconds of jobs that have run for `elapsed_s` (row,)."""
        if not len(self._survival.time_s):
            return self._estimate_left_from_similar(features, elapsed_s, levels)
        known = self._compute_base(elapsed_s)
        at = np.log(np.maximum(elapsed_s, 1.0))
        trust, near = (np.interp(at, np.log(KNOTS_S), row)[:, None] for row in self._blend.T)
        if self._boosted is not None:
            known = known + trust * self._boosted.predict(self._make_inputs(features, elapsed_s)).T
        quantiles = features[:, _EMPIRICAL].astype(np.float64)
        similar = np.stack([estimate_left_s(quantiles, elapsed_s, level) for level in REMAINING_LEVELS], axis=1)
        known = (1 - near) * known + near * _compute_log_left_s(similar, known)
        known = np.sort(known, axis=1)
        return np.exp(np.stack([_interpolate_level(known, REMAINING_LEVELS, level) for level in levels], axis=1))

    def _estimate_left_from_similar(self, features: Features, elapsed_s: Array, levels: tuple[float, ...]) -> Array:
        quantiles = features[:, _EMPIRICAL].astype(np.float64)
        return np.stack([estimate_left_s(quantiles, elapsed_s, level) for level in levels], axis=1)

    def _compute_base(self, elapsed_s: Array, levels: tuple[float, ...] = REMAINING_LEVELS) -> Array:
        """Return (row, level) log remaining seconds by the survival curve of all jobs."""
        columns = [self._survival.estimate_run_s(elapsed_s, level) - elapsed_s for level in levels]
        return np.log(np.maximum(SHORTEST_S, np.stack(columns, axis=1)))

    def _make_inputs(self, features: Features, elapsed_s: Array) -> Features:
        """Return (row, feature) the inputs of the trees.

        They are the features, the elapsed time, the remaining times of similar jobs that ran longer, and the time
        left until the time limit.
        """
        quantiles = features[:, _EMPIRICAL].astype(np.float64)
        left = [np.log(np.maximum(SHORTEST_S, estimate_left_s(quantiles, elapsed_s, level))) for level in (0.5, 0.9)]
        limit_s = np.exp(features[:, COLUMN["log_limit"]].astype(np.float64)) - elapsed_s
        columns = (np.log(np.maximum(elapsed_s, 1.0)), *left, np.log(np.maximum(SHORTEST_S, limit_s)))
        return np.column_stack([features, *columns]).astype(np.float32)

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the trees into files, and return the other facts for the JSON file in the same folder."""
        trees = None if self._boosted is None else self._boosted.save(folder, "remaining")
        curve = [self._survival.time_s.tolist(), self._survival.alive.tolist()]
        return {"trees": trees, "survival": curve, "blend": self._blend.tolist()}

    @classmethod
    def load(cls, folder: Path, about: dict[str, Any], threads: int = 1) -> "RemainingModel":
        """Load the trees that `save` wrote. about: the facts that `save` returned."""
        made = cls(threads=threads)
        times, alive = about["survival"]
        made._survival = Survival(np.array(times, np.float64), np.array(alive, np.float64))
        made._blend = np.array(about["blend"], np.float64).reshape(len(KNOTS_S), 2)
        if about["trees"] is not None:
            made._boosted = BoostedQuantiles.load(folder, "remaining", about["trees"], threads)
        return made


class _BackTest(NamedTuple):
    """Moments of a back-test, and the errors of each blend at these moments.

    elapsed_s: (row,) how long the job had run. begin_s: (row,) the start of the job. weight: (row,). errors:
    (blend, row) errors of the median, in log seconds.
    """

    elapsed_s: Array
    begin_s: Array
    weight: Array
    errors: Array


def _make_usual_blend() -> Array:
    """Return (knot, 2) the usual values of `trust` and `near` at the elapsed times KNOTS_S."""
    return np.where(np.array(KNOTS_S)[:, None] >= LONG_S, LONG_BLEND, USUAL_BLEND)


def _choose_best_blend(tried: Sequence[_BackTest]) -> Array:
    """Return (knot, 2) the values of `trust` and `near` with the smallest errors at the times KNOTS_S.

    The errors are those of the median, for rows near each elapsed time.
    """
    found = _make_usual_blend()
    if not tried:
        return found
    elapsed_s, begin_s, weight = (np.concatenate(column) for column in list(zip(*tried, strict=True))[:3])
    errors = np.concatenate([one.errors for one in tried], axis=1)
    for at, knot_s in enumerate(KNOTS_S):
        close = np.flatnonzero(np.abs(np.log(knot_s / np.maximum(elapsed_s, 1.0))) < np.log(2.5))
        if weight[close].sum() > 0:
            best = BLENDS[int(np.argmin(np.average(errors[:, close], axis=1, weights=weight[close])))]
            jobs = len(np.unique(begin_s[close]))
            found[at] += jobs / (jobs + PRIOR_JOBS) * (best - found[at])
    return found


def _compute_log_left_s(left_s: Array, otherwise: Array) -> Array:
    """Return the logarithms of the remaining seconds, or `otherwise` where they are NaN."""
    return np.where(np.isnan(left_s), otherwise, np.log(np.maximum(SHORTEST_S, left_s)))


def estimate_left_s(log_quantiles: Array, elapsed_s: Array, level: float) -> Array:
    """Return (row,) the remaining seconds at a level, from quantiles of the whole run time.

    log_quantiles: (row, LEVELS) log seconds. The result is NaN where the quantiles are unknown, and linear in log
    time between the levels. For a job that has outlasted its last quantile, the median is its elapsed time.
    """
    log_elapsed = np.log(np.maximum(elapsed_s, 1.0))
    levels = np.array(LEVELS)
    below = log_quantiles <= log_elapsed[:, None]
    row = below.sum(axis=1)
    left, right = np.clip(row - 1, 0, len(LEVELS) - 1), np.clip(row, 0, len(LEVELS) - 1)
    every = np.arange(len(elapsed_s))
    low, high = log_quantiles[every, left], log_quantiles[every, right]
    share = divide(log_elapsed - low, high - low, 0.0)
    passed = np.where(row == 0, 0.0, levels[left] + share * (levels[right] - levels[left]))
    wanted = passed + level * (1 - passed)
    run_s = np.exp([np.interp(one, levels, known) for one, known in zip(wanted, log_quantiles, strict=True)])
    tail = np.maximum(elapsed_s, 1.0) * (1 / (1 - level) - 1)
    found = np.where(row == len(LEVELS), tail, np.maximum(np.reshape(run_s, len(wanted)) - elapsed_s, SHORTEST_S))
    return np.where(np.isnan(log_quantiles[:, 0]), np.nan, found)


def condition_on_survival(left_s: Array, since_s: Array, age_s: Array) -> Array:
    """Return (row, LEVELS) the remaining seconds of jobs that still run `since_s` after a forecast.

    left_s: (row, LEVELS) the remaining seconds in that forecast. The result is conditional on the fact that the job
    still runs. So a job is not about to end only because its forecast is over. The result is linear between the
    levels, from 0 s at level 0. For a job that has outlasted its last quantile, the median is `age_s`.
    """
    levels = np.array((0.0, *LEVELS))
    known = np.column_stack((np.zeros(len(left_s)), np.maximum.accumulate(left_s.astype(np.float64), axis=1)))
    rows = np.arange(len(known))[:, None]
    right = (known[:, 1:] <= since_s[:, None]).sum(axis=1, keepdims=True).clip(0, len(LEVELS) - 1) + 1
    gap_s = known[rows, right] - known[rows, right - 1]
    share = np.clip((since_s[:, None] - known[rows, right - 1]) / np.maximum(gap_s, 1e-9), 0.0, 1.0)
    passed = levels[right - 1] + share * (levels[right] - levels[right - 1])
    wanted = passed + levels[1:] * (1 - passed)
    right = np.searchsorted(levels, wanted).clip(1, len(LEVELS))
    share = ((wanted - levels[right - 1]) / (levels[right] - levels[right - 1])).clip(0.0, 1.0)
    run_s = known[rows, right - 1] + share * (known[rows, right] - known[rows, right - 1])
    beyond_s = run_s * np.maximum((1 - levels[-1]) / np.maximum(1 - wanted, 1e-9), 1.0)
    tail_s = np.maximum(age_s, 1.0)[:, None] * (1 / (1 - levels[1:]) - 1)
    over = (known[:, -1] <= since_s)[:, None]
    return np.asarray(np.where(over, tail_s, np.maximum(beyond_s - since_s[:, None], SHORTEST_S * levels[1:])))


def blend_with_all_jobs(left_s: Array, everybody_s: Array, elapsed_s: Array) -> Array:
    """Return (row, LEVELS) the mean of two forecasts of the remaining seconds: from similar jobs, and from all jobs.

    The mean is that of logarithms. left_s: from similar jobs. everybody_s: (row, LEVELS) from all jobs that ran as
    long. NaN means unknown. From LONG_S on, only `everybody_s` counts, because hardly any similar job ran for
    days.
    """
    near = np.where(elapsed_s >= LONG_S, LONG_BLEND[1], USUAL_BLEND[1])[:, None]
    mixed = np.exp(
        near * np.log(np.maximum(left_s, SHORTEST_S)) + (1 - near) * np.log(np.maximum(everybody_s, SHORTEST_S))
    )
    return np.asarray(np.where(np.isnan(mixed), np.where(np.isnan(left_s), everybody_s, left_s), mixed))


def _interpolate_level(known: Array, levels: tuple[float, ...], level: float) -> Array:
    """Return (row,) the value at a level, interpolated linearly between the known levels.

    A level outside the known ones has the value of the nearest known level. known: (row, levels).
    """
    right = int(np.clip(np.searchsorted(levels, level), 1, len(levels) - 1))
    share = np.clip((level - levels[right - 1]) / (levels[right] - levels[right - 1]), 0.0, 1.0)
    return np.asarray(known[:, right - 1] + share * (known[:, right] - known[:, right - 1]))
