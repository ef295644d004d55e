"""What is known at an origin: by hand, without the future, and the same alone as in a batch."""

import numpy as np
import pytest

from fleetcast.models.demand.features import FEATURES, PanelPast, compute_features, fill_gaps
from fleetcast.models.demand.job_survival import AGES_S, JobSurvival
from fleetcast.models.forecast import Panel

HOUR, DAY, WEEK = 6, 144, 1008  # bins of ten minutes


def panel(values, capacity=100.0, target="running", **covariates):
    values = np.atleast_2d(np.asarray(values, np.float64))
    names = tuple(f"s{n}" for n in range(len(values)))
    rows = {name: np.atleast_2d(row) for name, row in covariates.items()}
    return Panel(target, names, 600, 0, values, np.full(len(values), capacity), rows)


def busy(bins=2 * WEEK, series=2):
    rng = np.random.default_rng(3)
    started, ended = rng.poisson(4.0, (2, series, bins)).astype(np.float64)
    running = 400 + np.cumsum(started - ended, axis=1)
    others = {"started": started, "ended": ended, "arriving": started + 1, "queued": started / 2}
    return panel(running, np.nan, **others)


def survival():
    return JobSurvival(600, np.linspace(0.5, 0.01, len(AGES_S)), np.full(len(AGES_S), 1 / len(AGES_S)))


def value(rows, name, step=0, origin=0, series=0):
    return float(rows[step, origin, series, FEATURES.index(name)])


def test_lags_means_and_movements_are_shares_of_the_capacity_from_the_last_value():
    ramp = np.arange(3.0 * WEEK)  # one more in every bin
    rows = compute_features(PanelPast.from_panel(panel(ramp, 1000.0)), np.array([2000]), (HOUR,))
    assert value(rows, "level") == pytest.approx(2.0)
    assert value(rows, "lag_1_bins") == pytest.approx(-0.001)
    assert value(rows, "lag_24h") == pytest.approx(-0.144)
    assert value(rows, "mean_3600s") == pytest.approx(-0.0025)  # the last six: 1995 … 2000
    assert value(rows, "moved_yesterday") == pytest.approx(0.006)
    assert value(rows, "moved_days") == pytest.approx(0.006)
    assert value(rows, "was_last_week") == pytest.approx((HOUR - WEEK) / 1000)
    assert value(rows, "change") == pytest.approx(0.006)
    assert value(rows, "ahead_h") == 1.0


def test_the_clock_is_that_of_the_target():
    rows = compute_features(
        PanelPast.from_panel(panel(np.ones(WEEK))), np.array([DAY - 1]), (HOUR, DAY)
    )  # the epoch was a Thursday
    assert [value(rows, "target_hour", step) for step in (0, 1)] == [1.0, 0.0]
    assert [value(rows, "target_weekday", step) for step in (0, 1)] == [4.0, 5.0]


def test_without_a_capacity_the_scale_is_the_most_that_ran_and_of_other_series_their_week():
    ran = PanelPast.from_panel(panel([10.0, 40.0, 20.0], np.nan))
    assert ran.compute_scale(np.array([0, 1, 2]))[:, 0].tolist() == [10.0, 40.0, 40.0]
    rates = PanelPast.from_panel(panel([3.0, 3.0], np.nan, "request_rate"))
    assert rates.compute_scale(np.array([1])).item() == 3.0


def test_counts_are_told_from_the_level_of_the_week():
    past = PanelPast.from_panel(panel([0.0, 6.0, 0.0, 6.0], np.nan, "arriving"))
    assert past.compute_anchor(np.array([3])).item() == 3.0


def test_a_missing_bin_carries_the_last_value_on():
    assert fill_gaps(np.array([[np.nan, 2.0, np.nan, 3.0]])).tolist()[0][1:] == [2.0, 2.0, 3.0]


def test_what_comes_after_an_origin_changes_nothing():
    whole, origins = busy(), np.array([5, 500, 1500])
    spoilt = busy()
    for array in (spoilt.values, *spoilt.covariates.values()):
        array[:, 1501:] = 1e6
    steps = (1, HOUR, DAY, 3 * DAY)
    told = [compute_features(PanelPast.from_panel(one, survival()), origins, steps) for one in (whole, spoilt)]
    np.testing.assert_array_equal(*told)


def test_an_origin_alone_has_the_features_that_it_has_in_a_batch():
    whole, steps = busy(), (1, HOUR, DAY)
    batch = compute_features(PanelPast.from_panel(whole, survival()), np.array([3, 700, 1600]), steps)
    for at, origin in enumerate((3, 700, 1600)):
        alone = compute_features(PanelPast.from_panel(whole.until(origin + 1), survival()), np.array([origin]), steps)
        np.testing.assert_allclose(alone[:, 0], batch[:, at], rtol=1e-5, atol=1e-7)


def test_a_series_has_the_features_that_it_has_among_others():
    whole = busy(series=3)
    rows = {name: row[1:2] for name, row in whole.covariates.items()}
    alone = Panel("running", ("s1",), 600, 0, whole.values[1:2], whole.capacity[1:2], rows)
    origins = np.array([200, 1900])
    both = [compute_features(PanelPast.from_panel(one, survival()), origins, (HOUR,)) for one in (whole, alone)]
    np.testing.assert_array_equal(both[0][:, :, 1:2], both[1])


def test_twice_the_fleet_has_the_same_features():
    small = busy()
    rows = {name: 2 * row for name, row in small.covariates.items()}
    large = Panel("running", small.names, 600, 0, 2 * small.values, small.capacity, rows)
    told = [
        compute_features(PanelPast.from_panel(one, survival()), np.array([1500]), (1, DAY)) for one in (small, large)
    ]
    np.testing.assert_allclose(*told, rtol=1e-4, atol=1e-6)


def test_no_history_is_unknown_not_an_error():
    rows = compute_features(PanelPast.from_panel(panel(np.full(3, np.nan))), np.array([2]), (1, DAY))
    assert np.isnan(value(rows, "level"))
    assert compute_features(PanelPast.from_panel(panel([[1.0]])), np.array([0]), (1, DAY)).shape == (
        2,
        1,
        1,
        len(FEATURES),
    )
