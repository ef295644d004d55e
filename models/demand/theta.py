"""Theta: exponential smoothing of the series without its daily shape, plus half of its drift.

The method is that of Assimakopoulos and Nikolopoulos (2000), in the closed form of Hyndman and Billah (2003).
It consists of running sums and recursive filters, so one pass computes the forecasts of all origins of all
series:

    shape    the distance from the mean of the day before: its mean over two weeks, by time of day. It is
             shrunk by how well yesterday's shape predicted today's, so that a random walk has no shape
    level    the series, smoothed with the factor whose errors were smallest at this very lead over two weeks
    drift    slope of the least-squares line through two weeks

The quantiles are those of Theta's own past errors (models/demand/naive.py).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fleetcast.models.demand.naive import count_bins_per_day, forecast_by_errors, forward_fill, shift_bins
from fleetcast.models.forecast import Panel

Array = NDArray[np.float64]

FACTORS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
FEW_SERIES = 16  # smoothed without scipy.signal, which takes 56 MiB and a second to import
SHAPE_DAYS = 14
SMOOTH_S = 1800  # the shape is smoothed over as much on either side
WARM_DAYS = 2


class Theta:
    """The Theta forecaster. Everything that does not depend on the lead is computed once."""

    name = "theta"

    def forecast(self, panel: Panel, origins: NDArray[np.intp], steps: Sequence[int]) -> Array:
        filled = forward_fill(panel.values)
        day = count_bins_per_day(panel.bin_s)
        shape, edge = compute_daily_shape(filled, day, SMOOTH_S // panel.bin_s)
        plain = filled - shift_bins(shape, day)
        levels = [smooth_series(plain, factor) for factor in FACTORS]
        drift = compute_slope(plain, SHAPE_DAYS * day) / 2
        young = np.isfinite(filled).cumsum(axis=1) < WARM_DAYS * day

        def forecast_points(panel: Panel, filled: Array, step: int) -> Array:
            level = choose_best_level(levels, plain, step, SHAPE_DAYS * day)
            back = -(-(step + edge) // day) * day - step
            bets = level + drift * step + shift_bins(shape, back)
            bets[young] = np.nan
            return bets

        return forecast_by_errors(panel, origins, steps, forecast_points)


def compute_daily_shape(filled: Array, day: int, smooth: int) -> tuple[Array, int]:
    """Return (series, bin) the usual height above the day's mean at this time of day, 0 if unknown.

    Also returns the number of bins by which the smoothing looks ahead.
    """
    usual = compute_rolling_mean(filled, day)
    above = filled - usual
    lagged = np.stack([shift_bins(above, number * day) for number in range(SHAPE_DAYS)])
    known = np.isfinite(lagged)
    shape = np.where(known, lagged, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
    if smooth:  # the mean of the bins around it, which are a day old when it is used
        shape = shift_bins(compute_rolling_mean(shape, 2 * smooth + 1), -smooth)
        shape = np.nan_to_num(shape)
    past = shift_bins(shape, day)
    both = compute_rolling_mean(np.nan_to_num(above * past), SHAPE_DAYS * day)
    own = compute_rolling_mean(np.nan_to_num(past**2), SHAPE_DAYS * day)
    fit = np.divide(both, own, out=np.zeros_like(both), where=own > 0)
    # The fit is as of the bin itself, the shape looks `smooth` bins ahead of it.
    return shape * np.clip(fit, 0.0, 1.0), smooth


def smooth_series(values: Array, factor: float) -> Array:
    """Return (series, bin) the exponentially smoothed values. Bins before the first known value are NaN."""
    if not values.shape[1]:
        return values
    known = np.isfinite(values)
    first = np.take_along_axis(values, known.argmax(axis=1)[:, None], axis=1)
    start = np.nan_to_num(first)
    whole = np.where(known, values, start)
    above = whole - start
    level = _smooth_few_series(above, factor) if len(values) <= FEW_SERIES else _smooth_many_series(above, factor)
    return np.where(np.maximum.accumulate(known, axis=1), level + start, np.nan)


def _smooth_many_series(values: Array, factor: float) -> Array:
    """Return (series, bin) `values` smoothed exponentially, starting from a level of 0."""
    from scipy.signal import lfilter

    level, _ = lfilter([factor], [1.0, factor - 1.0], values, axis=1, zi=np.zeros((len(values), 1)))
    return np.asarray(level)


def _smooth_few_series(values: Array, factor: float) -> Array:
    """Return (series, bin) the result of `_smooth_many_series`, computed faster for few series.

    Both do the same operations in the same order, so the results are identical to the last bit.
    """
    levels = np.empty_like(values)
    keep = -(factor - 1.0)
    for series, row in enumerate(values.tolist()):
        rest, line = 0.0, []
        for value in row:
            level = factor * value + rest
            rest = keep * level
            line.append(level)
        levels[series] = line
    return levels


def choose_best_level(levels: Sequence[Array], plain: Array, step: int, window: int) -> Array:
    """Return (series, bin) the smoothed level with the smallest errors at this lead within the window.

    levels: one array (series, bin) for each smoothing factor. All levels are known at the same bins, so sums
    of errors can be compared instead of means.
    """
    known = np.isfinite(plain) & np.isfinite(shift_bins(levels[-1], step))
    best = levels[-1].copy()
    least = np.full_like(best, np.inf)
    any_known = _sum_windows(known.astype(np.float64), window) > 0
    for level in levels:
        errors = np.zeros_like(plain)
        np.subtract(plain[:, step:], level[:, :-step], out=errors[:, step:], where=known[:, step:])
        cost = _sum_windows(np.abs(errors, out=errors), window)
        better = any_known & (cost < least)
        np.copyto(best, level, where=better)
        np.copyto(least, cost, where=better)
    return best


def compute_rolling_mean(values: Array, window: int) -> Array:
    """Return (series, bin) the mean of the known values in the last `window` bins, NaN without any."""
    known = np.isfinite(values)
    sums, counts = (_sum_windows(rows, window) for rows in (np.where(known, values, 0.0), known.astype(np.float64)))
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


def compute_slope(values: Array, window: int) -> Array:
    """Return (series, bin) the slope of the least-squares line through the last `window` bins.

    The slope is 0 until there are that many bins.
    """
    known = np.isfinite(values)
    at = np.broadcast_to(np.arange(values.shape[1], dtype=np.float64), values.shape)
    centre = np.nan_to_num(values[:, :1]) if values.shape[1] else 0.0
    level = np.where(known, values - centre, 0.0)
    mean_at = at - (window - 1) / 2
    both = _sum_windows(level * at, window) - mean_at * _sum_windows(level, window)
    full = _sum_windows(known.astype(np.float64), window) >= window
    return np.asarray(np.where(full, both / (window * (window**2 - 1) / 12), 0.0))


def _sum_windows(values: Array, window: int) -> Array:
    sums = values.cumsum(axis=1)
    found = sums.copy()
    found[:, window:] -= sums[:, :-window]
    return found
