"""Features of regular series at an origin, on the same scale for small and large pools.

Values are differences from an anchor: the last value, or for flows the mean of the last week. They are
divided by a scale known at the origin: the capacity, else the highest number of running GPUs, else the
level of the past week. So one model also serves series that it was not fitted on. Lags and windows are
times, not bins, so panels of a minute and of an hour have the same features. No feature reads a bin after
its origin. A missing bin has the last known value.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.sums import divide
from fleetcast.models.demand.flows import FLOW_TARGETS
from fleetcast.models.demand.job_survival import JobSurvival
from fleetcast.models.forecast import Panel

Array = NDArray[np.float64]
Rows = NDArray[np.float32]

HOUR_S, DAY_S = 3600, 86_400
WEEK_S = 7 * DAY_S
LAG_BINS = (1, 2, 3, 6)
LAGS_S = (HOUR_S, 2 * HOUR_S, 3 * HOUR_S, 6 * HOUR_S, 12 * HOUR_S, DAY_S, 2 * DAY_S, WEEK_S)
WINDOWS_S = (1800, HOUR_S, 3 * HOUR_S, 6 * HOUR_S, DAY_S, WEEK_S)
FLOW_WINDOWS_S = (HOUR_S, 3 * HOUR_S, 6 * HOUR_S, DAY_S)
LEVELS = ("running", "queued")
FLOWS = FLOW_TARGETS
AGE_GROUPS = (0, 3, 6, 9)
"""First age class of models/demand/job_survival.py in each: below half an hour, up to 4 h, up to 2 days, longer."""
DAYS, WEEKS = 7, 4
CHANGE_WINDOW_S = 14 * DAY_S
THURSDAY = 3  # 1 January 1970

ORIGIN_FEATURES = (
    "level",
    *(f"lag_{bins}_bins" for bins in LAG_BINS),
    *(f"lag_{lag // HOUR_S}h" for lag in LAGS_S),
    *(f"mean_{window}s" for window in WINDOWS_S),
    *LEVELS,
    *(f"{flow}_{window // HOUR_S}h" for flow in FLOWS for window in FLOW_WINDOWS_S),
    *(f"age_{start}" for start in AGE_GROUPS),
)
STEP_FEATURES = (
    "ahead_h",
    "target_hour",
    "target_weekday",
    "change",
    "moved_yesterday",
    "moved_last_week",
    "moved_days",
    "moved_weeks",
    "was_yesterday",
    "was_last_week",
    "was_days",
    "was_weeks",
    "leaving",
    "starts_days",
    "starts_last_week",
)
FEATURES = (*ORIGIN_FEATURES, *STEP_FEATURES)


@dataclass(frozen=True, slots=True)
class PanelPast:
    """The values of one panel without gaps, and their running sums, computed once for all origins.

    filled: (series, bin), NaN before the first known value.
    sums, squares, counts: (series, bin + 1) running sums of `filled` less `centre`, from bin `first` on, a week
    before the first origin. centre: (series,) the first known value.
    highest: (series, bin) the most running GPUs so far.
    ages: (series, aged, age) at the bins `aged` (job_survival.py).
    started: (series, bin + 1) running sums of started GPUs.
    """

    panel: Panel
    filled: Array
    first: int
    sums: Array
    squares: Array
    counts: Array
    centre: Array
    highest: Array | None
    survival: JobSurvival | None
    ages: NDArray[np.float32] | None
    aged: NDArray[np.intp]
    started: Array | None

    @classmethod
    def from_panel(
        cls, panel: Panel, survival: JobSurvival | None = None, origins: NDArray[np.intp] | None = None
    ) -> "PanelPast":
        """Prepare a panel for `compute_features`.

        survival: how long jobs stay. Without it, or without counts of starts and ends, the features that need it are
        NaN. origins: the bins at which features are needed, None for all.
        """
        aged = np.arange(panel.bins) if origins is None else np.unique(origins)
        started = panel.covariates.get("started")
        starts = None if started is None else _compute_running_sums(np.nan_to_num(started))
        filled = fill_gaps(panel.values)
        known = np.isfinite(filled)
        begin = np.argmax(known, axis=1) if panel.bins else np.zeros(len(panel.names), np.intp)
        centre = np.nan_to_num(filled[np.arange(len(filled)), begin]) if panel.bins else np.zeros(len(filled))
        first = max(0, int(aged.min(initial=panel.bins)) + 1 - max(1, round(WEEK_S / panel.bin_s)))
        around = np.nan_to_num(filled[:, first:] - centre[:, None])
        sums = (
            _compute_running_sums(around),
            _compute_running_sums(around**2),
            _compute_running_sums(known[:, first:].astype(np.float64)),
        )
        ages = _compute_ages(panel, survival, aged)
        return cls(panel, filled, first, *sums, centre, _compute_running_maximum(panel), survival, ages, aged, starts)

    def count_bins(self, seconds: float) -> int:
        return max(1, round(seconds / self.panel.bin_s))

    def find_values_before(self, origins: NDArray[np.intp], back: int) -> Array:
        """Return (origin, series) the value `back` bins before each origin, NaN before the first value.

        No value after the origin is read.
        """
        return find_values_at(self.filled, origins - back)

    def compute_moments(self, origins: NDArray[np.intp], bins: int) -> tuple[Array, Array]:
        """Return the mean and the standard deviation of the last `bins` bins, (origin, series) each.

        Only known values count. `bins` covers at most a week.
        """
        last = origins - self.first
        total, square, count = (sum_window(sums, last, bins) for sums in (self.sums, self.squares, self.counts))
        mean = divide(total, count)
        spread = np.sqrt(np.maximum(divide(square, count) - mean**2, 0.0))
        return mean + self.centre, spread

    def compute_scale(self, origins: NDArray[np.intp]) -> Array:
        """Return (origin, series) the scale by which changes are divided, at least 1e-9.

        The scale is the capacity. Without a capacity, it is the most GPUs that ever ran. If that number is unknown
        too, the scale is the level of the last week.
        """
        if self.highest is not None:
            own = np.maximum(find_values_at(self.highest, origins), 1.0)
        else:
            mean, spread = self.compute_moments(origins, self.count_bins(WEEK_S))
            own = np.maximum(np.abs(mean) + spread, 1e-9)
        return np.where(np.isfinite(self.panel.capacity) & (self.panel.capacity > 0), self.panel.capacity, own)

    def compute_anchor(self, origins: NDArray[np.intp]) -> Array:
        """Return (origin, series) the value to which forecast changes are added.

        The anchor is the last value. For flows, it is the mean of the last week.
        """
        if self.panel.target in FLOW_TARGETS:
            return self.compute_moments(origins, self.count_bins(WEEK_S))[0]
        return self.find_values_before(origins, 0)

    def compute_mean_change(self, origins: NDArray[np.intp], step: int) -> Array:
        """Return (origin, series) the mean absolute change over `step` bins in the last two weeks.

        Only changes that are known at the origin count.
        """
        bins = self.count_bins(CHANGE_WINDOW_S)
        end = int(origins.max(initial=-1)) + 1
        first = max(0, int(origins.min(initial=self.panel.bins)) - step + 1 - bins)
        filled = self.filled[:, first:end]
        moved = filled[:, step:] - filled[:, :-step]
        np.abs(moved, out=moved)
        if len(origins) == 1 and moved.shape[1] and np.isfinite(moved[:, 0]).all():  # what is known stays known
            return np.asarray(moved.mean(axis=1)[None])
        known = np.isfinite(moved)
        sums, counts = (
            _compute_running_sums(np.where(known, moved, 0.0)),
            _compute_running_sums(known.astype(np.float64)),
        )
        last = origins - step - first
        return divide(sum_window(sums, last, bins), sum_window(counts, last, bins))


def compute_features(past: PanelPast, origins: NDArray[np.intp], steps: Sequence[int]) -> Rows:
    """Return (step, origin, series, feature) the features in the order of FEATURES, NaN if unknown.

    >>> panel = Panel("running", ("a",), 600, 0, np.arange(300.0)[None], np.array([1000.0]))
    >>> rows = compute_features(PanelPast.from_panel(panel), np.array([299]), (6,))
    >>> rows.shape == (1, 1, 1, len(FEATURES)), float(rows[0, 0, 0, FEATURES.index("lag_1h")])
    (True, -0.006000000052154064)
    """
    scale = past.compute_scale(origins)
    now = past.compute_anchor(origins)
    shape = (len(steps), len(origins), len(past.filled), len(FEATURES))
    rows = np.empty(shape, np.float32)
    known = len(ORIGIN_FEATURES)
    rows[..., :known] = _compute_origin_features(past, origins, now, scale)
    for row, step in enumerate(steps):
        rows[row, ..., known:] = _compute_step_features(past, origins, step, now, scale)
    return rows


def _compute_origin_features(past: PanelPast, origins: NDArray[np.intp], now: Array, scale: Array) -> Array:
    """Return (origin, series, feature) the features that are the same for every step."""
    columns = [past.find_values_before(origins, 0) / scale]
    lags = [*LAG_BINS, *(past.count_bins(lag) for lag in LAGS_S)]
    columns += [(past.find_values_before(origins, lag) - now) / scale for lag in lags]
    columns += [(past.compute_moments(origins, past.count_bins(seconds))[0] - now) / scale for seconds in WINDOWS_S]
    columns += _compute_level_columns(past, origins, scale)
    columns += _compute_flow_columns(past, origins, scale)
    columns += _compute_age_columns(past, origins, scale)
    return np.stack(columns, axis=-1)


def _compute_level_columns(past: PanelPast, origins: NDArray[np.intp], scale: Array) -> list[Array]:
    unknown = np.full(scale.shape, np.nan)
    found = {
        name: find_values_at(fill_gaps(rows), origins) for name, rows in past.panel.covariates.items() if name in LEVELS
    }
    found.setdefault(past.panel.target, past.find_values_before(origins, 0))
    return [found.get(name, unknown) / scale for name in LEVELS]


def _compute_flow_columns(past: PanelPast, origins: NDArray[np.intp], scale: Array) -> list[Array]:
    """Return columns (origin, series): each flow's sum over the last hours less the usual sum.

    The usual sum itself is no feature, because trees would recognise the months by it.
    """
    unknown = np.full(scale.shape, np.nan)
    recent = []
    for name in FLOWS:
        rows = past.panel.covariates.get(name)
        if rows is None:
            recent += [unknown] * len(FLOW_WINDOWS_S)
            continue
        week = past.count_bins(WEEK_S)
        first = max(0, int(origins.min(initial=past.panel.bins)) + 1 - week)
        latest, last = rows[:, first:], origins - first
        sums, counts = (
            _compute_running_sums(np.nan_to_num(latest)),
            _compute_running_sums(np.isfinite(latest).astype(np.float64)),
        )
        rate = sum_window(sums, last, week) / np.maximum(sum_window(counts, last, week), 1.0)
        for seconds in FLOW_WINDOWS_S:
            bins = past.count_bins(seconds)
            recent.append((sum_window(sums, last, bins) - rate * bins) / scale)
    return recent


def _compute_age_columns(past: PanelPast, origins: NDArray[np.intp], scale: Array) -> list[Array]:
    """Return columns (origin, series): the running GPUs in each group of ages. The age is the time since the start."""
    if past.ages is None:
        return [np.full(scale.shape, np.nan)] * len(AGE_GROUPS)
    now = past.ages[:, np.searchsorted(past.aged, origins)].transpose(1, 0, 2)
    return [group.sum(axis=-1) / scale for group in np.split(now, AGE_GROUPS[1:], axis=-1)]


def _compute_survival_columns(past: PanelPast, origins: NDArray[np.intp], step: int, scale: Array) -> list[Array]:
    """Return three columns (origin, series) about the ends and starts of GPUs up to the target.

    The first is the number of GPUs expected to end by the target. The other two are numbers of GPUs that
    started in an equally long span before: the mean of the last days, and the value of a week ago.
    """
    unknown = np.full(scale.shape, np.nan)
    sums = past.started
    if past.ages is None or past.survival is None or sums is None:
        return [unknown] * 3
    leaving = np.einsum(
        "sok,k->os", past.ages[:, np.searchsorted(past.aged, origins)], past.survival.compute_ending_share(step)
    )
    day, week = past.count_bins(DAY_S), past.count_bins(WEEK_S)
    first = -(-step // day)
    days = [_sum_following_bins(sums, origins - day * (first + more), step) for more in range(DAYS)]
    weeks = _sum_following_bins(sums, origins - week * -(-step // week), step)
    return [leaving / scale, compute_known_mean(days) / scale, weeks / scale]


def _sum_following_bins(sums: Array, bins: NDArray[np.intp], step: int) -> Array:
    """Return (bin, series) the sums over the `step` bins after each bin, NaN before the first bin."""
    found = sum_window(sums, np.maximum(bins, 0) + step, step)
    found[bins < 0] = np.nan
    return found


def _compute_step_features(past: PanelPast, origins: NDArray[np.intp], step: int, now: Array, scale: Array) -> Array:
    """Return (origin, series, feature) the features of one step.

    Some features look at the same span of time on earlier days or weeks. They are the change over that span,
    and the value at its end less the anchor.
    """
    seconds = step * past.panel.bin_s
    day, week = past.count_bins(DAY_S), past.count_bins(WEEK_S)
    days, weeks = -(-step // day), -(-step // week)
    daily = [_find_values_at_lag(past, origins, step, day * (days + more)) for more in range(DAYS)]
    weekly = [_find_values_at_lag(past, origins, step, week * (weeks + more)) for more in range(WEEKS)]
    target_s = (past.panel.first_ms // 1000 + (origins + 1) * past.panel.bin_s + seconds)[:, None]
    everywhere = np.ones(now.shape)
    columns = [
        everywhere * (seconds / HOUR_S),
        everywhere * (target_s % DAY_S / HOUR_S),
        everywhere * ((target_s // DAY_S + THURSDAY) % 7),
        past.compute_mean_change(origins, step) / scale,
        (daily[0][1] - daily[0][0]) / scale,
        (weekly[0][1] - weekly[0][0]) / scale,
        compute_known_mean([after - before for before, after in daily]) / scale,
        compute_known_mean([after - before for before, after in weekly]) / scale,
        (daily[0][1] - now) / scale,
        (weekly[0][1] - now) / scale,
        (compute_known_mean([after for _, after in daily]) - now) / scale,
        (compute_known_mean([after for _, after in weekly]) - now) / scale,
        *_compute_survival_columns(past, origins, step, scale),
    ]
    return np.stack(columns, axis=-1)


def _find_values_at_lag(past: PanelPast, origins: NDArray[np.intp], step: int, back: int) -> tuple[Array, Array]:
    """Return two arrays (origin, series): the values `back` bins before the origin, and before the target.

    The target is `step` bins after the origin. `back` is at least `step`, so both values are known.
    """
    return past.find_values_before(origins, back), past.find_values_before(origins, back - step)


def _compute_running_maximum(panel: Panel) -> Array | None:
    """Return (series, bin) the most running GPUs so far, or None if the panel does not have running GPUs."""
    running = panel.values if panel.target in ("running", "active_nodes") else panel.covariates.get("running")
    return None if running is None else np.maximum.accumulate(np.nan_to_num(running), axis=1)


def _compute_ages(panel: Panel, survival: JobSurvival | None, bins: NDArray[np.intp]) -> NDArray[np.float32] | None:
    started, ended = panel.covariates.get("started"), panel.covariates.get("ended")
    running = panel.values if panel.target == "running" else panel.covariates.get("running")
    if survival is None or survival.bin_s != panel.bin_s or started is None or ended is None or running is None:
        return None
    return survival.compute_ages(started, ended, running, bins)


def fill_gaps(values: Array) -> Array:
    """Fill each unknown bin of (series, bin) with the last known value before it.

    Bins before the first known value stay NaN.
    """
    known = np.isfinite(values)
    if known.all():
        return values
    last = np.maximum.accumulate(np.where(known, np.arange(values.shape[1]), 0), axis=1)
    return np.take_along_axis(np.where(known, values, np.nan), last, axis=1)


def find_values_at(values: Array, bins: NDArray[np.intp]) -> Array:
    """Return (bin, series) the values at these bins, NaN for bins before the first one."""
    if not values.shape[1]:
        return np.full((len(bins), len(values)), np.nan)
    found = values.T[np.maximum(bins, 0)]
    found[bins < 0] = np.nan
    return found


def sum_window(sums: Array, origins: NDArray[np.intp], bins: int) -> Array:
    """Return (origin, series) the sums over the `bins` bins that end with each origin.

    sums: running sums, (series, bin + 1).
    """
    end = np.clip(origins + 1, 0, sums.shape[1] - 1)
    start = np.clip(origins + 1 - bins, 0, sums.shape[1] - 1)
    return np.asarray((sums[:, end] - sums[:, start]).T)


def compute_known_mean(parts: Sequence[Array]) -> Array:
    """Return the mean over the parts that are known, element by element, NaN if none is.

    >>> compute_known_mean([np.array([1.0, np.nan]), np.array([3.0, np.nan])])
    array([ 2., nan])
    """
    stack = np.stack(parts)
    known = np.isfinite(stack)
    return divide(np.where(known, stack, 0.0).sum(axis=0), known.sum(axis=0))


def _compute_running_sums(values: Array) -> Array:
    return np.concatenate((np.zeros((len(values), 1)), np.cumsum(values, axis=1)), axis=1)
