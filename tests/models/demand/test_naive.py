"""Forecasters to check by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.models.demand.naive import (
    Persistence,
    RecentLevel,
    SeasonalNaive,
    compute_error_window,
    compute_window_quantiles,
    forward_fill,
)
from fleetcast.models.forecast import QUANTILES, Panel
from tests.fuzz.bounds import examples


def panel(values):
    values = np.atleast_2d(np.asarray(values, np.float64))
    names = tuple(f"s{n}" for n in range(len(values)))
    return Panel("running", names, 600, 0, values, np.full(len(values), np.nan))


def test_quantiles_of_persistence_are_those_of_past_changes():
    history = np.cumsum(np.tile([4.0, -4.0, 4.0, -4.0, 0.0], 400))
    last = len(history) - 1
    values = Persistence().forecast(panel(history), np.array([last]), (1,))[:, 0, 0, 0]
    assert values.tolist() == [-4.0, -4.0, -4.0, 0.0, 4.0, 4.0, 4.0]


def test_the_seasonal_naive_says_the_value_of_the_last_whole_day():
    history = np.arange(2000.0) % 144
    values = SeasonalNaive().forecast(panel(history), np.array([1500]), (1, 144, 150))[3, :, 0, 0]
    assert values.tolist() == [1501 % 144, 1500 % 144, 1506 % 144]


def test_the_recent_level_is_the_quantiles_of_a_week_at_every_lead():
    history = np.concatenate([np.full(3000, 900.0), np.tile([1.0, 2.0, 3.0], 400)])
    values = RecentLevel().forecast(panel(history), np.array([len(history) - 1]), (1, 144))
    assert (values[:, 0] == values[:, 1]).all()
    assert values[[0, 3, 6], 0, 0, 0].tolist() == [1.0, 2.0, 3.0]


def test_a_first_value_gets_a_spread_that_grows_with_the_lead():
    values = Persistence().forecast(panel([np.nan, 400.0]), np.array([0, 1]), (1, 4))
    assert np.isnan(values[:, :, 0]).all()
    assert values[3, :, 1, 0].tolist() == [400.0, 400.0]
    near, far = values[-1, :, 1, 0] - values[0, :, 1, 0]
    assert np.isclose(far, 2 * near)


def test_a_hole_carries_the_last_value_on_and_is_no_error():
    history = np.concatenate([np.full(300, 7.0), np.full(50, np.nan)])
    assert (forward_fill(history[None]) == 7.0).all()
    values = Persistence().forecast(panel(history), np.array([349]), (6,))[:, 0, 0, 0]
    assert values.tolist() == [7.0] * len(QUANTILES)


def test_quantiles_of_a_window_are_those_of_numpy():
    values = np.random.default_rng(0).normal(size=(2, 50))
    found, counts = compute_window_quantiles(values, np.array([9, 49]), 5, 3, overlap=3)
    assert counts.tolist() == [[4, 4], [5, 5]]  # bin 9 has 9, 6, 3, 0 behind it
    assert np.allclose(found[:, 0], np.quantile(values[:, [0, 3, 6, 9]], QUANTILES, axis=1, method="weibull"))
    assert np.allclose(found[:, 1], np.quantile(values[:, [37, 40, 43, 46, 49]], QUANTILES, axis=1, method="weibull"))


@given(st.integers(0, 2**32 - 1), st.sampled_from([6, 36, 144]), st.integers(0, 300))
@examples(12)
def test_bands_of_two_weeks_are_the_plain_quantiles_of_the_errors(seed, step, later):
    """At each lead: a stretched baseline loses to every challenger that is not."""
    last = 15 * 144 + later
    walk = np.cumsum(np.random.default_rng(seed).normal(size=last + 1))
    count, thin = compute_error_window(step, 600)
    ends = last - thin * np.arange(count)
    plain = np.quantile(walk[ends] - walk[ends - step], QUANTILES, method="weibull")
    served = Persistence().forecast(panel(walk), np.array([last]), (step,))[:, 0, 0, 0]
    np.testing.assert_allclose(served - walk[last], plain, atol=1e-9)


@pytest.mark.parametrize("days", [3, 5, 8, 11, 15])
def test_bands_of_a_day_ahead_hold_what_they_say_while_errors_become_many(days):
    walks = np.cumsum(np.random.default_rng(1).normal(size=(200, 17 * 144)), axis=1)
    low, high = Persistence().forecast(panel(walks), np.array([days * 144]), (144,))[[1, 5], 0, 0]
    outcome = walks[:, days * 144 + 144]
    assert 0.68 <= ((low <= outcome) & (outcome <= high)).mean() <= 0.9


def test_the_band_of_a_day_ahead_holds_what_it_says_after_a_few_days():
    """Two weeks have some fourteen errors of a day that do not overlap, five days have five: their own quantiles are
    too narrow."""
    walks = np.cumsum(np.random.default_rng(0).normal(size=(400, 15 * 144)), axis=1) + 1000
    for origin in (5 * 144, 14 * 144):
        low, high = Persistence().forecast(panel(walks), np.array([origin]), (144,))[[1, 5], 0, 0]
        outcome = walks[:, origin + 143]
        assert 0.75 <= ((low <= outcome) & (outcome <= high)).mean() <= 0.87
