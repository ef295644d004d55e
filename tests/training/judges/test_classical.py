"""Baselines of statsmodels beside what statsmodels itself forecasts, and what becomes of a fit that fails.

The tests import statsmodels themselves. Otherwise each worker would load it, in a second, to collect them.
"""

import numpy as np
import pytest

from fleetcast.checks import check_forecaster
from fleetcast.models.forecast import Panel
from fleetcast.training.judges.classical import (
    METHODS,
    RefittedForecaster,
    SeriesSpan,
    forecast_by_autoreg,
    forecast_by_ets,
    forecast_by_mstl,
)

DAY, HOUR = 144, 6


def waves(days: float, seed: int = 0) -> np.ndarray:
    bins = np.arange(round(days * DAY))
    return 500 + 100 * np.sin(bins * 2 * np.pi / DAY) + np.random.default_rng(seed).normal(0, 5, len(bins))


def span(values: np.ndarray, fitted: int, steps: tuple[int, ...], is_flow: bool = False) -> SeriesSpan:
    return SeriesSpan(values, fitted, steps, 600, is_flow)


def panel(values: np.ndarray, target: str = "running") -> Panel:
    values = np.atleast_2d(values)
    return Panel(target, tuple("abc"[: len(values)]), 600, 0, values, np.full(len(values), np.nan))


def test_autoreg_forecasts_what_statsmodels_does_from_any_bin() -> None:
    from statsmodels.tsa.ar_model import AutoReg

    values, fitted = waves(9), 8 * DAY
    found = forecast_by_autoreg(span(values, fitted, (1, 6, 144)))
    model = AutoReg(values[:fitted], lags=[1, 2, 3, 6, 36, 144]).fit()
    wanted = model.forecast(144)[[0, 5, 143]]
    np.testing.assert_allclose(found[:, fitted - 1], wanted, rtol=1e-9)
    later = model.append(values[fitted : fitted + 50]).forecast(144)[[0, 5, 143]]
    np.testing.assert_allclose(found[:, fitted + 49], later, rtol=1e-9)


def test_ets_forecasts_what_statsmodels_does_at_whole_hours() -> None:
    from statsmodels.tsa.exponential_smoothing.ets import ETSModel

    values, fitted = waves(9), 8 * DAY
    found = forecast_by_ets(span(values, fitted, (HOUR, 3 * HOUR, 30 * HOUR)))
    own = values[:fitted][HOUR - 1 :: HOUR]
    kind = {"error": "add", "trend": "add", "damped_trend": True, "seasonal": "add", "seasonal_periods": 24}
    model = ETSModel(own, **kind, initialization_method="heuristic").fit(disp=False, maxiter=50)
    np.testing.assert_allclose(found[:, fitted - 1], model.forecast(30)[[0, 2, 29]], rtol=1e-6)


def test_mstl_repeats_the_seasons_of_statsmodels() -> None:
    from statsmodels.tsa.seasonal import MSTL

    values, fitted = waves(18), 17 * DAY
    found = forecast_by_mstl(span(values, fitted, (HOUR, 24 * HOUR)))
    own = values[:fitted][HOUR - 1 :: HOUR]
    seasons = MSTL(own, periods=[24, 168]).fit().seasonal
    step = (seasons[-24, 0] + seasons[-168, 1]) - (seasons[-1, 0] + seasons[-1, 1])
    assert found[0, fitted - 1] - found[1, fitted - 1] == pytest.approx(step, abs=abs(step) / 2)
    assert np.abs(found[1, fitted:-1] - values[fitted + 1 - DAY : -DAY]).mean() < 15


@pytest.mark.parametrize("name", METHODS)
def test_within_an_hour_forecasts_begin_at_the_last_value(name: str) -> None:
    values, fitted = waves(9), 8 * DAY
    near, far = METHODS[name](span(values, fitted, (1, HOUR)))[:, fitted - 1]
    if name != "autoreg":
        assert near == pytest.approx(values[fitted - 1] + (far - values[fitted - 1]) / 6)


@pytest.mark.parametrize("name", METHODS)
def test_they_keep_the_contract_and_see_nothing_that_comes_later(name: str) -> None:
    check_forecaster(lambda: RefittedForecaster(name, METHODS[name], 1800))


def test_each_week_is_fitted_on_the_weeks_before_it() -> None:
    fitted = []

    def remembered(one: SeriesSpan) -> np.ndarray:
        fitted.append((one.fitted, one.values[one.fitted - 1]))
        return np.zeros((len(one.steps), len(one.values)))

    weeks = RefittedForecaster("mine", remembered, 50 * DAY)
    weeks.forecast(panel(np.arange(60.0 * DAY)), np.arange(50 * DAY, 59 * DAY), (6,))
    ends = [last for _, last in fitted]
    assert ends == [day * DAY - 1 for day in (29, 36, 43, 50, 57)]
    assert {bins for bins, _ in fitted} == {28 * DAY}
    assert weeks.fits == 5


def test_a_fit_that_fails_is_counted_and_says_nothing() -> None:
    def refuses(one: SeriesSpan) -> np.ndarray:
        raise np.linalg.LinAlgError("singular")

    broken = RefittedForecaster("mine", refuses, 8 * DAY)
    found = broken.forecast(panel(waves(9)), np.arange(8 * DAY, 9 * DAY), (6,))
    assert np.isnan(found).all()
    assert dict(broken.failed) == {"LinAlgError: singular": broken.fits}
    assert broken.fits > 0


@pytest.mark.parametrize("name", METHODS)
def test_empty_and_flat_series_are_no_accident(name: str) -> None:
    flat = np.stack([np.zeros(9 * DAY), np.full(9 * DAY, 7.0), np.full(9 * DAY, np.nan)])
    told = RefittedForecaster(name, METHODS[name], 8 * DAY).forecast(
        panel(flat), np.arange(8 * DAY, 9 * DAY - 1), (1, 6)
    )
    known = np.isfinite(told[3, :, :, 1])
    assert np.allclose(told[3, :, :, 1][known], 7.0, atol=0.5)
    assert np.isnan(told[..., 2]).all()
