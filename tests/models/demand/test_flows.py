"""One bin of arrivals that were never asked for before is no forecast of the next bins."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.models.demand.flows import cap_lone_spikes, compute_recent_medians
from fleetcast.models.demand.forecaster import BIN_MS, DemandForecaster, Histories, SeriesKey
from fleetcast.models.demand.naive import Persistence
from fleetcast.models.demand.theta import Theta
from fleetcast.models.forecast import QUANTILES, Panel
from tests.fuzz.bounds import examples

NOW_MS = 2_916_000 * BIN_MS
MEDIAN = QUANTILES.index(0.5)
FLEET = 512.0


def panel(values: np.ndarray, target: str = "arriving", capacity: float = FLEET) -> Panel:
    return Panel(target, ("a",), 600, 0, np.atleast_2d(values), np.array([capacity]))


def arrivals(seed: int, bins: int) -> np.ndarray:
    """(bin,) GPUs that arrive: jobs of 1 to 64 GPUs, by day more than by night."""
    rng = np.random.default_rng(seed)
    rate = rng.uniform(0.05, 3) * (1.2 + np.sin(np.arange(bins) / 144 * 2 * np.pi))
    return rng.poisson(rate) * rng.choice([1.0, 2.0, 4.0, 8.0], bins) + 64.0 * (rng.random(bins) < 0.01)


def served(values: np.ndarray, capacity: float = FLEET) -> np.ndarray:
    """(quantile, horizon)"""
    minutes = np.repeat(values, 10)[None, -1440:]
    history = Histories("arriving", (SeriesKey("all"),), minutes, values[None], np.array([capacity]))
    (row,) = DemandForecaster().forecast_all([history], NOW_MS)
    return np.array(row.values, float)


@given(st.integers(0, 2**32 - 1), st.integers(12, 900), st.integers(0, 8), st.floats(2, 30))
@examples(15)
def test_one_spike_is_not_the_next_forecast(seed, bins, back, fleets):
    values = arrivals(seed, bins)
    usual = values.max()
    values[-1 - back] = fleets * FLEET
    found = served(values)
    assert found.max() <= FLEET
    assert found[MEDIAN, 2:].max() <= usual + 1
    assert (np.diff(found, axis=0) >= 0).all()


@pytest.mark.parametrize("back", [0, 1, 3])
def test_a_spike_of_twelve_fleets_leaves_the_forecast_as_it_was(back):
    values = arrivals(3, 800)
    before = served(values)
    values[-1 - back] = 12 * FLEET
    after = served(values)
    np.testing.assert_allclose(after[MEDIAN, 2:], before[MEDIAN, 2:], atol=8)


@pytest.mark.parametrize("forecaster", [Persistence(), Theta()])
def test_no_forecaster_bets_on_a_spike(forecaster):
    values = arrivals(5, 900)
    usual = values.max()
    values[-1] = 12 * FLEET
    found = forecaster.forecast(cap_lone_spikes(panel(values)), np.array([899]), (1, 6, 144))
    assert found[MEDIAN].max() <= usual


def test_a_demand_that_stays_is_followed():
    values = arrivals(7, 800)
    values[-36:] = 300.0
    assert served(values)[MEDIAN, 2] >= 200


def test_the_persistence_of_a_flow_is_the_median_of_four_hours_and_that_of_a_level_is_the_last_value():
    values = np.array([1.0, 8.0, 2.0, 90.0])  # too few for errors of its own: the median is the bet
    for target, bet in (("arriving", 5.0), ("arriving_jobs", 5.0), ("queued", 90.0), ("running", 90.0)):
        found = Persistence().forecast(panel(values, target), np.array([3]), (1, 144))
        assert found[MEDIAN, :, 0, 0].tolist() == [bet, bet]


@given(st.integers(0, 2**32 - 1), st.integers(1, 80), st.integers(1, 30))
@examples(20)
def test_recent_medians_are_those_of_numpy(seed, bins, window):
    rng = np.random.default_rng(seed)
    values = rng.poisson(rng.uniform(0, 3), (3, bins)).astype(float)
    values[1, : bins // 2] = np.nan
    found = compute_recent_medians(values, window)
    for row, bin in np.ndindex(values.shape):
        known = values[row, max(0, bin + 1 - window) : bin + 1]
        known = known[np.isfinite(known)]
        assert found[row, bin] == np.median(known) if len(known) else np.isnan(found[row, bin])


def test_no_bin_depends_on_later_ones():
    values = np.append(arrivals(1, 400), [9000.0, 9000.0, 3.0])
    whole = cap_lone_spikes(panel(values)).values
    for bins in (1, 100, 399, 401):
        np.testing.assert_array_equal(cap_lone_spikes(panel(values[:bins])).values, whole[:, :bins])
    assert whole[0, 400] <= values[:400].max()
    assert whole[0, 401] == 9000.0
