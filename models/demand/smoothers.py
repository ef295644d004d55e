"""Forecasters that smooth a series: Theta, and the rolling median of some hours.

The rolling median is a baseline of the reports. Each smoother needs a pass over the whole history. So in
a large fleet only the largest series have one.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fleetcast.models.demand.flows import MEDIAN_S
from fleetcast.models.demand.largest import LargestSeriesForecaster
from fleetcast.models.demand.naive import count_bins_per_day, forecast_by_errors, forward_fill
from fleetcast.models.demand.sparse import is_intermittent
from fleetcast.models.demand.theta import Theta
from fleetcast.models.forecast import Forecaster, Panel

Array = NDArray[np.float64]

MOST_SMOOTHED = 32  # series of a panel


class RollingMedian:
    """The forecaster that repeats the median of the last four hours.

    For flows it equals persistence, which repeats the same median.
    """

    name = "rolling_median"

    def forecast(self, panel: Panel, origins: NDArray[np.intp], steps: Sequence[int]) -> Array:
        medians = compute_rolling_median(forward_fill(panel.values), max(1, MEDIAN_S // panel.bin_s))
        return forecast_by_errors(panel, origins, steps, lambda panel, filled, step: medians)


def compute_rolling_median(values: Array, window: int) -> Array:
    """Return (series, bin) the median of the last `window` bins, NaN until there are that many.

    >>> compute_rolling_median(np.array([[1.0, 9.0, 2.0, 3.0]]), 3).tolist()
    [[nan, nan, 2.0, 3.0]]
    """
    found = np.full_like(values, np.nan)
    if values.shape[1] >= window:
        found[:, window - 1 :] = np.median(np.lib.stride_tricks.sliding_window_view(values, window, axis=1), axis=2)
    return found


class SteadyForecaster:
    """A wrapper that leaves out series whose demand is intermittent.

    A smoothed level misleads for such series. `SparseForecaster` forecasts them better.
    """

    def __init__(self, forecaster: Forecaster) -> None:
        self.name = forecaster.name
        self._forecaster = forecaster

    def forecast(self, panel: Panel, origins: NDArray[np.intp], steps: Sequence[int]) -> Array:
        found = self._forecaster.forecast(panel, origins, steps)
        found[:, :, is_intermittent(panel.values, origins, count_bins_per_day(panel.bin_s)).T] = np.nan
        return found


def make_smoothers() -> tuple[Forecaster, ...]:
    """Return the smoothers that compete in the contest by ten minutes. The reports evaluate the same ones."""
    return (LargestSeriesForecaster(Theta(), MOST_SMOOTHED),)


def make_group_smoothers() -> tuple[Forecaster, ...]:
    """Return the smoothers of user groups. They leave out intermittent series, which are common among groups."""
    return tuple(SteadyForecaster(one) for one in make_smoothers())
