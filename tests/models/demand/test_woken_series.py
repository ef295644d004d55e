"""A quiet series that wakes: its bands have width at once, and its record is of what happened since."""

import numpy as np
import pytest

from fleetcast.models.demand.gate import Gate
from fleetcast.models.demand.naive import FORECASTERS, Persistence
from fleetcast.models.demand.smoothers import make_smoothers
from fleetcast.models.forecast import QUANTILES, Panel

STEPS = (1, 3, 6, 18, 36)
LOW, HIGH = QUANTILES.index(0.1), QUANTILES.index(0.9)
DAY, QUIET_DAYS = 144, 16
WAKES = QUIET_DAYS * DAY


def queue(rng):
    """A queue that fills and drains: jobs of eight GPUs."""
    waits = np.zeros(3 * DAY)
    waits[0] = 40
    for bin in range(1, len(waits)):
        waits[bin] = max(0, waits[bin - 1] + 8 * (rng.poisson(1.0) - rng.poisson(0.03 * waits[bin - 1])))
    return waits


def counts(rng):
    return rng.poisson(30, 3 * DAY).astype(float)


def walk(rng):
    return np.abs(np.rint(200 + np.cumsum(rng.normal(0, 6, 3 * DAY))))


def served_after(values, target="queued"):
    """Everything that a gate served from the wake on: (quantile, step, origin, series), and the gate."""
    names = tuple(f"s{n}" for n in range(len(values)))
    one = Panel(target, names, 600, 0, values, np.full(len(values), np.nan))
    forecasters = (*FORECASTERS, *make_smoothers())
    gate = Gate([each.name for each in forecasters], STEPS, names, whole=np.ones(len(names), bool))
    origins = np.concatenate([np.arange(2 * DAY, WAKES, 6), np.arange(WAKES, one.bins)])
    raw = np.stack([each.forecast(one, origins, STEPS) for each in forecasters])
    served, at = [], {int(origin): n for n, origin in enumerate(origins)}
    for bin in range(2 * DAY, one.bins):
        gate.score_bin(bin, values[:, bin])
        if bin in at:
            found = gate.issue_forecast(bin, raw[:, :, :, at[bin]])
            if bin >= WAKES:
                served.append(found.values)
    return np.stack(served, axis=2), gate


def coverage(served, values, first, last):
    """(step,) share of outcomes within the 80 % band, of forecasts issued in bins [first, last) after the wake."""
    hits = []
    for at, step in enumerate(STEPS):
        outcomes = values[:, WAKES + first + step : WAKES + last + step].T
        inside = (served[LOW, at, first:last] <= outcomes) & (outcomes <= served[HIGH, at, first:last])
        hits.append(inside.mean())
    return np.array(hits)


@pytest.mark.parametrize("wakes", [queue, counts, walk])
def test_bands_cover_from_the_first_hours_on(wakes):
    rng = np.random.default_rng(0)
    values = np.stack([np.concatenate([np.zeros(WAKES), wakes(rng)]) for _ in range(12)])
    served, gate = served_after(values)
    for first, last in ((0, 36), (36, DAY), (DAY, 2 * DAY)):
        found = coverage(served, values, first, last)
        assert found.mean() >= 0.65, (first, found)
        assert found.min() >= 0.5, (first, found)
    record = gate.list_accuracy()
    real = coverage(served, values, 0, 2 * DAY).mean()
    assert abs(np.mean([row["coverage_80"] for row in record]) - real) < 0.15


def test_a_band_has_width_at_the_first_value_after_the_quiet():
    values = np.zeros((1, WAKES + 2))
    values[0, WAKES:] = 40.0
    one = Panel("queued", ("a",), 600, 0, values, np.array([np.nan]))
    said = Persistence().forecast(one, np.array([WAKES]), STEPS)
    assert (said[HIGH] - said[LOW] >= 2 * 1.28 * np.sqrt(40) - 1).all()


def test_the_record_counts_no_forecast_of_what_never_moved():
    """Flat for two weeks, then three days of surprises that nothing covers."""
    gate = Gate(["persistence"], (1,), ("a",))
    raw = np.zeros((1, len(QUANTILES), 1, 1))
    for bin in range(WAKES):
        gate.score_bin(bin, np.array([0.0]))
        gate.issue_forecast(bin, raw)
    assert gate.list_accuracy()[0]["coverage_80"] is None
    for bin in range(WAKES, WAKES + 3 * DAY):
        gate.score_bin(bin, np.array([100.0]))
        gate.issue_forecast(bin, raw)
    assert gate.list_accuracy()[0]["coverage_80"] < 0.1


def test_a_series_that_never_slept_keeps_all_its_errors():
    values = 500 + np.cumsum(np.random.default_rng(1).normal(0, 5, (1, 3000)), axis=1)
    one = Panel("running", ("a",), 600, 0, values, np.array([np.nan]))
    said = Persistence().forecast(one, np.array([2999]), (6,))[:, 0, 0, 0]
    errors = (values[0, 6:] - values[0, :-6])[-2016:]
    assert abs((said[HIGH] - said[LOW]) / np.subtract(*np.quantile(errors, (0.9, 0.1))) - 1) < 0.05
