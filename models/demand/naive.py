"""Naive forecasters that can be checked by hand.

Each makes a point forecast from the values up to the origin, called its *bet*. The quantiles are the bet
plus the quantiles of its own past errors at the same lead, over two weeks. Persistence bets on the last
value, and for a flow on the median of its last hours (`flows.py`). On real GPU demand, persistence is hard to
beat. So it serves unless a rolling back-test shows that a challenger is better (`gate.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fleetcast.models.demand.flows import MEDIAN_S, compute_recent_medians, is_flow
from fleetcast.models.forecast import QUANTILES, Forecaster, Panel

Array = NDArray[np.float64]
Bins = NDArray[np.intp]
Mask = NDArray[np.bool_]

DAY_S = 86_400
ERRORS_DAYS = 14
MOST_ERRORS = 672  # of two weeks: every third one at ten minutes
FEWEST_ERRORS = 20
MOST_AWAKE = 0.5  # of two weeks: a series that was awake for longer has enough errors of its own
THIN_STEPS = 6
# Sums over windows that overlap tell a spread as well as so many times as many that do not: the sum of the squares of
# their autocorrelations 1 - k / window is 2 / 3 of a window. So bands of few errors are stretched. Bands of all errors
# of two weeks are not: they would be too wide, and every challenger would be compared with too weak a baseline.
OVERLAP_WEIGHT = 1.5
LEVEL_DAYS = 7
# Without any history: about 3 % of what there is within an hour, growing with the root of time (Venus: 1.7 % sMAPE).
PRIOR_SHARE_1H = 0.03
NORMAL_QUANTILES = np.array([-1.6449, -1.2816, -0.6745, 0.0, 0.6745, 1.2816, 1.6449])  # at QUANTILES
CHUNK = 4_000_000  # values that are sorted at once


class PointForecaster(Protocol):
    """A function that makes a point forecast at every bin."""

    def __call__(self, panel: Panel, filled: Array, step: int) -> Array:
        """Return (series, bin) the forecast of bin b + step made at bin b, NaN where there is none.

        It uses nothing after bin b.
        """


def count_bins_per_day(bin_s: int) -> int:
    return max(1, DAY_S // bin_s)


def forward_fill(values: Array) -> Array:
    """Fill unknown bins with the last known value. Bins before the first known value are NaN.

    >>> forward_fill(np.array([[np.nan, 1.0, np.nan]])).tolist()
    [[nan, 1.0, 1.0]]
    """
    known = np.isfinite(values)
    last = np.maximum.accumulate(np.where(known, np.arange(values.shape[-1]), 0), axis=-1)
    return np.asarray(np.take_along_axis(values, last, axis=-1))


def shift_bins(values: Array, bins: int) -> Array:
    """Return (series, bin) the values moved `bins` bins later, or earlier if `bins` is negative.

    Bins that receive no value are NaN.
    """
    moved = np.full_like(values, np.nan)
    size = values.shape[-1]
    if abs(bins) >= size:
        return moved
    if bins >= 0:
        moved[:, bins:] = values[:, : size - bins]
    else:
        moved[:, : size + bins] = values[:, -bins:]
    return moved


def forecast_by_errors(panel: Panel, origins: Bins, steps: Sequence[int], bet: PointForecaster) -> Array:
    """Return (quantile, step, origin, series) a point forecast plus the quantiles of its past errors.

    bet: makes the point forecasts. Only errors whose outcomes were known at the origin are used. For a series
    that changes again after a day without changes, only forecasts issued while it changed count.
    """
    filled = forward_fill(panel.values)
    awake = find_awake_bins(filled, count_bins_per_day(panel.bin_s))
    woken = WokenSeries.from_panel(panel, filled, awake, origins)
    spread = compute_short_spread(panel, filled, origins)
    out = np.empty((len(QUANTILES), len(steps), len(origins), len(panel.names)))
    for at, step in enumerate(steps):
        bets = bet(panel, filled, step)
        errors = panel.values - shift_bins(bets, step)
        alike = woken.find_similar_errors(awake, step)
        quantiles, counts = compute_window_quantiles(
            errors, origins, *compute_error_window(step, panel.bin_s), step, alike
        )
        lasts = 1 if is_flow(panel) else step  # bins over which moves add up
        deviation = np.where(woken.mask, woken.estimate_deviation(lasts), spread * np.sqrt(lasts))
        guess = NORMAL_QUANTILES[:, None, None] * deviation
        out[:, at] = bets[:, origins].T + np.where(counts < FEWEST_ERRORS, guess, quantiles)
    return out


def find_awake_bins(filled: Array, day: int) -> Mask:
    """Return (series, bin) whether the series is awake: its value has changed within the last day.

    day: the number of bins of a day.

    >>> find_awake_bins(np.array([[0.0, 0.0, 5.0, 5.0, 5.0]]), 2).tolist()
    [[False, False, True, True, False]]
    """
    changed = np.zeros(filled.shape, bool)
    changed[:, 1:] = (filled[:, 1:] != filled[:, :-1]) & np.isfinite(filled[:, :-1])
    last = np.maximum.accumulate(np.where(changed, np.arange(filled.shape[1]), -day), axis=1)
    return np.asarray(np.arange(filled.shape[1]) - last < day)


@dataclass(frozen=True, slots=True)
class WokenSeries:
    """The series that are active at an origin after not changing for a day. All arrays: (origin, series).

    mask: whether the series is one of them. level: the present value. highest: the highest value while
    active. move: the root mean square of the changes within one bin while active.
    """

    mask: Mask
    level: Array
    highest: Array
    move: Array

    @classmethod
    def from_panel(cls, panel: Panel, filled: Array, awake: Mask, origins: Bins) -> "WokenSeries":
        known_bins = np.isfinite(filled).cumsum(axis=1)
        slept = np.logical_or.accumulate(~awake & (known_bins > count_bins_per_day(panel.bin_s)), axis=1)
        days = ERRORS_DAYS * count_bins_per_day(panel.bin_s)
        lately = awake.cumsum(axis=1)
        lately[:, days:] = lately[:, days:] - lately[:, :-days].copy()
        mask = (awake & slept & (lately < MOST_AWAKE * np.minimum(known_bins, days)))[:, origins].T
        level = np.abs(filled[:, origins]).T
        if not mask.any():
            return cls(mask, level, level, level)
        moves = np.diff(panel.values, axis=1, prepend=np.nan) ** 2
        known = np.isfinite(moves) & awake
        known[:, 1:] &= awake[:, :-1]  # the leap that woke it is no usual move
        counts = known.cumsum(axis=1)[:, origins].T
        squares = np.where(known, moves, 0.0).cumsum(axis=1)[:, origins].T
        highest = np.maximum.accumulate(np.where(awake, np.abs(np.nan_to_num(filled)), 0.0), axis=1)[:, origins].T
        return cls(mask, level, highest, np.sqrt(squares / np.maximum(counts, 1)))

    def find_similar_errors(self, awake: Mask, step: int) -> tuple[Mask, Mask] | None:
        """Return two masks that limit which past errors may be used, or None if no series became active again.

        The first mask, (series, bin), marks errors of forecasts issued while the series was active. The second,
        (origin, series), marks the series that may use only those errors.
        """
        if not self.mask.any():
            return None
        issued = np.zeros_like(awake)
        issued[:, step:] = awake[:, : max(0, awake.shape[1] - step)]
        return issued, self.mask

    def estimate_deviation(self, step: int) -> Array:
        """Return (origin, series) the standard deviation to assume at a lead without past errors.

        The result is at least the standard deviation of a Poisson count.
        """
        grown = np.minimum(self.move * np.sqrt(step), self.highest)
        return np.asarray(np.maximum(grown, np.sqrt(np.maximum(self.level, 1.0))))


def compute_error_window(step: int, bin_s: int) -> tuple[int, int]:
    """Return how many errors of the last two weeks to use, and how many bins lie between two of them.

    At long leads fewer errors are used, because neighbouring errors are nearly the same.
    """
    window = ERRORS_DAYS * count_bins_per_day(bin_s)
    thin = max(min(max(step // THIN_STEPS, 1), THIN_STEPS), -(-window // MOST_ERRORS))
    return -(-window // thin), thin


def compute_window_quantiles(
    values: Array,
    origins: Bins,
    count: int,
    thin: int,
    overlap: int = 1,
    alike: tuple[Mask, Mask] | None = None,
) -> tuple[Array, NDArray[np.intp]]:
    """Return (quantile, origin, series) QUANTILES of the last `count` values, and how many were known.

    values: (series, bin). Two values that are used are `thin` bins apart. overlap: the number of bins within
    which values are nearly the same. alike: a pair of masks, or None. The second mask, (origin, series),
    marks series that may use only the values in the first mask, (series, bin).
    """
    series = len(values)
    padded = np.concatenate([np.full((series, 1), np.nan), values], axis=1)  # column 0 stands for "before the first"
    back = np.arange(count) * thin
    out = np.empty((len(QUANTILES), len(origins), series))
    counts = np.empty((len(origins), series), np.intp)
    chunk = max(1, CHUNK // max(1, series * count))
    for first in range(0, len(origins), chunk):
        at = np.maximum(origins[first : first + chunk, None] - back, -1) + 1
        window = padded[:, at]  # (series, origin, value)
        if alike is not None:
            usable = np.concatenate([np.zeros((series, 1), bool), alike[0]], axis=1)[:, at]
            window = np.where(usable | ~alike[1][first : first + chunk].T[..., None], window, np.nan)
        window = np.sort(window, axis=-1)  # NaN last
        known = np.isfinite(window).sum(axis=-1)
        counts[first : first + chunk] = known.T
        missing = 1 - (known / count) ** 2
        effective = 1 + np.maximum(known - 1, 0) * min(1.0, OVERLAP_WEIGHT * thin / overlap) ** missing
        out[:, first : first + chunk] = compute_sorted_quantiles(window, known, effective).transpose(0, 2, 1)
    return out, counts


def compute_sorted_quantiles(ordered: Array, known: NDArray[np.intp], effective: Array) -> Array:
    """Return (quantile, ...) QUANTILES of the first `known` values of each ascending row, NaN without any.

    ordered: (..., value). effective: the number of independent values. The quantiles are interpolated linearly.
    A small sample does not reach as far as the distribution that it is drawn from. The k-th of n values is on
    average the quantile k / (n + 1) (Weibull, 1939; type 6 of Hyndman and Fan, 1996).

    >>> few = np.array([1.0, 2.0, 3.0, np.nan])
    >>> compute_sorted_quantiles(few, np.array(3), np.array(3.0))[2:5].tolist()
    [1.0, 2.0, 3.0]
    >>> compute_sorted_quantiles(few, np.array(3), np.array(1e9))[2:5].round(3).tolist()
    [1.5, 2.0, 2.5]
    """
    outwards = (effective + 1) / np.maximum(effective - 1, 1e-9)
    levels = np.clip(0.5 + np.multiply.outer(np.asarray(QUANTILES) - 0.5, outwards), 0.0, 1.0)
    at = levels * np.maximum(known - 1, 0)
    low = np.floor(at).astype(np.intp)
    high = np.minimum(low + 1, np.maximum(known - 1, 0))
    rows = np.moveaxis(ordered, -1, 0)
    below = np.take_along_axis(rows, low, axis=0)
    # Rounding in the interpolation must not make two equal neighbours cross.
    return np.maximum.accumulate(below + (at - low) * (np.take_along_axis(rows, high, axis=0) - below), axis=0)


def compute_short_spread(panel: Panel, filled: Array, origins: Bins) -> Array:
    """Return (origin, series) the typical change within one bin, computed from all changes so far.

    While there are few changes, the result is at least a share of the highest value so far.
    """
    moves = np.diff(panel.values, axis=1, prepend=np.nan) ** 2
    known = np.isfinite(moves)
    count = known.cumsum(axis=1)[:, origins].T
    squares = np.where(known, moves, 0.0).cumsum(axis=1)[:, origins].T
    seen = np.where(count >= 3, np.sqrt(squares / np.maximum(count, 1)), 0.0)
    highest = np.fmax.accumulate(np.abs(filled), axis=1)[:, origins].T
    prior = PRIOR_SHARE_1H * highest * np.sqrt(panel.bin_s / 3600)
    return np.asarray(np.where((count >= FEWEST_ERRORS) & (seen > 0), seen, np.maximum(prior, seen)))


class Persistence:
    """The forecaster that repeats the last value. For flows, it repeats the median of the last hours.

    Its quantiles are those of the changes over the same lead in the past two weeks.
    """

    name = "persistence"

    def forecast(self, panel: Panel, origins: Bins, steps: Sequence[int]) -> Array:
        medians = None
        if is_flow(panel):
            medians = compute_recent_medians(forward_fill(panel.values), max(1, MEDIAN_S // panel.bin_s))
        return forecast_by_errors(
            panel, origins, steps, lambda panel, filled, step: filled if medians is None else medians
        )


class SeasonalNaive:
    """The forecaster that repeats the value at the same time of the last known day.

    Its quantiles are those of the differences between days.
    """

    name = "seasonal_naive"

    def forecast(self, panel: Panel, origins: Bins, steps: Sequence[int]) -> Array:
        day = count_bins_per_day(panel.bin_s)

        def forecast_from_yesterday(panel: Panel, filled: Array, step: int) -> Array:
            return shift_bins(filled, -(-step // day) * day - step)

        return forecast_by_errors(panel, origins, steps, forecast_from_yesterday)


class RecentLevel:
    """The forecaster whose quantiles are those of the values of the last week. It predicts spiky arrivals best."""

    name = "recent_level"

    def forecast(self, panel: Panel, origins: Bins, steps: Sequence[int]) -> Array:
        window = LEVEL_DAYS * count_bins_per_day(panel.bin_s)
        thin = -(-window // MOST_ERRORS)
        values, counts = compute_window_quantiles(panel.values, origins, window // thin, thin)
        values[:, counts < count_bins_per_day(panel.bin_s) // thin] = np.nan
        return np.repeat(values[:, None], len(steps), axis=1)


FORECASTERS: tuple[Forecaster, ...] = (Persistence(), SeasonalNaive(), RecentLevel())
