import numpy as np
import pytest

from fleetcast.features.period import _refine_period, find_period

RNG = np.random.default_rng(5)


def steps(period: float, samples: int, jitter: float = 0.0, level: float = 0.05) -> np.ndarray:
    """(2, samples) activity and traffic of steps of `period` samples: computing, then exchanging for a fifth of it.

    Means over each sample's interval, as sensors give them.
    """
    many = int(samples / period) + 2
    lengths = period * np.maximum(1 + jitter * RNG.standard_normal(many), 0.1)
    ends = np.cumsum(lengths)
    fine = (np.arange(samples * 50) + 0.5) / 50
    step = np.searchsorted(ends, fine)
    into = 1 - (ends[step] - fine) / lengths[step]
    busy = (into < 0.8).reshape(samples, 50).mean(axis=1)
    return np.stack([level + busy, level + 1 - busy]) + 0.02 * RNG.standard_normal((2, samples))


@pytest.mark.parametrize("period", [4.3, 5.445, 7.7, 12.6, 60.25])
def test_the_period_is_found_between_samples(period: float) -> None:
    found = find_period(steps(period, 900, jitter=0.05), 0.5)
    assert found.period_s == pytest.approx(period * 0.5, rel=0.02)


@pytest.mark.parametrize("period", [0.07, 0.42, 0.69, 1.05, 1.39, 2.42, 3.1, 3.6])
def test_what_repeats_faster_than_four_samples_is_unknown(period: float) -> None:
    found = find_period(steps(period, 900, jitter=0.01), 15.0)
    assert found.period_s is None
    assert "sample" in found.reason


def test_noise_and_idleness_have_no_period() -> None:
    assert find_period(np.abs(RNG.standard_normal((2, 600))), 1.0).reason == "nothing repeats"
    assert "nothing swings" in find_period(np.full((2, 600), 70.0), 1.0).reason
    assert "fewer than 24 samples" in find_period(np.ones((2, 10)), 1.0).reason
    assert find_period(np.full((2, 600), np.nan), 1.0).period_s is None


def test_micro_batches_are_not_the_step() -> None:
    micro = np.tile(np.repeat([1.0, 0.2], 3), 4)  # four of six samples each, then the exchange
    step = np.concatenate([micro, np.zeros(6)])
    exchange = np.concatenate([np.zeros(24), np.ones(6)])
    found = find_period(np.tile(np.stack([step, exchange]), 20), 1.0)
    assert found.period_s == pytest.approx(30, rel=0.01)


@pytest.mark.parametrize("bend", [-1e-6, 1e-6])
def test_a_slope_where_a_multiple_should_be_moves_no_period(bend: float) -> None:
    curve = np.zeros(80)
    curve[15:18] = 0.8, 1.0, 0.8
    rise = np.arange(13)
    curve[27:40] = 0.5 + 0.02 * rise + bend * rise**2 / 2
    assert _refine_period(curve, 16) == 16


def test_gaps_are_bridged() -> None:
    seen = steps(9.0, 600)
    seen[:, RNG.choice(600, 60, replace=False)] = np.nan
    assert find_period(seen, 1.0).period_s == pytest.approx(9.0, rel=0.02)


def test_of_steps_that_vary_the_usual_one_is_told() -> None:
    rng = np.random.default_rng(3)
    lengths = 40 * np.where(rng.random(300) < 0.12, 2.2, 1 + 0.1 * rng.standard_normal(300))
    ends = np.cumsum(lengths)
    at = np.arange(int(ends[-1]))
    step = np.searchsorted(ends, at, side="right")
    busy = np.where((ends[step] - at) / lengths[step] > 0.2, 1.0, 0.1)
    found = find_period(np.stack([busy, 1.1 - busy]), 1.0)
    assert found.period_s == pytest.approx(float(np.median(lengths)), rel=0.02)
