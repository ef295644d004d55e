"""Quantiles that follow their outcomes."""

import numpy as np

from fleetcast.models.calibrate import QuantileTracker

LEVELS = (0.1, 0.5, 0.9)
RAW = np.array([0.0, 0.5, 1.0]).reshape(1, 3, 1, 1)


def followed(outcomes: list[float]) -> QuantileTracker:
    tracker = QuantileTracker.empty(LEVELS, 1, (1,), 1, 3600)
    for outcome in outcomes:
        tracker.learn_outcome(0, np.array([[[0.0], [0.5], [1.0]]]), np.array([outcome]), np.array([True]))
    return tracker


def test_quantiles_that_are_missed_move_to_where_outcomes_are() -> None:
    low, middle, high = followed([5.0] * 300).apply_offsets(RAW, np.zeros((1, 1), np.intp)).ravel()
    assert low > 0.5
    assert middle > 2.0
    assert high > 3.0


def test_an_unknown_outcome_moves_nothing() -> None:
    tracker = followed([5.0])
    before = tracker.offset.copy()
    tracker.learn_outcome(0, np.zeros((1, 3, 1)), np.array([99.0]), np.array([False]))
    assert np.array_equal(tracker.offset, before)


def test_the_first_outcomes_are_believed_little() -> None:
    assert followed([5.0]).compute_trust().max() < 0.05
    assert followed([5.0] * 300).compute_trust().min() > 0.9


def test_one_absurd_outcome_widens_little_and_a_new_size_is_learnt() -> None:
    usual = [float(n % 7) for n in range(300)]
    calm, shocked = followed(usual), followed([*usual, 1e9])
    assert shocked.size.item() < 3 * calm.size.item()
    assert np.abs(shocked.offset - calm.offset).max() < calm.size.item()
    assert followed([*[0.0] * 300, *[5000.0] * 100]).size.item() > 1500
