"""Theta against its definition and against the one of statsmodels."""

import numpy as np
import pytest

from fleetcast.models.demand.theta import (
    FACTORS,
    FEW_SERIES,
    Theta,
    compute_daily_shape,
    compute_rolling_mean,
    compute_slope,
    smooth_series,
)
from fleetcast.models.forecast import Panel


def panel(values):
    return Panel("running", ("a",), 600, 0, np.asarray(values, np.float64)[None], np.array([np.nan]))


def test_smoothing_follows_the_recursion():
    values = np.random.default_rng(0).normal(10, 2, (1, 50))
    level, expected = values[0, 0], []
    for value in values[0]:
        level += 0.3 * (value - level)
        expected.append(level)
    assert np.allclose(smooth_series(values, 0.3)[0], expected)


@pytest.mark.parametrize("factor", FACTORS)
def test_few_series_are_smoothed_to_the_same_bit_as_many(factor):
    rng = np.random.default_rng(2)
    values = rng.normal(0, 1, (FEW_SERIES + 1, 300)) * 10.0 ** rng.integers(-6, 7, (FEW_SERIES + 1, 300))
    values[:, :5] = np.nan
    values[0, 100:200] = np.nan
    values[1] = np.nan
    many = smooth_series(values, factor)
    for series in range(len(values)):
        np.testing.assert_array_equal(smooth_series(values[series : series + 1], factor), many[series : series + 1])


def test_the_slope_is_that_of_least_squares():
    values = np.random.default_rng(1).normal(0, 1, (1, 60)).cumsum(axis=1) + 500
    found = compute_slope(values, 20)
    assert np.isclose(found[0, 59], np.polyfit(np.arange(20), values[0, 40:], 1)[0])
    assert found[0, 18] == 0.0


def test_a_mean_of_the_known_ones():
    values = np.array([[1.0, np.nan, 3.0, 5.0]])
    assert compute_rolling_mean(values, 2)[0].tolist() == [1.0, 1.0, 3.0, 4.0]


def test_a_daily_wave_is_foretold_at_every_lead():
    wave = 500 + 100 * np.sin(np.arange(4000) * 2 * np.pi / 144) + np.random.default_rng(2).normal(0, 2, 4000)
    origins = np.arange(3000, 3800, 50)
    values = Theta().forecast(panel(wave), origins, (6, 36, 144))
    for at, step in enumerate((6, 36, 144)):
        assert np.abs(values[3, at, :, 0] - wave[origins + step]).mean() < 12


def test_a_walk_has_no_daily_shape():
    walk = np.random.default_rng(3).normal(0, 5, (1, 8000)).cumsum(axis=1) + 5000
    shape, _ = compute_daily_shape(walk, 144, 3)
    assert np.abs(shape[:, 4000:]).mean() < 0.25 * walk[:, 4000:].std()


def test_with_less_than_two_days_there_is_no_bet():
    assert np.isnan(Theta().forecast(panel(np.full(200, 5.0)), np.array([199]), (1,))).all()
