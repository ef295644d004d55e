"""Intervals by block bootstrap: what they hold, and how often."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from fleetcast.training.reports.results import FEWEST, compute_interval
from tests.fuzz.bounds import examples

numbers = st.floats(0, 1e6) | st.just(0.0)
pairs = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=120)


@examples(100)
@given(pairs, st.integers(1, 100), st.integers(0, 5))
@example([(0.9, 5e-324)], 24, 0)
@example([(1e6, 1e-308)] * FEWEST, 1, 0)
@example([(1.0, 1.0), (1e6, 1e-320)] * FEWEST, 1, 0)
def test_a_value_lies_in_its_interval_and_few_outcomes_have_none(found, block, seed) -> None:
    top, below = (np.array(column) for column in zip(*found, strict=True))
    value, low, high = compute_interval(top, below, block=block, seed=seed)
    with np.errstate(all="ignore"):
        finite = np.isfinite(np.float64(top.sum()) / below.sum())
    assert (value is not None) == finite
    assert (low is None) == (high is None) == (value is None or len(found) < FEWEST)
    if low is not None:
        assert low <= value <= high
        assert np.isfinite([low, high]).all()
        if low > 1e-290 and high < 1e290:
            assert compute_interval(8 * top, below, block=block, seed=seed) == (8 * value, 8 * low, 8 * high)


def test_the_first_and_the_last_outcome_count_as_much_as_the_others() -> None:
    widths = []
    for at in (0, 20, 39):
        outcomes = np.zeros(40)
        outcomes[at] = 1.0
        _, low, high = compute_interval(outcomes, block=10)
        widths.append(high - low)
    assert min(widths) > 0.5 * max(widths) > 0


def test_intervals_hold_the_mean_of_outcomes_that_are_alike_for_hours() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(200):
        noise = rng.normal(size=500)
        alike = np.convolve(noise, np.ones(12), "valid")[:480]  # twenty days of hours, alike for twelve
        _, low, high = compute_interval(alike, block=24)
        held += low <= 0 <= high
    assert 0.85 <= held / 200 <= 0.99
