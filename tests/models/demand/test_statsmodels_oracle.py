"""statsmodels as the oracle of what we compute ourselves: Theta's parts and the autocorrelation of periods.

The tests import statsmodels themselves. Otherwise each worker would load it, in a second, to collect them.
"""

import numpy as np
import pytest

from fleetcast.features.period import _correlate_at_lags
from fleetcast.models.demand.theta import compute_slope, smooth_series


@pytest.mark.parametrize("factor", [0.02, 0.2, 0.7, 1.0])
def test_the_level_is_that_of_simple_exponential_smoothing(factor: float) -> None:
    from statsmodels.tsa.holtwinters import SimpleExpSmoothing

    values = np.random.default_rng(0).normal(50, 9, (3, 200)).cumsum(axis=1)
    found = smooth_series(values, factor)
    for row, mine in zip(values, found, strict=True):
        model = SimpleExpSmoothing(row, initialization_method="known", initial_level=row[0])
        theirs = model.fit(smoothing_level=factor, optimized=False)
        np.testing.assert_allclose(mine, theirs.level, rtol=1e-9)


def test_level_and_half_the_slope_are_the_theta_model() -> None:
    """Hyndman and Billah (2003): with theta 2, smoothing with a drift of half the slope of the least-squares line."""
    from statsmodels.tsa.forecasting.theta import ThetaModel

    rng = np.random.default_rng(1)
    values = 100 + 0.3 * np.arange(300) + rng.normal(0, 4, 300)
    theirs = ThetaModel(values, deseasonalize=False).fit(use_mle=False)
    factor, drift = float(theirs.params["alpha"]), float(theirs.params["b0"])
    assert compute_slope(values[None], 300)[0, -1] == pytest.approx(drift, rel=1e-6)
    level = smooth_series(values[None], factor)[0, -1]
    # statsmodels starts its level elsewhere and adds the drift that the start has not seen: a constant of the origin.
    constant = (1 - (1 - factor) ** 300) / factor
    told = np.asarray(theirs.forecast(24, theta=2))
    mine = level + drift / 2 * (np.arange(24) + constant)
    np.testing.assert_allclose(np.diff(told), drift / 2, rtol=1e-6)
    np.testing.assert_allclose(told, mine, atol=0.5)


def test_the_autocorrelation_is_the_one_that_allows_for_fewer_pairs() -> None:
    from statsmodels.tsa.stattools import acf

    rng = np.random.default_rng(2)
    rows = np.sin(np.arange(400) * 2 * np.pi / 37) + rng.normal(0, 0.3, (2, 400))
    rows -= rows.mean(axis=1, keepdims=True)
    found = _correlate_at_lags(rows, 100)
    np.testing.assert_allclose(found, np.mean([acf(row, adjusted=True, nlags=100) for row in rows], axis=0), atol=1e-9)


def test_of_one_channel_each_shuffled_copy_has_its_own() -> None:
    from statsmodels.tsa.stattools import acf

    rows = np.random.default_rng(3).normal(0, 1, (4, 1, 120))
    rows -= rows.mean(axis=-1, keepdims=True)
    for mine, row in zip(_correlate_at_lags(rows, 30), rows[:, 0], strict=True):
        np.testing.assert_allclose(mine, acf(row, adjusted=True, nlags=30), atol=1e-9)
