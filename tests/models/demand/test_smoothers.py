"""Forecasters that smooth: which series have them, and that the rolling median bears spikes."""

import numpy as np

from fleetcast.checks import check_forecaster
from fleetcast.models.demand.smoothers import MOST_SMOOTHED, RollingMedian, make_group_smoothers, make_smoothers
from fleetcast.models.forecast import Panel

DAY = 144


def test_the_rolling_median_keeps_the_contract_and_bears_spikes() -> None:
    check_forecaster(RollingMedian)
    spiky = np.where(np.arange(9 * DAY) % 7 == 0, 900.0, 3.0)[None]
    panel = Panel("arriving", ("a",), 600, 0, spiky, np.array([np.nan]))
    assert (RollingMedian().forecast(panel, np.arange(8 * DAY, 9 * DAY), (1,))[3] <= 3.0).all()


def test_the_largest_series_alone_are_smoothed() -> None:
    values = 10.0 + np.arange(MOST_SMOOTHED + 3)[:, None] + np.zeros((1, 5 * DAY))
    names = tuple(map(str, range(len(values))))
    panel = Panel("arriving", names, 600, 0, values, np.full(len(values), np.nan))
    for forecaster in make_smoothers():
        told = np.isfinite(forecaster.forecast(panel, np.array([5 * DAY - 1]), (1,))[3, 0, 0])
        assert told.tolist() == [False] * 3 + [True] * MOST_SMOOTHED


def test_of_groups_that_come_and_go_smoothers_say_nothing() -> None:
    values = np.stack([np.full(5 * DAY, 7.0), np.where(np.arange(5 * DAY) % 6 < 2, 7.0, 0.0)])
    panel = Panel("running", ("steady", "seldom"), 600, 0, values, np.full(2, np.nan))
    (theta,) = make_group_smoothers()
    assert theta.name == "theta"
    told = np.isfinite(theta.forecast(panel, np.array([5 * DAY - 1]), (1, 6)))
    assert told[..., 0].all()
    assert not told[..., 1].any()
